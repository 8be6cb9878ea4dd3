"""A doorbell: how one process of a machine wakes another.

Theory.  A doorbell is an eventfd.  Ringing adds one to a counter in the kernel and never blocks; the
sleeper waits in `poll()` until the counter is not zero.  A doorbell says only "look again": what there
is to see stands in shared memory.  So that no ring is ever lost, both sides keep one order:

* the ringing side: first publish, then `ring()` — always, without asking whether the other side sleeps;
* the sleeping side: first `drain()`, then look, and only then `poll()`.

A ring between the look and the poll leaves the counter set, so the poll returns at once.  A ring before
the drain is lost, but the look that follows sees what it was about (both calls pass through the
kernel's lock of the same counter, which orders the memory around them).
"""

from __future__ import annotations

import os


class Doorbell:
    """An eventfd, not blocking, closed on exec unless it is handed to a child with `pass_fds`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        """Takes over `fd`, an eventfd that this process made or inherited."""
        os.set_blocking(fd, False)
        self._fd = fd

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """Wakes the process that polls this doorbell, or will poll it next.  Never blocks."""
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:
            pass  # 2^64 - 2 rings and nobody looked: it is ringing already

    def drain(self) -> bool:
        """Silences the bell.  Returns whether it had been rung.  Never blocks."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Closes the descriptor; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
