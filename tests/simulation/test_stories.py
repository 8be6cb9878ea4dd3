"""The event log in the simulator: the same notes as of a real server, with clocks that are known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from baton.executor.base import StepBatch
from baton.observe.events.clocks import DRIFT
from baton.observe.events.spans import spans
from baton.protocol.notes import MAX_NOTES, MEANING
from baton.simulation.parties.worker import RankProcess
from baton.simulation.plans.draw import draw_plan
from baton.simulation.plans.scenarios import SCENARIOS
from baton.simulation.runner import run_plan
from baton.simulation.world import World
from tests.observe.traces import check_trace


def run(scenario: str, seed: int) -> World:
    outcome, world = run_plan(draw_plan(seed, SCENARIOS[scenario]), recording=True)
    assert outcome.violation is None
    return world


@pytest.mark.parametrize("scenario", ["standard", "handover", "2p3d"])
def test_the_way_of_each_request_is_told_without_gaps(scenario: str) -> None:
    names: set[str] = set()
    for seed in range(3):
        world = run(scenario, seed)
        check_trace(json.loads(world.timeline.chrome_trace())["traceEvents"])
        for _, story in world.timeline.stories:
            (trail,) = story.trails
            if story.ended is None:
                continue
            found = spans(story, trail, story.ended)
            names |= {span.name for span in found}
            assert (found[0].begin, found[-1].end) == (story.arrived, story.ended)
            assert all(span.end == after.begin for span, after in pairwise(found))
            for told in trail.told:
                assert told.notes[-1].what == "ended"
                assert len(told.notes) <= MAX_NOTES
                assert {note.what for note in told.notes} <= set(MEANING)
                assert [note.at for note in told.notes] == sorted(note.at for note in told.notes)
    assert {"read", "queue", "prefill", "decode"} <= names
    assert scenario == "standard" or "handover" in names


@pytest.mark.parametrize("scenario", ["calm", "standard", "2p3d", "relay"])
def test_each_rank_shows_its_steps_where_they_were(scenario: str) -> None:
    """Against what the ranks themselves did, by the clock of the world."""
    ranks = looked = 0
    shape = SCENARIOS[scenario]
    calm = [seed for seed in range(40) if draw_plan(seed, shape).drift <= DRIFT]
    for seed in calm[:3]:
        with ran_steps() as true:
            world = run(scenario, seed)
        told: dict[tuple[str, int], list[int]] = {}
        for (gateway, name), log in world.timeline.steps.items():
            for step in log.between(-math.inf, math.inf):
                at = true[step.incarnation, step.rank, step.number]
                told.setdefault((f"{gateway.name} {step.incarnation}", step.rank), []).append(step.number)
                if step.error is not None:
                    looked += 1
                    assert abs(gateway.global_time(step.begin) - at) <= step.error + 1e-6, (name, step)
        for numbers in told.values():
            assert len(set(numbers)) == len(numbers), "each once"
            assert scenario != "calm" or set(numbers) == set(range(1, max(numbers) + 1)), "none is missing"
        ranks += len({rank for _, rank in told})
        events = json.loads(world.timeline.chrome_trace())["traceEvents"]
        steps = [event for event in events if event.get("cat") == "step"]
        assert len(steps) == len({(e["pid"], e["tid"], e["args"]["step"], e["ts"]) for e in steps}) > 0
    assert looked
    assert ranks > 3  # (some have several)


@contextmanager
def ran_steps() -> Iterator[dict[tuple[str, int, int], float]]:
    """By incarnation, rank and number: when ranks began their steps."""
    true: dict[tuple[str, int, int], float] = {}
    observe = RankProcess._observe

    def observed(self: RankProcess, applied: int, batch: StepBatch) -> None:
        true[self.instance.name, self.rank, batch.step] = self._events.now
        observe(self, applied, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankProcess, "_observe", observed)
        yield true


def test_the_error_of_a_clock_is_never_less_than_it_is_wrong() -> None:
    looked = 0
    shape = SCENARIOS["2p3d"]
    calm = [seed for seed in range(40) if draw_plan(seed, shape).drift <= DRIFT]
    for seed in calm[:3]:
        world = run("2p3d", seed)
        for gateway in world.gateways:
            for instance in world.instances:
                member = gateway.cluster.members.get(instance.member)
                if member is None or member.incarnation != instance.name:
                    continue
                now = gateway.now()
                offset, error = member.clock.offset(now)
                if error is None or not error:
                    continue
                looked += 1
                true = instance.engine.local(world.events.now) - now
                assert abs(offset - true) <= error + 1e-9
    assert looked
