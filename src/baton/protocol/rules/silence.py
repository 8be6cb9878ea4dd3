"""Failure detection by timeout, where the watching process may have stood still itself.  Pure: no I/O, the
clock an argument.

Theory.  With a lease, a time to live or a heartbeat one process (the watcher) decides that another one (the
watched) is gone, by the watcher's timer.  A watcher that stood still (a long callback, swap, a paused
machine) finds its timer due while messages of the watched lie unread in its socket; event loops even run
timers first.  So no single timer decides:

* the last part of the time allowed is divided into `LOOKS` looks of equal distance, and the watched is given
  up only when that many looks in a row came on time and nothing was heard.  Between two of them the watcher
  was awake and has read what there was;
* a look that comes late by more than half of that distance is *void*: the watcher was away.  It counts
  nothing, and the count begins anew: the watched has half of the time allowed again;
* after `MAX_VOIDS` void looks in one silence, late looks count as well.  So a process that is really gone is
  given up after `(MAX_VOIDS + 1) * LOOKS` looks at most, also by a watcher that stands still again and again.

A process that renews or answers often enough causes no look: the first one comes after five eighths of the
time.
"""

from __future__ import annotations

LOOKS = 4
MAX_VOIDS = 5
_PARTS = 8
"""Of the time allowed; the last `LOOKS` of them end with a look each."""


class Silence:
    """How long another process has been silent.  `patience_s`: the time allowed, by the watcher's clock.

    The watcher calls `look` at `deadline`, and `heard` with everything that shows that the other one lives.
    """

    __slots__ = ("_grace_s", "_left", "_part_s", "_voids", "deadline", "patience_s", "since")

    def __init__(self, patience_s: float, now: float) -> None:
        self.patience_s = patience_s
        self._part_s = patience_s / _PARTS
        self._grace_s = self._part_s / 2
        self.heard(now)

    def heard(self, now: float) -> None:
        """The other one lives."""
        self.since = now
        """When it was heard of last."""
        self.deadline = now + self._part_s * (_PARTS - LOOKS + 1)
        """When `look` must be called at the latest."""
        self._left = LOOKS
        self._voids = 0

    @property
    def until(self) -> float:
        """When the verdict is due if nothing is heard and the watcher is not away meanwhile."""
        return self.deadline + self._part_s * (self._left - 1)

    def look(self, now: float) -> bool:
        """Whether the verdict is due: it has been silent for too long, before the watcher's eyes.

        Before `deadline` nothing happens; at it, another look is scheduled or the verdict is due.
        """
        if now < self.deadline:
            return False
        if now - self.deadline > self._grace_s and self._voids < MAX_VOIDS:
            self._voids += 1
            self._left = LOOKS
        else:
            self._left -= 1
            if self._left <= 0:
                self._left = 1  # (the next call gives the same verdict)
                return True
        self.deadline = now + self._part_s
        return False
