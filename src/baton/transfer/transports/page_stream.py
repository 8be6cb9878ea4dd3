"""What both ends of a page connection share: the headers, and sending in many pieces.

See `tcp.py` for the protocol.  `send` is a task (`tasks.py`): it waits for the socket, never longer than
`silence_s` at a time, and lets others have a turn after a few megabytes.
"""

from __future__ import annotations

import os
import socket
import struct
import zlib
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any

from baton.transfer.base import Int32Array, TransferError
from baton.transfer.layout import Part, runs
from baton.transfer.tasks import WRITE, Wait

MAGIC = b"BPG2"
REQUEST = struct.Struct("<4s16sIHHHHI")
"""Magic, token of the grant, pages, first layer, layers, first head, heads, whether checksums are wanted."""
ANSWER = struct.Struct("<4sIQ")
"""Magic, status, bytes that follow."""
OK, REFUSED = 0, 1
MAX_MESSAGE = 1000

_MAX_VECTORS = min(256, os.sysconf("SC_IOV_MAX"))
TURN_BYTES = 4 << 20
"""Moved between two turns of others."""

Step = Generator[Wait | None, Any, Any]


class Closed(Exception):
    """The other side has closed the connection."""


def send(connection: socket.socket, parts: Iterable[bytes | memoryview], silence_s: float) -> Step:
    """All of `parts`, one after the other, without copying them together."""
    rest = Vectors(memoryview(part) for part in parts)
    turn = 0
    while rest.window:
        try:
            sent = connection.sendmsg(rest.window)
        except BlockingIOError:
            if not (yield Wait(connection.fileno(), WRITE, silence_s)):
                raise TransferError(f"it took nothing for {silence_s:.1f} s") from None
            continue
        rest.advance(sent)
        turn += sent
        if turn >= TURN_BYTES:
            turn = 0
            yield None


class Vectors:
    """A long sequence of buffers, of which the kernel gets a window at a time."""

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self._parts = iter(parts)
        self.window: list[memoryview] = []
        self._refill()

    def advance(self, count: int) -> None:
        """So many bytes of the window are done."""
        done = 0
        for part in self.window:
            if len(part) > count:
                break
            count -= len(part)
            done += 1
        del self.window[:done]
        if count:
            self.window[0] = self.window[0][count:]
        if len(self.window) <= _MAX_VECTORS // 2:
            self._refill()

    def _refill(self) -> None:
        self.window.extend(islice(self._parts, _MAX_VECTORS - len(self.window)))


def checksums(memory: memoryview, part: Part, ids: Int32Array) -> Iterator[int]:
    """crc32 of what `part` names of each page, computed from the pool as it is now."""
    for index in range(len(ids)):
        found = 0
        for at, size in runs(part, ids[index : index + 1]):
            found = zlib.crc32(memory[at : at + size], found)
        yield found
