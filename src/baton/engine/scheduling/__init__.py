"""Who is admitted, which KV blocks they get, who has to give way.  Pure.

`scheduler` decides who grows and who gives way, `admission` who gets a slot, both by the sums of `room`;
`decisions` is what they say.  `ledger` knows the owner of every block; `sharing` which blocks of a request
there are already: computed ones (`prefix`), or those that another request computes (`in_flight`).  `waiting`
is the line of requests that wait, `backlog` chooses which of them is displaced when the queue is full;
`headroom` says how much growth an admission leaves room for.
"""
