"""One end of the connection between the leader's host and a node: numbers, room, silence.

Theory.  The connection is ordered, and loses what was on its way when it breaks, which may show late or,
after a silent reconnection, not at all.  So frames are numbered: one that does not follow the last ends the
connection (`LaneBroken`).  A frame also says up to which frame of the other side everything has gone into the
rings there; what has not is bounded by `window` bytes, so a slow ring on one host becomes a full ring on the
other, and nothing between them grows.

Each end sends a frame at least four times within the other's patience, and is given up after the whole of it
(`protocol/rules/silence.py`: a watcher that stood still itself judges nobody).
"""

from __future__ import annotations

from collections import deque

from baton.protocol.rules.silence import Silence

_BEATS = 4
"""Frames within the other side's patience, at least."""


class LaneBroken(RuntimeError):
    """Something was lost on the way; the message says what."""


class Lane:
    """`window`: bytes that may be on the way in each direction; a frame that is larger goes alone."""

    def __init__(self, patience_s: float, window: int, now: float) -> None:
        self._window = window
        self._beat_s = patience_s / _BEATS
        self._beat_at = now + self._beat_s
        self._silence = Silence(patience_s, now)
        self._sent = 0
        self._on_the_way: deque[tuple[int, int]] = deque()
        """(number, bytes) of frames that the other side has not done yet."""
        self._bytes_on_the_way = 0
        self._received = 0
        self._done = 0
        """Frames of the other side whose content is in the rings here."""
        self._told = 0
        """The last `ack` that was sent."""
        self._bytes_undone = 0
        self._bytes_untold = 0
        """Done since `_told`."""

    # -- sending

    @property
    def room(self) -> int:
        """Bytes that may be sent now."""
        return self._window - self._bytes_on_the_way

    def due(self, now: float) -> bool:
        """A frame is to be sent even if there is nothing to say."""
        return now >= self._beat_at or self._bytes_untold >= self._window // 2

    def stamp(self, size: int, now: float) -> tuple[int, int]:
        """(number, ack) of the next frame, whose content has so many bytes."""
        self._sent += 1
        if size:
            self._on_the_way.append((self._sent, size))
            self._bytes_on_the_way += size
        self._told = self._done
        self._bytes_untold = 0
        self._beat_at = now + self._beat_s
        return self._sent, self._told

    # -- receiving

    def take(self, number: int, ack: int, size: int, now: float) -> None:
        """A frame has come whose content has `size` bytes.  Raises `LaneBroken`."""
        if number != self._received + 1:
            raise LaneBroken(f"frame {number} came after frame {self._received}: the connection lost some")
        if not 0 <= ack <= self._sent:
            raise LaneBroken(f"frame {ack} is said to be done, and {self._sent} were sent")
        self._received = number
        self._bytes_undone += size
        while self._on_the_way and self._on_the_way[0][0] <= ack:
            self._bytes_on_the_way -= self._on_the_way.popleft()[1]
        self._silence.heard(now)

    def done(self) -> None:
        """The content of all that was received is in the rings."""
        self._done = self._received
        self._bytes_untold += self._bytes_undone
        self._bytes_undone = 0

    # -- time

    def silent(self, now: float) -> bool:
        """Whether the other side is to be given up."""
        return self._silence.look(now)

    @property
    def deadline(self) -> float:
        """When `due` or `silent` must be asked at the latest."""
        return min(self._beat_at, self._silence.deadline)
