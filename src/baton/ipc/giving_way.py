"""A process that gives way to everything else on the machine.

Theory.  `nice` alone is not enough, for two reasons of Linux's.

* Where the kernel groups tasks by session (`CONFIG_SCHED_AUTOGROUP`, as on most distributions), each session
  gets the same share of a core, and `nice` counts inside of a session only.  Engines have sessions of their
  own, so a helper in the gateway's takes half of a core from them, however nice it is.  A session has a
  niceness of its own, in /proc/PID/autogroup.
* A task that wakes up does not interrupt one that runs before that one's slice is over, nice or not: for up
  to 4 ms (Linux 6.6 and later).  But a task whose slice is shorter does (6.12 and later).  So what gives way
  asks for the longest slice that there is: its share of a busy core is the same, in fewer and longer turns,
  and everything else interrupts it.

What a kernel does not have, or does not let this process do, is left out.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from contextlib import suppress
from pathlib import Path

LONG_SLICE_S = 0.1
"""The longest that Linux gives."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
"""Numbers of sched_setattr(2), which glibc has since 2.41 only."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, priority, runtime (for an ordinary task: its slice), deadline, period."""


def give_way(nice: int) -> bool:
    """Lowers this process's priority by so much, for good, in a session of its own; `nice` 0: leaves it.

    False: the kernel refused the session's niceness for now, as it sets only ten a second for users without
    rights; `lower_session` may be tried again.
    """
    if not nice:
        return True
    with suppress(PermissionError):  # the first one of its session already
        os.setsid()
    _lengthen_slice(os.nice(nice))
    return lower_session(nice)


def lower_session(nice: int) -> bool:
    """Sets the niceness of this process's session.  False: not for now."""
    try:
        Path("/proc/self/autogroup").write_text(str(nice))
    except OSError as error:
        return error.errno != errno.EAGAIN
    return True


def _lengthen_slice(nice: int) -> None:
    number, policy = _SET_ATTRIBUTES.get(os.uname().machine), os.sched_getscheduler(0)
    if number is None or policy not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return
    slice_ns = int(LONG_SLICE_S * 1e9)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, 0, slice_ns, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)
