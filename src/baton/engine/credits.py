"""Credits: the requests of other instances that were refused for want of room, and who comes next.

Theory.  Who was refused waits in line, by (priority, when it asked), and nobody behind overtakes.  When there
is room for the first one it gets a `Credit`, and the room is *promised* to it: it counts as taken until its
next `Reserve` or its `Cancel`, which P owes at once, or until `PROMISE_S` is over.  So room that became free
once is not given away twice, and one that does not answer costs a second.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from baton.engine.courier import Alarm
from baton.protocol.requests import Target

PROMISE_S = 1.0
KEPT_S = 60.0
"""Longer than any request waits for credit; P says when one waits no more, or is lost."""
MAX_LINE = 1024


@dataclass(slots=True, order=True)
class Entry:
    rank: tuple[int, int]
    target: Target = field(compare=False)
    id: int = field(compare=False)
    attempt: int = field(compare=False)
    blocks: int = field(compare=False)
    until: float = field(compare=False)

    @property
    def key(self) -> tuple[str, int]:
        return (self.target.incarnation, self.id)


class Credits:
    """The line, and the promises."""

    def __init__(self) -> None:
        self._line: list[Entry] = []
        """A heap; those that left are still in it until they come to its top, or are too many."""
        self._waiting: dict[tuple[str, int], Entry] = {}
        self._promised: dict[tuple[str, int], Entry] = {}
        self._alarm = Alarm()
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def promised_slots(self) -> int:
        return len(self._promised)

    @property
    def promised_blocks(self) -> int:
        return sum(entry.blocks for entry in self._promised.values())

    @property
    def next_deadline(self) -> float | None:
        return self._alarm.at

    def must_wait(self, peer: str, id: int, priority: int) -> bool:
        """Whether somebody in the line is ahead of this one, which has no promise."""
        head = self.head
        return (peer, id) not in self._promised and head is not None and head.rank[0] <= priority

    def join(self, target: Target, id: int, attempt: int, priority: int, blocks: int, now: float) -> bool:
        """Somebody was refused.  False: the line is full."""
        if len(self._waiting) >= MAX_LINE:
            return False
        self._count += 1
        entry = Entry((priority, self._count), target, id, attempt, blocks, now + KEPT_S)
        self._waiting[entry.key] = entry
        heapq.heappush(self._line, entry)
        self._alarm.note(entry.until)
        return True

    @property
    def head(self) -> Entry | None:
        while self._line and not self._waits(self._line[0]):
            heapq.heappop(self._line)
        return self._line[0] if self._line else None

    def promise(self, now: float) -> Entry:
        """The head gets its credit.  Somebody is in the line."""
        entry = self.head
        assert entry is not None
        heapq.heappop(self._line)
        del self._waiting[entry.key]
        entry.until = now + PROMISE_S
        self._promised[entry.key] = entry
        self._alarm.note(entry.until)
        return entry

    def drop(self, peer: str, id: int) -> bool:
        """This one has asked again, or does not wait any more.  Returns whether room was promised to it."""
        self._waiting.pop((peer, id), None)
        promised = self._promised.pop((peer, id), None) is not None
        self._tidy()
        return promised

    def drop_peer(self, peer: str) -> None:
        for entries in (self._promised, self._waiting):
            for key in [key for key in entries if key[0] == peer]:
                del entries[key]
        self._tidy()

    def expire(self, now: float) -> int:
        """Forgets what is overdue; returns how many."""
        if not self._alarm.due(now):
            return 0
        count = 0
        self._alarm.at = None
        for entries in (self._promised, self._waiting):
            for key in [key for key, entry in entries.items() if now >= entry.until]:
                del entries[key]
                count += 1
            for entry in entries.values():
                self._alarm.note(entry.until)
        self._tidy()
        return count

    def _waits(self, entry: Entry) -> bool:
        return self._waiting.get(entry.key) is entry

    def _tidy(self) -> None:
        if len(self._line) > 2 * len(self._waiting) + 16:
            self._line = [entry for entry in self._line if self._waits(entry)]
            heapq.heapify(self._line)
        if not self._waiting and not self._promised:
            self._alarm.at = None
