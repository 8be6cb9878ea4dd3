"""Pages over TCP: a page server beside each worker, and a reader that receives straight into its blocks.

Theory.  The reader opens a connection, sends a request and receives the pages into its blocks; nothing else
than its own `recvmsg` ever writes there.  A connection carries one request after the other.  A reader that
gives up, for whatever reason, closes the connection: bytes that are still under way then have nowhere to
land.

Request:  `REQUEST` header, then the page ids as packed int32.
Answer:   `ANSWER` header; then, by its status, the pages in the order page, layer, K/V, head, tile, followed
by a crc32 of each page if they were asked for; or a message for people.

`PoolSource.tcp` is "HOST:PORT/TOKEN".  The token is drawn when the server starts and every request shows
it: a reader with an old address never gets pages of a process that took over the port, and neither does
anybody who merely found it.

| limit | of the server | of the reader |
| --- | --- | --- |
| connections | 256; further ones are closed | 2 idle ones a source |
| a request | 65,536 pages | |
| silence in the middle of something | 3 s, then closed | 3 s, then `TransferError` |
| an idle connection | 120 s | 30 s |
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Generator
from typing import Any

import msgspec
import numpy as np

from baton.protocol.handover import PoolSource
from baton.transfer.base import SILENCE_S, Copy, Copying, PoolView, TransferError
from baton.transfer.layout import Part, part_here, runs
from baton.transfer.page_server import PageServer
from baton.transfer.page_stream import (
    ANSWER,
    MAGIC,
    MAX_MESSAGE,
    OK,
    REQUEST,
    Closed,
    Step,
    checksums,
    receive,
    receive_bytes,
    send,
)
from baton.transfer.tasks import WRITE, Tasks, Wait

_READER_IDLE_S = 30.0
_MAX_IDLE = 2


class TcpTransport:
    """See `base.Transport`.  The page server runs in `tasks` once `export` was called."""

    name = "tcp"
    parallel = 2

    def __init__(
        self,
        pool: PoolView,
        tasks: Tasks,
        *,
        host: str = "127.0.0.1",
        checksums: bool = False,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._pool = pool
        self._memory = pool.memory
        self._tasks = tasks
        self._host = host
        self._checksums = checksums
        self._silence_s = silence_s
        self._server: PageServer | None = None
        self._idle: dict[str, deque[tuple[float, socket.socket]]] = {}

    def export(self, source: PoolSource) -> PoolSource:
        """Raises `ValueError` if the host cannot be listened on."""
        if self._memory is None:
            return source
        self._server = PageServer(self._pool, self._tasks, self._host, self._silence_s)
        return msgspec.structs.replace(source, tcp=self._server.name)

    def why_not(self, source: PoolSource) -> str:
        if self._memory is None:
            return "this pool is not in main memory"
        return "" if source.tcp else "the source has no page server"

    def copy(self, copy: Copy) -> Copying:
        assert self._memory is not None  # as `why_not` said
        part = part_here(copy, self._pool)
        expected = len(copy.pages) * part.page_bytes
        connection: socket.socket | None = None
        try:
            connection = yield from self._connect(copy.source.tcp)
            yield from send(connection, [self._request(copy)], self._silence_s)
            yield from self._take_answer(connection, expected)
            blocks = (self._memory[at : at + size] for at, size in runs(part, copy.blocks))
            yield from receive(connection, blocks, expected, self._silence_s)
            if self._checksums:
                yield from self._check(connection, part, copy)
        except (OSError, Closed, TransferError) as error:
            what = "the connection was closed" if isinstance(error, Closed) else str(error)
            raise TransferError(f"page server {_address(copy.source.tcp)}: {what}") from None
        else:
            self._keep(copy.source.tcp, connection)
            connection = None
        finally:
            if connection is not None:
                connection.close()
        return expected

    def tick(self) -> bool:
        """Closes connections that nobody used for a while."""
        too_old = time.monotonic() - _READER_IDLE_S
        for name, idle in list(self._idle.items()):
            while idle and idle[0][0] < too_old:
                idle.popleft()[1].close()
            if not idle:
                del self._idle[name]
        return bool(self._idle)

    def close(self) -> None:
        for idle in self._idle.values():
            for _, connection in idle:
                connection.close()
        self._idle.clear()
        if self._server is not None:
            self._server.close()
        self._memory = None

    def _request(self, copy: Copy) -> bytes:
        token = bytes.fromhex(copy.source.tcp.rpartition("/")[2])
        header = REQUEST.pack(
            MAGIC,
            token,
            len(copy.pages),
            copy.first_layer,
            copy.num_layers,
            copy.source_head,
            copy.num_heads,
            int(self._checksums),
        )
        return header + copy.pages.astype("<i4").tobytes()

    def _take_answer(self, connection: socket.socket, expected: int) -> Step:
        header = yield from receive_bytes(connection, ANSWER.size, self._silence_s)
        magic, status, size = ANSWER.unpack(header)
        if magic != MAGIC:
            raise TransferError("it does not answer as a page server")
        if status != OK:
            message = yield from receive_bytes(connection, min(size, MAX_MESSAGE), self._silence_s)
            raise TransferError(f"refused: {message.decode(errors='replace')}")
        if size != expected:
            raise TransferError(f"it sends {size} bytes instead of {expected}")

    def _check(self, connection: socket.socket, part: Part, copy: Copy) -> Step:
        """Compares the checksums that the source computed with those of what lies here now."""
        assert self._memory is not None
        packed = yield from receive_bytes(connection, 4 * len(copy.blocks), self._silence_s)
        told = np.frombuffer(packed, "<u4")
        for index, found in enumerate(checksums(self._memory, part, copy.blocks)):
            if found != told[index]:
                raise TransferError(f"the checksum of page {copy.pages[index]} is wrong after copying")
            yield None

    def _connect(self, name: str) -> Generator[Wait | None, Any, socket.socket]:
        """An idle connection that still lives, or a new one."""
        idle = self._idle.get(name)
        while idle:
            connection = idle.pop()[1]
            if _is_quiet(connection):
                return connection
            connection.close()
        host, port = _split(name)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = connection.connect_ex((host, port))
            if code == errno.EINPROGRESS:
                if not (yield Wait(connection.fileno(), WRITE, self._silence_s)):
                    raise TransferError(f"no connection within {self._silence_s:.1f} s")
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        except BaseException:
            connection.close()
            raise
        return connection

    def _keep(self, name: str, connection: socket.socket) -> None:
        idle = self._idle.setdefault(name, deque())
        if len(idle) < _MAX_IDLE:
            idle.append((time.monotonic(), connection))
        else:
            connection.close()


def _is_quiet(connection: socket.socket) -> bool:
    """An idle connection has nothing to say: what can be read is its end."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _address(name: str) -> str:
    return name.rpartition("/")[0]


def _split(name: str) -> tuple[str, int]:
    host, _, port = _address(name).rpartition(":")
    if not host or not port.isdigit():
        raise TransferError("this is no address of a page server (HOST:PORT/TOKEN)")
    return host.strip("[]"), int(port)
