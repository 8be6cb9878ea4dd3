"""The connection to the instance breaks while both of its ends live on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.gateway.errors import InstanceUnavailable
from baton.gateway.instances.client import ClusterClient
from baton.gateway.instances.inbox import Inbox
from baton.protocol.codec import unpack_int32
from baton.protocol.params.sampling import Sampling, Stopping
from tests.gateway.echo_engine import EchoEngine


class Proxy:
    """Passes bytes on between a gateway and an engine until it is told to cut."""

    def __init__(self, path: Path, engine: EchoEngine) -> None:
        self.path = path
        self._engine = engine
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, str(self.path))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        socket = self._engine.endpoint.removeprefix("ipc://")
        far_reader, far_writer = await asyncio.open_unix_connection(socket)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._pumps.append(asyncio.ensure_future(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        finally:
            sink.transport.abort()


class Link:
    def __init__(self, tmp_path: Path) -> None:
        self.engine = EchoEngine()
        self.proxy = Proxy(tmp_path / "proxy.sock", self.engine)
        self.client = ClusterClient(retry_wait_s=60.0)
        self.instance = self.client.add("instance-0")
        self.inbox = Inbox()

    def submit(self, prompt, max_tokens):
        return self.client.submit(prompt, Sampling(seed=1), Stopping(max_tokens), inbox=self.inbox)


@pytest_asyncio.fixture
async def link(tmp_path) -> AsyncIterator[Link]:
    link = Link(tmp_path)
    await link.proxy.start()
    await link.instance.connect(f"ipc://{link.proxy.path}", 60, "first")
    yield link
    await link.client.close()
    await link.proxy.close()
    link.engine.die()


async def collect(link: Link, request):
    tokens = []
    async with asyncio.timeout(60):
        while True:
            for _ in await link.inbox.wait():
                chunk = request.take()
                if chunk.error:
                    raise chunk.error
                tokens += chunk.tokens
                if chunk.finished:
                    return tokens


async def test_what_was_in_flight_goes_on_over_a_new_connection(link: Link):
    link.engine.behaviour.hold_after = 3  # it cannot end before the cut
    request = link.submit((7, 8), 12)
    await link.inbox.wait()
    begun = request.take().tokens
    assert begun
    link.proxy.cut()
    link.engine.behaviour.hold_after = None
    assert begun + await collect(link, request) == [7, 8] * 6
    assert (link.client.state, link.instance.restarts, link.instance.failure) == ("ready", 1, None)
    first, second = link.engine.submits
    assert first.id != second.id
    assert list(unpack_int32(second.generated))[: len(begun)] == begun


async def test_the_supervisor_has_the_first_word(link: Link):
    """A connection that breaks because the process died is reported as the process's death."""
    link.engine.behaviour.mute = True
    request = link.submit((7, 8), 50)
    link.proxy.cut()
    await asyncio.sleep(0.05)
    link.instance.failed("it was killed by SIGKILL")
    with pytest.raises(InstanceUnavailable, match="SIGKILL"):
        await collect(link, request)
    await asyncio.sleep(0.3)
    assert link.instance.failure == "it was killed by SIGKILL"
