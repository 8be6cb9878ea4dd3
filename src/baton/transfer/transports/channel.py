"""A connection for pages as both ends use it: in clear here, encrypted in `sealed.py`.

Until the other end has proved who it is it is a stranger: `Budget` limits its seconds and its bytes.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import select
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from baton.transfer.base import TransferError
from baton.transfer.tasks import READ, Wait
from baton.transfer.transports.page_stream import Closed, Step, send

_LOW_WATER = 512 << 10
_FIRST_S, _AGAIN_S, _MOST_ATTEMPTS = 0.5, 0.2, 12
"""Of one connection: until the second attempt, between further ones, and how many are made."""
_PLACE = re.compile(r"(.+):([0-9]{1,5})(?:\?tls=([0-9a-f]{64}))?\Z", re.ASCII)


class Place(NamedTuple):
    """Where a page server listens, as `PoolSource.tcp` says it: `HOST:PORT`, with `?tls=HEX` behind it if
    connections are encrypted."""

    host: str
    port: int
    fingerprint: str = ""
    """Of the server's certificate; "": connections are in clear."""

    @classmethod
    def parse(cls, name: str) -> Place:
        """Raises `TransferError`, also for a host's name: to look it up would keep the thread waiting."""
        found = _PLACE.match(name)
        try:
            if found is None or int(found[2]) > 65535:
                raise ValueError
            host = found[1].strip("[]")
            ipaddress.ip_address(host)
        except ValueError:
            raise TransferError(
                "this is no address of a page server (HOST:PORT in numbers, and ?tls=… if encrypted)"
            ) from None
        return cls(host, int(found[2]), found[3] or "")


class NotAMember(TransferError):
    """The other end has not proved to belong to the cluster, or to be who was named."""


class Budget(Protocol):
    """What an end that has not proved itself may still take."""

    bytes_left: int

    def seconds_left(self) -> float: ...


class Channel(Protocol):
    """A connection that is open, and never blocks."""

    connection: socket.socket
    key: bytes
    """That the reader at the other end has proved (`PoolSource.reader_key`); empty: in clear."""

    def receive_into(self, window: list[memoryview]) -> int:
        """What has come, into the first of these.  0: the other end has closed.  Raises `BlockingIOError` if
        nothing has come."""

    def expect(self, size: int) -> None:
        """So many bytes are still awaited: the socket need not wake anybody for a few of them."""

    def wrapped(self, question: bytes) -> bytes:
        """As it is to be sent, next."""

    def send(self, parts: Iterable[bytes | memoryview], silence_s: float) -> Step:
        """All of it, one after the other."""


class PlainChannel:
    """In clear."""

    key = b""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._low_water = 1

    def receive_into(self, window: list[memoryview]) -> int:
        return int(self.connection.recvmsg_into(window)[0])

    def expect(self, size: int) -> None:
        self._low_water = expect(self.connection, size, self._low_water)

    def wrapped(self, question: bytes) -> bytes:
        return question

    def send(self, parts: Iterable[bytes | memoryview], silence_s: float) -> Step:
        yield from send(self.connection, parts, silence_s)


class Encryption(Protocol):
    """How connections are encrypted; `encryption.py`."""

    fingerprint: str
    """Of the certificate of this process, by which readers know its page server."""
    key: bytes
    """The same as bytes, by which page servers know its readers."""

    def open(self, connection: socket.socket, fingerprint: str, budget: Budget) -> Step:
        """The reader's end, to the server of this fingerprint.  Returns a `Channel`; raises `NotAMember`."""

    def listen(self, connection: socket.socket, budget: Budget) -> Step:
        """The server's end, first: until the other end has knocked.  Raises `NotAMember`."""

    def accept(self, connection: socket.socket, budget: Budget) -> Step:
        """The server's end, then.  Returns a `Channel`; raises `NotAMember`."""


def receive_bytes(channel: Channel, size: int, silence_s: float, idle_s: float = 0.0) -> Step:
    """The next `size` bytes: a header, or a list of pages.  `idle_s`: so long it may take at least until the
    first of them comes."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        try:
            count = channel.receive_into([rest])
        except BlockingIOError:
            wait_s = max(silence_s, idle_s) if len(rest) == size else silence_s
            if not (yield Wait(channel.connection.fileno(), READ, wait_s)):
                raise TransferError(f"it sent nothing for {wait_s:.1f} s") from None
            continue
        if count == 0:
            raise Closed
        rest = rest[count:]
    return bytes(data)


def expect(connection: socket.socket, size: int, low_water: int) -> int:
    """Sets how much must have come before the socket counts as readable; returns it.  Few large pieces
    instead of many small ones: each costs a wake-up."""
    water = max(1, min(size, _LOW_WATER))
    if water != low_water:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, water)
    return water


def connect(place: Place, silence_s: float) -> Step:
    """Returns the socket.

    A host whose queue of new connections is full, as strangers flood it, drops what asks for another, and the
    kernel asks again only after 1 s, 3 s and so on.  So further attempts are made beside the first one, and
    the first to be answered is taken."""
    attempts: list[socket.socket] = []
    give_up = time.monotonic() + silence_s
    due = time.monotonic()
    with select.epoll() as answers:
        try:
            while True:
                now = time.monotonic()
                if now >= give_up:
                    raise TransferError(f"no connection within {silence_s:.1f} s")
                if now >= due and len(attempts) < _MOST_ATTEMPTS:
                    due = now + (_AGAIN_S if attempts else _FIRST_S)
                    attempts.append(_attempt(place))
                    answers.register(attempts[-1], select.EPOLLOUT)
                until = min(due, give_up) if len(attempts) < _MOST_ATTEMPTS else give_up
                yield Wait(answers.fileno(), READ, until - now)  # (woken: there is more to ask for)
                for number, _ in answers.poll(0):
                    answered = next(one for one in attempts if one.fileno() == number)
                    if code := answered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        raise OSError(code, os.strerror(code))
                    attempts.remove(answered)
                    return answered
        finally:
            for one in attempts:
                one.close()


def _attempt(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = connection.connect_ex(place[:2])
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        connection.close()
        raise
    return connection


def is_quiet(connection: socket.socket) -> bool:
    """An idle connection has nothing to say: what can be read is its end."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
