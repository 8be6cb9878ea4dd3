"""Processes that do what could hold up the gateway's event loop: reading long bodies, rendering templates.

pool    the gateway's side: bounded queues, deadlines, dead helpers replaced; on the event loop
link    the connection to one helper
main    the parent of the helpers, which has imported what they need and forks them
child   a helper: one job after the other, each with limits of time and memory
metrics what Prometheus sees of them
wire    how jobs and answers travel

The parent is a process of its own, small and without threads, because the gateway has threads and cannot be
forked.  A fork takes about a millisecond, so a helper that became slow or fat is replaced without a thought.
"""
