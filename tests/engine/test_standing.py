"""What an engine tells all its gateways: label, draining, pauses, and who of them came first."""

from __future__ import annotations

import pytest

from baton.protocol.messages.requests import Hello, Query, QueryReply, Welcome
from baton.protocol.standing import Stand, Standing
from tests.engine.world import World

A, B, WATCHER = b"a", b"b", b"w"


class Gateways:
    """An engine that is ready, and what its gateways have heard last."""

    def __init__(self) -> None:
        self.world = World()
        self.heard: dict[bytes, Welcome] = {}
        self.replies: dict[int, dict] = {}

    def tell(self, who: bytes, message) -> None:
        self.world.core.on_message(who, message, self.world.now)
        self.flush()

    def flush(self) -> None:
        for to, message in self.world.core.flush(self.world.now).gateways:
            if isinstance(message, Welcome):
                self.heard[to] = message
            elif isinstance(message, QueryReply):
                self.replies[message.id] = message.body


@pytest.fixture
def gateways() -> Gateways:
    gateways = Gateways()
    gateways.tell(WATCHER, Hello("watcher", watches=True))
    gateways.tell(A, Hello("a"))
    gateways.tell(B, Hello("b"))
    return gateways


def test_an_order_of_one_gateway_is_heard_by_all(gateways: Gateways):
    gateways.tell(A, Query(1, "stand", stand=Stand(label="decode")))
    gateways.tell(B, Query(2, "stand", stand=Stand(draining=True, move_after_s=2.0)))
    standing = Standing(2, "decode", True, 2.0)
    assert [gateways.heard[who].standing for who in (A, B, WATCHER)] == [standing] * 3
    assert gateways.replies[2] == {"generation": 2, "label": "decode", "draining": True}


def test_of_two_decisions_at_once_the_second_is_refused(gateways: Gateways):
    gateways.tell(A, Query(1, "stand", stand=Stand("only_if", 0, "decode")))
    gateways.tell(B, Query(2, "stand", stand=Stand("only_if", 0, "prefill")))
    assert gateways.replies[2]["code"] == "stale"
    assert gateways.heard[B].standing == Standing(1, "decode")


def test_who_comes_later_finds_it_as_it_is(gateways: Gateways):
    gateways.tell(A, Query(1, "stand", stand=Stand(draining=True)))
    gateways.tell(A, Query(2, "pause"))
    gateways.tell(b"c", Hello("c"))
    assert (gateways.heard[b"c"].standing.draining, gateways.heard[b"c"].paused) == (True, True)


def test_the_first_gateway_is_one_that_sends_requests(gateways: Gateways):
    assert [gateways.heard[who].first for who in (WATCHER, A, B)] == [False, True, False]
    gateways.world.core.gateway_lost(B)
    gateways.tell(B, Hello("b"))
    gateways.world.core.gateway_lost(A)
    gateways.flush()
    assert gateways.heard[B].first, "its heir is told"
    gateways.tell(A, Hello("a"))
    assert not gateways.heard[A].first


def test_a_pause_ends_without_the_gateway_that_ordered_it(gateways: Gateways):
    core, world = gateways.world.core, gateways.world
    gateways.tell(A, Query(1, "pause", "5"))
    assert [gateways.heard[who].paused for who in (A, B)] == [True, True]
    core.gateway_lost(A)
    gateways.flush()
    assert core.next_deadline() == world.now + 5
    world.now += 5
    core.on_clock(world.now)
    gateways.flush()
    assert not core.scheduler.paused
    assert not gateways.heard[B].paused
    assert core.next_deadline() is None


def test_a_resume_ends_it_earlier_and_a_second_pause_has_its_own_end(gateways: Gateways):
    core = gateways.world.core
    gateways.tell(A, Query(1, "pause", "5"))
    gateways.tell(B, Query(2, "pause"))
    assert core.next_deadline() is None, "the last order holds: until somebody ends it"
    gateways.tell(A, Query(3, "resume"))
    assert not gateways.heard[B].paused
    assert not core.scheduler.paused
