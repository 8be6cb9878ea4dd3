"""The explorer: every interleaving of a small scenario, each state once.

Theory.  States and actions are those of `explored_world.py`, of two
instances those of `explored_pair.py`.  A search in breadth visits all states that can
be reached, so the first violation that it meets has a shortest path.  What is looked at: the invariants of
each party and of each pair (`explored.py`) in every state, every token and every end as clients get them, and

* no state is *stuck*: if nobody has to act any more, everybody has an answer and nothing is held (hanging up
  and dying are nobody's duty, so a state that only a cancel would set going is stuck);
* the graph has no cycle: with finitely many states, every run ends, however slow any process is.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.simulation.explorer.explored_pair import PairState, PairWorld
from baton.simulation.explorer.explored_world import Action, SmallWorld, State
from baton.simulation.explorer.machines import Broken
from baton.simulation.explorer.scenarios import SCENARIOS, Scenario

MAX_STATES = 3_000_000
AnyState = State | PairState


@dataclass
class ExploreResult:
    """What an exploration saw."""

    scenario: str
    states: int = 0
    transitions: int = 0
    terminal: int = 0
    """States in which nothing can happen any more."""
    depth: int = 0
    """Actions on the longest of the shortest paths to a state."""
    seconds: float = 0.0
    complete: bool = True
    """False: stopped at the limit of states."""
    events: Counter[str] = field(default_factory=Counter)
    """Distinct messages by kind: what the scenario really contains."""
    violation: str | None = None
    path: list[str] = field(default_factory=list)
    """A shortest path to the violation, a line an action."""

    def __str__(self) -> str:
        size = (
            f"{self.scenario}: {self.states:,} states, {self.transitions:,} transitions, {self.terminal:,} "
            f"terminal, depth {self.depth}, {self.seconds:.1f} s"
        )
        if self.violation is not None:
            steps = "\n".join(f"{number:4}  {line}" for number, line in enumerate(self.path, start=1))
            said = f"{self.scenario}: VIOLATION after {len(self.path)} actions"
            return f"{size}\n{said}\n{steps}\n      {self.violation}"
        if not self.complete:
            return (
                f"{size}\n{self.scenario}: NOT COMPLETE, stopped at the limit of states; no violation so far"
            )
        contains = ", ".join(f"{count} {kind}" for kind, count in sorted(self.events.items()))
        return f"{size}\n{self.scenario}: no violation, every run ends (distinct messages: {contains})"


def explore(scenario_name: str, *, max_states: int = MAX_STATES) -> ExploreResult:
    """Visits all states of a scenario.  Raises `ValueError` for an unknown name."""
    scenario = SCENARIOS.get(scenario_name)
    if scenario is None:
        raise ValueError(f"no scenario {scenario_name!r} to explore; there are {', '.join(SCENARIOS)}")
    with _quiet():
        return _Search(scenario, max_states).run()


def run_explore(name: str) -> int:
    """Explores one scenario, or "all", and prints what it saw.

    Returns the exit code: 0 nothing is violated, 1 something is, 2 there is no such scenario.
    """
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    failed = False
    if name != "all" and name not in SCENARIOS:
        console.print(f"error: --explore {name}: there are all, {', '.join(SCENARIOS)}")
        return 2
    for each in SCENARIOS if name == "all" else (name,):
        result = explore(each)
        console.print(str(result))
        failed = failed or result.violation is not None or not result.complete
    return int(failed)


@contextmanager
def _quiet() -> Iterator[None]:
    """A death is an event like any other here, nothing to be told about."""
    logger = logging.getLogger("baton")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Search:
    """One exploration."""

    def __init__(self, scenario: Scenario, max_states: int) -> None:
        self._name = scenario.name
        self._world: Any = PairWorld(scenario) if scenario.pair else SmallWorld(scenario)
        self._max_states = max_states
        self._states: dict[AnyState, int] = {}
        self._order: list[AnyState] = []
        self._parents: list[tuple[int, Action]] = []
        self._depths = array("i")
        self._edges = (array("q"), array("q"))

    def run(self) -> ExploreResult:
        result = ExploreResult(self._name)
        began = time.perf_counter()
        self._visit(self._world.initial(), -1, ("start", 0))
        at = 0
        while at < len(self._order) and len(self._order) <= self._max_states:
            try:
                result.terminal += self._expand(at)
            except _Found as found:
                result.violation = str(found.broken)
                result.path = self._path(at, found.action)
                break
            at += 1
        result.complete = result.violation is not None or at == len(self._order)
        if result.complete and result.violation is None:
            result.violation = self._find_cycle()
        result.states, result.transitions = len(self._order), len(self._edges[0])
        result.depth = max(self._depths)
        result.events = self._world.count_events()
        result.seconds = time.perf_counter() - began
        return result

    def _expand(self, at: int) -> bool:
        """Visits what follows a state.  Returns whether nothing does."""
        state = self._order[at]
        duties, freedoms = self._world.actions(state)
        if not duties:
            reason = self._world.unsettled(state)
            if reason is not None:
                raise _Found(Broken(f"stuck: nobody has anything to do, and {reason}"), None)
        for action in (*duties, *freedoms):
            try:
                following = self._world.drain(self._world.act(state, action))
                self._world.check_pair(following)
            except Broken as broken:
                raise _Found(broken, action) from None
            number = self._visit(following, at, action)
            self._edges[0].append(at)
            self._edges[1].append(number)
        return not duties and not freedoms

    def _visit(self, state: AnyState, parent: int, action: Action) -> int:
        number = self._states.setdefault(state, len(self._order))
        if number == len(self._order):
            self._order.append(state)
            self._parents.append((parent, action))
            self._depths.append(self._depths[parent] + 1 if parent >= 0 else 0)
        return number

    def _find_cycle(self) -> str | None:
        """Takes away states without predecessors until none is left; what stays is in, or behind, a cycle."""
        sources, targets = self._edges
        following: list[list[int]] = [[] for _ in self._order]
        degree = [0] * len(self._order)
        for source, target in zip(sources, targets, strict=True):
            following[source].append(target)
            degree[target] += 1
        ready = [number for number, count in enumerate(degree) if not count]
        removed = 0
        while ready:
            removed += 1
            for target in following[ready.pop()]:
                degree[target] -= 1
                if not degree[target]:
                    ready.append(target)
        left = len(self._order) - removed
        return f"endless: a run can go round, {left} states are in a cycle or behind one" if left else None

    # -- for people

    def _path(self, at: int, last: Action | None) -> list[str]:
        """The actions from the start to a state, and the one after it."""
        actions: list[tuple[AnyState, Action]] = [] if last is None else [(self._order[at], last)]
        while at > 0:
            parent, action = self._parents[at]
            actions.append((self._order[parent], action))
            at = parent
        return [self._world.describe(state, action) for state, action in reversed(actions)]


class _Found(Exception):
    """A violation, and the action that led to it (None: the state itself is wrong)."""

    def __init__(self, broken: Broken, action: Action | None) -> None:
        super().__init__(str(broken))
        self.broken = broken
        self.action = action
