"""Runs many generations to their ends, for a caller that uses the results only when all are complete.

A task for each generation would be woken for each of its messages.  Here the inboxes call a function in the
turn in which a message of the engine is distributed, as they do for streams (`responses.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.gateway.generation.generation import AGAIN_S, Completion, Generation


class Gathering:
    """The completions of generations that were started; `ended` is called after each of them."""

    def __init__(self, generations: list[Generation], ended: Callable[[], object]) -> None:
        self._ended = ended
        self._left = len(generations)
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._each = [_One(self, generation) for generation in generations]

    async def completions(self) -> list[list[Completion]]:
        """Those of each generation, when all are over.  Raises what the first one that failed raises; the
        caller closes the generations."""
        for one in self._each:
            one.generation.inbox.listen(one.on_news)
        try:
            if self._left:
                await self._over
        finally:
            for one in self._each:
                one.generation.inbox.listen(None)
        return [one.completions for one in self._each]

    def again(self, one: _One) -> None:
        """Its instances' queues are full: nothing will come by itself."""
        self._loop.call_later(AGAIN_S, one.on_news)

    def one_ended(self) -> None:
        self._ended()
        self._left -= 1
        if not self._left and not self._over.done():
            self._over.set_result(None)

    def failed(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)


class _One:
    """One generation of a `Gathering`."""

    __slots__ = ("_owner", "completions", "generation")

    def __init__(self, owner: Gathering, generation: Generation) -> None:
        self._owner = owner
        self.generation = generation
        self.completions = generation.completions()

    def on_news(self) -> None:
        generation = self.generation
        if generation.done:
            return
        try:
            generation.gather(generation.take(), self.completions)
        except Exception as error:
            generation.inbox.listen(None)
            self._owner.failed(error)
            return
        if generation.done:
            generation.inbox.listen(None)
            generation.close()
            self._owner.one_ended()
        elif generation.stalled:
            self._owner.again(self)
