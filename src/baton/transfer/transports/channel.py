"""A connection for pages as both ends use it: in clear here, encrypted in `sealed.py`.

Until the other end has proved who it is it is a stranger: `Budget` limits its seconds and its bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Protocol

from baton.transfer.base import TransferError
from baton.transfer.tasks import READ, Wait
from baton.transfer.transports.page_stream import Closed, Step, send

_LOW_WATER = 512 << 10


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

    def accept(self, connection: socket.socket, budget: Budget) -> Step:
        """The server's end.  Returns a `Channel`; raises `NotAMember`."""


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
