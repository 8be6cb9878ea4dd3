"""A connection to a host whose queue of new connections is full."""

from __future__ import annotations

import contextlib
import select
import socket
import time

import pytest

from baton.transfer.base import TransferError
from baton.transfer.transports import channel
from baton.transfer.transports.channel import Place, connect

from .pools import DEADLINE_S


@pytest.fixture
def full():
    """A listener that accepts nothing, with as many connections as it has room for."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        filling = []
        while not filling or select.select([], [filling[-1]], [], 0.2)[1]:
            filling.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            filling[-1].connect_ex(listener.getsockname())
        yield listener
        for one in filling:
            one.close()


@pytest.fixture
def attempts(monkeypatch):
    made = []
    attempt = channel._attempt

    def noted(place):
        made.append(attempt(place))
        return made[-1]

    monkeypatch.setattr(channel, "_attempt", noted)
    return made


def test_further_attempts_are_made_and_all_but_one_closed(full, attempts):
    step = connect(Place(*full.getsockname()), DEADLINE_S)
    full.setblocking(False)

    def run() -> None:
        wait = next(step)
        while True:
            if len(attempts) == 3:  # from now on there is room
                with contextlib.suppress(BlockingIOError):
                    full.accept()[0].close()
            ready = select.select([wait.fd], [], [], min(wait.seconds, 0.05))[0]
            wait = step.send(bool(ready) or None)

    with pytest.raises(StopIteration) as returned:
        run()
    assert len(attempts) >= 3
    connection = returned.value.value
    assert connection.getpeername() == full.getsockname()
    assert [one for one in attempts if one.fileno() >= 0] == [connection]
    connection.close()


def test_it_gives_up_and_closes_them_all(full, attempts):
    step = connect(Place(*full.getsockname()), 1.0)

    def run() -> None:
        next(step)
        while True:
            time.sleep(0.05)
            step.send(None)

    with pytest.raises(TransferError, match=r"no connection within 1\.0 s"):
        run()
    assert len(attempts) > 1
    assert all(one.fileno() < 0 for one in attempts)
