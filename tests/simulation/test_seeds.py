"""The simulator over the code as it is: many seeds, and no rule is broken."""

from __future__ import annotations

import pickle
import secrets

import pytest

from baton.simulation.checks.books import Violation
from baton.simulation.plans.scenarios import SCENARIOS
from baton.simulation.runner import Summary, run_seeds
from baton.simulation.world import Outcome

FIXED = {
    "standard": range(0, 150),
    "calm": range(0, 20),
    "tiny-pool": range(0, 30),
    "crashes": range(0, 40),
    "network": range(0, 40),
    "clients": range(0, 40),
    "small": range(0, 60),
    "handover": range(0, 100),
    "1p1d": range(0, 30),
    "tight": range(0, 20),
    "late": range(0, 40),
    "2p3d": range(0, 30),
    "slow": range(0, 20),
    "partition": range(0, 30),
    "leases": range(0, 30),
    "restart": range(0, 30),
    "labels": range(0, 30),
    "drain": range(0, 30),
    "refused": range(0, 20),
    "credits": range(0, 20),
    "order": range(0, 30),
    "alike": range(0, 20),
    "bursts": range(0, 40),
    "coming": range(0, 30),
    "lease-end": range(0, 20),
    "strangers": range(0, 30),
    "retired": range(0, 20),
    "early": range(0, 20),
    "fair": range(0, 40),
    "gateway-floods": range(0, 40),
    "returns": range(0, 20),
    "watchers": range(0, 20),
    "weights": range(0, 20),
    "pooled": range(0, 30),
    "routes": range(0, 40),
    "constrained": range(0, 60),
    "auto-labels": range(0, 40),
    "relay": range(0, 40),
    "multi-gateway": range(0, 40),
}
assert FIXED.keys() == SCENARIOS.keys()


def check(summary: Summary, scenario: str) -> None:
    print(f"{scenario}: {summary}")
    lines = [
        f"seed {failure.seed}: {failure.rule}: {failure.text}\n"
        f"  baton simulate --scenario {scenario} --seed {failure.seed} --timeline"
        for failure in summary.failures
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # (a minute of CPU time, which is many where other work has the cores)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fixed_seeds(scenario):
    check(run_seeds(SCENARIOS[scenario], FIXED[scenario], keep_going=True), scenario)


@pytest.mark.parametrize("scenario", ["standard", "handover"])
def test_fresh_seeds(scenario):
    start = secrets.randbits(32)
    print(f"fresh seeds from {start}")
    check(run_seeds(SCENARIOS[scenario], range(start, start + 8), keep_going=True), scenario)


def test_the_standard_scenario_is_eventful():
    """Every kind of fault strikes, and every kind of answer is given."""
    summary = run_seeds(SCENARIOS["standard"], range(1000, 1060), keep_going=True)
    assert set(SCENARIOS["standard"].faults) == set(summary.faults)
    answers = set(summary.answers)
    assert {"stop", "length", "cancelled", "gateway gone"} <= answers
    assert {"error: internal", "rejected: queue_full", "rejected: never_fits"} <= answers
    assert summary.preemptions > 20
    assert summary.crashes > 20
    assert summary.continued > 50


def test_the_handover_scenario_is_eventful():
    """Every kind of fault strikes, and a hand-over ends in every way."""
    summary = run_seeds(SCENARIOS["handover"], range(1150, 1300), keep_going=True)
    assert set(SCENARIOS["handover"].faults) == set(summary.faults)
    handovers = summary.handovers
    for name in ("taken", "returned", "lost", "seated", "credits", "fetch_errors"):
        assert handovers[name] > 0, (name, handovers)
    for kind in ("recomputed", "given_up", "stayed", "refused"):
        assert sum(count for name, count in handovers.items() if name.startswith(kind)) > 10, handovers
    assert summary.continued > 20


def test_several_processes_find_the_same():
    shape = SCENARIOS["small"]
    alone, together = (run_seeds(shape, range(20), jobs=jobs, keep_going=True) for jobs in (1, 2))
    assert (alone.events, alone.answers, alone.faults) == (together.events, together.answers, together.faults)


def test_a_violation_reaches_the_process_that_sums_up():
    outcome = Outcome(7, violation=Violation("order", "request 3 came before request 2"))
    there = pickle.loads(pickle.dumps(outcome)).violation
    assert (there.rule, there.text, str(there)) == ("order", outcome.violation.text, str(outcome.violation))


@pytest.mark.parametrize(
    ("scenario", "seed"),
    [
        # A prompt of 18 tokens is not cut, though 16 take longer than streams should wait.
        ("crashes", 2003299),
        # A follower's reports waited in a full ring for as long as it ran steps.
        ("coming", 1666),
        # P decided what it tells D, then read in the same turn that D is over, then sent it.
        ("restart", 4000093),
        # A rank of two was held up while the other one reported a step whose pages it had not written yet.
        ("late", 61),
        ("late", 152),
        # One gateway named two requests over two connections: it is the same one.
        ("retired", 4000248),
        # The last gateway crashed between the last answer and the end of the registrations.
        ("watchers", 4000928),
        # A label that was not given left its patience: the next change that took one back came too soon.
        ("auto-labels", 3709),
        # A host died behind a line that had vanished, and with no client left the link's time stood still.
        ("relay", 9850),
    ],
)
def test_seeds_that_were_once_found(scenario, seed):
    check(run_seeds(SCENARIOS[scenario], range(seed, seed + 1)), scenario)
