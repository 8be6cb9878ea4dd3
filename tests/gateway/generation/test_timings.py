"""`timings` of answers, and `Server-Timing`: who asks gets them, in each API, and they add up."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton.gateway.anthropic import answers as anthropic
from baton.gateway.api import answers
from baton.gateway.responses import answers as responses
from tests.gateway.harness import GatewayServer
from tests.observe.timings import check_timings

USER = [{"role": "user", "content": "the cat"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the cat", "max_tokens": 4},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
}
SHAPES: dict[str, Any] = {
    "/v1/completions": (answers.Completion, answers.CompletionChunk),
    "/v1/chat/completions": (answers.ChatCompletion, answers.ChatCompletionChunk),
    "/v1/responses": (responses.ResponseObject, responses.ResponseEvent),
    "/v1/messages": (anthropic.MessageAnswer, anthropic.MessageEvent),
}


def events(text: str) -> list[Any]:
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_says_where_its_time_went(server: GatewayServer, path: str) -> None:
    with server.http() as http:
        asked = http.post(path, json={**BODIES[path], "timings": True}).raise_for_status()
        plain = http.post(path, json={**BODIES[path], "timings": False}).raise_for_status()
    body = asked.json()
    check_timings(body["timings"])
    header = dict(one.split(";dur=") for one in asked.headers["server-timing"].split(", "))
    told = {name.removesuffix("_ms"): value for name, value in body["timings"].items()}
    assert {name: float(value) for name, value in header.items()} == {name: told[name] for name in header}
    assert "timings" not in plain.json()
    # (This server keeps no events.)
    assert "server-timing" not in plain.headers
    msgspec.json.decode(asked.content, type=SHAPES[path][0])


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_it_at_its_end(server: GatewayServer, path: str, usage: bool) -> None:
    body = {**BODIES[path], "stream": True, "timings": True}
    if usage and path.endswith("completions"):
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with server.http() as http:
        answer = http.post(path, json=body).raise_for_status()
        plain = http.post(path, json={**body, "timings": None}).raise_for_status()
    found = events(answer.text)
    for event in found:
        msgspec.json.decode(json.dumps(event).encode(), type=SHAPES[path][1])
    if path == "/v1/responses":
        found = [event.get("response", {}) for event in found]
    if path == "/v1/messages":
        assert found.pop()["type"] == "message_stop"
    *before, last = found
    check_timings(last["timings"])
    assert not any("timings" in event for event in before)
    if path.endswith("completions"):
        assert last["choices"] == []
        assert ("usage" in last) == usage
    assert '"timings"' not in plain.text


def test_all_sequences_of_a_stream_end_before_it(server: GatewayServer) -> None:
    body = {"prompt": ["the cat", "a"], "n": 2, "max_tokens": 3, "stream": True, "timings": True}
    with server.http() as http:
        found = events(http.post("/v1/completions", json=body).raise_for_status().text)
    *before, last = found
    check_timings(last["timings"])
    assert sum(event["choices"][0]["finish_reason"] == "length" for event in before) == 4
    assert not any("timings" in event for event in before)
