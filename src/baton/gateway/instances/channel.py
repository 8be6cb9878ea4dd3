"""One ZeroMQ DEALER socket on an asyncio event loop: bytes out at once, bytes in by callback.

The socket is a plain one, read when its notification descriptor becomes readable.  That descriptor is
edge-triggered and every operation on the socket may consume the edge, so after each send the events are
looked at again, and reading goes on until the socket says that it is empty.  In exchange there is no
future, task or copy per message, and sending never waits (queues are unbounded: what the engine accepts
is bounded by its own admission, what a client has not read yet is bounded by `max_tokens`).

ZeroMQ connects again by itself when a connection breaks, without a word, and whatever was on its way is gone.
So a monitor socket tells when that happens; the owner of the channel decides what it means.  It tells as well
when an engine refuses the key of this cluster: ZeroMQ tries that again for ever, and in silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.ipc.sockets.curve import Encryption, Unprotected, protect
from baton.ipc.sockets.zeromq import has_messages

log = logging.getLogger(__name__)

_BATCH = 64
"""Messages read before other work of the event loop gets its turn."""
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class EngineChannel:
    """Connects to `endpoint` and calls `receive` with each message, `died` if that raises, and `broke` when
    an established connection ends, after everything that came over it.  Raises `Unprotected` if the endpoint
    encrypts and this side does not, or the reverse."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        receive: Callable[[bytes], None],
        died: Callable[[Exception], None],
        broke: Callable[[], None],
        *,
        reconnect_ms: int | None = None,
        encryption: Encryption | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._died = died
        self._broke = broke
        self._socket: zmq.Socket[bytes] | None = context.socket(zmq.DEALER)
        try:
            self._address = protect(self._socket, endpoint, encryption)
        except Unprotected:
            self._socket.close(0)
            raise
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, reconnect_ms or _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, max(reconnect_ms or 0, _RECONNECT_MAX_MS))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED)
        self._socket.connect(self._address)
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._look_at_monitor)
        self._look_at_monitor()  # its descriptor is silent until somebody has looked once

    def send(self, data: bytes) -> None:
        """Queues a message; it leaves once the peer is there.  Ignored after `close`."""
        socket = self._socket
        if socket is None:
            return
        socket.send(data, zmq.NOBLOCK)
        if has_messages(socket):
            self._loop.call_soon(self._drain)

    def close(self, linger_ms: int = 0) -> None:
        """Forgets what was not read, and what was not sent after `linger_ms`."""
        if self._socket is not None:
            self._loop.remove_reader(self._fd)
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger_ms)
            self._socket = None

    def _look_at_monitor(self) -> None:
        broken = False
        while self._socket is not None and has_messages(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] & _REFUSED:
                log.error("%s refuses this gateway: it has another --cluster-secret", self._address)
            else:
                broken = True
        while broken and self._socket is not None and has_messages(self._socket):
            self._drain()
        if broken and self._socket is not None:
            self._broke()

    def _drain(self) -> None:
        for _ in range(_BATCH):
            socket = self._socket
            if socket is None:
                return
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._receive(data)
            except Exception as error:
                self.close()
                self._died(error)
                return
        self._loop.call_soon(self._drain)
