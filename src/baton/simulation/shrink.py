"""A failing plan made smaller: fewer requests, fewer faults, the same rule broken.

Delta debugging: leave out halves, quarters, … of the requests and of the faults, and keep what still
fails.  What is left out shifts everything else in time, so each smaller plan gets a few chances with other
delays.  It fails "in the same way" if it breaks the same rule.  Its run is deterministic like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from baton.simulation.monitor import Violation
from baton.simulation.plan import Plan
from baton.simulation.world import World

T = TypeVar("T")

CHANCES = 3
_SAME = {"end": "liveness"}
"""Rules that are one defect: that nothing moves shows at the end too."""


@dataclass
class Shrunk:
    plan: Plan
    violation: Violation
    runs: int


def shrink(plan: Plan, violation: Violation, *, max_runs: int = 1000) -> Shrunk:
    """The smallest plan found within `max_runs` runs that breaks the rule of `violation`."""
    best = Shrunk(plan, violation, 0)
    rule = _SAME.get(violation.rule, violation.rule)

    def fails(candidate: Plan) -> bool:
        for chance in range(CHANCES):
            if best.runs >= max_runs:
                return False
            best.runs += 1
            tried = replace(candidate, delays=best.plan.delays + chance)
            found = World(tried).run().violation
            if found is not None and _SAME.get(found.rule, found.rule) == rule:
                best.plan, best.violation = tried, found
                return True
        return False

    def before_the_end(plan: Plan) -> Plan:
        """Without what had not come yet when the rule was broken."""
        end = World(plan).run().virtual_seconds
        return replace(
            plan,
            requests=tuple(spec for spec in plan.requests if spec.at <= end),
            faults=tuple(fault for fault in plan.faults if fault.at <= end),
        )

    fails(before_the_end(plan))
    while best.runs < max_runs:
        before = len(best.plan.requests) + len(best.plan.faults)
        _reduce(best.plan.faults, lambda kept: fails(replace(best.plan, faults=tuple(kept))))
        _reduce(best.plan.requests, lambda kept: fails(replace(best.plan, requests=tuple(kept))))
        if len(best.plan.requests) + len(best.plan.faults) == before:
            break
    return best


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
