"""Headroom H: the tokens by which each running request can still grow after an admission.

Theory (`admission.py` says what it is for).  The best H depends on the traffic: on which part of `max_tokens`
requests use, and on whether they end together.  It is learnt from events, never from calls or clocks:

* a preemption doubles H, but at most once between two admissions: what follows from one mistake is one
  mistake (as a congestion window reacts once to a burst of losses);
* each request that runs to its end shrinks H by 1/32.

(`admission_headroom` fixes H instead; 0 admits whatever fits at the moment.)

In the long run that allows one such mistake for about 22 requests that finish (ln 2 / ln(32/31)), whatever
the traffic; and admitting and preempting the same request in turn drives H to the point where only limits
count, at which no request that was admitted under it is preempted. Against no headroom at all this gives
4 to 10 times fewer preemptions for 3 to 16 % of throughput in a pool that is far too small, and against room
for every `max_tokens` up to several times the throughput (virtual clock, three mixes of lengths).
"""

from __future__ import annotations


class Headroom:
    """H, in tokens; see the theory above."""

    INITIAL = 128

    def __init__(self, smallest: int, largest: int, fixed: int | None = None) -> None:
        """`fixed`: H does not adapt."""
        self._fixed = fixed
        self._smallest = smallest
        self._largest = max(smallest, largest)
        self._tokens = float(min(max(self.INITIAL, smallest), self._largest))
        self._admitted = False

    @property
    def tokens(self) -> int:
        return int(self._tokens) if self._fixed is None else self._fixed

    def on_admission(self) -> None:
        self._admitted = True

    def on_preemption(self) -> None:
        if self._admitted:
            self._admitted = False
            self._tokens = min(self._tokens * 2, self._largest)

    def on_finish(self) -> None:
        self._tokens = max(self._tokens * (31 / 32), self._smallest)
