"""How many tokens a model is to draft for each of some rows, by what that costs and gives.

Theory. With a fixed number each row has as many drafts. Otherwise (`cost`) as many, up to that number, as
make most tokens per second: by what steps cost with them, what the drafting model's own steps cost, and how
often drafts came true at each place. With many rows this is none; then nothing is computed. As nobody would
know when that changes, one draft of one row is tried now and then; trials take a hundredth of the time.
"""

from __future__ import annotations

import numpy as np

from baton.drafting.base import Int32Array
from baton.drafting.cost import StepCost
from baton.drafting.guesses import Judged

_GAIN = 0.02
"""More tokens per second, at least: what is less is noise."""
_TRIALS = 0.01
"""Of the time."""
_SELDOM = 16
"""Steps without drafts, after which there may be a trial."""


class HowMany:
    """Of one drafter."""

    def __init__(self, num_slots: int, most: int, cost: StepCost | None) -> None:
        """`cost` None: each row has `most` drafts."""
        self._most = most
        self._cost = cost
        self._own_cost = StepCost(2 * num_slots)
        """Of the drafting model's steps, by their tokens."""
        self.judged = Judged(num_slots, most)
        self._credit = 0.0
        """Seconds for trials."""
        self._idle = 0
        """Steps since the last draft, or trial."""

    def took(self, tokens: int, seconds: float) -> None:
        """A step of the serving model, as `Drafter.took`."""
        self._credit += _TRIALS * seconds
        if self._cost is not None:
            self._cost.add(tokens, seconds)

    def own_took(self, tokens: int, seconds: float) -> None:
        """A step of the drafting model that gave drafts."""
        self._own_cost.add(tokens, seconds)

    def waited(self) -> None:
        """There was a step."""
        self._idle += 1

    def drafted(self) -> None:
        """There are drafts for the next one."""
        self._credit, self._idle = 0.0, 0

    def number(self, slots: Int32Array, rows: int) -> int:
        """How many drafts these slots are to have each, in a step of so many rows."""
        if self._cost is None:
            return self._most
        if not self._cost.knows(rows):
            return 0
        n = len(slots)
        gained = np.cumsum(self.judged.expected(slots, self._most).sum(axis=0))
        step, own = self._cost.table(), self._own_cost.table()
        most = min(self._most, (len(step) - 1 - rows) // n)
        if most < 1:
            return 0
        number = np.arange(1, most + 1)
        seconds = step[rows + n * number]
        if self._own_cost.knows(n):  # (else it is tried)
            first = own[min(2 * n, len(own) - 1)]
            seconds = seconds + (first if first < np.inf else own[n]) + (number - 1) * own[n]
        rate = (rows + gained[:most]) / seconds
        best = int(rate.argmax())
        return best + 1 if rate[best] >= (1 + _GAIN) * rows / step[rows] else 0

    def time_to_try(self, rows: int) -> bool:
        """Whether there may be a trial in a step of so many rows, if there is time for it."""
        if self._cost is None or self._idle < _SELDOM or not self._cost.knows(rows):
            return False
        self._idle = 0
        return True

    def may_try(self, rows: int, beside: float) -> bool:
        """Whether there is time for one draft of one row, and so many seconds beside it; then it is spent."""
        assert self._cost is not None
        step, own = self._cost.table(), self._own_cost.table()
        needed = beside + (float(own[1]) if self._own_cost.knows(1) else 0.0)
        more = step[min(rows + 1, len(step) - 1)]
        needed += float(more - step[rows]) if more < np.inf else 0.0
        if self._credit < needed:
            return False
        self._credit = 0.0
        return True
