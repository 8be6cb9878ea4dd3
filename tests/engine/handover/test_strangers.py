"""What somebody who reaches an engine's port can cost it."""

from __future__ import annotations

import time
from array import array

import pytest
import zmq

from baton.engine.handover.records import Phase
from baton.engine.outbox import _MAX_UNNAMED, Outboxes
from baton.engine.request import Request
from baton.protocol.codec import MalformedMessage
from baton.protocol.messages.handover import Reserve, Reserved
from baton.protocol.messages.requests import MAX_NAME, TO_ENGINE, Hello, Query, QueryReply, Submit, Welcome
from baton.protocol.params.sampling import MAX_STOP_IDS, Sampling, Stopping
from tests.engine.instance import Gateway, Instance
from tests.engine.peerscript import SAMPLING, PeerScript
from tests.engine.shell.test_loop import CONFIG

BIG = Submit(1, "big", b"\0" * (8 << 20), Sampling(seed=0), Stopping(1))


def test_a_flood_on_the_public_port_keeps_nobody_from_an_answer():
    """Before: 150 messages of 8 MB were read in one turn, and the supervisor's question was answered after
    the last of them."""
    taken: list[int] = []
    instance = Instance(CONFIG, public="tcp://127.0.0.1:0")
    core = instance.loop.core
    on_message, flush = core.on_message, core.flush

    def counting(gateway, message, now):
        if isinstance(message, Submit):
            taken.append(len(message.prompt))
        elif isinstance(message, Query):
            taken.append(-1)
        on_message(gateway, message, now)

    def flushing(now):
        taken.append(0)
        return flush(now)

    core.on_message, core.flush = counting, flushing
    context = zmq.Context()
    try:
        supervisor = Gateway(instance.loop.endpoint)
        assert isinstance(supervisor.receive(), Welcome)
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.SNDHWM, 0)
        stranger.connect(instance.loop.public)
        data = TO_ENGINE.encode(BIG)
        for _ in range(40):
            stranger.send(data)
        for number in range(3):
            supervisor.send(Query(number, "stats"))
            assert isinstance(supervisor.receive(), QueryReply)
        while sum(size > 0 for size in taken) < 40:
            time.sleep(0.01)
        turns = " ".join(str(size) for size in taken if size >= 0).split(" 0")
        assert max(len(turn.split()) for turn in turns) == 1, "one turn takes one of them, and then sends"
        stranger.close(0)
        supervisor.close()
    finally:
        context.term()
        instance.close()


def test_gateways_of_both_sockets_are_told_apart():
    instance = Instance(CONFIG, public="tcp://127.0.0.1:0")
    try:
        near, far = Gateway(instance.loop.endpoint, "near"), Gateway(instance.loop.public, "far")
        for gateway in (near, far):
            assert isinstance(gateway.receive(), Welcome)
        near.send(Query(1, "stats"))
        far.send(Query(2, "stats"))
        assert (near.receive().id, far.receive().id) == (1, 2)
        near.close()
        far.close()
    finally:
        instance.close()


@pytest.mark.parametrize(
    "message",
    [
        Hello("x" * (MAX_NAME + 1)),
        Submit(1, "x" * (MAX_NAME + 1), b"", Sampling(seed=0), Stopping(1)),
        Submit(1, "x", b"", Sampling(seed=0), Stopping(1, stop_token_ids=(1,) * (MAX_STOP_IDS + 1))),
    ],
)
def test_what_is_too_long_is_no_message(message):
    with pytest.raises(MalformedMessage):
        TO_ENGINE.decode(TO_ENGINE.encode(message))


def test_senders_that_never_say_hello_are_forgotten():
    outboxes = Outboxes()
    named = outboxes.of(b"gateway")
    named.name = "gate"
    busy = outboxes.of(b"busy")
    request = Request(busy, 1, "r", array("i", [1]), SAMPLING, Stopping(1), priority=0, number=1, arrived=0.0)
    busy.requests[1] = request
    for number in range(10 * _MAX_UNNAMED):
        outboxes.of(f"stranger {number}".encode())
    assert len(outboxes) == _MAX_UNNAMED + 2
    assert outboxes.of(b"gateway") is named
    assert outboxes.of(b"busy") is busy


# -- costs and windows of hand-overs


class Counted(dict):
    """A dictionary that counts the entries which somebody walks over."""

    walked = 0

    def values(self):
        Counted.walked += len(self)
        return super().values()


def test_a_submit_does_not_walk_over_what_is_in_preparation():
    """Before: twice over all departures for each `Submit`."""
    p = PeerScript(max_waiting=1000)
    departures = p.core._handovers.departures
    departures._live = Counted(departures._live)
    departures._preparing = Counted(departures._preparing)
    for number in range(1, 200):
        p.submit(number, "d")
    Counted.walked = 0
    for number in range(200, 220):
        p.submit(number, "d")
    assert Counted.walked == 0
    assert departures.num_preparing == 219
    assert len(list(departures.preparing())) == 219


def test_what_is_prepared_is_counted_until_it_is_settled_or_gone():
    p = PeerScript()
    departures = p.core._handovers.departures
    for number in (1, 2, 3):
        p.submit(number, "d")
    asked = [message for _, message in p.take() if isinstance(message, Reserve)]
    assert departures.num_preparing == 3
    p.hear("d", Reserved(asked[0].id, 1, 0))
    assert departures.num_preparing == 2
    p.wait(0.6)
    assert departures.num_preparing == 0, "the others stay: nobody answered"


def test_a_window_is_lowered_only_by_those_who_asked_in_it():
    """D is lost while two ask: both ask again, in a new window.  Before, it lost two places that nobody
    had."""
    p = PeerScript(max_preparing=2)
    for number in (1, 2):
        p.submit(number, "d", "d")
    assert len(p.take()) == 2
    p.lose("d")
    assert len(p.take()) == 2, "they ask the next decoder, which is the same one"
    attempts = p.core._handovers.departures.attempts
    assert attempts._windows["d"].asking == 2
    asking = [attempt for attempt in attempts.of("d") if attempt.phase is Phase.ASKING]
    assert len(asking) == 2
    p.lose("d")
    assert all(window.asking == 0 for window in attempts._windows.values())
