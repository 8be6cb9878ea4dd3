"""`/ui`, a page for operators, and what it shows: `/debug/overview` once, or `/ui/events` as it changes.

The page is one file without anything of a client in it and without a key, as a browser that opens an address
sends none: everybody may load it.  What it shows, and does, it asks for with the key that was typed into it.
Its script and style are named by their hashes in the page's Content-Security-Policy: nothing else runs.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.gateway.errors import Overloaded
from baton.gateway.http.context import Gateway
from baton.gateway.http.overview import Overview

EVERY_S: Final = 1.0
"""Between two looks for something new."""
ALIVE_S: Final = 15.0
"""A stream without news gets a comment so often: who has gone is noticed, and proxies keep it."""
MAX_STREAMS: Final = 32
"""Pages that may listen at a time."""
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def ui_routes(gateway: Gateway) -> list[Route]:
    seen = Overview(gateway)
    listening: set[_Events] = set()

    async def overview(_: Request) -> Response:
        return Response(seen.timed(await seen.latest()), media_type="application/json")

    async def events(_: Request) -> Response:
        if len(listening) >= MAX_STREAMS:
            raise Overloaded(
                f"{MAX_STREAMS} pages listen to this server already; close some",
                code="too_many_listeners",
                retry_after_s=30,
            )
        return _Events(gateway, seen, listening)

    async def page(_: Request) -> Response:
        body, policy = _page()
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
        return Response(body, headers=headers, media_type="text/html")

    return [Route("/ui", page), Route("/ui/events", events), Route("/debug/overview", overview)]


class _Events(Response):
    """Server-sent events: each is an overview.  Ends when the client goes, or the server will stop."""

    def __init__(self, gateway: Gateway, seen: Overview, listening: set[_Events]) -> None:
        self.background = None
        self._gateway, self._seen, self._listening = gateway, seen, listening

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._listening.add(self)
        gone = asyncio.create_task(_until_gone(receive), name="listener")
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            last, silent = b"", 0.0
            while not gone.done() and not self._gateway.leaving:
                body = await self._seen.latest()
                if body != last:
                    await _write(send, b"data: %b\n\n" % self._seen.timed(body))
                    last, silent = body, 0.0
                elif silent >= ALIVE_S:
                    await _write(send, b": alive\n\n")
                    silent = 0.0
                silent += EVERY_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(gone), EVERY_S)
            if not gone.done():
                await send({"type": "http.response.body", "body": b"event: end\ndata: {}\n\n"})
        finally:
            self._listening.discard(self)
            gone.cancel()


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@cache
def _page() -> tuple[bytes, str]:
    """(the page, its policy): put together when it is first asked for."""
    pages = files("baton.gateway").joinpath("pages")
    script = b"".join(pages.joinpath(f"ui-{part}.js").read_bytes() for part in ("draw", "live"))
    body = pages.joinpath("ui.html").read_bytes().replace(b"/* script */", script)
    body = body.replace(b"/* style */", pages.joinpath("ui.css").read_bytes())
    hashes: dict[bytes, str] = {}
    for kind, text in _INLINE.findall(body):
        hashes[kind] = f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
    return body, (
        f"default-src 'none'; script-src {hashes[b'script']}; style-src {hashes[b'style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
