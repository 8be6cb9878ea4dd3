"""The room for connections while they come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from baton.launch.http.accept import Acceptor
from baton.launch.http.limits import Connections
from baton.launch.http.listening import listen
from baton.launch.options import HttpOptions


class Quiet(asyncio.Protocol):
    """A connection whose client has said nothing yet: the first that is closed where there is no room."""

    def __init__(self, table: Connections[Quiet], made: Callable[[], None]) -> None:
        self._table = table
        self._made = made
        self.opened = False
        self.was_cut = False
        self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.opened = True
        self._table.opened(self, 0.0)
        self._made()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.gone(self)

    def cut(self, why: str) -> None:
        self.was_cut = True

    def paused(self) -> bool:
        return False

    def proven(self) -> bool:
        return False

    def unsent(self) -> int:
        return 0


async def test_a_connection_has_one_place_from_when_it_is_accepted_on():
    """The second of two is accepted in the very turn in which the first is opened."""
    table: Connections[Quiet] = Connections(HttpOptions(limit_concurrency=2), 0.0)
    made: list[Quiet] = []
    both = asyncio.Event()

    def make() -> Quiet:
        made.append(Quiet(table, opened))
        return made[-1]

    def opened() -> None:
        if table.count == 1:
            clients.append(socket.create_connection(address))
            acceptor._accept_one()  # as the event loop may do it now
        else:
            both.set()

    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        acceptor = Acceptor(listener, make, table, 1000)  # type: ignore[arg-type]
        clients = [socket.create_connection(address)]
        async with asyncio.timeout(60):
            await both.wait()
        assert (table.count, table.coming) == (2, 0)
        assert [one.was_cut for one in made] == [False, False]
        clients.append(socket.create_connection(address))
        acceptor._accept_one()
        assert [one.was_cut for one in made[:2]] == [True, False], "only now there is no room"
        acceptor.close()
        for client in clients:
            client.close()
        for one in made:
            one.transport.abort()  # type: ignore[attr-defined]


async def test_a_connection_that_cannot_be_opened_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
):
    table: Connections[Quiet] = Connections(HttpOptions(limit_concurrency=2), 0.0)

    async def fails(*_: object) -> None:
        raise OSError("no")

    with listen("127.0.0.1", 0) as listener:
        acceptor = Acceptor(listener, lambda: Quiet(table, lambda: None), table, 1000)  # type: ignore
        monkeypatch.setattr(asyncio.get_running_loop(), "connect_accepted_socket", fails)
        with socket.create_connection(listener.getsockname()) as client:
            acceptor._accept_one()
            assert table.coming == 1
            assert await asyncio.to_thread(client.recv, 1) == b""
        assert (table.count, table.coming) == (0, 0)
        acceptor.close()
