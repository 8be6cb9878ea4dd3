"""A failing plan made smaller: fewer requests, fewer faults, the same rule broken.

Three kinds of steps, each kept if what is left still fails:

1. what had not come yet when the rule was broken is left out;
2. of the requests only those that the violation names, with all faults and with none, as one step down is
   worth many small ones;
3. delta debugging: halves, quarters, … of the faults and of the requests are left out.

What is left out shifts everything else in time, so each smaller plan gets a few chances with other delays.
It fails "in the same way" if it breaks the same rule.  Its run is deterministic like any other.

A plan that does not fail costs the most, as it runs to its end.  So a candidate is given up when twice the
time has passed in which the best one failed (not where the rule is that something happens in time), and
nothing is tried twice.  After `limit_s` seconds the best plan so far is the answer, in the middle of a run
too.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from baton.simulation.checks.monitor import Violation
from baton.simulation.plans.plan import RunPlan
from baton.simulation.world import Outcome, World

T = TypeVar("T")

CHANCES = 3
LIMIT_S = 60.0
_SAME = {"end": "liveness"}
"""Rules that are one defect: that nothing moves shows at the end too."""
_SPARE_S = 0.5
_NAMED = re.compile(r"\brequest (\d+)|\br(\d+)\b")


@dataclass
class Shrunk:
    plan: RunPlan
    violation: Violation
    runs: int
    whole: bool = True
    """Nothing more can be left out; False: the time was over before that was known."""


def named_in(text: str) -> list[int]:
    """The numbers of the requests that a violation names, in order."""
    return list(dict.fromkeys(int(one or other) for one, other in _NAMED.findall(text)))


def shrink(
    plan: RunPlan,
    violation: Violation,
    *,
    max_runs: int = 1000,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Shrunk:
    """The smallest plan found within `max_runs` runs and `limit_s` seconds of `clock` that breaks the rule of
    `violation`."""
    search = _Search(plan, violation, max_runs, clock() + limit_s, clock)
    search.run()
    return search.best


class _Search:
    def __init__(
        self, plan: RunPlan, violation: Violation, max_runs: int, deadline: float, clock: Callable[[], float]
    ) -> None:
        self.best = Shrunk(plan, violation, 0)
        self._rule = _SAME.get(violation.rule, violation.rule)
        self._max_runs = max_runs
        self._deadline = deadline
        self._clock = clock
        self._lasted: float | None = None
        """Virtual seconds until the best plan failed."""
        self._tried: set[tuple[object, ...]] = set()

    @property
    def over(self) -> bool:
        return self.best.runs >= self._max_runs or self._clock() >= self._deadline

    def run(self) -> None:
        first = self._try(self.best.plan)
        if first is not None and first.violation is not None:
            self._lasted = first.virtual_seconds
            self._fails(self._before(first.virtual_seconds))
        numbers = named_in(self.best.violation.text)
        if numbers:
            self._only(numbers)
        before = -1
        while not self.over and before != self._size:
            before = self._size
            _reduce(self.best.plan.faults, lambda kept: self._fails(self._with(faults=kept)))
            _reduce(self.best.plan.requests, lambda kept: self._fails(self._with(requests=kept)))
        self.best.whole = before == self._size

    @property
    def _size(self) -> int:
        return len(self.best.plan.requests) + len(self.best.plan.faults)

    def _with(self, **parts: Sequence[object]) -> RunPlan:
        changes = {name: tuple(kept) for name, kept in parts.items()}
        return replace(self.best.plan, **changes)  # type: ignore[arg-type]

    def _before(self, end: float) -> RunPlan:
        plan = self.best.plan
        return self._with(
            requests=[spec for spec in plan.requests if spec.at <= end],
            faults=[fault for fault in plan.faults if fault.at <= end],
        )

    def _only(self, numbers: list[int]) -> None:
        wanted = set(numbers)
        requests = [spec for spec in self.best.plan.requests if spec.number in wanted]
        if not self._fails(self._with(requests=requests, faults=[])):
            self._fails(self._with(requests=requests))

    def _fails(self, candidate: RunPlan) -> bool:
        if len(candidate.requests) + len(candidate.faults) >= self._size:
            return False
        for chance in range(CHANCES):
            tried = replace(candidate, delays=self.best.plan.delays + chance)
            key = (tried.requests, tried.faults, tried.delays)
            if self.over:
                return False
            if key in self._tried:
                continue
            self._tried.add(key)
            outcome = self._try(tried)
            found = None if outcome is None else outcome.violation
            if outcome is not None and found is not None and _SAME.get(found.rule, found.rule) == self._rule:
                self.best.plan, self.best.violation = tried, found
                self._lasted = outcome.virtual_seconds
                return True
        return False

    def _try(self, plan: RunPlan) -> Outcome | None:
        """None: it was given up."""
        if self.over:
            return None
        self.best.runs += 1
        until = math.inf
        if self._lasted is not None and self._rule != "liveness":
            until = 2.0 * self._lasted + _SPARE_S
        return World(plan).run_until(until, lambda: self._clock() >= self._deadline)


def _reduce(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """The items without which it still fails are left out, in ever smaller groups."""
    kept = list(items)
    size = len(kept)
    while size >= 1 and kept:
        start = 0
        while start < len(kept):
            candidate = kept[:start] + kept[start + size :]
            if fails(candidate):
                kept = candidate
            else:
                start += size
        size //= 2
    return kept
