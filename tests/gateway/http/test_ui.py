"""`/ui`: what the page may load, who may see what, and the events that it draws."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from baton.gateway.access import Access
from baton.gateway.api.states import Overview
from baton.gateway.http.routes.ui import MAX_STREAMS
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

PROMPT = {"prompt": "hello", "stream": True, "max_tokens": 4}


@pytest.fixture
def locked(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    with GatewayServer(byte_level, eos=END, vocab=vocab, access=Access(("user",), ("admin",))) as server:
        yield server


def overviews(lines: Iterator[str]) -> Iterator[Overview]:
    """Of a stream of events."""
    for line in lines:
        if line.startswith('data: {"now"'):
            yield msgspec.json.decode(line.removeprefix("data: "), type=Overview)


def test_the_page_runs_its_own_script_and_style_alone(locked: GatewayServer) -> None:
    with locked.http() as http:
        page = http.get("/ui")
    assert page.status_code == 200, "a browser that opens an address sends no key"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert not re.findall(r"""\b(?:src|@import|url)\s*[=(]|\son[a-z]+=|\sstyle=|eval\(""", page.text)
    assert set(re.findall(r"https?://\S+?(?=\")", page.text)) == {"http://www.w3.org/2000/svg"}
    for path in ("/ui/events", "/debug/ledger", "/v1/chat/completions", "/cluster/instances/"):
        assert path in page.text


@pytest.mark.parametrize("path", ["/ui/events", "/debug/overview"])
def test_what_it_shows_is_for_operators(locked: GatewayServer, path: str) -> None:
    with locked.http() as http:
        assert http.get(path).status_code == 401
        assert http.get(path, headers={"authorization": "Bearer user"}).status_code == 403
        with http.stream("GET", path, headers={"authorization": "Bearer admin"}) as answer:
            assert answer.status_code == 200


def test_events_tell_what_changes(server: GatewayServer) -> None:
    """First how it stands; then a request that comes, and that it has gone."""
    server.engine.behaviour.mute = True
    with server.http() as http, server.http() as other, http.stream("GET", "/ui/events") as events:
        seen = overviews(events.iter_lines())
        first = next(seen)
        assert [one["name"] for one in first.instances] == ["instance-0"]
        assert first.state == "ready"
        ThreadPoolExecutor(1).submit(
            other.post, "/v1/completions", json=PROMPT, headers={"x-request-id": "it"}
        )
        listed = next(now for now in seen if now.open)
        (row,) = [row for row in listed.requests if row[0] == "it"]
        assert row[2] > 0
        assert row[3] == 0
        assert row[4:] == ("prefill", "instance-0")
        assert listed.now >= row[1]
        server.call(_abort(server))
        assert next(now for now in seen if not now.open).requests == []


async def _abort(server: GatewayServer) -> None:
    for generation in server.app.state.gateway.generator.open:
        generation.abort()


def test_totals_have_tokens_that_nobody_has_read(server: GatewayServer) -> None:
    with server.http() as http:
        before = msgspec.json.decode(http.get("/debug/overview").content, type=Overview).totals
        http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
        with http.stream("GET", "/ui/events") as events:  # (a snapshot is kept for a moment)
            for now in overviews(events.iter_lines()):
                if now.totals.ended > before.ended:
                    break
        assert now.totals.generated_tokens == before.generated_tokens + 3


def test_a_stream_ends_when_the_server_will_stop(server: GatewayServer) -> None:
    gateway = server.app.state.gateway
    with server.http() as http, http.stream("GET", "/ui/events") as events:
        lines = events.iter_lines()
        next(overviews(lines))
        gateway.leaving = True
        try:
            rest = [line for line in lines if line]
        finally:
            gateway.leaving = False
    assert rest[-2:] == ["event: end", "data: {}"]


def test_listeners_are_bounded_and_leave_no_trace(server: GatewayServer) -> None:
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=server.url, timeout=60, limits=limits) as http:
        open_streams = [http.stream("GET", "/ui/events") for _ in range(MAX_STREAMS)]
        for stream in open_streams:
            assert stream.__enter__().status_code == 200
        refused = http.get("/ui/events")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_listeners"
        for stream in open_streams:
            stream.__exit__(None, None, None)
        while True:  # the server hears of it in its own time
            with http.stream("GET", "/ui/events") as again:
                if again.status_code == 200:
                    break
