"""A `Generation` as an HTTP response, whole or as server-sent events.

One class, because both must see the client go away: while the answer is made, a task waits for the
disconnect and cancels the generation, and with it every sequence, at once.

The status of a stream is decided by its first update, so that a full queue is a 429 and not an event; if
that takes long the stream begins without it.  Each wake-up by the engine becomes one write, however many
sequences have news.

While a stream flows no task of it runs: its inbox calls a function that renders what came and writes it, in
one go with all other streams that got something from the same message.  Only a connection that does not take
more (its client reads too slowly: the transport's buffer is over its mark) wakes the task, which then waits
for that connection; meanwhile nothing listens, and tokens coalesce in the inbox.  So a slow client holds a
buffer and the tokens that it has not read, which `max_tokens` bounds, and delays nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.gateway.errors import ApiError, InternalError, RequestCancelled
from baton.gateway.generation.ending import timings_of
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.http.failures import error_response, log_failure
from baton.gateway.http.stepping import Begun, begin
from baton.gateway.rendering.formats import TURN, Part, in_turns
from baton.observe.events.views import server_timing

log = logging.getLogger(__name__)

SEND = "baton.send"
"""In the scope: the server's own `send`, for the pieces of a body.  Every wrapper around it looks at nothing
but the start of a response, and would cost each piece another call."""

KEEP_ALIVE = "baton.keep_alive"
"""In the scope: after so many seconds of silence a stream gets a sign of life; 0: none."""
_FIRST_UPDATE_S = 2.0
_MANY_LOGPROBS = 16 * 21
"""At once, alternatives counted: more of them are rendered by the task, which lets others have a turn."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Renderer(Protocol):
    """Writes one endpoint's shapes for one generation."""

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        """The body of an answer that is not streamed."""

    def begin(self) -> bytes:
        """Events before any update."""

    def chunk(self, update: Update) -> bytes:
        """The event for an update; empty if it says nothing new."""

    def parts(self, update: Update) -> Iterator[Part]:
        """The same, for an update that brings much."""

    def end(self) -> bytes:
        """Events after the last update, the end mark among them."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that cannot go on."""

    @property
    def idle(self) -> bytes:
        """What a stream is sent in a silence, so that nobody on the way takes it for dead."""


