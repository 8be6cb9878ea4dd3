"""Credits: a line of other instances' requests that were refused for want of room.

Theory.  A refused request waits in the line, by priority and fairly by flow (`protocol/rules/fair_queue.py`),
and none behind it overtakes.  When there is room for the first one it gets a `Credit`, and the room is
*promised* to it: it counts as taken until its next `Reserve` or its `Cancel`, which P owes at once, or until
`PROMISE_S` is over.  So room that became free once is not given away twice, and one that does not answer
costs a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.handover.courier import Alarm
from baton.protocol.messages.requests import Target
from baton.protocol.rules.fair_queue import FairLine, Flow

PROMISE_S = 1.0
KEPT_S = 60.0
"""Longer than any request waits for credit; P says when one waits no more, or is lost."""
MAX_LINE = 1024


@dataclass(slots=True, eq=False)
class Entry:
    number: int
    """Counts those that came."""
    priority: int
    target: Target
    id: int
    attempt: int
    blocks: int
    until: float

    @property
    def key(self) -> tuple[str, int]:
        return (self.target.incarnation, self.id)


class Credits:
    """The line, and the promises."""

    def __init__(self) -> None:
        self._line: FairLine[Entry] = FairLine()
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
        return (peer, id) not in self._promised and head is not None and head.priority <= priority

    def join(
        self, target: Target, id: int, attempt: int, priority: int, flow: Flow, blocks: int, now: float
    ) -> bool:
        """Somebody was refused.  False: the line is full."""
        if len(self._waiting) >= MAX_LINE:
            return False
        self._count += 1
        entry = Entry(self._count, priority, target, id, attempt, blocks, now + KEPT_S)
        self._waiting[entry.key] = entry
        self._line.push(entry, entry.number, (priority,), flow)
        self._alarm.note(entry.until)
        return True

    @property
    def head(self) -> Entry | None:
        return self._line.head()

    def promise(self, now: float) -> Entry:
        """The head gets its credit.  Somebody is in the line."""
        entry = self.head
        assert entry is not None
        self._line.take(entry.number, entry.blocks)
        del self._waiting[entry.key]
        entry.until = now + PROMISE_S
        self._promised[entry.key] = entry
        self._alarm.note(entry.until)
        return entry

    def drop(self, peer: str, id: int) -> bool:
        """This one has asked again, or does not wait any more.  Returns whether room was promised to it."""
        self._leave((peer, id))
        promised = self._promised.pop((peer, id), None) is not None
        self._tidy()
        return promised

    def drop_peer(self, peer: str) -> None:
        for key in [key for key in self._waiting if key[0] == peer]:
            self._leave(key)
        for key in [key for key in self._promised if key[0] == peer]:
            del self._promised[key]
        self._tidy()

    def expire(self, now: float) -> int:
        """Forgets what is overdue; returns how many."""
        if not self._alarm.due(now):
            return 0
        count = 0
        self._alarm.at = None
        for entries in (self._promised, self._waiting):
            for key in [key for key, entry in entries.items() if now >= entry.until]:
                self._leave(key)
                self._promised.pop(key, None)
                count += 1
            for entry in entries.values():
                self._alarm.note(entry.until)
        self._tidy()
        return count

    def _leave(self, key: tuple[str, int]) -> None:
        entry = self._waiting.pop(key, None)
        if entry is not None:
            self._line.remove(entry.number)

    def _tidy(self) -> None:
        if not self._waiting and not self._promised:
            self._alarm.at = None
