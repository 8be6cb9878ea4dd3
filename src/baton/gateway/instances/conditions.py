"""Who waits until something holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Conditions:
    """Those that somebody waits for: `look` after whatever may have changed one.  For one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def look(self) -> None:
        """Wakes those whose condition holds now."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for condition, waiter in waiting:
            if waiter.done():
                continue
            if condition():
                waiter.set_result(None)
            else:
                self._waiting.append((condition, waiter))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds: at once, or after some `look`."""
        if condition():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, waiter)
        self._waiting.append(entry)
        try:
            await waiter
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
