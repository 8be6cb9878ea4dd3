"""Where the time of requests went: /debug/requests and /debug/timeline."""

from __future__ import annotations

import asyncio
from time import monotonic as now
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.errors import BadRequest, NotFound
from baton.gateway.generation.ending import tell
from baton.gateway.http.context import Gateway
from baton.gateway.rendering.formats import encode
from baton.observe.events.perfetto import Load, chrome_trace
from baton.observe.events.steps import StepLog
from baton.observe.events.story import Story
from baton.observe.events.views import summary, whole

_KINDS = ("recent", "slow", "failed", "running")
_MAX_LISTED = 1000
_LAST_S = 10.0
_MAX_LAST_S = 86_400.0
_ALIGN_S = 1.0
"""Instances get so long to say what their clocks show, before this is answered without."""


def event_routes(gateway: Gateway) -> list[Route]:
    client, generator = gateway.client, gateway.generator

    async def requests(request: Request) -> Response:
        """Lists requests, or tells all of one (`id`)."""
        given = request.query_params
        limit = _number(given.get("limit"), "limit", 100, _MAX_LISTED, whole=True)
        if "id" in given:
            story = await asked(given["id"])
            return _json({"keep": generator.events.keep, "kind": "id", "requests": [whole(story, now())]})
        kind = next((name for name in _KINDS if name in given), "recent")
        stories = _running() + generator.events.recent() if kind == "recent" else _of(kind)
        rows = [summary(story, now()) for story in stories[: int(limit)]]
        return _json({"keep": generator.events.keep, "kind": kind, "requests": rows})

    async def timeline(request: Request) -> Response:
        """A trace for Perfetto: of one request (`id`), or of the last seconds (`last_s`)."""
        given = request.query_params
        last_s = _number(given.get("last_s"), "last_s", _LAST_S, _MAX_LAST_S)
        if "id" in given:
            stories = [await asked(given["id"])]
            begin, end = stories[0].arrived, stories[0].ended or now()
        else:
            await client.query_each("stats", _ALIGN_S, "steps")
            end = now()
            begin = end - last_s
            ended = [story for story in generator.events.recent() if (story.ended or end) >= begin]
            stories = _running() + ended
        loads, logs = _loads(begin, end), _steps()

        def made() -> bytes:
            steps = {name: log.between(begin, end) for name, log in logs.items()}
            return encode(chrome_trace(stories, now(), loads, steps))

        # (Not on the loop: it takes a tenth of a second for a thousand requests.)
        trace = await asyncio.to_thread(made)
        return Response(trace, media_type="application/json")

    async def asked(id: str) -> Story:
        """The story of one request.  Raises `NotFound`."""
        story = next((story for story in _running() if story.id == id), None) or generator.events.find(id)
        if story is None:
            keep = generator.events.keep
            raise NotFound(
                f"id: no request {id[:200]!r} is known; this gateway keeps the last {keep} (--events-keep)",
                param="id",
                code="request_not_found",
            )
        await client.query_each("stats", _ALIGN_S, "steps")
        return story

    def _running() -> list[Story]:
        found = []
        for generation in generator.open:
            if generation.story is not None:
                tell(generation, generation.story)
                found.append(generation.story)
        return sorted(found, key=lambda story: -story.arrived)

    def _of(kind: str) -> list[Story]:
        if kind == "running":
            return _running()
        return generator.events.slow() if kind == "slow" else generator.events.failed()

    def _loads(begin: float, end: float) -> dict[str, list[Load]]:
        found = {}
        for name, member in client.cluster.members.items():
            blocks = member.welcome.num_blocks if member.welcome is not None else 0
            found[name] = [
                Load(at, running, waiting, max(blocks - free, 0))
                for at, running, waiting, free in member.loads
                if begin <= at <= end
            ]
        return found

    def _steps() -> dict[str, StepLog]:
        if not generator.events.keep:
            return {}
        return {name: member.steps.copy() for name, member in client.cluster.members.items()}

    return [Route("/debug/requests", requests), Route("/debug/timeline", timeline)]


def _number(text: str | None, name: str, default: float, most: float, *, whole: bool = False) -> float:
    """Raises `BadRequest`."""
    if text is None:
        return default
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise BadRequest(f"{name}: {text[:50]!r} must be more than 0 and at most {most:g}", param=name)
    return value


def _json(body: dict[str, Any]) -> Response:
    return Response(encode(body), media_type="application/json")
