"""What the simulator has for clusters: links between engines, and pages that are read as they are written."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from baton.protocol.codec import pack_int32
from baton.protocol.messages.handover import Cancelled
from baton.protocol.messages.reports import REPORTS, LayersDone, StepReport
from baton.simulation.events import Events, Party
from baton.simulation.plans.draw import draw_plan
from baton.simulation.plans.scenarios import SCENARIOS
from baton.simulation.runner import run_plan
from baton.simulation.wires.gate import PartialPages, StepGate
from baton.simulation.wires.peers import CONNECT_S, Network, Peers
from baton.simulation.wires.rings import ReportEnd
from tests.engine.introductions import introduce

CLUSTERS = [name for name, shape in SCENARIOS.items() if len(shape.clusters[0]) > 1]


def run_until_idle(events):
    while (timer := events.next()) is not None:
        timer.action(*timer.args)


# -- plans


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_seed_is_one_run(name):
    plan = draw_plan(4, SCENARIOS[name])
    assert plan == draw_plan(4, SCENARIOS[name])
    outcomes = [run_plan(plan, recording=recording)[0] for recording in (False, True, False)]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0].events > 100


def test_clocks_of_a_cluster_differ_less_than_the_lease_allows():
    for seed in range(60):
        plan = draw_plan(seed, SCENARIOS["leases"])
        assert (1 + plan.drift / 2) / (1 - plan.drift / 2) < 1 / 0.95


def test_burdens_are_where_the_scenario_says():
    plan = draw_plan(1, SCENARIOS["2p3d"])
    assert [config.name for config in plan.instances] == ["p0", "p1", "d0", "d1", "d2"]
    assert plan.instances[2].max_num_seqs == 1
    assert {fault.instance for fault in plan.faults if fault.kind == "slow_peer"} == {3}
    assert [fault.instance for fault in plan.faults if fault.kind == "crash_engine"] == [4, 4, 4]


# -- links


class Engine(Party):
    """What a link needs of an engine process."""

    def __init__(self, world, index):
        super().__init__(f"e{index}")
        self.listening = True
        self.told = []
        self.core = SimpleNamespace(
            on_peer=lambda peer, message, now: self.told.append((peer, message.id)),
            peer_lost=lambda peer, now, dead=False: self.told.append((peer, "dead" if dead else "lost")),
            violation=lambda sender, what: self.told.append("violation"),
        )
        self.instance = SimpleNamespace(name=f"i{index}", index=index, world=world, secret=b"")
        self.peers = Peers(self, random.Random(index))
        self._events = world.events

    def wake(self):
        self._events.after(0.0, self, self.peers.turn, 0.0, 1000)


@pytest.fixture
def world():
    world = SimpleNamespace(
        events=Events(),
        plan=SimpleNamespace(usual_delay=0.001, one_host=True, instances=(1, 2)),
        random_for=random.Random,
        message_passed=lambda *args: None,
        monitor=SimpleNamespace(
            peer_reads=lambda *args: None,
            peer_has_read=lambda *args: None,
            handover=SimpleNamespace(peer_lost=lambda *args: None),
            engine=SimpleNamespace(refused_malformed=lambda engine: None),
            strangers=SimpleNamespace(links=SimpleNamespace(heard=lambda *args: None)),
        ),
    )
    world.network = Network(world)
    world.engines = [Engine(world, index) for index in range(2)]
    world.listening = lambda endpoint: next(
        (one for one in world.engines if one.alive and endpoint == f"sim://{one.instance.name}"), None
    )
    return world


TO = introduce("i1", "sim://i1", "i0")


def send(world, numbers):
    for number in numbers:
        world.engines[0].peers.send(TO, Cancelled(number, 1, by_p=True))


def test_messages_of_a_peer_come_in_order(world):
    send(world, range(50))
    run_until_idle(world.events)
    assert world.engines[1].told == [("i0", number) for number in range(50)]
    assert world.engines[0].told == []


def test_a_break_is_told_to_the_sender_and_with_the_next_link_to_the_other(world):
    one, other = world.engines
    send(world, [1])
    run_until_idle(world.events)
    send(world, [2, 3])
    (link,) = world.network.between(0, 1)
    link.cut()
    run_until_idle(world.events)
    assert one.told == [("i1", "lost")]
    assert other.told == [("i0", 1)]
    send(world, [4])
    run_until_idle(world.events)
    assert other.told == [("i0", 1), ("i0", "lost"), ("i0", 4)]


def test_what_is_left_of_an_earlier_link_is_dropped(world):
    one, other = world.engines
    send(world, [1])
    run_until_idle(world.events)
    (first,) = world.network.between(0, 1)
    first.delays.extra = 1.0
    send(world, [2])
    one.peers.broke(first)
    send(world, [3])
    run_until_idle(world.events)
    assert other.told == [("i0", 1), ("i0", "lost"), ("i0", 3)]


@pytest.mark.parametrize("one_host", [True, False])
def test_a_dead_peer_is_known_to_be_dead_on_one_host(world, one_host):
    world.plan.one_host = one_host
    send(world, [1])
    run_until_idle(world.events)
    world.engines[1].alive = False
    world.network.died(world.engines[1])
    run_until_idle(world.events)
    assert world.engines[0].told == [("i1", "dead" if one_host else "lost")]
    send(world, [2])
    run_until_idle(world.events)
    assert len(world.engines[0].told) == 2, "nobody listens there: lost again"


def test_a_partition_holds_messages_back_and_new_links_give_up(world):
    send(world, [1])
    run_until_idle(world.events)
    world.network.partition(0, 1, world.events.now + 5.0)
    send(world, [2])
    began = world.events.now
    run_until_idle(world.events)
    assert world.engines[1].told == [("i0", 1), ("i0", 2)]
    assert world.events.now >= began + 5.0
    world.network.partition(0, 1, world.events.now + 5.0)
    (link,) = world.network.between(0, 1)
    world.engines[0].peers.broke(link)
    began = world.events.now
    send(world, [3])
    while len(world.engines[0].told) < 2:
        timer = world.events.next()
        timer.action(*timer.args)
    assert world.engines[0].told == [("i1", "lost"), ("i1", "lost")]
    assert world.events.now == pytest.approx(began + CONNECT_S, abs=0.1)


def test_who_sends_nonsense_is_not_read_any_more(world):
    one, other = world.engines
    send(world, [1])
    run_until_idle(world.events)
    (link,) = world.network.between(0, 1)
    link.send(b"\xc1")
    send(world, [2])
    run_until_idle(world.events)
    assert other.told == [("i0", 1), "violation", ("i0", "lost")]
    assert one.told == [("i1", "lost")]


# -- steps


def step(number):
    return REPORTS.encode(StepReport(step=number, applied=0))


def layers(count):
    return REPORTS.encode(LayersDone(pack_int32([0]), pack_int32([1]), count))


def write(gate, record, ring=True):
    return gate.write(REPORTS.decode(record), record, ring)


def test_records_of_a_step_wait_until_every_rank_has_come_so_far():
    events, leader, written = Events(), Party("leader"), []
    end = ReportEnd(9, lambda record: written.append((events.now, record)), lambda: None)
    gate = StepGate(events, leader, 2, 4, end)
    idle = step(0)
    write(gate, idle)
    assert written == [(0.0, idle)]
    for record in (layers(1), layers(3), step(1), idle):
        assert write(gate, record)
    gate.begins(0, 1, 1.0)
    run_until_idle(events)
    assert len(written) == 1, "the other rank has not begun"
    events.at(2.0, leader, gate.begins, 1, 1, 2.0)
    run_until_idle(events)
    assert written[1:] == [(2.5, layers(1)), (3.5, layers(3)), (4.0, step(1)), (4.0, idle)]


def test_records_that_wake_nobody_come_with_one_that_does():
    events, leader, written = Events(), Party("leader"), []
    gate = StepGate(events, leader, 1, 1, ReportEnd(9, written.append, lambda: None))
    for number in (1, 2, 3):
        write(gate, step(number), ring=number == 2)
        gate.begins(0, number, 1.0)
        run_until_idle(events)
        assert len(written) == (0 if number == 1 else 2)
    gate.ring()
    assert written == [step(1), step(2), step(3)]
    write(gate, step(4), ring=False)
    gate.ring()  # as soon as it is true
    assert len(written) == 3
    gate.begins(0, 4, 1.0)
    run_until_idle(events)
    assert written[3:] == [step(4)]


def test_a_dead_leader_says_nothing_more():
    events, leader, written = Events(), Party("leader"), []
    gate = StepGate(events, leader, 1, 1, ReportEnd(9, written.append, lambda: None))
    write(gate, step(1))
    gate.begins(0, 1, 1.0)
    leader.alive = False
    run_until_idle(events)
    assert written == []


def test_a_reader_sees_what_was_there_before_in_layers_that_are_not_computed():
    events = Events()
    cells = np.zeros((3, 2, 2, 1, 4), np.uint8)
    cells[1] = 7
    pages = PartialPages(events, cells)
    pages.remember([1])
    cells[1], cells[2] = 9, 9
    pages.begins(1.0)
    seen = []
    for at in (0.4, 0.6, 1.1):
        events.at(at, Party("reader"), lambda: seen.append(pages.seen(1, 0, 2)[:, 0, 0, 0].tolist()))
    run_until_idle(events)
    assert seen == [[7, 7], [9, 7], [9, 9]]
    assert pages.seen(2, 1, 1).shape == (1, 2, 1, 4)
    assert pages.seen(2, 1, 1).min() == 9
