"""Accepts connections up to the limits; one more takes the place of one that waits for its client.

asyncio's own server accepts until descriptors run out, and then drops all connections that wait.  This one
accepts a few a turn, and stops before descriptors run out: the kernel gives a new descriptor the lowest free
number, so that number says how many are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from baton.launch.http.limits import Connections
from baton.launch.http.protocol import Connection, refusal

log = logging.getLogger(__name__)

_BATCH = 32
"""Connections accepted in one turn of the event loop."""
RESERVED_DESCRIPTORS = 2 * _BATCH
"""Kept free: what a turn accepts before those whose place it takes are gone, and for the rest of the
process."""
_FULL_PAUSE_S = 0.1
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts from `listener` until `close`.  `descriptors`: how many the process may have open."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Connection],
        table: Connections[Connection],
        descriptors: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._table = table
        self._max_count = table.limits.limit_concurrency or descriptors
        self._max_descriptor = max(descriptors - RESERVED_DESCRIPTORS, descriptors // 2)
        self._opening: set[asyncio.Task[Any]] = set()
        self._refusing = ""
        self._paused: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        if listener.family != socket.AF_UNIX:  # (inherited by connections)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        self._loop.add_reader(listener.fileno(), self._accept)

    def refuse(self, why: str) -> None:
        """From now on each new connection is answered 503 with this."""
        self._refusing = why

    def close(self) -> None:
        """Refuses who waits to be accepted (the kernel would reset them), and listens no more."""
        if self._listener.fileno() < 0:
            return
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._refusing = self._refusing or "the server shuts down"
        while self._accept_one():
            pass
        self._listener.close()

    # -- inside

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """False: there is none, or no room for any."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno not in _SHORT:
                return True  # it left while it waited
            self._make_room()
            self._pause()
            return False
        connection.setblocking(False)
        if self._refusing:
            self._answer(connection, refusal(503, self._refusing, retry_after_s=2))
        elif self._has_room(connection) or self._make_room():
            self._open(connection)
        else:
            self._table.note("full")
            message = "the server has as many connections as it may; try again"
            self._answer(connection, refusal(503, message, retry_after_s=1))
        return True

    def _answer(self, connection: socket.socket, data: bytes) -> None:
        if self._tls is None:
            _answer(connection, data)
        else:
            connection.close()  # (nothing can be said before the handshake)

    def _has_room(self, connection: socket.socket) -> bool:
        count = self._table.count + self._table.coming
        return count < self._max_count and connection.fileno() < self._max_descriptor

    def _make_room(self) -> bool:
        """Ends the connection that is missed least."""
        victim = self._table.dispensable(self._loop.time())
        if victim is None:
            return False
        victim.cut("shed")
        return True

    def _open(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._table.comes()
        task = self._loop.create_task(self._connect(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            made = self._make()
        except Exception:
            log.exception("a connection could not be taken over")
            connection.close()
            self._table.lost()
            return
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: made, connection)
            else:
                handshake_s = self._table.limits.timeout_head
                await self._loop.connect_accepted_socket(
                    lambda: made, connection, ssl=self._tls, ssl_handshake_timeout=handshake_s
                )
        except Exception as error:
            clients = isinstance(error, OSError | ssl.SSLError)  # (it left, or its handshake failed)
            log.log(
                logging.DEBUG if clients else logging.ERROR,
                "a connection could not be taken over: %r",
                error,
                exc_info=None if clients else error,
            )
            connection.close()
            if not made.opened:
                self._table.lost()

    def _pause(self) -> None:
        """No descriptor is left: the listener stays readable, and must not be asked all the time."""
        fd = self._listener.fileno()
        self._loop.remove_reader(fd)
        self._paused = self._loop.call_later(_FULL_PAUSE_S, self._resume, fd)

    def _resume(self, fd: int) -> None:
        self._paused = None
        self._loop.add_reader(fd, self._accept)


def _answer(connection: socket.socket, data: bytes) -> None:
    """Sends what the socket takes at once, to a client for which there is no room."""
    with contextlib.suppress(OSError):
        connection.send(data)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1 << 16)  # (what was not read would reset the connection, and the answer be lost)
    connection.close()
