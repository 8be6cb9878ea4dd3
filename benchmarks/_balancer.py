"""A TCP balancer as small as can be, in the event loop of a benchmark: it looks at `/ready` of each gateway,
and gives each new connection to one that says 200, in turn.

It passes bytes on and never looks at them, so a request that it has begun to pass on is not asked again.  A
gateway that does not answer in time is asked again, as balancers do, before it counts as not ready; a client
waits while no gateway is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

LOOK_S = 0.1
_ANSWER_S = 2.0
_FALL = 3
"""Looks in a row without an answer after which a gateway is not ready."""
_WAIT_S = 30.0
_PIECE = 1 << 16
_READY = b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@dataclass(eq=False)
class Backend:
    port: int
    ready: bool = False
    unanswered: int = 0
    """Connections that were given to it and on which it has not said anything yet."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, *, ready: bool, deadline_s: float) -> None:
        """Returns when it is ready; or when it is not, and has begun to answer all that it was given.
        Raises `TimeoutError`."""
        async with asyncio.timeout(deadline_s):
            while self.ready != ready or (not ready and self.unanswered):
                await self.changed.wait()


class Balancer:
    """Of gateways at 127.0.0.1; an asynchronous context manager."""

    def __init__(self, ports: list[int]) -> None:
        self.backends = [Backend(port) for port in ports]
        self.port = 0
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._tasks = {asyncio.create_task(self._look(backend)) for backend in self.backends}
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- inside

    async def _look(self, backend: Backend) -> None:
        unanswered = 0
        while True:
            try:
                ready, unanswered = await _is_ready(backend.port), 0
            except TimeoutError:
                unanswered += 1
                ready = backend.ready and unanswered < _FALL
            if ready != backend.ready:
                backend.ready = ready
                backend.note()
            await asyncio.sleep(LOOK_S)

    async def _connect(self) -> tuple[Backend, asyncio.StreamReader, asyncio.StreamWriter] | None:
        """To the next one that is ready and accepts."""
        for _ in self.backends:
            self._turn += 1
            backend = self.backends[self._turn % len(self.backends)]
            if backend.ready:
                backend.unanswered += 1  # (before: it may be given up while the connection is made)
                try:
                    return backend, *await asyncio.open_connection("127.0.0.1", backend.port)
                except OSError:
                    backend.unanswered -= 1
                    backend.note()
        return None

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _WAIT_S
        while (found := await self._connect()) is None:
            if loop.time() > deadline:
                writer.close()
                return
            await asyncio.sleep(LOOK_S)
        backend, back_reader, back_writer = found

        def answered() -> None:
            backend.unanswered -= 1
            backend.note()

        ways = [
            asyncio.create_task(_pump(reader, back_writer)),
            asyncio.create_task(_pump(back_reader, writer, answered)),
        ]
        self._tasks.update(ways)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._tasks.difference_update(ways)
            for one in (writer, back_writer):
                one.close()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: Callable[[], None] | None = None
) -> None:
    """Until the end of what is read.  `first` is called once: when the first byte has come, or none will."""
    try:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                if first is not None:
                    first()
                    first = None
                writer.write(piece)
                await writer.drain()
    finally:
        if first is not None:
            first()


async def _is_ready(port: int) -> bool:
    """Raises `TimeoutError` if it does not answer."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(_READY)
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        raise
    except OSError:
        return False
