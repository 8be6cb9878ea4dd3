"""Where output of the engine waits for the one who wants it: buffers per sequence, one wake-up a message.

An `Inbox` belongs to one consumer (one API request, however many sequences that has).  The engine client
appends tokens to the `EngineRequest`s of the inbox and wakes the consumer at most once for each message
from the engine.  A consumer that is slower than the engine finds more tokens at once: they coalesce, and
it delays nobody else.

Everything here runs on one event loop; nothing is locked.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field

import msgspec

from baton.gateway.errors import ApiError, RequestCancelled
from baton.protocol.reports import PromptLogprobs
from baton.protocol.requests import Finished, Submit, Target
from baton.protocol.sampling import Sampling, Stopping, TokenLogprobs


@dataclass(slots=True)
class Chunk:
    """What came for one sequence since the last look."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """Aligned with `tokens`, or empty where none were asked for."""
    prompt_logprobs: list[PromptLogprobs]
    finished: Finished | None
    error: ApiError | None
    """Instead of `finished`: no more will come."""


class Inbox:
    """The news of one consumer's sequences."""

    __slots__ = ("_closed", "_news", "_waiter")

    def __init__(self) -> None:
        self._news: list[EngineRequest] = []
        self._waiter: asyncio.Future[None] | None = None
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
        if self._closed:
            raise RequestCancelled
        news, self._news = self._news, []
        for request in news:
            request.has_news = False
        return news

    def add(self, request: EngineRequest) -> None:
        """Notes that a sequence has news.  The caller wakes the consumer when its message is through."""
        self._news.append(request)
        request.has_news = True

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """The consumer is gone: its wait, if it still waits, ends with `RequestCancelled`."""
        self._closed = True
        self.wake()


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence on its way through the cluster, over as many instances as it takes.

    What follows `id` belongs to the cluster's table (`requests_table.py`), and the buffers to both sides.
    """

    name: str
    prompt: bytes
    """Packed int32."""
    sampling: Sampling
    stopping: Stopping
    priority: int
    cache_salt: str
    inbox: Inbox
    id: int = -1
    """The id under which instances know it now; another one after each loss."""
    at: str = ""
    """The instance that has it, as far as is known; "" while it waits for one."""
    plan: tuple[str, ...] = ()
    """The instances that may have it under this id, the one that prefills first."""
    heard: bool = False
    """Output came under this id: from here on it stays with the instance that sent it."""
    gone: set[str] = field(default_factory=set)
    """Instances of the plan that were lost since it was sent, and may be there again."""
    work: int = 0
    """Tokens to compute under this id, those in the prefix cache left out: an estimate."""
    losses: int = 0
    fruitless: int = 0
    """Losses in a row without a token in between."""
    known: int = 0
    """Tokens that it had at the last loss."""
    refused_by: set[str] = field(default_factory=set)
    """Instances that had no room for it; forgotten when it waits for room."""
    wait_until: float | None = None
    """While it waits for an instance: until then."""
    prompt_position: int = 1
    """The prompt position whose log-probabilities come next: those before came, maybe of a lost instance."""
    received: array[int] = field(default_factory=lambda: array("i"))
    """The tokens that the consumer has taken, of all instances."""
    has_news: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    error: ApiError | None = None

    @property
    def num_generated(self) -> int:
        return len(self.received) + len(self.tokens)

    @property
    def last_token(self) -> int | None:
        """The last token that came; None before the first."""
        tokens = self.tokens or self.received
        return tokens[-1] if tokens else None

    def take(self) -> Chunk:
        """Everything that came since the last call."""
        self.received.extend(self.tokens)
        chunk = Chunk(self.tokens, self.logprobs, self.prompt_logprobs, self.finished, self.error)
        self.tokens, self.logprobs, self.prompt_logprobs = [], [], []
        return chunk

    def submit(self, decoders: tuple[Target, ...] = ()) -> Submit:
        """The message that asks an engine for it, or for the rest of it."""
        sampling = self.sampling
        generated = b""
        if self.num_generated:
            generated = (self.received + array("i", self.tokens)).tobytes()
            if sampling.prompt_logprobs is not None:  # they came before the first token
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submit(
            id=self.id,
            name=self.name,
            prompt=self.prompt,
            sampling=sampling,
            stopping=self.stopping,
            priority=self.priority,
            cache_salt=self.cache_salt,
            generated=generated,
            decoders=decoders,
        )

    def add_prompt_logprobs(self, run: PromptLogprobs) -> bool:
        """Takes the positions that did not come before; False if there are none."""
        known = self.prompt_position - run.first
        if known >= len(run.positions):
            return False
        if known > 0:
            run = msgspec.structs.replace(run, first=self.prompt_position, positions=run.positions[known:])
        self.prompt_position = run.first + len(run.positions)
        self.prompt_logprobs.append(run)
        self.notify()
        return True

    def renew(self) -> None:
        """It ended before it began, and may be sent again as if it never had been."""
        self.finished = None
        self.losses = self.fruitless = 0
        self.refused_by.clear()

    def end(self, finished: Finished) -> None:
        self.finished = finished
        self.notify()
        self.inbox.wake()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.notify()
        self.inbox.wake()

    def notify(self) -> None:
        """Puts the sequence among the news.  Whoever calls this wakes the consumer afterwards."""
        if not self.has_news:
            self.inbox.add(self)
