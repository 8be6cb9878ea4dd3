"""What the server's processes use, for metrics: read now and then, however often the metrics are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from baton.observe.memory import Memory, memory_of_all

KEPT_S: Final = 10.0
"""The kernel walks all pages of a process to say it: milliseconds each, and everybody may ask for metrics."""


class MemorySamples:
    """Of the processes that `processes()` names."""

    def __init__(
        self,
        processes: Callable[[], Mapping[str, int]],
        *,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[Mapping[str, int]], dict[str, Memory]] = memory_of_all,
    ) -> None:
        self._processes, self._clock, self._read = processes, clock, read
        self._found: dict[str, Memory] = {}
        self._due = clock()

    async def latest(self) -> Mapping[str, Memory]:
        """By process, not older than `KEPT_S` before the call, or than the one that is being read; nothing
        where the system does not say it."""
        now = self._clock()
        if now >= self._due:
            self._due = now + KEPT_S
            try:
                self._found = await asyncio.to_thread(self._read, dict(self._processes()))
            except OSError:
                self._found = {}
        return self._found
