"""The page server of a worker rank: sends pages of its pool to readers that show a grant for them.

It runs in the transfer thread: one task for the listening socket, one for each connection, which answers one
question after the other.  See `tcp.py` for the protocol and the limits.

Strangers.  A connection has `AUTH_S` seconds and `AUTH_BYTES` bytes to show that it is a member's; then it is
one of `_MAX_MEMBERS`, and closed when it has been idle for `_IDLE_S`.  In clear a grant that stands shows it;
where connections are encrypted a member knocks with its first packet, and its handshake follows.

At most 64 connections wait to do so, and one more takes the place of another one (`ipc/sockets/waiting.py`),
those that have knocked apart from those that have not.  So a client that opens connections keeps no reader
away: who says nothing gives way to who says something, who says what no member says is sent away in the next
turn, and a reader knows how to knock.  The thread takes a few dozen connections in a turn, fewer than may
wait, so each that has spoken has its turn before those behind it can push it out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import time
from itertools import chain
from typing import Any

import numpy as np

from baton.ipc.sockets.waiting import Waiting
from baton.transfer.base import Int32Array, PoolView, TransferError
from baton.transfer.grants import EARLY, GrantBook
from baton.transfer.layout import Part, runs
from baton.transfer.refusals import Refusals
from baton.transfer.tasks import READ, Task, Tasks, Wait
from baton.transfer.transports.channel import Channel, Encryption, NotAMember, PlainChannel, receive_bytes
from baton.transfer.transports.page_stream import (
    ANSWER,
    MAGIC,
    MAX_MESSAGE,
    OK,
    REFUSED,
    REQUEST,
    Closed,
    Step,
    checksums,
)

log = logging.getLogger(__name__)

AUTH_S = 2.0
AUTH_BYTES = 1024
_EARLY_S = 1.0
"""How much later than its first use a grant may come: it takes the way of the engine's commands."""
_EARLY_LOOK_S = 0.005
_MAX_MEMBERS = 256
_ACCEPTED_AT_ONCE = 32
_BACKLOG = 1024
"""Of connections that the kernel has made and nobody has looked at."""
_MAX_PAGES = 1 << 16
_IDLE_S = 120.0


