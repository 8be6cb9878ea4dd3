"""How processes of one machine talk: a broadcast ring in shared memory, doorbells, tickets, pidfds.

Knows bytes, not messages.  Everything lives in memfds and eventfds that children inherit, so that
nothing is left behind in /dev/shm, whichever processes die and in whatever order.
"""
