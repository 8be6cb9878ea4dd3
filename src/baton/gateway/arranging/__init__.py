"""What the cluster should look like for the load that it has: which instance prefills, which decodes, how
many there are.  Pure: no I/O, the clock an argument.

`slo` reads what clients are promised; `measured` is what is looked at; `pressure` says how hard each of the
two kinds of work presses, now and after a change; `arranger` decides.  The gateway's cluster asks it when
instances report (`gateway/cluster/roles.py`), `baton plan` in a simulation, and `baton scale` through
`advising`, from what a gateway shows (`described`).  Imports nothing of Baton.
"""
