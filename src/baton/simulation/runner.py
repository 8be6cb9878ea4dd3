"""Many seeds, in several processes, and what they add up to."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from baton.simulation.plans.draw import draw_plan
from baton.simulation.plans.plan import RunPlan, Shape
from baton.simulation.world import Outcome, World

_CHUNK = 8
_BETWEEN_COLLECTIONS = 50_000
"""Objects.  By default the collector looks at a run's world a hundred times, while all of it is in use."""


@dataclass
class Failure:
    """A seed that broke a rule."""

    seed: int
    rule: str
    text: str


@dataclass
class Summary:
    """What a number of runs did."""

    seeds: int = 0
    events: int = 0
    steps: int = 0
    virtual_seconds: float = 0.0
    preemptions: int = 0
    crashes: int = 0
    continued: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    handovers: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.events += outcome.events
        self.steps += outcome.steps
        self.virtual_seconds += outcome.virtual_seconds
        self.preemptions += outcome.preemptions
        self.crashes += outcome.crashes
        self.continued += outcome.continued
        self.faults += outcome.faults
        self.answers += outcome.answers
        self.handovers += outcome.handovers
        if outcome.violation is not None:
            self.failures.append(Failure(outcome.seed, outcome.violation.rule, outcome.violation.text))

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {count}" for kind, count in self.faults.most_common())
        answers = ", ".join(f"{kind} {count}" for kind, count in self.answers.most_common())
        handovers = ", ".join(f"{kind} {count}" for kind, count in self.handovers.most_common())
        return (
            f"{self.seeds:,} seeds in {self.seconds:.1f} s: {len(self.failures)} violations, "
            f"{self.events:,} events, {self.steps:,} steps, {sum(self.faults.values()):,} faults, "
            f"{self.preemptions:,} preemptions, {self.crashes:,} crashes, {self.continued:,} continued, "
            f"{self.virtual_seconds / 3600:.2f} virtual hours\n"
            f"  faults: {faults or 'none'}\n  answers: {answers}"
            + (f"\n  hand-overs: {handovers}" if handovers else "")
        )


def run_seed(shape: Shape, seed: int) -> Outcome:
    """Draws the seed's plan and runs it."""
    with _rare_collections():
        return World(draw_plan(seed, shape)).run()


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_plan(plan: RunPlan, *, recording: bool = False) -> tuple[Outcome, World]:
    world = World(plan, recording=recording)
    return world.run(), world


def run_seeds(
    shape: Shape,
    seeds: range,
    *,
    jobs: int = 1,
    keep_going: bool = False,
    progress: Callable[[Summary], None] | None = None,
) -> Summary:
    """Runs every seed, or up to the first violation unless `keep_going`.

    `progress` is called after each seed.  With several jobs, which seeds run after a violation depends on the
    machine; what each seed does never does.
    """
    summary = Summary()
    began = time.perf_counter()
    for outcome in _outcomes(shape, seeds, jobs):
        summary.add(outcome)
        summary.seconds = time.perf_counter() - began
        if progress is not None:
            progress(summary)
        if summary.failures and not keep_going:
            break
    return summary


def _outcomes(shape: Shape, seeds: range, jobs: int) -> Iterator[Outcome]:
    if jobs <= 1:
        yield from map(partial(run_seed, shape), seeds)
        return
    # (An executor, unlike a pool, says so when its processes die.)
    executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        yield from executor.map(partial(run_seed, shape), seeds, chunksize=_CHUNK)
    finally:
        executor.shutdown(cancel_futures=True)
