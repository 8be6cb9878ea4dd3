"""The writing end of a ring for several threads of one process.

Theory.  A ring has one writer, and two threads in it at once would tear it; a lock around each call makes
them one.  It is held for microseconds and never across a wait, and an uncontended one costs a fraction of a
microsecond.  Records of one thread stay in order; between threads there is none.

A thread that cannot sleep on the ring's behalf rings `owner`, the doorbell of the one that can: what did not
fit is flushed by that one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingWriter


class LockedRingWriter(RingWriter):
    """A `RingWriter` whose methods may be called from any thread.  `pending` is a hint."""

    def __init__(self, fd: int, doorbells: Sequence[Doorbell], owner: Doorbell) -> None:
        super().__init__(fd, doorbells)
        self._lock = threading.RLock()
        self._owner = owner

    def append(self, record: bytes) -> None:
        with self._lock:
            super().append(record)

    def flush(self, ring: bool = True) -> bool:
        with self._lock:
            return super().flush(ring)

    def write(self, record: bytes, ring: bool = True) -> bool:
        with self._lock:
            return super().write(record, ring)

    def write_from_helper(self, record: bytes) -> None:
        """As `write`; what does not fit is left to the thread that sleeps on `owner`."""
        if not self.write(record):
            self._owner.ring()
