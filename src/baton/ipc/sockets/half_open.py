"""Connections that somebody has made and not authenticated yet: so many at most.

Theory.  ZeroMQ takes every connection and gives it `HANDSHAKE_S` to say who it is.  Each costs a descriptor
and memory, and ZeroMQ has no limit for them: a stranger that opens some thousands takes all descriptors of
the process, and an engine that cannot open another one fails.  So the owner of a listening socket reads its
monitor, knows by it which connections are new, and when there are more than `MAX_HALF_OPEN` that have not
authenticated ends one of them (`waiting.py` says which).  A member needs some milliseconds for its handshake:
it is sent away only while strangers at its own address, who talk as it does, come faster than that, and then
connects again.

Which have authenticated ZeroMQ does not tell, but the kernel does: who listens has sent a stranger its
greeting and a welcome, 234 bytes, or 12 more to refuse it; only a member gets the next part of the
handshake.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.ipc.sockets.waiting import MOST, Waiting
from baton.ipc.sockets.zeromq import has_messages

log = logging.getLogger(__name__)

MAX_HALF_OPEN = MOST
_AUTHENTICATED_BYTES = 270
_MOST_BYTES = 8 << 10
_GONE = 1 << 63
_LOOK_S = 0.05
_BYTES_ACKED = 120
"""Where `tcpi_bytes_acked` is in Linux's `struct tcp_info`; after it comes `tcpi_bytes_received`."""
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = 64
"""Of one socket that are read in one turn."""

Socket = zmq.Socket[bytes]


class _New(NamedTuple):
    peer: Any
    """Its address, by which it is recognized: the descriptor's number may be another one's soon."""
    since: float


class HalfOpen:
    """Of the listening sockets of one loop.  `patience_s`: after that ZeroMQ has closed what did not
    authenticate."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._monitors: list[Socket] = []
        self._new: dict[int, _New] = {}
        """Descriptor → connection."""
        self._waiting: Waiting[int] = Waiting(self._has_spoken)
        self.ended = 0
        """Connections that made room for newer ones, or sent too much."""
        self.failed = 0
        """Handshakes that no member makes: those who do not know the key of who listens."""
        self._failing = False
        """One has failed, and ZeroMQ says next which connection it was."""
        self.disconnected = 0
        """Connections that are no more, of members too."""

    def watch(self, listener: Socket) -> None:
        """Before it is bound."""
        self._monitors.append(listener.get_monitor_socket(_WATCHED))

    def descriptors(self) -> tuple[int, ...]:
        return tuple(monitor.fileno() for monitor in self._monitors)

    def busy(self) -> bool:
        return any(map(has_messages, self._monitors))

    def turn(self) -> None:
        for monitor in self._monitors:
            limit = _EVENTS
            while limit and has_messages(monitor):
                event = recv_monitor_message(monitor, zmq.NOBLOCK)
                self._note(event["event"], event["value"])
                limit -= 1
        if self._new:
            self._look(self._clock())

    def next_deadline(self) -> float | None:
        """When `turn` is to be called at the latest."""
        return self._clock() + _LOOK_S if self._new else None

    # -- inside

    def _note(self, event: int, descriptor: int) -> None:
        """(Of a failed handshake ZeroMQ tells no descriptor.)"""
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.failed += 1
            self._failing = True
            return
        if self._failing and event == zmq.EVENT_DISCONNECTED and descriptor in self._new:
            self._failing = False
            log.warning(
                "a connection from %s is refused: its handshake is none of this cluster's (is its "
                "--cluster-secret another one?)",
                self._new[descriptor].peer[0],
            )
        self._forget(descriptor)
        self.disconnected += event == zmq.EVENT_DISCONNECTED
        if event == zmq.EVENT_ACCEPTED:
            with suppress(OSError), _borrowed(descriptor) as connection:  # (else it is gone already)
                peer = connection.getpeername()
                self._new[descriptor] = _New(peer, self._clock())
                surplus = self._waiting.come(descriptor, str(peer[0]))
                if surplus is not None:
                    self._end(surplus, "and others open connections and do not say who they are")

    def _look(self, now: float) -> None:
        for descriptor, one in list(self._new.items()):
            told, heard = _passed(descriptor, one.peer)
            if told > _AUTHENTICATED_BYTES:
                if told < _GONE:
                    self._waiting.proved(descriptor, str(one.peer[0]))
                self._forget(descriptor)
            elif now - one.since > self._patience_s:
                self._forget(descriptor)
            elif heard > _MOST_BYTES:
                self._end(descriptor, "sends more than a handshake has")

    def _has_spoken(self, descriptor: int) -> bool:
        return _passed(descriptor, self._new[descriptor].peer)[1] > 0

    def _forget(self, descriptor: int) -> None:
        self._new.pop(descriptor, None)
        self._waiting.leave(descriptor)

    def _end(self, descriptor: int, why: str) -> None:
        peer = self._new[descriptor].peer
        self._forget(descriptor)
        self.ended += 1
        with suppress(OSError), _borrowed(descriptor) as connection:
            if connection.getpeername() == peer:
                log.warning("%s %s: a connection is closed", peer[0], why)
                connection.shutdown(socket.SHUT_RDWR)


def _borrowed(descriptor: int) -> socket.socket:
    """Another handle of ZeroMQ's connection, to be closed soon."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _passed(descriptor: int, peer: Any) -> tuple[int, int]:
    """Bytes (that the other end has acknowledged, that it has sent) of the connection with this peer; `_GONE`
    and none if it is gone, or another one has its number: there is an event of that."""
    try:
        with _borrowed(descriptor) as connection:
            if connection.getpeername() == peer:
                return passed(connection)
    except OSError:
        pass
    return _GONE, 0


def passed(connection: socket.socket) -> tuple[int, int]:
    """Bytes (that the other end has acknowledged, that it has sent)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 16)
    told, heard = struct.unpack_from("=QQ", info.ljust(_BYTES_ACKED + 16, b"\0"), _BYTES_ACKED)
    return told, heard
