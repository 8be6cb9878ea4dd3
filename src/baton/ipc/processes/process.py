"""Processes that notice each other's death, and waiting for several things at once.

Theory.  Two mechanisms, because each has a gap that the other closes.  `die_with_parent` asks the kernel
to kill this process when its parent dies: it works even if this process is stuck in a kernel or in a
collective, but says nothing to anybody.  A *pidfd* becomes readable when the process it names has died:
every poll set that waits for that process has it, so that no wait for a dead process goes on.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_MAX_WAIT_S = 86_400.0
_DEAD = select.POLLERR | select.POLLHUP | select.POLLNVAL


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's start and imports included."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


class ParentGone(RuntimeError):
    """The process that should be our parent is not, or is no more."""


def die_with_parent(expected_ppid: int) -> None:
    """Has the kernel send this process SIGKILL when its parent dies.

    Call it first thing in the child.  Raises `ParentGone` if the parent is not `expected_ppid`: it may
    have died before the call, and then no signal would ever come.  The kernel means the *thread* that
    started the child: start children from a thread that lives as long as its process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    parent = os.getppid()
    if parent != expected_ppid:
        raise ParentGone(f"the parent is process {parent}, not {expected_ppid}: it died or never was ours")


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when process `pid` dies.  The caller closes it.

    Raises `ProcessLookupError` if there is no such process.
    """
    return os.pidfd_open(pid)


def describe_exit(pidfd: int) -> str:
    """How the process ended, without taking its status away from who started it."""
    try:
        status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        status = None
    if status is None:
        return "ended"
    if status.si_code == os.CLD_EXITED:
        return f"exited with status {status.si_status}"
    return f"was killed by {signal.Signals(status.si_status).name}"


class Waiter:
    """A fixed set of descriptors to sleep on, until one of them is readable (or broken)."""

    def __init__(self, fds: Iterable[int]) -> None:
        self._poll = select.poll()
        for fd in fds:
            self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float | None) -> list[int]:
        """The descriptors that are readable or broken; empty after `timeout_s` (None: no limit).

        The grain of the timeout is a millisecond, rounded up; after a day it returns in any case, as `poll`
        knows none of more than 24.  Raises `OSError` for a closed descriptor.
        """
        ready = self._poll.poll(None if timeout_s is None else min(max(timeout_s, 0.0), _MAX_WAIT_S) * 1e3)
        for fd, events in ready:
            if events & select.POLLNVAL:
                raise OSError(f"descriptor {fd} of a poll set is closed")
        return [fd for fd, events in ready if events & (select.POLLIN | _DEAD)]


def wait_any(fds: Iterable[int], timeout_s: float | None) -> list[int]:
    """Waits once for any of `fds`; see `Waiter.wait`."""
    return Waiter(fds).wait(timeout_s)
