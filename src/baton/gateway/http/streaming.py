"""A `Generation` as server-sent events, once the head of the answer is out.

Each wake-up by the engine becomes one write, however many sequences have news.

While a stream flows no task of it runs: its inbox calls a function that renders what came and writes it, in
one go with all other streams that got something from the same message.  Only a connection that does not take
more (its client reads too slowly: the transport's buffer is over its mark) wakes the task, which then waits
for that connection; meanwhile nothing listens, and tokens coalesce in the inbox.  So a slow client holds a
buffer and the tokens that it has not read, which `max_tokens` bounds, and delays nobody else.

A stream for which nothing comes gets signs of life (`alive.py`), and how far its prompt is, if it asked.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Send

from baton.gateway.errors import ApiError, InternalError, RequestCancelled
from baton.gateway.generation.generation import Generation, Update
from baton.gateway.generation.progress import Progress, progress_of
from baton.gateway.http.alive import SignsOfLife
from baton.gateway.http.failures import log_failure
from baton.gateway.http.stepping import Begun, begin
from baton.gateway.rendering.formats import in_turns
from baton.gateway.rendering.renderer import Renderer

log = logging.getLogger(__name__)

_MANY_LOGPROBS = 16 * 21
"""At once, alternatives counted: more of them are rendered by the task, which lets others have a turn."""


class Stream:
    """The events of one answer."""

    __slots__ = (
        "_before",
        "_clock",
        "_generation",
        "_renderer",
        "_send",
        "_shown",
        "_signs",
        "_silent_since",
        "_tells_progress",
        "ended",
        "written",
    )

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        send: Send,
        signs: SignsOfLife,
        *,
        progress: bool = False,
    ) -> None:
        """`progress`: the client wants to know how far its prompt is."""
        self._generation = generation
        self._renderer = renderer
        self._send = send
        self._signs = signs
        self._tells_progress = progress
        self._shown: Progress | None = None
        """What was told of it last."""
        self._before = b""
        """Is to be written before what is to be rendered."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self.written = self._silent_since = loop.time()
        """When anything, and when news of the answer was last written."""
        self.ended: asyncio.Future[bytes | list[Update] | Begun] = loop.create_future()
        """While it flows: what is to be written, or what is to be rendered first, or a write that waits."""

    async def run(self, updates: list[Update]) -> None:
        """Writes all of it, to its end; `updates` came first.  Errors become the last event.  Raises
        `RequestCancelled`."""
        generation, renderer = self._generation, self._renderer
        data = renderer.begin()
        try:
            data += self._progress() + await _render_much(renderer, updates)
            while not generation.done:
                if data:
                    await self._write(data)
                if generation.stalled:
                    data = await self._wait()
                else:
                    data = await self._flow()
                    if data:
                        self._silent_since = self._clock()
            data += renderer.end()
        except ApiError as error:
            log_failure(error, generation.request_id, "in the middle of its stream")
            data = renderer.failure(error)
        except RequestCancelled:
            raise
        except Exception:
            data = renderer.failure(unforeseen(generation.request_id, "in the middle of its stream"))
        generation.close()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.written = self._clock()

    async def _wait(self) -> bytes:
        """What has come after a while, where nothing of the request is at an instance."""
        updates = await self._generation.next()
        data = self._progress() + await _render_much(self._renderer, updates)
        interval = self._signs.interval_s
        if not data and interval and self._clock() - self.written >= interval:
            return self._sign()
        if data:
            self._silent_since = self._clock()
        return data

    async def _flow(self) -> bytes:
        """Writes events as they come, until the generation is done or has to be waited for, or the connection
        took no more and takes some again.  Returns what is not written yet.  Raises as `Generation.next`."""
        self.ended = asyncio.get_running_loop().create_future()
        inbox = self._generation.inbox
        inbox.listen(self.on_news)
        self._signs.watch(self)
        try:
            left = await self.ended
        finally:
            inbox.listen(None)
            self._signs.leave(self)
        if isinstance(left, bytes):
            return left
        if isinstance(left, list):
            before, self._before = self._before, b""
            return before + await _render_much(self._renderer, left)
        await left
        self.written = self._clock()
        return b""

    def on_news(self) -> None:
        """What happens for nearly every token: one update of text, to be written at once."""
        generation = self._generation
        try:
            told = self._progress() if self._tells_progress else b""
            updates = generation.take()
            if (len(updates) != 1 or updates[0].logprobs) and _are_much(updates):
                self._before = told
                self._end(updates)
                return
            data = told + _render(self._renderer, updates)
            if not generation.flows:
                self._end(data)
            elif data:
                self._begin_write(data)
                self._silent_since = self.written
        except Exception as error:
            self._fail(error)

    def _sign(self) -> bytes:
        return self._renderer.sign_of_life(self._clock() - self._silent_since)

    def give_sign(self) -> None:
        """Nothing came for a while."""
        try:
            if not self.ended.done():
                self._begin_write(self._sign())
        except Exception as error:
            self._fail(error)

    def _begin_write(self, data: bytes) -> None:
        """Writes it; where the connection takes no more, the stream flows no more."""
        self.written = self._clock()
        waits = begin(self._send({"type": "http.response.body", "body": data, "more_body": True}))
        if waits is not None:
            self._end(waits)

    def _end(self, left: bytes | list[Update] | Begun) -> None:
        self._generation.inbox.listen(None)
        if not self.ended.done():
            self.ended.set_result(left)

    def _fail(self, error: Exception) -> None:
        self._generation.inbox.listen(None)
        if not self.ended.done():
            self.ended.set_exception(error)

    def _progress(self) -> bytes:
        """The event that tells how far the prompt is, if that is wanted and new."""
        if not self._tells_progress:
            return b""
        progress = progress_of(self._generation)
        if progress is None or progress == self._shown:
            return b""
        self._shown = progress
        if progress.processed >= progress.total:
            self._tells_progress = False
        return self._renderer.progress(progress)


def unforeseen(request_id: str, where: str) -> InternalError:
    """Logs the exception that is being handled, a defect; what its client is told of it."""
    log.exception("request %s failed %s", request_id, where, extra={"request_id": request_id})
    message = f"internal error; the server's log has it under request {request_id}"
    return InternalError(message, code="internal")


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
