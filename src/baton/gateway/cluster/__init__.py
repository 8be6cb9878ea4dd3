"""What a gateway decides about its instances and requests.  Pure: no I/O, the clock an argument.

`cluster` is the whole; `member` one instance; `table` the requests, where each is and how it goes on when
an instance is lost; `request` one of them; `routing` the choice of a plan; `digest` what an instance has in
its cache.
"""
