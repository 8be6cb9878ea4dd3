"""How processes talk: on one machine by a broadcast ring in shared memory, doorbells and tickets; between
machines by ZeroMQ (`sockets/`).  `processes/` has the processes themselves: forks, pidfds, cores.

Knows bytes, not messages.  Everything of one machine lives in memfds and eventfds that children inherit, so
that nothing is left behind in /dev/shm, whichever processes die and in whatever order.
"""
