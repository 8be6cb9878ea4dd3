"""The vocabulary of Baton: every message that crosses a process boundary, and nothing else.

Theory. Parties (gateway, engine, worker ranks) share no memory that two of them write, and call no
functions of each other: they exchange the records defined here.  Every record is a `msgspec` struct,
encoded as MessagePack arrays with a tag, so decoding checks types and an unknown tag or a wrong
field is a `MalformedMessage`, which the receiver logs with its sender and drops.  Nothing here is
ever unpickled.  Long integer sequences (token ids, block ids) travel as packed little-endian int32.

This package imports nothing else of Baton, and no torch.
"""
