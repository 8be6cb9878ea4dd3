"""A `Generation` as an HTTP response, whole or as server-sent events.

One class, because both must see the client go away: while the answer is made, a task waits for the
disconnect and cancels the generation, and with it every sequence, at once.

The status of a stream is decided by its first update, so that a full queue is a 429 and not an event; if
that takes long the stream begins without it.  Each wake-up by the engine becomes one write, however many
sequences have news.  While the connection does not take more, tokens coalesce in the inbox.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.gateway.errors import ApiError, InternalError, RequestCancelled
from baton.gateway.formats import DONE, encode, event
from baton.gateway.generation import Completion, Generation, Update
from baton.gateway.middleware import error_response

log = logging.getLogger(__name__)

_FIRST_UPDATE_S = 2.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Renderer(Protocol):
    """Writes one endpoint's shapes for one generation."""

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def begin(self) -> bytes:
        """Events before any update."""

    def chunk(self, update: Update) -> bytes:
        """The event for an update; empty if it says nothing new."""

    def end(self) -> bytes:
        """Events after the last update, without the end mark."""


class GenerationResponse(Response):
    """Answers with a generation, and closes it."""

    def __init__(self, generation: Generation, renderer: Renderer, *, stream: bool) -> None:
        self.background = None
        self._generation = generation
        self._renderer = renderer
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive), name="disconnect")
        try:
            if self._stream:
                updates = await self._generation.next(_FIRST_UPDATE_S)
                await self._send_stream(updates, send)
            else:
                completions = await self._generation.collect()
                body = Response(encode(self._renderer.whole(completions)), media_type="application/json")
                await body(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except RequestCancelled:
            log.debug("request %s: the client went away", self._generation.request_id)
        finally:
            watcher.cancel()
            self._generation.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.cancel()

    async def _send_stream(self, updates: list[Update], send: Send) -> None:
        """Everything from the status line on; errors become the last event."""
        generation, renderer = self._generation, self._renderer
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        data = renderer.begin()
        try:
            while True:
                data += b"".join([renderer.chunk(update) for update in updates])
                if generation.done:
                    data += renderer.end() + DONE
                    break
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                updates = await generation.next()
                data = b""
        except ApiError as error:
            data = event(encode(error.body()))
        except RequestCancelled:
            raise
        except Exception:
            log.exception("request %s failed in the middle of its stream", generation.request_id)
            failure = InternalError(
                f"internal error; the server's log has it under request {generation.request_id}",
                code="internal",
            )
            data = event(encode(failure.body()))
        generation.close()
        await send({"type": "http.response.body", "body": data, "more_body": False})


def now() -> int:
    """Unix seconds, as `created` wants them."""
    return int(time.time())
