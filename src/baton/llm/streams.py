"""One request of `AsyncLLM`, between two event loops.

The background's loop starts it and takes its updates in the turn in which they come, as for the streams of a
server (`Inbox.listen`); the program's loop gets them by a `Hop`, and finds those of a slow consumer put
together.  What either side has is its own: they share only what is handed over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from baton.gateway.errors import InstanceUnavailable
from baton.gateway.generation.generation import AGAIN_S, Generation, Update
from baton.llm.hops import Hop


class Stream:
    """One request.  `begin` and `abort` and `leave` run on the background's loop, `news` on the program's."""

    def __init__(
        self, hop: Hop, start: Callable[[], Generation], ready: Callable[[], Awaitable[None]]
    ) -> None:
        """`start`: submits it; `ready`: waits until that is possible, or raises."""
        self._hop = hop
        self._start: Callable[[], Generation] | None = start
        self._ready = ready
        self._waiting: asyncio.Task[None] | None = None
        self._over = False
        """Nothing more is given to the other side."""
        self.generation: Generation | None = None
        """None: it was not submitted (yet)."""
        # Of the program's loop:
        self._updates: list[Update] = []
        self._error: Exception | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    # -- on the background's loop

    def begin(self) -> None:
        try:
            self._submit()
        except InstanceUnavailable:  # one is being restarted
            self._waiting = asyncio.get_running_loop().create_task(self._begin_later(), name="stream: ready")
        except Exception as error:
            self.fail(error)

    def abort(self) -> None:
        """It ends with what there is."""
        if self.generation is not None:
            self.generation.abort()
        else:
            self._give([], None, ended=True)
            self.leave()

    def leave(self) -> None:
        """Nobody wants more of it."""
        self._over, self._start = True, None
        if self._waiting is not None:
            self._waiting.cancel()
        if self.generation is not None:
            self.generation.inbox.listen(None)
            self.generation.close()

    def _submit(self) -> None:
        if self._over or self._start is None:
            return
        generation = self._start()
        self.generation, self._start = generation, None
        generation.inbox.listen(self._on_news)

    async def _begin_later(self) -> None:
        try:
            await self._ready()
            self._submit()
        except Exception as error:
            self.fail(error)

    def _on_news(self) -> None:
        generation = self.generation
        if generation is None or self._over:
            return
        try:
            updates = generation.take()
        except Exception as error:
            self.fail(error)
            self.leave()
            return
        ended = generation.done
        if ended:
            generation.close()  # (before the other side looks at its times)
        if updates or ended:
            self._give(updates, None, ended=ended)
        if ended:
            self.leave()
        elif generation.stalled:  # its instances' queues are full: nothing will come by itself
            asyncio.get_running_loop().call_later(AGAIN_S, self._on_news)

    def fail(self, error: Exception) -> None:
        """The other side gets this."""
        self._give([], error)

    def _give(self, updates: list[Update], error: Exception | None, *, ended: bool = False) -> None:
        if not self._over:
            self._over = ended or error is not None
            self._hop(lambda: self._receive(updates, error, ended))

    # -- on the program's loop

    def _receive(self, updates: list[Update], error: Exception | None, ended: bool) -> None:
        self._updates += updates
        self._error = self._error or error
        self._ended = self._ended or ended
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> tuple[list[Update], bool]:
        """(updates, whether it has ended), as soon as there are some.  Raises what it failed with."""
        while not (self._updates or self._ended or self._error):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._updates and self._error is not None:
            raise self._error
        updates, self._updates = self._updates, []
        return updates, self._ended


class Streams:
    """Those that are open, by the ids of their requests; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Stream] = {}
        self._ended = False

    def __len__(self) -> int:
        return len(self._open)

    def get(self, request_id: str) -> Stream | None:
        return self._open.get(request_id)

    def add(self, request_id: str, stream: Stream) -> None:
        """Raises `ValueError` for an id that is taken, `RuntimeError` after `end`."""
        with self._lock:
            if self._ended:
                raise RuntimeError("this AsyncLLM is shut down")
            if request_id in self._open:
                raise ValueError(f"request_id: {request_id!r} is running already; give another one")
            self._open[request_id] = stream

    def discard(self, request_id: str) -> None:
        with self._lock:
            self._open.pop(request_id, None)

    def end(self) -> None:
        """The background is gone: whichever are left end with an error."""
        with self._lock:
            self._ended, left = True, list(self._open.values())
        for stream in left:
            stream.fail(InstanceUnavailable("this AsyncLLM was shut down", code="shutting_down"))
