"""Wakes consumers of the engine's output: each at most once a message, however many sequences it has.

An `Inbox` belongs to one consumer (one API request, however many sequences that has).  The engine client
appends tokens to the `EngineRequest`s of the inbox and wakes the consumer at most once for each message
from the engine.  A consumer that is slower than the engine finds more tokens at once: they coalesce, and
other consumers are not delayed.

A consumer either waits (`wait`), which costs a future and a wake-up of its task each time, or it is a
function (`listen`).  The functions of all consumers that have news are called in one go by the `Turn` that
their inboxes share, after the message has been distributed: with many streams that is the difference between
one entry in the event loop's queue for each step of the engine, and two for each token.

Everything here runs on one event loop; nothing is locked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import RequestCancelled

log = logging.getLogger(__name__)


class Turn:
    """Calls listeners in the next turn of the event loop: all that are due by one entry there."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: list[Inbox] = []

    def add(self, inbox: Inbox) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(inbox)

    def _run(self) -> None:
        due, self._due = self._due, []
        for inbox in due:
            inbox.due, listener = False, inbox.listener
            try:
                if listener is not None:
                    listener()
            except Exception:  # (a defect: it must not cost the others their turn)
                log.exception("a consumer of the engine's output failed")


class Inbox:
    """The news of one consumer's sequences.  `turn`: shared by consumers that listen."""

    __slots__ = ("_closed", "_news", "_turn", "_waiter", "due", "listener")

    def __init__(self, turn: Turn | None = None) -> None:
        self._news: list[EngineRequest] = []
        self._waiter: asyncio.Future[None] | None = None
        self._turn = turn or Turn()
        self.listener: Callable[[], None] | None = None
        """Set by `listen`."""
        self.due = False
        """It has a place in the next turn."""
        self._closed = False

    async def wait(self, timeout_s: float | None = None) -> list[EngineRequest]:
        """The sequences that have news, in order of arrival; empty after `timeout_s` without any.

        Without a timeout the wait ends when the engine answers or is lost: the client of the engine
        sees to one of them.  Raises `RequestCancelled` once the inbox is closed.
        """
        if not self._news and not self._closed and timeout_s != 0:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self.wake)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer:
                    timer.cancel()
        return self.take()

    def take(self) -> list[EngineRequest]:
        """The sequences that have news now.  Raises `RequestCancelled` once the inbox is closed."""
        if self._closed:
            raise RequestCancelled
        news, self._news = self._news, []
        for request in news:
            request.has_news = False
        return news

    def listen(self, listener: Callable[[], None] | None) -> None:
        """From now on `listener` is called soon after each `wake`, and at once if there are news already;
        None ends that.  Instead of `wait`; it must not raise."""
        self.listener = listener
        if self._news or self._closed:
            self.wake()

    def add(self, request: EngineRequest) -> None:
        """Notes that a sequence has news.  The caller wakes the consumer when its message is through."""
        self._news.append(request)
        request.has_news = True

    def wake(self) -> None:
        if self.listener is not None:
            if not self.due:
                self.due = True
                self._turn.add(self)
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """The consumer is gone: its wait, if it still waits, ends with `RequestCancelled`."""
        self._closed = True
        self.wake()
