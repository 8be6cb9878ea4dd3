"""How many requests of a costly kind are answered at once.

Who asks for the log-probabilities of a whole vocabulary takes milliseconds of each step that gives one of its
tokens, and memory until its client has read the answer.  So few such requests run at a time, and others of
their kind wait; no other request does.
"""

from __future__ import annotations

import asyncio
from collections import deque

from baton.gateway.errors import Overloaded
from baton.gateway.instances.patience import any_within

AT_ONCE = 2
PATIENCE_S = 60.0
MOST_WAITING = 256


class Permits:
    """First come, first served.  Of one event loop."""

    def __init__(self, at_once: int = AT_ONCE, patience_s: float = PATIENCE_S) -> None:
        self._free = at_once
        self._patience_s = patience_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, what: str) -> None:
        """Waits for a permit; who has one gives it back (`release`).  `what`: of the request, for errors.
        Raises `Overloaded` when none came in time."""
        if self._free:
            self._free -= 1
            return
        if len(self._waiting) >= MOST_WAITING:
            raise self._overloaded(what)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            in_time = await any_within((turn,), self._patience_s)
        except BaseException:
            self._leave(turn)
            raise
        if not in_time:
            self._leave(turn)
            raise self._overloaded(what)

    def release(self) -> None:
        """Gives a permit back, to who has waited longest."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._free += 1

    def _leave(self, turn: asyncio.Future[None]) -> None:
        if turn.done():
            self.release()
        else:
            self._waiting.remove(turn)

    def _overloaded(self, what: str) -> Overloaded:
        return Overloaded(
            f"{what}: few requests that ask for so many are answered at once, and others wait; try again",
            code="too_many_logprobs",
            retry_after_s=10,
        )
