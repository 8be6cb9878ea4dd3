"""From the body of a request to its fields, its prompts and their token ids.  No HTTP.

`reader` runs on the event loop or in a helper, `prompts` in the gateway's process; `constraints/` has what an
answer must be.
"""
