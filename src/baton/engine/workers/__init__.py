"""The engine's view of its ranks.  Pure.

`handshake`: the ranks introduce themselves and must agree; `steps`: their reports become tokens, computed
blocks and ends of requests; `controls`: orders to all ranks that are answered when all have carried them out.
"""