class GenerationResponse(Response):
    """Answers with a generation, and closes it."""

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        *,
        stream: bool,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.background = None
        self._headers = list(headers)
        """Besides those of every answer."""
        self._generation = generation
        self._renderer = renderer
        self._stream = stream
        self._gone = False
        """The client went away."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive), name="disconnect")
        try:
            if self._stream:
                updates = await self._generation.next(_FIRST_UPDATE_S)
                headers = [*_STREAM_HEADERS, *self._traced()]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._send_stream(updates, scope.get(SEND, send), scope.get(KEEP_ALIVE, 0.0))
            elif self._generation.permit is not None:
                await self._send_large(send)
            else:
                body = Response(await self._whole(), headers=self._timing(), media_type="application/json")
                body.raw_headers += self._traced()
                await body(scope, receive, send)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
        except RequestCancelled:
            log.debug("request %s: the client went away", self._generation.request_id)
        finally:
            watcher.cancel()
            self._generation.close()

    async def _whole(self) -> bytes:
        """The body of an answer that is not streamed.  Raises as `Generation.collect`."""
        return await in_turns(self._renderer.whole(await self._generation.collect()))

    def _timing(self) -> dict[str, str]:
        found = timings_of(self._generation)
        return {} if found is None else {"server-timing": server_timing(found)}

    def _traced(self) -> list[tuple[bytes, bytes]]:
        """Which span the request is, and what else is told of it."""
        story = self._generation.story
        if story is None or story.trace is None:
            return self._headers
        return [(b"traceresponse", story.trace.response.encode()), *self._headers]

    async def _send_large(self, send: Send) -> None:
        """A body that is written as its client takes it: nowhere is it whole."""
        completions = await self._generation.collect()
        timing = [(name.encode(), value.encode()) for name, value in self._timing().items()]
        headers = [(b"content-type", b"application/json"), *timing, *self._traced()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pieces: list[bytes] = []
        work = 0
        for weight, data in self._renderer.whole(completions):
            pieces.append(data)
            work += weight
            if work >= TURN:
                await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
                await asyncio.sleep(0)
                if self._gone:
                    raise RequestCancelled
                pieces, work = [], 0
        await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": False})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._generation.cancel()

    async def _send_stream(self, updates: list[Update], send: Send, keep_alive_s: float) -> None:
        """Everything after the headers; errors become the last event."""
        generation, renderer = self._generation, self._renderer
        data = renderer.begin()
        try:
            data += await _render_much(renderer, updates)
            while not generation.done:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if generation.stalled:
                    data = await _render_much(renderer, await generation.next())
                else:
                    data = await self._flow(send, keep_alive_s)
            data += renderer.end()
        except ApiError as error:
            log_failure(error, generation.request_id, "in the middle of its stream")
            data = renderer.failure(error)
        except RequestCancelled:
            raise
        except Exception:
            about = {"request_id": generation.request_id}
            log.exception("request %s failed in the middle of its stream", about["request_id"], extra=about)
            failure = InternalError(
                f"internal error; the server's log has it under request {generation.request_id}",
                code="internal",
            )
            data = renderer.failure(failure)
        generation.close()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _flow(self, send: Send, keep_alive_s: float) -> bytes:
        """Writes events as they come, until the generation is done or has to be waited for, or the connection
        took no more and takes some again.  Returns what is not written yet.  Raises as `Generation.next`."""
        flow = _Flow(self._generation, self._renderer, send)
        inbox = self._generation.inbox
        inbox.listen(flow.on_news)
        try:
            left = await flow.until_ended(keep_alive_s)
        finally:
            inbox.listen(None)
        if isinstance(left, bytes):
            return left
        if isinstance(left, list):
            return await _render_much(self._renderer, left)
        await left
        return b""


class _Flow:
    """A stream while nobody waits for it."""

    __slots__ = ("_generation", "_renderer", "_send", "_wrote", "ended")

    def __init__(self, generation: Generation, renderer: Renderer, send: Send) -> None:
        self._generation = generation
        self._renderer = renderer
        self._send = send
        self._wrote = False
        """Something, since it was last looked at."""
        self.ended: asyncio.Future[bytes | list[Update] | Begun] = asyncio.get_running_loop().create_future()
        """What is to be written, or what is to be rendered first, or a write that waits."""

    async def until_ended(self, keep_alive_s: float) -> bytes | list[Update] | Begun:
        """Writes a sign of life after each silence of so many seconds; 0: none."""
        while keep_alive_s:
            self._wrote = False
            done, _ = await asyncio.wait((self.ended,), timeout=keep_alive_s)
            if done:
                break
            if not self._wrote:
                await self._send(
                    {"type": "http.response.body", "body": self._renderer.idle, "more_body": True}
                )
        return await self.ended

    def on_news(self) -> None:
        """What happens for nearly every token: one update of text, to be written at once."""
        generation = self._generation
        left: bytes | list[Update] | Begun | None = None
        try:
            updates = generation.take()
            if (len(updates) != 1 or updates[0].logprobs) and _are_much(updates):
                left = updates
            else:
                data = _render(self._renderer, updates)
                if not generation.flows:
                    left = data
                elif data:
                    self._wrote = True
                    left = begin(self._send({"type": "http.response.body", "body": data, "more_body": True}))
        except Exception as error:
            generation.inbox.listen(None)
            if not self.ended.done():
                self.ended.set_exception(error)
            return
        if left is not None:
            generation.inbox.listen(None)
            if not self.ended.done():
                self.ended.set_result(left)


def _render(renderer: Renderer, updates: list[Update]) -> bytes:
    if len(updates) == 1:
        return renderer.chunk(updates[0])
    return b"".join([renderer.chunk(update) for update in updates])


def _are_much(updates: list[Update]) -> bool:
    """A client that reads slowly finds many log-probabilities at once."""
    count = sum(
        [len(update.logprobs) * (1 + update.logprobs[0].count) for update in updates if update.logprobs]
    )
    return count > _MANY_LOGPROBS


async def _render_much(renderer: Renderer, updates: list[Update]) -> bytes:
    """`_render` that lets others have a turn."""
    return await in_turns(part for update in updates for part in renderer.parts(update))
