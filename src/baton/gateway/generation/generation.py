"""One API request in progress: its sequences, submitted and read.  No HTTP.

`Generator.start` makes a `Generation`.  Its consumer calls `next` until `done` and always calls `close` at
the end, which cancels what still runs, counts and logs the request.

A request may have more sequences than the instances let wait, so they are submitted through a window: as
many as they run at once, the next ones as those before them end.  If the instances' queues are full
when the request comes, that is the answer.  If it is full later, when work would be thrown away, the window
shrinks to what was taken and the sequence is submitted again, for at most `QUEUE_FULL_S` without success.

A generation can be ended from this side with what it has (`abort`), for pauses (`pausing.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from baton.gateway.cluster.request import Chunk, EngineRequest
from baton.gateway.errors import ApiError, RequestCancelled
from baton.gateway.generation.ending import log_end, tell_end
from baton.gateway.generation.permits import Permits
from baton.gateway.generation.sequence import Completion, Sequence, Update
from baton.gateway.instances.client import ClusterClient
from baton.gateway.instances.inbox import Inbox
from baton.gateway.parsing.deltas import Parsed
from baton.observe.events.story import Story
from baton.observe.metrics import Metrics
from baton.protocol.messages.requests import Finished

QUEUE_FULL_S = 60.0
"""How long a request that has begun tries to have its other sequences accepted."""
AGAIN_S = 1.0
"""Between two such tries, while nothing of the request runs."""
SUBMITTED_AT_ONCE = 64
"""Sequences of a request, in one turn of the event loop: one to two milliseconds."""


class Generation:
    """One API request in progress."""

    __slots__ = (
        "_aborted",
        "_begun",
        "_cached",
        "_client",
        "_closed",
        "_feeds",
        "_full_since",
        "_make",
        "_metrics",
        "_on_close",
        "_pending",
        "_running",
        "_sent",
        "_widest",
        "_window",
        "arrived",
        "choices",
        "error",
        "first_token",
        "held",
        "inbox",
        "permit",
        "request_id",
        "sequences",
        "story",
    )

    def __init__(
        self,
        request_id: str,
        client: ClusterClient,
        metrics: Metrics | None,
        make: Callable[[Sequence, Inbox], EngineRequest],
        *,
        n: int,
        arrived: float,
        window: int,
        on_close: Callable[[Generation], None],
        story: Story | None = None,
    ) -> None:
        self.request_id = request_id
        self.sequences: list[Sequence] = []
        self.inbox = Inbox(client.turn)
        self.arrived = arrived
        """`time.monotonic()` when the request came."""
        self.story = story
        """Its way, if somebody may want to know it."""
        self.held = False
        """Nothing of it is submitted now."""
        self.permit: Permits | None = None
        """Of this it has one, and gives it back at its end."""
        self._on_close = on_close
        self._aborted = False
        self._client = client
        self._metrics = metrics
        self._make = make
        """What is sent of a sequence; made when it is sent."""
        self.choices = n
        self._running = 0
        self._pending: deque[Sequence] = deque()
        """Not submitted yet."""
        self._sent = 0
        """Submitted and not ended; at most `_window`, if nothing waits for room."""
        self._window = self._widest = window
        self._feeds = False
        """More is submitted in the next turn of the event loop."""
        self._begun = False
        """Something came of it."""
        self._full_since: float | None = None
        self.first_token: float | None = None
        """When it came."""
        self._cached = (0, 0)
        """(the first sequence of which the cached tokens are not counted yet, those counted)."""
        self._closed = False
        self.error: str | None = None
        """The code of what `next` raised."""

    def add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self._running += 1
        self._pending.append(sequence)

    def feed(self) -> None:
        """Submits as many sequences as the window has room for; if those are many, the others have a turn in
        between."""
        if self._feeds:
            return
        count = 0
        while self._pending and self._sent < self._window and not (self._closed or self.held):
            if count == SUBMITTED_AT_ONCE:
                self._feeds = True
                asyncio.get_running_loop().call_soon(self._feed_on)
                return
            count += 1
            self._sent += 1
            sequence = self._pending.popleft()
            if sequence.request is None:
                sequence.submitted(self._make(sequence, self.inbox))
            assert sequence.request is not None
            self._client.enqueue(sequence.request)

    def _feed_on(self) -> None:
        self._feeds = False
        self.feed()

    @property
    def done(self) -> bool:
        """Every sequence has ended."""
        return self._running == 0

    @property
    def num_prompt(self) -> int:
        """Prompt tokens, once for each prompt."""
        return sum(len(sequence.prompt) for sequence in self.sequences[:: self.choices])

    @property
    def num_generated(self) -> int:
        return sum(sequence.num_generated for sequence in self.sequences)

    @property
    def has_reasoning(self) -> bool:
        return bool(self.sequences) and self.sequences[0].has_reasoning

    @property
    def num_reasoning(self) -> int:
        return sum(sequence.num_reasoning for sequence in self.sequences)

    @property
    def num_cached(self) -> int | None:
        """Prompt tokens from the prefix cache (by the first choice of each prompt); None while unknown."""
        number, total = self._cached
        while number < len(self.sequences):
            cached = self.sequences[number].num_cached
            if cached is None:
                self._cached = number, total
                return None
            number, total = number + self.choices, total + cached
        self._cached = number, total
        return total

    async def next(self, timeout_s: float | None = None) -> list[Update]:
        """The next updates; none after `timeout_s`, if all is done, or now and then if it takes long.

        Raises `ApiError` if a sequence failed (the others are cancelled then), `RequestCancelled` after
        `cancel`.
        """
        if self.done:
            return []
        if self.stalled:
            timeout_s = AGAIN_S if timeout_s is None else min(timeout_s, AGAIN_S)
        return self._advance(await self.inbox.wait(timeout_s))

    def take(self) -> list[Update]:
        """The updates that have come, without waiting; for who listens to the inbox.  Raises as `next`."""
        return self._advance(self.inbox.take()) if self._running else []

    @property
    def flows(self) -> bool:
        """Neither `done` nor `stalled`."""
        return self._running != 0 and self._sent != 0

    @property
    def stalled(self) -> bool:
        """The queue was full, and nothing will come by itself: `next` tries again after a while."""
        return not self._sent

    def _advance(self, news: list[EngineRequest]) -> list[Update]:
        updates: list[Update] = []
        refused: list[Sequence] = []
        now = time.monotonic()
        for request in news:
            sequence: Sequence = request.consumer
            if sequence.finish_reason is not None:
                continue
            tokens = request.take_tokens()
            if tokens is not None:
                update = sequence.take(tokens)
            else:
                chunk = request.take()
                if self._must_wait(chunk, now):
                    request.renew()
                    refused.append(sequence)
                    continue
                try:
                    update = sequence.advance(chunk)
                except ApiError as error:
                    self.error = error.code or type(error).__name__
                    self.close()
                    raise
            if update.finish_reason is not None:
                self._running -= 1
                self._sent -= 1
                self._window = min(self._window + 1, self._widest)
                self._full_since = None
                self._client.cancel(request)
            if update.token_ids:
                self._observe(sequence, request, len(update.token_ids), now)
            if update.finish_reason is not None:
                self._count(sequence, now)
                sequence.settle()
            updates.append(update)
            self._begun = True
        if refused:
            self._pending.extendleft(reversed(refused))
        if self._aborted and self._pending:
            updates += [sequence.abort() for sequence in self._pending]
            self._running -= len(self._pending)
            self._pending.clear()
        if self._pending and (self._sent or not refused):
            self.feed()
        return updates

    def _must_wait(self, chunk: Chunk, now: float) -> bool:
        """The queue had no room for this sequence of a request that has begun; it is to be tried again."""
        if chunk.finished is None or chunk.finished.code != "queue_full" or chunk.tokens:
            return False
        if not (self._begun or any(one.request and one.request.tokens for one in self.sequences)):
            return False  # (tokens of patient sequences may have come without any news of them)
        self._full_since = self._full_since or now
        if now - self._full_since > QUEUE_FULL_S:
            return False
        self._sent -= 1
        self._window = max(1, self._sent)
        return True

    async def collect(self) -> list[Completion]:
        """Runs to the end and closes.  Raises as `next` does."""
        try:
            updates = await self.next()
            completions = self.completions()
            self.gather(updates, completions)
            while not self.done:
                self.gather(await self.next(), completions)
        finally:
            self.close()
        return completions

    def completions(self) -> list[Completion]:
        """Of each sequence, with nothing in it yet: for `gather`."""
        return [Completion(sequence.index) for sequence in self.sequences]

    def gather(self, updates: Iterable[Update], completions: list[Completion]) -> None:
        """Appends what is new."""
        for update in updates:
            completion = completions[update.index]
            if update.text:
                completion.pieces.append(update.text)
            completion.token_ids += update.token_ids
            completion.logprobs += update.logprobs
            completion.finish_reason = update.finish_reason
            completion.stop_reason = update.stop_reason
            if update.deltas is not None:
                completion.parsed = completion.parsed or Parsed()
                completion.parsed.add(update.deltas)
                completion.called = update.called

    def abort(self) -> int:
        """The server ends the request: its consumer gets what there is, with the reason "abort".  Returns how
        many sequences that concerns."""
        if self._closed or self.done:
            return 0
        self._aborted, self.held = True, False
        for sequence in self.sequences:
            request = sequence.request
            if request is not None and request.finished is None and request.error is None:
                self._client.cancel(request)
                request.end(Finished(request.id, "aborted", num_cached=request.num_cached))
        self.inbox.wake()
        return self._running

    def cancel(self) -> None:
        """Nobody wants the answer any more: `next` raises `RequestCancelled`."""
        self.inbox.close()
        self.close()

    def close(self) -> None:
        """Cancels what still runs, counts and logs.  Always call it; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self.permit is not None:
            self.permit.release()
        now = time.monotonic()
        if self.story is not None:
            tell_end(self, self.story, now)
        self._on_close(self)
        self._pending.clear()
        unsent: Counter[tuple[str, int]] = Counter()
        for sequence in self.sequences:
            if sequence.settled:
                continue
            if sequence.request is not None:
                self._client.cancel(sequence.request)
                self._count(sequence, now)
            else:
                unsent[self._reason(sequence), len(sequence.prompt)] += 1
            sequence.settle()
        if self._metrics is not None:
            seconds = now - self.arrived
            for (reason, prompt), count in unsent.items():
                self._metrics.finished(reason, seconds=seconds, prompt=prompt, generated=0, count=count)
            self._metrics.choices(self.choices, max((one.num_generated for one in self.sequences), default=0))
        log_end(self, now)

    def _reason(self, sequence: Sequence) -> str:
        return sequence.finish_reason or ("error" if self.error else "abort")

    def _count(self, sequence: Sequence, now: float) -> None:
        """A sequence that was submitted is over: at once, as 4,096 of them take long together."""
        request = sequence.request
        if self._metrics is None or request is None:
            return
        self._metrics.finished(
            self._reason(sequence),
            seconds=now - self.arrived,
            prompt=len(sequence.prompt),
            generated=sequence.num_generated,
            max_tokens=request.stopping.max_tokens,
            queued_s=sequence.queued_s,
            first_s=sequence.first_tokens_at - self.arrived if sequence.first_tokens_at else None,
            decode_s=sequence.last_tokens_at - sequence.first_tokens_at,
            cached=sequence.num_cached,
            key=request.flow.key,
        )

    def _observe(self, sequence: Sequence, request: EngineRequest, count: int, now: float) -> None:
        """So many tokens of the sequence have come."""
        if request.patient and request.first_at is not None:
            self._observe_all(sequence, count, request.first_at, now)
            return
        metrics, last, sequence.last_tokens_at = self._metrics, sequence.last_tokens_at, now
        if last:
            if metrics is not None:
                metrics.more_tokens(count, now - last)
            return
        sequence.first_tokens_at = now
        if self.first_token is None:
            self.first_token = now
        if metrics is not None:
            metrics.first_tokens(count, len(sequence.prompt), now - self.arrived)

    def _observe_all(self, sequence: Sequence, count: int, first: float, now: float) -> None:
        """All tokens of a patient sequence are taken at its end; the first one came at `first`."""
        sequence.first_tokens_at, sequence.last_tokens_at = first, max(first, now)
        if self.first_token is None or first < self.first_token:
            self.first_token = first
        if self._metrics is not None:
            self._metrics.first_tokens(1, len(sequence.prompt), first - self.arrived)
            if count > 1:
                self._metrics.all_tokens(count - 1, max(0.0, now - first))


__all__ = ["Completion", "Generation", "RequestCancelled", "Update"]
