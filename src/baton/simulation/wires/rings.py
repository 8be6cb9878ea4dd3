"""What the processes of an instance share, without memory: the command ring, the report rings, the tickets.

A record or a ticket becomes visible to each rank after a delay of its own, in order; and, as in shared
memory, a ticket never before the records that it speaks of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from baton.ipc.ring import PUBLISHED_WORD
from baton.worker.rounds import LeaderRounds


class Blocked(Exception):
    """The rank would sleep until another rank moves."""


class LogEnd:
    """A rank's end of the command ring: as much of the common records as is visible to it."""

    def __init__(self, records: list[bytes]) -> None:
        self.words = [0] * (PUBLISHED_WORD + 1)
        self.cursor = 0
        self.partial = False
        self._records = records

    def read(self) -> bytes | None:
        if self.cursor == self.words[PUBLISHED_WORD]:
            return None
        self.cursor += 1
        return self._records[self.cursor - 1]

    def publish(self) -> None:
        self.words[PUBLISHED_WORD] += 1

    @property
    def has_news(self) -> bool:
        return self.words[PUBLISHED_WORD] != self.cursor


class ReportEnd:
    """A rank's end of its report ring, which has room for a few records; the rest waits with the rank."""

    def __init__(self, room: int, send: Callable[[bytes], None], wake: Callable[[], None]) -> None:
        self._room = room
        self._send = send
        self._wake = wake
        self._queue: deque[bytes] = deque()
        self._unheard: deque[bytes] = deque()
        """Written, and nobody was woken for it: the engine has not seen it yet."""

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    def append(self, record: bytes) -> None:
        self._queue.append(record)

    def write(self, record: bytes, ring: bool = True) -> bool:
        self._queue.append(record)
        return self.flush(ring)

    def flush(self, ring: bool = True) -> bool:
        while self._queue and self._room:
            self._room -= 1
            self._unheard.append(self._queue.popleft())
        if ring or self._queue:
            self.ring()
        return not self._queue

    def ring(self) -> None:
        """The engine looks: what was written is on its way to it."""
        while self._unheard:
            self._send(self._unheard.popleft())

    def freed(self) -> None:
        """The engine has read a record; it rings if somebody waits for the space."""
        self._room += 1
        if self._queue:
            self._wake()

    def force(self) -> None:
        """What a rank that ends does: it waits until the engine has read enough."""
        self._room += len(self._queue)
        self.flush()


class WatchedReports:
    """What the token loop writes to: its report end, but for `write`, which watches the writer and may keep a
    record until the step that it tells of has come so far."""

    def __init__(
        self,
        end: ReportEnd,
        write: Callable[[bytes, bool], bool],
        ring: Callable[[], None],
    ) -> None:
        self._end = end
        self._write = write
        self._ring = ring

    @property
    def pending(self) -> bool:
        return self._end.pending

    def write(self, record: bytes, ring: bool = True) -> bool:
        return self._write(record, ring)

    def flush(self, ring: bool = True) -> bool:
        return self._end.flush(ring)

    def ring(self) -> None:
        self._ring()


class Bell:
    """A doorbell that nobody needs to ring: the world runs a rank when something is visible to it."""

    def ring(self) -> None:
        """Nothing."""

    def drain(self) -> bool:
        return False

    def fileno(self) -> int:
        return 0


class TicketEnd:
    """A follower's end of the tickets."""

    def __init__(self, taken: Callable[[], None]) -> None:
        self.visible: dict[int, int] = {}
        self.taken = 0
        self._on_taken = taken

    def take(self, round_: int) -> int | None:
        sequence = self.visible.pop(round_, None)
        if sequence is not None:
            self.taken = round_
            self._on_taken()
        return sequence

    def wait(
        self,
        round_: int,
        *,
        timeout_s: float | None,
        spin_s: float = 0.0,
        on_wake: Callable[[], bool] | None = None,
    ) -> int | None:
        """Instead of sleeping."""
        if on_wake is not None:
            on_wake()
        return None

    def wake(self) -> None:
        """Nothing: see `Bell`."""


class TicketBoard:
    """The leader's end of the tickets.  `entries` as in shared memory: so far may it be ahead."""

    def __init__(self, entries: int, write: Callable[[int, int], None]) -> None:
        self.entries = entries
        self.last = 0
        self.ends: list[TicketEnd] = []
        self._write = write

    def publish(self, round_: int, sequence: int) -> bool:
        if self.full:
            return False
        self.last = round_
        self._write(round_, sequence)
        return True

    def lag(self) -> int:
        return self.last - min(end.taken for end in self.ends)

    @property
    def full(self) -> bool:
        return self.lag() >= self.entries


class Leader(LeaderRounds):
    """Rounds of rank 0 that give up instead of sleeping."""

    def _wait(self, timeout_s: float | None, reason: str) -> None:
        if reason != "commands":
            raise Blocked
