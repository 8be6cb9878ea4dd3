"""What only happens when two rare things meet: found by reading, each shown here."""

from __future__ import annotations

import math
import time

import pytest
import zmq

from baton.engine.shell.peers import Peers
from baton.ipc.sockets.zeromq import terminate
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Admit, Control
from baton.protocol.messages.handover import (
    Cancel,
    Cancelled,
    Credit,
    Handoff,
    Progress,
    Refused,
    Reserve,
    Reserved,
    Taken,
)
from baton.protocol.messages.reports import CloseReason, ControlDone
from baton.protocol.messages.requests import Query, Target
from baton.protocol.params.sampling import TokenLogprobs
from baton.protocol.weights import Weights
from tests.conftest import GENEROUS_S
from tests.engine.handover.test_arrivals import PAGES, handed, reserved
from tests.engine.handover.test_departures import prepared
from tests.engine.peerscript import LEASE_S, PeerScript, instance_source


def test_a_paused_instance_sleeps_with_a_finite_deadline_or_none():
    """A request that is ready has no deadline of its own: the loop cannot sleep for `inf` seconds."""
    d, fetch = handed()
    d.query("pause")
    d.fetched(fetch.id)
    assert ("p", Taken(1, 1)) in d.take()
    d.wait(3 * LEASE_S)
    deadline = d.core.next_deadline()
    assert deadline is None or math.isfinite(deadline)
    d.query("resume")
    assert [type(command) for command in d.orders() if isinstance(command, Admit)] == [Admit]


def test_a_request_that_gives_way_before_its_first_page_gives_its_reservation_back():
    """D has heard that it begins, and would keep the room for as long as it waits."""
    p = PeerScript(num_blocks=16)
    admit = prepared(p, prompt=range(1, 31), max_tokens=20)
    first = [m for _, m in p.take() if isinstance(m, Progress)]
    assert [m.complete for m in first] == [0]
    p.core.scheduler.drain()
    p.core.scheduler.end_drain()
    p.close(admit, CloseReason.PREEMPTED)
    sent = [m for _, m in p.take()]
    assert [type(m) for m in sent] == [Cancel, Reserve]
    assert (sent[0].attempt, sent[1].attempt) == (1, 2)


def test_a_handoff_that_cannot_be_run_is_refused():
    for tokens, logprobs in (([7] * 8, []), ([7] * 60, []), ([7], [TokenLogprobs(7, -1.0, 1)] * 2)):
        d = reserved()
        d.hear("p", Handoff(1, 1, 0, PAGES, pack_int32(tokens), logprobs, 4, 0.25))
        assert [m for _, m in d.take()] == [Cancel(1, 1, False, "protocol violation")], tokens
        assert d.tokens == []
        assert d.owned == (0, 0, 0)


def test_an_id_that_does_not_fit_into_an_answer_is_refused():
    d = PeerScript()
    d.ask(request=1 << 63)
    ((_, refused),) = d.take()
    assert refused.code == "bad_request"
    d.submit(1 << 63)
    assert [f.reason for f in d.finished] == ["rejected"]


def test_a_later_attempt_does_not_orphan_what_was_handed_over():
    d, fetch = handed()
    d.orders()
    d.ask(attempt=2)
    d.fetched(fetch.id, dropped=True)
    orders = d.orders()
    assert [o for o in orders if isinstance(o, Admit)], "it is ours, and is computed again"


def test_an_instance_that_restarts_after_an_update_fits_those_that_were_updated():
    """Its first checkpoint is the one that the others were given while they ran."""
    d = PeerScript(weights=Weights(1, "/new", "/new"))
    d.ask("p", source=instance_source(weights="/new"))
    ((_, answer),) = d.take()
    assert isinstance(answer, Reserved)
    d.tell(Query(1, "start_profile", "/tmp"))
    (order,) = [command for command in d.orders() if isinstance(command, Control)]
    d.report(ControlDone(0, order.id))
    d.ask("p", 2, source=instance_source(weights="/new"))
    assert [type(m) for _, m in d.take()] == [Reserved], "another order changes nothing"


def test_a_line_for_credit_is_served_in_order_though_many_leave_it():
    d = PeerScript(max_num_seqs=1, num_blocks=16)
    for number in range(1, 60):
        d.ask("p", number)
    assert [type(m) for _, m in d.take()] == [Reserved] + [Refused] * 58
    for number in range(2, 50):
        d.hear("p", Cancel(number, 1, True))
    d.take()
    d.hear("p", Cancel(1, 1, True))
    assert [m for _, m in d.take()] == [Cancelled(1, 1, True), Credit(50, 1)]
    d.wait(1.0)
    assert [m for _, m in d.take() if isinstance(m, Credit)] == [Credit(51, 1)]
    d.lose("p")
    assert d.core._machinery.handovers.arrivals.credits.next_deadline is None


class _Events:
    def __init__(self) -> None:
        self.lost: list[str] = []

    def on_peer(self, peer, message, now) -> None: ...

    def peer_lost(self, peer, now, *, dead=False) -> None:
        self.lost.append(peer)

    def violation(self, sender, what) -> None:
        raise AssertionError(what)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_sending_to_a_peer_that_died_a_moment_ago_is_a_loss_and_no_defect(tmp_path, scheme):
    """ZeroMQ has no queue any more to put the message in; nobody has looked at the monitor yet."""
    contexts = [zmq.Context() for _ in range(2)]
    places = [f"ipc://{tmp_path}/{name}" if scheme == "ipc" else "tcp://127.0.0.1:0" for name in "ab"]
    a, b = (Peers(c, place, name, 1 << 20) for c, place, name in zip(contexts, places, "ab", strict=True))
    events = _Events()
    try:
        to = Target("b", b.endpoint)
        assert a.send(to, Taken(1, 1), time.monotonic())
        give_up = time.monotonic() + GENEROUS_S
        while a.next_deadline() is not None:  # until the link is open
            assert time.monotonic() < give_up
            a.turn(events, time.monotonic(), 10)
        b.close()
        while not a.busy():  # ZeroMQ takes messages until its thread has seen the end of the connection
            assert time.monotonic() < give_up
            assert a.send(to, Taken(2, 1), time.monotonic())
        assert a.send(to, Taken(3, 1), time.monotonic())
        assert events.lost == []
        a.turn(events, time.monotonic(), 10)
        assert events.lost == ["b"]
    finally:
        a.close()
        for context in contexts:
            terminate(context, 1.0)
