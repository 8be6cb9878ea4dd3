"""A connection whose bytes are records (`sealing.py`), in both directions.

The reader receives into a buffer of a few records, and opens each straight into the pages if it belongs to
one run of them.  The server seals long runs straight from the pool, and gathers short ones.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from baton.transfer.base import TransferError
from baton.transfer.tasks import WRITE, Wait
from baton.transfer.transports.channel import expect
from baton.transfer.transports.page_stream import TURN_BYTES, Step
from baton.transfer.transports.sealing import HEAD_BYTES, RECORD_BYTES, TAG_BYTES, Seal

QUESTION_BYTES = 16 << 10
"""Most bytes of questions in a record: a server keeps little for each reader."""
_AT_ONCE = 4
"""Records that fit into what a reader keeps; a server keeps half of it to send."""
_ALONE_BYTES = 64 << 10
"""A run of pages that is so long makes records of its own, without being copied before."""
_OVERHEAD = HEAD_BYTES + TAG_BYTES


class SealedChannel:
    """Records.  `record_bytes`: the longest that the other end makes; `key`: what it has proved."""

    def __init__(
        self, connection: socket.socket, sending: bytes, receiving: bytes, record_bytes: int, key: bytes
    ) -> None:
        self.connection = connection
        self.key = key
        self._sending, self._receiving = Seal(sending), Seal(receiving)
        self._most = record_bytes
        self._buffer = memoryview(bytearray(_AT_ONCE * (record_bytes + _OVERHEAD)))
        self._start = self._end = 0
        self._opened = self._buffer[:0]
        """Of a record: what nobody has taken yet."""
        self._out: memoryview | None = None
        self._low_water = 1

    def receive_into(self, window: list[memoryview]) -> int:
        while True:
            if self._opened:
                return self._hand_out(window)
            if (count := self._open_next(window[0])) is not None:
                if count:
                    return count
                continue
            count = self.connection.recv_into(self._buffer[self._end :])
            if count == 0:
                return 0
            self._end += count

    def expect(self, size: int) -> None:
        # (What lies in the buffer, headers and all, is never more of it than that.)
        self._low_water = expect(self.connection, size - (self._end - self._start), self._low_water)

    def wrapped(self, question: bytes) -> bytes:
        records = bytearray()
        for at in range(0, len(question), QUESTION_BYTES):
            content = question[at : at + QUESTION_BYTES]
            record = bytearray(len(content) + _OVERHEAD)
            self._sending.seal(memoryview(content), memoryview(record))
            records += record
        return bytes(records)

    def send(self, parts: Iterable[bytes | memoryview], silence_s: float) -> Step:
        if self._out is None:
            self._out = memoryview(bytearray(_AT_ONCE // 2 * (RECORD_BYTES + _OVERHEAD)))
        out, end, gathered, turn = self._out, 0, 0, 0
        for part in parts:
            rest = memoryview(part)
            while rest:
                if gathered and (len(rest) >= _ALONE_BYTES or gathered == RECORD_BYTES):
                    end, gathered = self._seal_gathered(end, gathered), 0
                if not gathered and end + RECORD_BYTES + _OVERHEAD > len(out):
                    yield from _send_all(self.connection, out[:end], silence_s)
                    turn, end = turn + end, 0
                    if turn >= TURN_BYTES:
                        turn = 0
                        yield None
                if not gathered and len(rest) >= _ALONE_BYTES:
                    content = rest[:RECORD_BYTES]
                    end += self._sending.seal(content, out[end:])
                else:
                    content = rest[: RECORD_BYTES - gathered]
                    at = end + HEAD_BYTES + gathered
                    out[at : at + len(content)] = content
                    gathered += len(content)
                rest = rest[len(content) :]
        if gathered:
            end = self._seal_gathered(end, gathered)
        yield from _send_all(self.connection, out[:end], silence_s)

    def _seal_gathered(self, end: int, size: int) -> int:
        assert self._out is not None
        record = self._out[end:]
        return end + self._sending.seal(record[HEAD_BYTES : HEAD_BYTES + size], record)

    def _open_next(self, place: memoryview) -> int | None:
        """Opens the next record if all of it is here: straight to `place` if it fits there (returns its
        size), else in the buffer (0).  None: more has to come."""
        have = self._end - self._start
        if not have:
            self._start = self._end = 0
            return None
        if have < HEAD_BYTES:
            self._make_room(_OVERHEAD)
            return None
        at = self._start + HEAD_BYTES
        size = int.from_bytes(self._buffer[self._start : at], "big")
        if not 0 < size <= self._most:
            raise TransferError("what came was changed on the way")
        if have < size + _OVERHEAD:
            self._make_room(size + _OVERHEAD)
            return None
        self._start = at + size + TAG_BYTES
        direct = len(place) >= size
        content = place[:size] if direct else self._buffer[at : at + size]
        self._receiving.open(self._buffer[at : self._start], content)
        if direct:
            return size
        self._opened = content
        return 0

    def _make_room(self, size: int) -> None:
        """For a record of this length, of which the beginning is here."""
        if self._start + size > len(self._buffer):
            have = self._end - self._start
            self._buffer[:have] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, have

    def _hand_out(self, window: list[memoryview]) -> int:
        done = 0
        for part in window:
            count = min(len(part), len(self._opened))
            part[:count] = self._opened[:count]
            self._opened = self._opened[count:]
            done += count
            if not self._opened:
                break
        return done


def _send_all(connection: socket.socket, data: memoryview, silence_s: float) -> Step:
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            if not (yield Wait(connection.fileno(), WRITE, silence_s)):
                raise TransferError(f"it took nothing for {silence_s:.1f} s") from None
