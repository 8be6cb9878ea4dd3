"""When a rank other than 0 ran its steps, told to the engine some twenty times a second.

Rank 0 says so in the report of each step.  The other ranks report no steps; so theirs are collected, and
leave together: when the first of them is old enough, or when nothing runs any more.  Pure.
"""

from __future__ import annotations

from baton.protocol.messages.reports import StepsRan
from baton.protocol.step_notes import MAX_STEPS

EVERY_S = 0.05


class StepTimes:
    """Of one rank, on the clock of its host."""

    def __init__(self) -> None:
        self._first = 0
        self._began: list[float] = []
        self._seconds: list[float] = []

    def add(self, step: int, began: float, seconds: float) -> bool:
        """The rank has run a step, the one after the last.  True: it is time to `take` them."""
        if not self._began:
            self._first = step
        self._began.append(began)
        self._seconds.append(seconds)
        return began + seconds - self._began[0] >= EVERY_S or len(self._began) >= MAX_STEPS

    def take(self, now: float) -> StepsRan | None:
        """Those that were not taken yet; None: there are none."""
        if not self._began:
            return None
        told = StepsRan(now, self._first, self._began, self._seconds)
        self._began, self._seconds = [], []
        return told
