"""Gateways that go without a word: killed, or stopped behind a connection that stays open.

Each gateway that is lost here is a process of its own, and the instance stands still, so that no token and no
change of load finds out that nobody is there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import zmq

from baton.engine.shell import loop as shell
from baton.engine.shell.leavers import Leavers, keep_asking
from baton.engine.shell.sockets import bound_endpoint, listen
from baton.ipc.sockets.curve import Doorkeeper, Encryption, protect
from baton.ipc.sockets.zeromq import terminate
from baton.launch.planning.instance_config import instance_config
from baton.protocol.messages.requests import Query, QueryReply, Welcome
from baton.protocol.rules.cluster_secret import ClusterSecret, Secrets
from tests.conftest import GENEROUS_S
from tests.engine.instance import Gateway, Instance

ROOT = Path(__file__).resolve().parents[3]
CONFIG = instance_config(
    model="", executor="simulated", vocab_size=1000, max_model_len=256, block_size=8, num_blocks=40
)
REQUESTS = 20
SUBMITTING = f"""
import sys, time
from tests.engine.instance import Gateway
from tests.engine.shell.test_loop import submit
gateway = Gateway(sys.argv[1], "leaving")
gateway.socket.recv()
for number in range({REQUESTS}):
    gateway.send(submit(number, [1, 2, 3], 200))
sys.stdin.read()
"""


class Leaving:
    """A gateway as a process, with requests at the instance."""

    def __init__(self, endpoint: str) -> None:
        command = [sys.executable, "-c", SUBMITTING, endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(GENEROUS_S)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=GENEROUS_S)


def ask(gateway: Gateway, what: str) -> dict:
    gateway.send(Query(1, what))
    reply = gateway.receive()
    assert isinstance(reply, QueryReply)
    return reply.body


def until(gateway: Gateway, **expected: object) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not expected.items() <= (found := ask(gateway, "stats")).items():
        assert time.monotonic() < deadline, {name: found[name] for name in expected}
        time.sleep(0.01)


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    monkeypatch.setattr(shell, "keep_asking", partial(keep_asking, heartbeat_s=0.2, silent_s=1.0))
    instance = Instance(CONFIG, public="tcp://127.0.0.1:*")
    yield instance
    instance.close()
    assert instance.code == 0


@pytest.mark.parametrize(
    ("where", "number"),
    [("endpoint", signal.SIGKILL), ("public", signal.SIGKILL), ("public", signal.SIGSTOP)],
)
def test_of_a_gateway_that_is_lost_nothing_is_left(instance: Instance, where: str, number: int) -> None:
    gateway = Gateway(instance.loop.endpoint)
    assert isinstance(gateway.receive(), Welcome)
    ask(gateway, "pause")
    leaving = Leaving(getattr(instance.loop, where))
    try:
        until(gateway, gateways=2, waiting=REQUESTS)
        time.sleep(0.2)  # the load that changed has been told by now
        leaving.send_signal(number)
        until(gateway, gateways=1, waiting=0)
        ledger = ask(gateway, "ledger")
        assert ledger["held"] == ledger["reserved"] == ledger["exported"] == 0
    finally:
        leaving.close()
        gateway.close()


def test_where_connections_are_encrypted_too() -> None:
    """There the doorkeeper reads the monitor of the socket."""
    encryption = Encryption(Secrets((ClusterSecret.make(bytes(32)),)))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = Doorkeeper(context, encryption)
    router = listen(context, "tcp://127.0.0.1:*", 1 << 20, door=door, prepare=keep_asking)
    leavers = Leavers(door, [router])
    here, there = zmq.Context(), zmq.Context()
    dealers = [each.socket(zmq.DEALER) for each in (here, there)]
    try:
        for dealer in dealers:
            dealer.connect(protect(dealer, bound_endpoint(router, door), encryption))
            dealer.send(b"hello")
        told: list[bytes] = []

        def send(identity: bytes, message: object) -> bool:
            told.append(identity)
            try:
                router.send_multipart([identity, b""], zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            return True

        def turn() -> list[bytes]:
            door.turn()
            leavers.turn(time.monotonic())
            return leavers.gone(time.monotonic(), known, send)

        known: list[bytes] = []
        deadline = time.monotonic() + GENEROUS_S
        while len(known) < 2:
            assert time.monotonic() < deadline
            assert turn() == []
            if router.poll(10):
                known.append(router.recv_multipart()[0])
        assert told == [], "nobody has left, nobody was asked"
        dealers[1].close(0)
        while not (gone := turn()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert (len(gone), set(told)) == (1, set(known))
        known.remove(gone[0])
        while leavers.next_deadline() is not None:
            assert turn() == []
            time.sleep(0.01)
    finally:
        for dealer in dealers:
            dealer.close(0)
        for each in (here, there, context):
            terminate(each, GENEROUS_S)
