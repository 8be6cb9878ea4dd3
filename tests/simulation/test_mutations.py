"""The simulator can fail: it finds every one of these deliberate defects, and says what it is.

`python -m tests.simulation.test_mutations [part of a name]` prints the table.
"""

from __future__ import annotations

import sys

import pytest

from baton.simulation.checks.monitor import Violation
from baton.simulation.plans.scenarios import SCENARIOS
from baton.simulation.runner import run_seed
from tests.simulation import (  # noqa: F401  (they add to the table)
    arranging_mutations,
    coming_mutations,
    constrained_mutations,
    draft_mutations,
    fair_mutations,
    follow_mutations,
    gateway_mutations,
    handover_mutations,
    late_mutations,
    pace_mutations,
    relay_mutations,
    room_mutations,
    stranger_mutations,
)
from tests.simulation.mutations import MUTATIONS, Mutation

LIMIT = 2000


def find(mutation: Mutation, limit: int = LIMIT, start: int = 0) -> tuple[int, Violation | None]:
    """How many seeds of its scenario it took, from `start` on, and what was reported."""
    with pytest.MonkeyPatch.context() as patch:
        mutation.apply(patch)
        for seed in range(start, start + limit):
            violation = run_seed(SCENARIOS[mutation.scenario], seed).violation
            if violation is not None:
                return seed + 1 - start, violation
    return limit, None


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_simulator_finds(mutation):
    seeds, violation = find(mutation, start=mutation.start)
    assert violation is not None, f"not found in {seeds} seeds"
    assert violation.rule in mutation.rules, str(violation)


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print("| defect | scenario | seeds | reported as |\n| --- | --- | --- | --- |")
    for one in MUTATIONS:
        if wanted in one.name or wanted == one.scenario:
            needed, found = find(one)
            told = str(found).replace("\n", " ")[:160] if found else "NOT FOUND"
            print(f"| {one.name} | {one.scenario} | {needed} | {told} |", flush=True)
