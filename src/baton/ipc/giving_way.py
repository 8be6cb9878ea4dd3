"""A process that gives way to everything else on the machine.

Theory.  A task that wakes up does not interrupt one that runs before that one's slice is over, nice or not:
for up to 4 ms (Linux 6.6 and later).  But a task whose slice is shorter does (6.12 and later).  So what gives
way asks for the longest slice that there is, beside being nice: its share of a busy core is the same, in
fewer and longer turns, and everything else interrupts it.

Where the kernel groups tasks by session (`CONFIG_SCHED_AUTOGROUP`, as on most distributions, but not for
services and containers with a cgroup of their own), `nice` counts inside of a session only: a core is shared
between sessions first.  So all processes of a server are in one session, what gives way and what it gives
way to.  Sessions of their own, which Linux lets be nice as well, did worse: with several of them at work,
Linux 6.18 let who woke up wait for tens of milliseconds and up to 300, in a session of any niceness.
Instances that were started elsewhere on the same machine (`--join`) are of another session, which shares the
cores with all of this one.

What a kernel does not have, or does not let this process do, is left out.
"""

from __future__ import annotations

import ctypes
import os
import struct

LONG_SLICE_S = 0.1
"""The longest that Linux gives."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
"""Numbers of sched_setattr(2), which glibc has since 2.41 only."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime (for an ordinary task: its slice), deadline, period."""


def give_way(nice: int) -> None:
    """Lowers this process's priority by so much, for good; 0: leaves it."""
    if not nice:
        return
    lowered, policy = os.nice(nice), os.sched_getscheduler(0)
    number = _SET_ATTRIBUTES.get(os.uname().machine)
    if number is None or policy not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, lowered, 0, int(LONG_SLICE_S * 1e9), 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)
