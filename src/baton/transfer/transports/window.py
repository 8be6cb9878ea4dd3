"""How much may be asked of a page server before the first of it has come.  No I/O, the clock an argument.

Theory.  A connection carries its bandwidth only if what is on its way fills it: bandwidth x delay.  Both are
measured while pages come, as BBR does (https://queue.acm.org/detail.cfm?id=3022184): the bandwidth is the
most that was delivered a second between a question and the end of its answer, the delay the least time from a
question to the beginning of its answer.  Twice their product is asked for ahead, and never less than `LEAST`,
with which the measuring begins: each round trip it can double.  What lies beyond it is not asked for yet, so
a fetch that is dropped costs the others no more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 16 << 20
MOST = 256 << 20
SLOW_S = 0.005
"""A delay that no network of one building has."""


@dataclass(slots=True)
class Question:
    """One that was sent and not answered to its end."""

    size: int
    asked_at: float
    delivered: int
    """Bytes that had come when it was sent."""


class Window:
    """Of one connection; sizes in bytes, times in seconds."""

    def __init__(self) -> None:
        self.outstanding = 0
        """Bytes that were asked for and have not come."""
        self.delay_s = float("inf")
        self._delivered = 0
        self._rate = 0.0

    @property
    def size(self) -> float:
        if not self._rate:
            return LEAST
        return min(max(2 * self._rate * self.delay_s, LEAST), MOST)

    @property
    def is_open(self) -> bool:
        """Whether more may be asked for; at least one thing always."""
        return not self.outstanding or self.outstanding < self.size

    @property
    def is_slow(self) -> bool:
        return SLOW_S < self.delay_s < float("inf")

    def ask(self, size: int, now: float) -> Question:
        self.outstanding += size
        return Question(size, now, self._delivered)

    def begins(self, question: Question, now: float) -> None:
        """Its answer has begun to come."""
        self.delay_s = min(self.delay_s, now - question.asked_at)

    def ends(self, question: Question, now: float) -> None:
        """Its answer is complete."""
        self.outstanding -= question.size
        self._delivered += question.size
        seconds = now - question.asked_at
        if seconds > 0:
            self._rate = max(self._rate, (self._delivered - question.delivered) / seconds)
