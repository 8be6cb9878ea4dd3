"""The stories of the last requests that ended; of slow and failed ones for longer.

Three rings: the last `keep`; the last of those that failed; and of the last hour those that waited longest
for their first token.  The second and the third have a quarter of `keep` places each.  A story takes some two
kilobytes.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count

from baton.observe.events.story import Story

SLOW_FOR_S = 3600.0


class EventLog:
    """Of one gateway.  `keep` 0: nothing is kept, and engines are asked for nothing."""

    def __init__(self, keep: int = 0) -> None:
        self.keep = keep
        quarter = max(keep // 4, 1)
        self._recent: deque[Story] = deque(maxlen=keep)
        self._failed: deque[Story] = deque(maxlen=quarter if keep else 0)
        self._places = quarter
        self._slow: list[tuple[float, int, Story]] = []
        """A heap: (seconds to the first token, number, story)."""
        self._numbers = count()
        self._cleared = 0.0

    def add(self, story: Story, now: float) -> None:
        """A request has ended."""
        if not self.keep:
            return
        self._recent.append(story)
        if story.failed:
            self._failed.append(story)
        if now - self._cleared > SLOW_FOR_S / 60:
            self._cleared = now
            self._slow = [entry for entry in self._slow if now - entry[2].arrived < SLOW_FOR_S]
            heapq.heapify(self._slow)
        entry = (story.waited(now), next(self._numbers), story)
        if len(self._slow) < self._places:
            heapq.heappush(self._slow, entry)
        elif entry[0] > self._slow[0][0]:
            heapq.heapreplace(self._slow, entry)

    def recent(self) -> list[Story]:
        """The last one first."""
        return list(reversed(self._recent))

    def failed(self) -> list[Story]:
        """The last one first."""
        return list(reversed(self._failed))

    def slow(self) -> list[Story]:
        """The slowest one first."""
        return [story for _, _, story in sorted(self._slow, key=lambda entry: -entry[0])]

    def find(self, id: str) -> Story | None:
        """The last one that its client knows by this id."""
        for stories in (self._recent, self._failed, [story for _, _, story in self._slow]):
            for story in reversed(stories):
                if story.id == id:
                    return story
        return None
