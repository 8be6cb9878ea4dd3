"""The event log in the simulator: the same notes as of a real server, with clocks that are known."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from baton.observe.events.clocks import DRIFT
from baton.observe.events.spans import spans
from baton.protocol.notes import MAX_NOTES, MEANING
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
