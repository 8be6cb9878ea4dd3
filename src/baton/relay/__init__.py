"""An instance over several hosts: the command log, tickets and reports between them.

`lane.py`, `link.py` and `node.py` are state machines without I/O; `link_process.py` and `relay_process.py`
are thin shells around them.
"""
