"""What an answer must be, from a request's body: schemas, structural tags, calls that are demanded.

`structured` reads the fields, `calling` and `structural` describe calls and tags, `binding` is what the rest
of the gateway gets: a description as bytes, of a bounded length.
"""
