"""The HTTP side of a server: the application, and uvicorn with limits and an end of its own.

Imported after the instances have been started: it takes half a second, which their start then hides.

How it ends.  `leave` is the notice: `/ready` answers 503, everything is served as before, and each answer is
the last one of its connection, so that clients and load balancers move on.  With `stopping` connections that
idle between two requests are closed, new ones are answered 503, requests that have begun to arrive may do so
for `_UPLOADING_S`, as may the first one of a connection that was there before, and what runs may end.  The
listener is open until the last answer, so nobody is refused while the next server starts: it can take the
port over from the notice on (`listening.py`).  What has not ended in time loses its connection first, so that
it ends as when a client hangs up, without a word in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvicorn

from baton.gateway.access import Access
from baton.gateway.http.alive import SignsOfLife
from baton.gateway.http.app import create_app
from baton.gateway.http.context import Gateway
from baton.gateway.instances.client import ClusterClient
from baton.gateway.responses.store import ResponseStore
from baton.gateway.served_model import ServedModel
from baton.gateway.sharing import SharingOptions
from baton.launch.http.accept import Acceptor
from baton.launch.http.limits import SWEEP_S, Connections
from baton.launch.http.listening import Listener
from baton.launch.http.protocol import Connection
from baton.launch.options.flag import parse_bytes
from baton.launch.options.server import HttpOptions
from baton.observe.events.log import EventLog
from baton.observe.tracing.collector import make_tracer

_ANSWERING_S = 5.0
"""What the last answers may take to be written."""
_UPLOADING_S = 2.0
"""What requests that have begun to arrive, or whose client has connected, may take, once the server stops."""
_HANGING_UP_S = 1.0
_LOOK_S = 0.05


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process before the instances are stopped, and
    without its ten looks a second at `should_exit`: it serves until `stopping` is set.

    `close` gives up what the application holds.  `descriptors`: how many the process may have open.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        stopping: asyncio.Event,
        limits: HttpOptions,
        descriptors: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(config)
        self.table: Connections[Connection] = Connections(limits, asyncio.get_running_loop().time())
        self._gateway = gateway
        self._stopping = stopping
        self._descriptors = descriptors
        self._tls = tls
        self._acceptors: list[Acceptor] = []
        self._listeners: list[Listener] = []
        self._leaving = False
        gateway.metrics.registry.register(self.table)

    def close(self) -> None:
        self._gateway.close()

    def tell_traces(self, timeout_s: float) -> None:
        """`Gateway.tell_traces`."""
        self._gateway.tell_traces(timeout_s)

    def totals(self) -> dict[str, int]:
        """`Metrics.totals`."""
        return self._gateway.metrics.totals()

    def reload(self) -> None:
        """Reads files that may change while it serves.  Raises `ValueError`, and changes nothing then."""
        self._gateway.sharing.reload()

    def leave(self) -> None:
        """The server will stop soon, and says so to who asks whether it is ready."""
        self._leaving = self._gateway.leaving = True
        for connection in self._connections():
            connection.leave()
        for listener in self._listeners:
            listener.open_to_successor()

    # -- uvicorn's

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self._listeners = [one for one in sockets or () if isinstance(one, Listener)]
        self._acceptors = [
            Acceptor(listener, self._connection, self.table, self._descriptors, self._tls)
            for listener in self._listeners
        ]
        self.servers = []
        self.started = True

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            await self.on_tick(0)  # (the date header)
            self._sweep(loop.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), SWEEP_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self._leaving:
            self.leave()
        for acceptor in self._acceptors:
            acceptor.refuse("the server shuts down")
        for connection in self._connections():
            connection.shutdown()
        asyncio.get_running_loop().call_later(_UPLOADING_S, self._end_uploads)
        await self._until_empty(float(self.config.timeout_graceful_shutdown or 0))
        for acceptor in self._acceptors:
            acceptor.close()
        for connection in self._connections():
            connection.transport.abort()
        await self._until_empty(_HANGING_UP_S)
        for task in self.server_state.tasks:
            task.cancel()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
        await self.lifespan.shutdown()

    # -- inside

    def _connection(self) -> Connection:
        connection = Connection(self.config, self.server_state, self.table, asyncio.get_running_loop())
        connection.last = self._leaving
        return connection

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]

    def _end_uploads(self) -> None:
        for connection in self._connections():
            connection.end_upload()

    def _sweep(self, now: float) -> None:
        for connection, why in self.table.overdue(now):
            connection.expire(why)

    async def _until_empty(self, timeout_s: float) -> None:
        """Returns when no connection and no request is left, or after so long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self.server_state.connections or self.server_state.tasks:
            now = loop.time()
            if now >= deadline:
                return
            self._sweep(now)
            await asyncio.sleep(_LOOK_S)


def make_http(
    served: ServedModel,
    client: ClusterClient,
    stopping: asyncio.Event,
    *,
    access: Access,
    limits: HttpOptions,
    descriptors: int,
    sharing: SharingOptions,
    shutdown_timeout_s: float,
    started_with: Mapping[str, Any],
    processes: Callable[[], Mapping[str, int]] | None = None,
    placing: Callable[[], list[dict[str, Any]]] | None = None,
    tls: ssl.SSLContext | None = None,
    root_path: str = "",
    log_requests: bool = False,
    events_keep: int = 0,
    otlp_traces_endpoint: str | None = None,
) -> HttpServer:
    """Raises as `create_app`.  `started_with`, `processes`, `placing`: see `Gateway`; `tls` None: HTTP."""
    app = create_app(
        served,
        client,
        access=access,
        sharing=sharing,
        root_path=root_path,
        signs=SignsOfLife(limits.sse_keep_alive_interval, limits.early_headers_after),
        responses=ResponseStore(
            limits.responses_store, parse_bytes("--responses-store-memory", limits.responses_store_memory)
        ),
        refuse_tools=limits.unknown_tools == "refuse",
    )
    app.state.gateway.generator.logs = log_requests
    app.state.gateway.generator.events = EventLog(events_keep)
    if otlp_traces_endpoint is not None:
        tracer = make_tracer(otlp_traces_endpoint, served.name)
        app.state.gateway.generator.tracer = tracer
        app.state.gateway.metrics.registry.register(tracer)
        tracer.start()
    app.state.gateway.bodies.limit_bytes = parse_bytes("--max-body-memory", limits.max_body_memory)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,  # who asks is who is connected: rights depend on it
        timeout_graceful_shutdown=round(shutdown_timeout_s + _ANSWERING_S),
    )
    gateway = app.state.gateway
    gateway.started_with = started_with
    gateway.processes = processes or gateway.processes
    gateway.placing = placing or gateway.placing
    gateway.helpers.start()  # its imports take a moment, which the model's loading hides
    return HttpServer(config, gateway, stopping, limits, descriptors, tls)
