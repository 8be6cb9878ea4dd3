"""Requests that go to another engine to be decoded there, or come from one.  Pure.

`handovers` is the door to both directions.  `departures` and `attempts` are the side that prefills (P);
`arrivals`, `reservation`, `credits` and `fetches` the side that decodes (D); `records` what both know of a
request; `callers` who speaks on which connection; `courier` what is to be told to other engines.
docs/disaggregation.md is the protocol.
"""