class PageServer:
    """Serves the pages of a pool.  A task for the listening socket, and one for each connection."""

    def __init__(
        self,
        pool: PoolView,
        tasks: Tasks,
        grants: GrantBook,
        refusals: Refusals,
        host: str,
        silence_s: float,
        encryption: Encryption | None = None,
    ) -> None:
        assert pool.memory is not None
        self._pool = pool
        self._memory: memoryview | None = pool.memory
        self._tasks = tasks
        self._grants = grants
        self._refusals = refusals
        self._silence_s = silence_s
        self._socket = _listen_on(host)
        address, port = self._socket.getsockname()[:2]
        self._encryption = encryption
        self.name = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        """As readers are told it."""
        if encryption is not None:
            self.name += f"?tls={encryption.fingerprint}"
        self._strangers: Waiting[_Visit] = Waiting(_Visit.has_spoken)
        self._knocked: Waiting[_Visit] = Waiting(_Visit.has_spoken)
        self._members: set[_Visit] = set()
        self._visits: set[_Visit] = set()
        """All that are there."""
        self._listener = tasks.start(self._listen(), self._stopped)

    def close(self) -> None:
        self._tasks.cancel(self._listener)
        for visit in list(self._visits):
            self._end(visit)
        self._socket.close()
        self._memory = None

    def _stopped(self, _result: Any, error: Exception | None) -> None:
        raise RuntimeError(f"the page server stopped listening: {error}")

    def _listen(self) -> Step:
        while True:
            yield Wait(self._socket.fileno(), READ, 3600.0)
            try:
                for _ in range(_ACCEPTED_AT_ONCE):
                    connection, address = self._socket.accept()
                    self._begin(connection, str(address[0]))
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as error:
                # Too many descriptors, or no memory: it may pass.
                log.warning("the page server cannot accept a connection: %s", error)
                yield Wait(-1, 0, 0.1)

    def _begin(self, connection: socket.socket, address: str) -> None:
        visit = _Visit(connection, address)

        def ended(_result: Any, error: Exception | None) -> None:
            self._forget(visit)
            if isinstance(error, NotAMember):
                self._refusals.stranger(visit.address, str(error))
            elif error is not None and not isinstance(error, (OSError, Closed, TransferError)):
                log.error("serving pages failed", exc_info=error)

        try:
            self._wait_in(self._strangers, visit)
        except NotAMember as error:  # (of a flood: it costs no task)
            connection.close()
            self._refusals.stranger(address, str(error))
            return
        self._visits.add(visit)
        visit.task = self._tasks.start(self._serve(visit), ended)

    def _forget(self, visit: _Visit) -> None:
        for line in (self._strangers, self._knocked):
            line.leave(visit)
        self._members.discard(visit)
        self._visits.discard(visit)

    def _wait_in(self, line: Waiting[_Visit], visit: _Visit) -> None:
        """Raises `NotAMember` if there is no place for it."""
        surplus, why = line.come(visit, visit.address), "others come, and it has not said who it is"
        if surplus is visit:
            raise NotAMember(why)
        if surplus is not None:
            self._end(surplus)
            self._refusals.stranger(surplus.address, why)

    def _end(self, visit: _Visit) -> None:
        assert visit.task is not None
        self._forget(visit)
        self._tasks.cancel(visit.task)
        visit.connection.close()  # (a task that never had a turn has closed nothing)

    def _serve(self, visit: _Visit) -> Step:
        connection = visit.connection
        with contextlib.closing(connection):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = yield from self._open(visit)
            while channel is not None:
                header = yield from self._header(visit, channel)
                if header is None:
                    return
                magic, token, count, *part, checked = REQUEST.unpack(header)
                if magic != MAGIC:  # (it would not understand an answer)
                    raise NotAMember("what it sends is no question of pages")
                problem = yield from self._known(token, channel.key)
                if visit.stranger:
                    if problem and visit.bytes_left < 4 * count:
                        self._refusals.grant(visit.address, problem)
                        return
                    if not problem and not self._admit(visit):
                        return
                # What was sent is read before it is refused: closing with unread bytes would lose the answer.
                wait_s = self._silence_s if not visit.stranger else visit.seconds_left()
                packed = yield from receive_bytes(channel, 4 * min(count, _MAX_PAGES), wait_s)
                visit.bytes_left -= len(packed)
                pages = np.frombuffer(packed, "<i4").astype(np.int32)
                problem = problem or self._problem(token, channel.key, count, pages, *part)
                if problem:
                    self._refusals.grant(visit.address, problem)
                    yield from self._refuse(channel, problem)
                    if count > _MAX_PAGES:
                        return  # the rest of the list follows
                    continue
                yield from self._send_pages(channel, token, pages, bool(checked), *part)

    def _open(self, visit: _Visit) -> Step:
        """Returns the `Channel`; None: there is no place for it."""
        if self._encryption is None:
            return PlainChannel(visit.connection)
        yield from self._encryption.listen(visit.connection, visit)
        self._strangers.leave(visit)
        self._wait_in(self._knocked, visit)
        channel = yield from self._encryption.accept(visit.connection, visit)
        return channel if self._admit(visit) else None

    def _header(self, visit: _Visit, channel: Channel) -> Step:
        """The next question's; None: the other end has left.  Raises `NotAMember` for a stranger."""
        if visit.stranger:
            if visit.bytes_left < REQUEST.size:
                raise NotAMember("it has asked several times without a grant")
            visit.bytes_left -= REQUEST.size
            return (yield from _receive_within(channel, REQUEST.size, visit))
        # (What has come of an encrypted connection may be here already, and no more come.)
        return (yield from receive_bytes(channel, REQUEST.size, self._silence_s, _IDLE_S))

    def _known(self, token: bytes, key: bytes) -> Step:
        """Why nothing is served under this token to who has proved this key, "" if something is.  It may be a
        moment early."""
        give_up = time.monotonic() + _EARLY_S
        while True:
            problem = self._grants.why_not(token, key, time.monotonic())
            if problem != EARLY or time.monotonic() >= give_up:
                return problem
            yield Wait(-1, 0, _EARLY_LOOK_S)

    def _admit(self, visit: _Visit) -> bool:
        """It is a member's.  False: there are too many of them."""
        for line in (self._strangers, self._knocked):
            line.proved(visit, visit.address)
        if len(self._members) >= _MAX_MEMBERS:
            log.warning("the page server has %d connections of readers; closed another one", _MAX_MEMBERS)
            return False
        self._members.add(visit)
        visit.stranger = False
        return True

    def _problem(
        self,
        token: bytes,
        key: bytes,
        count: int,
        pages: Int32Array,
        first_layer: int,
        layers: int,
        head: int,
        heads: int,
    ) -> str:
        if count > _MAX_PAGES:
            return f"at most {_MAX_PAGES} pages can be asked for at once"
        pool = self._pool
        if not 0 < layers <= pool.num_layers - first_layer or not 0 < heads <= pool.kv_heads - head:
            return "layers or heads outside the pool"
        if len(pages) and (pages.min() < 0 or pages.max() >= pool.num_blocks):
            return "a page outside the pool"
        return self._grants.why_not(token, key, time.monotonic(), pages.tolist())

    def _send_pages(
        self,
        channel: Channel,
        token: bytes,
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
        beginning = ANSWER.pack(MAGIC, OK, size)
        parts = (
            self._granted(token, channel.key, memory[at : at + length]) for at, length in runs(part, pages)
        )
        yield from channel.send(chain([beginning], parts), self._silence_s)
        if checked:
            found = np.fromiter(checksums(memory, part, pages), "<u4", len(pages))
            yield from channel.send([found.tobytes()], self._silence_s)

    def _granted(self, token: bytes, key: bytes, memory: memoryview) -> bytes | memoryview:
        """A part of an answer.  Zeros once the grant has ended: its reader believes nothing that comes now,
        and other answers on this connection follow."""
        return bytes(len(memory)) if self._grants.why_not(token, key, time.monotonic()) else memory

    def _refuse(self, channel: Channel, message: str) -> Step:
        text = message.encode()[:MAX_MESSAGE]
        yield from channel.send([ANSWER.pack(MAGIC, REFUSED, len(text)), text], self._silence_s)


class _Visit:
    """A connection."""

    def __init__(self, connection: socket.socket, address: str = "") -> None:
        self.connection = connection
        self.address = address
        self.task: Task | None = None
        self.stranger = True
        """It has not shown yet that it is a member's."""
        self.bytes_left = AUTH_BYTES
        """What a stranger may still send."""
        self._until = time.monotonic() + AUTH_S

    def has_spoken(self) -> bool:
        """Whether anything has come from a stranger."""
        if self.bytes_left < AUTH_BYTES:
            return True
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def seconds_left(self) -> float:
        """For a stranger to show it."""
        return max(self._until - time.monotonic(), 0.0)


def _receive_within(channel: Channel, size: int, visit: _Visit) -> Step:
    """The next `size` bytes of a stranger; None: it has left."""
    data = memoryview(bytearray(size))
    rest = data
    while rest:
        try:
            count = channel.receive_into([rest])
        except BlockingIOError:
            if not (yield Wait(channel.connection.fileno(), READ, visit.seconds_left())):
                raise NotAMember("it has not shown a grant in time") from None
            continue
        if not count:
            return None
        rest = rest[count:]
    return bytes(data)


def _listen_on(host: str) -> socket.socket:
    """Readers are told the numeric address, so that none of them has to ask a name server."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise OSError("it means every address and names none")
        listener = socket.create_server((str(address[0]), 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ValueError(
            f"transfer_host {host!r}: the page server cannot listen there ({error.strerror or error}); give "
            "an address of this host under which the other hosts reach it"
        ) from None
    listener.setblocking(False)
    return listener
