"""An instance registers with each gateway, and with each address of a name, as they come and go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from baton.launch.instances.joining import gateways as module
from baton.launch.instances.joining.asking import Refused, Server
from baton.launch.instances.joining.gateways import Gateways, resolve
from baton.launch.instances.joining.registration import Registrar, Registration
from tests.launch.scripted import Scripted

ME = Registration("abc", "tcp://127.0.0.1:1", "decode", "tiny")
REFUSAL = (400, b'{"error": {"message": "another model"}}')


@pytest.fixture
def two() -> Iterator[tuple[Scripted, Scripted]]:
    one = Scripted("127.0.0.2")
    other = Scripted("127.0.0.3", one.port)
    yield one, other
    for server in (one, other):
        server.go()


class Instance:
    """It registers at the addresses of `known`, which a test changes."""

    def __init__(self, port: int, *known: str) -> None:
        self.known = list(known)
        self.renewed: list[str] = []
        server = Server.parse(f"http://gateways.test:{port}", None)
        self.gateways = Gateways([server], "d-0", 0.3, self._resolve)

    def _resolve(self, server: Server) -> list[Server]:
        if not self.known:
            raise OSError(None, "no such name")
        return [server.at(address) for address in self.known]

    async def _say(self) -> Registration:
        return ME

    async def _changed(self, registration: Registration) -> None:
        await asyncio.Event().wait()

    def _renewed(self, registrar: Registrar) -> None:
        self.renewed.append(registrar.server.address)

    def run(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.gateways.run(self._say, self._changed, self._renewed))

    @asynccontextmanager
    async def running(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        monkeypatch.setattr(module, "RESOLVE_S", 0.02)
        await self.gateways.look()
        task = self.run()
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_address_of_a_name_is_a_gateway(two, monkeypatch):
    one, other = two
    instance = Instance(one.port, "127.0.0.2")
    async with instance.running(monkeypatch):
        await until(lambda: len(instance.gateways.connected) == 1)
        assert not other.asked
        instance.known.append("127.0.0.3")
        await until(lambda: len(instance.gateways.connected) == 2)
    assert {*one.hosts, *other.hosts} == {f"gateways.test:{one.port}"}, "asked by the name"
    for server in two:
        server.answers = [(200, b'{"drained": false}'), (200, b'{"drained": true}')]
    await instance.gateways.drained()
    await instance.gateways.leave()
    assert [server.asked[-1][0] for server in two] == ["DELETE"] * 2


async def test_a_gateway_that_goes_does_not_concern_the_other(two, monkeypatch):
    one, other = two
    instance = Instance(one.port, "127.0.0.2", "127.0.0.3")
    async with instance.running(monkeypatch):
        await until(lambda: len(instance.gateways.connected) == 2)
        one.go()
        await until(lambda: len(instance.gateways.connected) == 1)
        seen = len(other.asked)
        await until(lambda: len(other.asked) >= seen + 2)
        one.come_back()  # another one at its address
        await until(lambda: len(instance.gateways.connected) == 2)


async def test_who_is_gone_from_the_name_stays_while_it_answers(two, monkeypatch):
    one, _ = two
    instance = Instance(one.port, "127.0.0.2", "127.0.0.3")
    async with instance.running(monkeypatch):
        await until(lambda: len(instance.gateways.connected) == 2)
        instance.known.remove("127.0.0.2")
        seen = len(one.asked)
        await until(lambda: len(one.asked) >= seen + 2)
        one.go()
        await until(
            lambda: [*instance.gateways._registrars] == [(f"http://gateways.test:{one.port}", "127.0.0.3")]
        )
        one.come_back()


async def test_a_name_that_is_not_known_for_a_while_changes_nothing(two, monkeypatch, caplog):
    one, _ = two
    instance = Instance(one.port)
    async with instance.running(monkeypatch):
        await until(lambda: bool(caplog.messages))
        instance.known.append("127.0.0.2")
        await until(lambda: len(instance.gateways.connected) == 1)
        instance.known.clear()
        seen = len(one.asked)
        await until(lambda: len(one.asked) >= seen + 3)
    assert [text for text in caplog.messages if "no such name" in text] == caplog.messages
    assert len(caplog.messages) == 2, "one line each time"


async def test_a_refusal_is_final_only_while_nobody_has_it(two, monkeypatch, caplog):
    one, other = two
    instance = Instance(one.port, "127.0.0.2")
    async with instance.running(monkeypatch):
        await until(lambda: len(instance.gateways.connected) == 1)
        other.answers = [REFUSAL, REFUSAL]
        instance.known.append("127.0.0.3")
        await until(lambda: len(instance.gateways.connected) == 2)
    assert sum("another model; others have it" in text for text in caplog.messages) == 1
    alone = Instance(one.port, "127.0.0.2")
    one.answers = [(200, b"{}"), REFUSAL]
    await alone.gateways.look()
    with pytest.raises(Refused, match=r"gateways.test:\d+ \(127.0.0.2\) refuses the instance: another model"):
        await alone.run()


def test_what_a_name_means(monkeypatch):
    def found(host: str, *_: object, **__: object) -> list[tuple]:
        known = {
            "gateways": ["10.0.0.2", "10.0.0.1", "10.0.0.2"],
            "10.0.0.9": ["10.0.0.9"],
            "localhost": ["::1"],
        }
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", found)

    def addresses(text: str) -> list[str]:
        return [server.address for server in resolve(Server.parse(text, None))]

    assert addresses("http://gateways:8000") == ["10.0.0.1", "10.0.0.2"]
    assert addresses("10.0.0.9:8000") == [""]
    assert addresses("localhost:8000") == [""]
