"""What an engine's core may rely on between engines: the real sockets and the simulator's keep it alike.

Messages of one peer come in order and none is missing, or `peer_lost` comes; then nothing that was sent
before follows.
"""

from __future__ import annotations

import itertools

import pytest

from baton.protocol.messages.handover import Cancel, Taken
from tests.engine.shell.simulated_side import SimulatedHost
from tests.engine.shell.test_peers import Side


class RealSide(Side):
    def break_link(self, to):
        self.peers._break(self.peers._links[to.name], "the test cuts it")

    def send_raw(self, to, data):
        self.peers._links[to.name].socket.send(data)

    def close(self):
        if not self.context.closed:
            super().close()


@pytest.fixture(params=["ipc", "tcp", "simulated on one host", "simulated on two"])
def side(request, tmp_path):
    """`side.local`: the death of a peer is told from the loss of its connection."""
    sides = []
    host = SimulatedHost(one_host=request.param == "simulated on one host")

    def make(name, endpoint=None):
        if request.param.startswith("simulated"):
            return host.side(name, endpoint)
        usual = f"ipc://{tmp_path}/{name}.peer" if request.param == "ipc" else "tcp://127.0.0.1:0"
        sides.append(RealSide(name, endpoint or usual))
        return sides[-1]

    make.local = request.param in ("ipc", "simulated on one host")
    yield make
    for one in sides:
        one.close()


def test_messages_come_in_order_with_the_name_of_their_sender(side):
    p, d = side("p"), side("d")
    for number in range(500):
        assert p.send(d, Taken(number, 1))
    d.until(lambda: len(d.messages) == 500, p)
    assert d.messages == [("p", Taken(number, 1)) for number in range(500)]
    d.send(p, Cancel(1, 1, False))
    p.until(lambda: p.messages, d)
    assert p.messages == [("d", Cancel(1, 1, False))]
    assert not p.lost
    assert not d.lost


def test_many_peers(side):
    hub, others = side("hub"), [side(f"o{number}") for number in range(20)]
    for other in others:
        other.send(hub, Taken(1, 1))
        hub.send(other, Taken(2, 1))
    hub.until(lambda: len(hub.messages) == 20 and all(o.messages for o in others), *others)
    assert {peer for peer, _ in hub.messages} == {other.name for other in others}


def test_nobody_there_is_one_loss_however_much_was_sent(side):
    p, gone = side("p"), side("gone")
    gone.close()
    for number in range(3):
        assert p.send(gone, Taken(number, 1))
    p.until(lambda: p.lost)
    assert p.lost == [("gone", side.local)]
    p.send(gone, Taken(1, 1))
    p.until(lambda: len(p.lost) == 2)
    assert p.lost[1] == p.lost[0]


def test_after_a_loss_the_next_message_makes_a_new_connection(side):
    p, d = side("p"), side("d")
    p.send(d, Taken(1, 1))
    d.until(lambda: d.messages, p)
    endpoint = d.peers.endpoint
    d.close()
    p.until(lambda: p.lost)
    d = side("d", endpoint)
    p.send(d, Taken(2, 1))
    d.until(lambda: d.messages, p)
    assert d.messages == [("p", Taken(2, 1))]


def test_a_peer_that_dies_is_dead_and_one_whose_connection_breaks_is_not(side):
    p, d, other = side("p"), side("d"), side("other")
    for to in (d, other):
        p.send(to, Taken(1, 1))
        to.until(lambda to=to: to.messages, p)
    p.break_link(other)
    p.until(lambda: p.lost, d, other)
    d.close()
    p.until(lambda: len(p.lost) > 1, other)
    if side.local:
        p.until(lambda: p.lost[-1] == ("d", True), other)
    # A death may be told as a loss first.
    assert list(dict.fromkeys(p.lost)) in (
        [("other", False), ("d", True)],
        [("other", False), ("d", False), ("d", True)],
        [("other", False), ("d", False)],
    )


def test_a_peer_that_connects_again_has_lost_what_was_before(side):
    """Only the connection broke: the listener cannot know what was on its way, but that some may be lost."""
    p, d = side("p"), side("d")
    p.send(d, Taken(1, 1))
    d.until(lambda: d.messages, p)
    p.break_link(d)
    p.until(lambda: p.lost, d)
    p.send(d, Taken(2, 1))
    d.until(lambda: len(d.messages) == 2, p)
    assert d.messages[-1] == ("p", Taken(2, 1))
    assert p.lost == [("d", False)]
    assert d.lost == [("p", False)]


def test_what_is_lost_with_a_connection_is_followed_by_a_loss_before_anything_else(side):
    """A thousand messages, with breaks anywhere among them: numbers only grow, and where some are missing a
    loss was told between their neighbours."""
    p, d = side("p"), side("d")
    seen: list[int | None] = []
    d.on_peer = lambda peer, message, now: seen.append(message.id)
    d.peer_lost = lambda peer, now, *, dead=False: seen.append(None)
    number = 0
    for breaks in range(10):
        for _ in range(100):
            number += 1
            p.send(d, Taken(number, 1))
        if breaks % 2:
            d.until(lambda number=number: number in seen, p)
        told = len(p.lost)
        p.break_link(d)
        p.until(lambda told=told: len(p.lost) > told, d)
    p.send(d, Taken(0, 1))
    d.until(lambda: 0 in seen, p)
    numbers = [one for one in seen[: seen.index(0)] if one is not None]
    assert numbers == sorted(set(numbers))
    for before, after in itertools.pairwise(seen):
        if before is not None and after:
            assert after == before + 1, "what is missing was not told"
    assert p.lost == [("d", False)] * 10


def test_a_message_that_makes_no_sense_ends_the_connection_on_both_sides(side):
    p, d = side("p"), side("d")
    p.send(d, Taken(1, 1))
    d.until(lambda: d.messages, p)
    p.send_raw(d, b"\xc1 nonsense")
    p.send(d, Taken(2, 1))
    p.until(lambda: p.lost, d)
    assert len(d.violations) == 1
    assert d.violations[0][0] == "peer p"
    assert d.lost == [("p", False)]
    assert d.messages == [("p", Taken(1, 1))], "nothing is believed after what made no sense"
    p.send(d, Taken(3, 1))
    d.until(lambda: len(d.messages) == 2, p)
    assert d.messages[-1] == ("p", Taken(3, 1))


def test_what_was_sent_before_a_death_is_read_before_the_loss_is_told(side):
    p, d = side("p"), side("d")
    seen: list[object] = []
    d.on_peer = lambda peer, message, now: seen.append(message)
    d.peer_lost = lambda peer, now, *, dead=False: seen.append("lost")
    d.send(p, Taken(9, 1))
    p.until(lambda: p.messages, d)
    for number in range(50):
        p.send(d, Taken(number, 1))
    d.until(lambda: seen, p)
    p.close()
    d.until(lambda: "lost" in seen)
    before = seen[: seen.index("lost")]
    assert before == [Taken(number, 1) for number in range(len(before))]
    assert set(seen[len(before) :]) == {"lost"}, "nothing of it follows"
