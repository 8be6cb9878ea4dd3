"""Connections between engines: real sockets, and real processes where death matters.  See
`test_peers_contract.py` for what the simulator has as well."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest
import zmq

from baton.engine.shell.peers import Peers
from baton.protocol.messages.handover import PEER, Cancel, Taken
from baton.protocol.messages.requests import Target
from tests.conftest import GENEROUS_S
from tests.engine.introductions import introduce

DEADLINE_S = GENEROUS_S
MAX_BYTES = 10_000


class Side:
    """One engine's sockets, and everything that its core would be told."""

    def __init__(self, name: str, endpoint: str, max_bytes: int = MAX_BYTES):
        self.name = name
        self.context = zmq.Context()
        self.peers = Peers(self.context, endpoint, name, max_bytes)
        self.messages = []
        self.lost = []
        self.violations = []
        self.refusals = []
        self.turns = 0

    def on_peer(self, peer, message, now):
        self.messages.append((peer, message))

    def peer_lost(self, peer, now, *, dead=False):
        self.lost.append((peer, dead))

    def refused(self, where, count):
        self.refusals.append((where, count))

    def violation(self, sender, what):
        self.violations.append((sender, what))

    def send(self, to, message):
        return self.peers.send(introduce(to.name, to.peers.endpoint, self.name), message, time.monotonic())

    def until(self, condition, *others, deadline_s=DEADLINE_S):
        """Lives as the engine's loop does, together with others, until the condition holds."""
        sides = (self, *others)
        end = time.monotonic() + deadline_s
        while not condition():
            timeout = end - time.monotonic()
            assert timeout > 0, (self.messages, self.lost, self.violations)
            for side in sides:
                deadline = side.peers.next_deadline()
                if deadline is not None:
                    timeout = min(timeout, deadline - time.monotonic())
                if side.peers.busy():
                    timeout = 0
            poll = select.poll()
            for side in sides:
                poll.register(side.peers.fileno(), select.POLLIN)
            poll.poll(max(0, timeout * 1000))
            for side in sides:
                side.turns += 1
                side.peers.turn(side, time.monotonic(), 256)

    def close(self):
        self.peers.close()
        self.context.term()


@pytest.fixture(params=["ipc", "tcp"])
def side(request, tmp_path):
    sides = []

    def make(name, **options):
        endpoint = f"ipc://{tmp_path}/{name}.peer" if request.param == "ipc" else "tcp://127.0.0.1:0"
        sides.append(Side(name, endpoint, **options))
        return sides[-1]

    make.kind = request.param
    yield make
    for one in sides:
        if not one.context.closed:
            one.close()


def test_an_address_that_is_none_is_refused_when_sending(side):
    p = side("p")
    assert not p.peers.send(Target("x", "carrier-pigeon"), Taken(1, 1), 0.0)
    assert not p.peers.send(Target("x", "tcp://1.2.3.4:port"), Taken(1, 1), 0.0)


def test_somebody_who_does_not_speak_the_protocol_is_given_up_in_time(side, monkeypatch):
    import socket

    monkeypatch.setattr("baton.engine.shell.peers.CONNECT_S", 0.3)
    p = side("p")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        target = Target("mute", f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        assert p.peers.send(target, Taken(1, 1), time.monotonic())
        p.until(lambda: p.lost)
    assert p.lost == [("mute", False)]


def test_a_peer_that_connects_again_has_lost_what_was_before(side):
    """Only the connection broke: the listener cannot know what was on its way, but that some may be lost."""
    p, d = side("p"), side("d")
    p.send(d, Taken(1, 1))
    d.until(lambda: d.messages, p)
    (link,) = p.peers._links.values()
    p.peers._break(link, "the test cuts it")
    p.until(lambda: p.lost, d)
    p.send(d, Taken(2, 1))
    d.until(lambda: len(d.messages) == 2, p)
    assert p.lost == [("d", False)]
    assert d.lost == [("p", False)]
    p.until(lambda: not p.peers.next_deadline(), d)
    assert p.lost == [("d", False)], "one who answers a look is not dead"


def test_a_sender_without_a_name_is_refused(side):
    d = side("d")
    context = zmq.Context()
    for name in (b"nobody", b"/7/s/00", b"a/x/s/00", b"\xff/1/s/00", b"p/1/s/nohex", b"p/1//00", b"p/1/s/00"):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.ROUTING_ID, name)
        stranger.connect(d.peers.endpoint)
        stranger.send(PEER.encode(Taken(1, 1)))
        d.until(lambda: d.violations)
        d.violations.clear()
        assert stranger.poll(DEADLINE_S * 1000), "it is told"
        stranger.close(0)
    context.term()
    assert not d.messages


def test_a_message_that_is_too_large_costs_the_connection(side):
    p, d = side("p", max_bytes=1 << 20), side("d")
    p.send(d, Cancel(1, 1, True, "x" * (MAX_BYTES + 1)))
    p.until(lambda: p.lost, d)
    assert not d.messages
    assert not d.send(p, Cancel(1, 1, True, "x" * (MAX_BYTES + 1))), "the sender knows the limit too"


def test_idle_means_asleep(side):
    p, d = side("p"), side("d")
    p.send(d, Taken(1, 1))
    d.send(p, Taken(1, 1))
    p.until(lambda: p.messages and d.messages, d)
    p.until(lambda: p.peers.next_deadline() is None and d.peers.next_deadline() is None, d)
    before = p.turns
    with pytest.raises(AssertionError):
        p.until(lambda: False, d, deadline_s=0.3)
    assert p.turns - before <= 2


PROGRAM = """
import sys, time
from tests.engine.shell.test_peers import Side
from baton.protocol.messages.handover import Taken
from tests.conftest import GENEROUS_S
from tests.engine.introductions import introduce
side = Side("other", sys.argv[1])
print(side.peers.endpoint, flush=True)
side.until(lambda: side.messages, deadline_s=60)
side.peers.send(introduce("p", sys.argv[2], "other"), Taken(7, 7), time.monotonic())
side.until(lambda: False, deadline_s=60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_a_process_is_noticed(side, tmp_path, how):
    p = side("p")
    endpoint = f"ipc://{tmp_path}/other.peer" if side.kind == "ipc" else "tcp://127.0.0.1:0"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, endpoint, p.peers.endpoint], stdout=subprocess.PIPE, text=True
    )
    try:
        other = introduce("other", process.stdout.readline().strip(), "p")
        p.peers.send(other, Taken(1, 1), time.monotonic())
        p.until(lambda: p.messages)
        os.kill(process.pid, how)
        p.until(lambda: p.lost)
        if side.kind == "ipc":
            p.until(lambda: p.lost[-1] == ("other", True))
        assert all(peer == "other" for peer, _ in p.lost)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
