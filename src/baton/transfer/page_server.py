"""The page server of a worker rank: sends pages of its pool to whoever shows its token.

It runs in the transfer thread: one task for the listening socket, one for each connection, which serves one
request after the other.  See `tcp.py` for the protocol and the limits.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
from typing import Any

import numpy as np

from baton.transfer.base import Int32Array, PoolView, TransferError
from baton.transfer.layout import Part, runs
from baton.transfer.page_stream import (
    ANSWER,
    MAGIC,
    MAX_MESSAGE,
    OK,
    REFUSED,
    REQUEST,
    Closed,
    Step,
    checksums,
    receive_bytes,
    send,
)
from baton.transfer.tasks import READ, Task, Tasks, Wait

log = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_MAX_CONNECTIONS = 256
_MAX_PAGES = 1 << 16
_IDLE_S = 120.0


class PageServer:
    """Serves the pages of a pool.  A task for the listening socket, and one for each connection."""

    def __init__(self, pool: PoolView, tasks: Tasks, host: str, silence_s: float) -> None:
        assert pool.memory is not None
        self._pool = pool
        self._memory: memoryview | None = pool.memory
        self._tasks = tasks
        self._silence_s = silence_s
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._socket = _listen_on(host)
        address, port = self._socket.getsockname()[:2]
        place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.name = f"{place}/{self._token.hex()}"
        self._connections: set[Task] = set()
        self._listener = tasks.start(self._listen(), self._stopped)

    def close(self) -> None:
        self._tasks.cancel(self._listener)
        for task in list(self._connections):
            self._tasks.cancel(task)
        self._socket.close()
        self._memory = None

    def _stopped(self, _result: Any, error: Exception | None) -> None:
        raise RuntimeError(f"the page server stopped listening: {error}")

    def _listen(self) -> Step:
        while True:
            yield Wait(self._socket.fileno(), READ, 3600.0)
            try:
                connection, peer = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as error:
                # Too many descriptors, or no memory: it may pass.
                log.warning("the page server cannot accept a connection: %s", error)
                yield Wait(-1, 0, 0.1)
                continue
            if len(self._connections) >= _MAX_CONNECTIONS:
                log.warning(
                    "the page server has %d connections; closed another from %s", _MAX_CONNECTIONS, peer
                )
                connection.close()
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        def ended(_result: Any, error: Exception | None) -> None:
            self._connections.discard(task)
            if error is not None and not isinstance(error, (OSError, Closed, TransferError)):
                log.error("serving pages failed", exc_info=error)

        task = self._tasks.start(self._serve(connection), ended)
        self._connections.add(task)

    def _serve(self, connection: socket.socket) -> Step:
        with contextlib.closing(connection):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                if not (yield Wait(connection.fileno(), READ, _IDLE_S)):
                    return
                header = yield from receive_bytes(connection, REQUEST.size, self._silence_s)
                magic, token, count, *part, checked = REQUEST.unpack(header)
                if magic != MAGIC:
                    return  # whoever this is does not understand an answer
                # What was sent is read before it is refused: closing with unread bytes would lose the answer.
                packed = yield from receive_bytes(connection, 4 * min(count, _MAX_PAGES), self._silence_s)
                pages = np.frombuffer(packed, "<i4").astype(np.int32)
                problem = self._problem(token, count, pages, *part)
                if problem:
                    yield from self._refuse(connection, problem)
                    return
                yield from self._send_pages(connection, pages, bool(checked), *part)

    def _problem(
        self,
        token: bytes,
        count: int,
        pages: Int32Array,
        first_layer: int,
        layers: int,
        head: int,
        heads: int,
    ) -> str:
        if not secrets.compare_digest(token, self._token):
            return "not a reader of this pool: it was made by another process"
        if count > _MAX_PAGES:
            return f"at most {_MAX_PAGES} pages can be asked for at once"
        pool = self._pool
        if not 0 < layers <= pool.num_layers - first_layer or not 0 < heads <= pool.kv_heads - head:
            return "layers or heads outside the pool"
        if len(pages) and (pages.min() < 0 or pages.max() >= pool.num_blocks):
            return "a page outside the pool"
        return ""

    def _send_pages(
        self,
        connection: socket.socket,
        pages: Int32Array,
        checked: bool,
        first_layer: int,
        layers: int,
        head: int,
        heads: int,
    ) -> Step:
        memory, pool = self._memory, self._pool
        assert memory is not None
        part = Part(pool.num_layers, pool.kv_heads, pool.tile_bytes, first_layer, layers, head, heads)
        size = len(pages) * part.page_bytes
        yield from send(connection, [ANSWER.pack(MAGIC, OK, size)], self._silence_s)
        parts = (memory[at : at + length] for at, length in runs(part, pages))
        yield from send(connection, parts, self._silence_s)
        if checked:
            found = np.fromiter(checksums(memory, part, pages), "<u4", len(pages))
            yield from send(connection, [found.tobytes()], self._silence_s)

    def _refuse(self, connection: socket.socket, message: str) -> Step:
        text = message.encode()[:MAX_MESSAGE]
        yield from send(connection, [ANSWER.pack(MAGIC, REFUSED, len(text)), text], self._silence_s)


def _listen_on(host: str) -> socket.socket:
    """Readers are told the numeric address, so that none of them has to ask a name server."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise OSError("it means every address and names none")
        listener = socket.create_server((str(address[0]), 0), family=family, backlog=_MAX_CONNECTIONS)
    except OSError as error:
        raise ValueError(
            f"transfer_host {host!r}: the page server cannot listen there ({error.strerror or error}); give "
            "an address of this host under which the other hosts reach it"
        ) from None
    listener.setblocking(False)
    return listener
