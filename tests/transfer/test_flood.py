"""Members are served while others flood a page server with connections, from the members' own address."""

import socket
import subprocess
import sys

import pytest

from baton.protocol.rules.cluster_secret import NO_SECRETS

from .pools import DEADLINE_S, Geometry
from .test_encryption import OURS, Member
from .test_refusals import QUESTION

GEOMETRY = Geometry()
FLOOD = """
import os, socket, sys
place, said = ("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2])
os.nice(5)
held, made = [], 0
while True:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    connection.connect_ex(place)
    held.append((connection, said))
    made += 1
    if made > 50:  # by now it is connected, if it ever is
        try:
            held[-50][0].send(held[-50][1])
        except OSError:
            pass
    if len(held) > 400:
        held.pop(0)[0].close()
    if made % 100 == 0:
        print(made, flush=True)
"""


class Flood:
    """A process that opens connections as fast as it can, says this on each, and keeps the last 400."""

    def __init__(self, port: int, said: bytes) -> None:
        argv = [sys.executable, "-c", FLOOD, str(port), said.hex()]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.made = 0

    def goes_on(self, count: int) -> None:
        """Returns when it has made so many more."""
        assert self._process.stdout is not None
        until = self.made + count
        while self.made < until:
            self.made = int(self._process.stdout.readline())

    def __enter__(self) -> "Flood":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def first_packets(source: Member) -> bytes:
    """What a member says to this server until it waits for an answer."""
    keys = source.server._encryption
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        reader = keys.open(here, keys.fingerprint, Budget())
        next(reader)
        reader.close()
        return there.recv(4096)


class Budget:
    bytes_left = 1 << 16

    def seconds_left(self) -> float:
        return DEADLINE_S


@pytest.mark.parametrize("says", ["nothing", "garbage", "half a knock", "what a member said"])
def test_a_member_gets_in_during_a_flood(says):
    with Member(GEOMETRY, OURS, filled=True) as source:
        said = {
            "nothing": b"",
            "garbage": b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
            "half a knock": bytes(16),
            "what a member said": first_packets(source),
        }[says]
        with Flood(source.place[1], said) as flood:
            flood.goes_on(1000)
            for _ in range(5):
                with Member(GEOMETRY, OURS) as reader:  # none of which has been there before
                    assert reader.fetch(source.source, [1, 2], [1, 2]).error == ""
                    flood.goes_on(100)
                    assert reader.fetch(source.source, [3], [3]).error == "", "and stays"
        assert len(source.server._visits) < 200, "a flood costs no more than so many descriptors"


@pytest.mark.parametrize("said", [b"", QUESTION[:9]])
def test_in_clear_too(said):
    with Member(GEOMETRY, NO_SECRETS, filled=True) as source, Flood(source.place[1], said) as flood:
        flood.goes_on(1000)
        for _ in range(5):
            with Member(GEOMETRY, NO_SECRETS) as reader:
                assert reader.fetch(source.source, [1, 2], [1, 2]).error == ""
                flood.goes_on(100)
