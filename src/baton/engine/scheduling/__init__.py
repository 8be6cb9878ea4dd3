"""Who is admitted, which KV blocks they get, who has to give way.  Pure.

`scheduler` decides; `ledger` knows the owner of every block; `prefix` which computed block holds which
tokens; `waiting` is the line of requests that wait, `backlog` chooses which of them is displaced when the
queue is full; `headroom` how much growth an admission leaves room for.
"""
