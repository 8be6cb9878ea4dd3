"""A `Generation` as an HTTP response: the head, and an answer in one piece; `streaming.py` has the events.

One class, because all must see the client go away: while the answer is made, a task waits for the disconnect
and cancels the generation, and with it every sequence, at once.

The status of a stream is decided by its first update, so that a full queue is a 429 and not an event; if
that takes long the stream begins without it, with its head and the events that say that there is an answer.
An answer in one piece waits for its end, unless `--early-headers-after` says how long: then its head goes
out, white space (which JSON allows before a value) after each silence, and the body when it is known; what
goes wrong from then on is a body of the API's error shape under the status 200.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.gateway.errors import ApiError, RequestCancelled
from baton.gateway.generation.ending import timings_of
from baton.gateway.generation.generation import Generation
from baton.gateway.http.alive import SILENT, SignsOfLife
from baton.gateway.http.failures import error_response
from baton.gateway.http.streaming import Stream, unforeseen
from baton.gateway.rendering.formats import TURN, in_turns
from baton.gateway.rendering.renderer import Renderer
from baton.observe.events.views import server_timing

log = logging.getLogger(__name__)

SEND = "baton.send"
"""In the scope: the server's own `send`, for the pieces of a body.  Every wrapper around it looks at nothing
but the start of a response, and would cost each piece another call."""

SIGNS = "baton.signs"
"""In the scope: the server's `SignsOfLife`."""
_FIRST_UPDATE_S = 2.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON = (b"content-type", b"application/json")

T = TypeVar("T")


class GenerationResponse(Response):
    """Answers with a generation, and closes it."""

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        *,
        stream: bool,
        progress: bool = False,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """`progress`: a stream tells how far its prompt is.  `headers`: besides those of every answer."""
        self.background = None
        self._more_headers = list(headers)
        self._generation = generation
        self._renderer = renderer
        self._stream = stream
        self._progress = progress
        self._gone = False
        """The client went away."""
        self._begun = False
        """The head of the answer is out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive), name="disconnect")
        signs: SignsOfLife = scope.get(SIGNS, SILENT)
        try:
            if self._stream:
                wait_s = min(_FIRST_UPDATE_S, signs.interval_s or _FIRST_UPDATE_S)
                updates = await self._generation.next(wait_s)
                await self._begin(send, _STREAM_HEADERS)
                write = scope.get(SEND, send)
                stream = Stream(self._generation, self._renderer, write, signs, progress=self._progress)
                await stream.run(updates)
            elif self._generation.permit is not None:
                await self._send_large(send, signs)
            else:
                body = await self._in_time(self._whole(), send, signs)
                if self._begun:
                    await send({"type": "http.response.body", "body": body, "more_body": False})
                else:
                    whole = Response(body, headers=self._timing(), media_type="application/json")
                    whole.raw_headers += self._traced()
                    await whole(scope, receive, send)
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except RequestCancelled:
            log.debug("request %s: the client went away", self._generation.request_id)
        except Exception:
            if not self._begun or self._stream:
                raise
            await self._fail(
                unforeseen(self._generation.request_id, "after its head was sent"), scope, receive, send
            )
        finally:
            watcher.cancel()
            self._generation.close()

    async def _begin(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        headers = [*headers, *self._traced()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """With its status, or in the body of an answer that has begun."""
        response = error_response(error, scope)
        if self._begun:
            await send({"type": "http.response.body", "body": response.body, "more_body": False})
        else:
            await response(scope, receive, send)

    async def _in_time(self, work: Coroutine[Any, Any, T], send: Send, signs: SignsOfLife) -> T:
        """What the work comes to.  If that takes long, and early headers are wanted, the answer begins."""
        if not signs.early_headers_s:
            return await work
        task = asyncio.create_task(work, name="answer")
        try:
            await asyncio.wait((task,), timeout=signs.early_headers_s)
            if not task.done():
                await self._begin(send, [_JSON])
            while not task.done():
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.wait((task,), timeout=signs.interval_s or None)
            return task.result()
        finally:
            task.cancel()

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
            return self._more_headers
        return [(b"traceresponse", story.trace.response.encode()), *self._more_headers]

    async def _send_large(self, send: Send, signs: SignsOfLife) -> None:
        """A body that is written as its client takes it: nowhere is it whole."""
        completions = await self._in_time(self._generation.collect(), send, signs)
        if not self._begun:
            timing = [(name.encode(), value.encode()) for name, value in self._timing().items()]
            await self._begin(send, [_JSON, *timing])
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
