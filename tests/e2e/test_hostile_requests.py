"""What careless and hostile agents send (`benchmarks/_attacks/hostile.py`): an error that names the field, or
plain content; and the server goes on as if nothing had been."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from benchmarks._attacks.hostile import CHAT, EITHER, HOSTILE, TEMPLATE, Hostile, thrash

from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with a template that shows tools."""
    directory = tmp_path_factory.mktemp("hostile")
    for file in resolve_model(None).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with Server(model=str(directory)) as server:
        yield server


def ask(server: Server, request: Hostile) -> None:
    answer = server.http.post(
        request.path, content=request.body(), headers={"content-type": "application/json"}
    )
    said = f"{request.body()[:300]!r}: {answer.status_code} {answer.text[:500]}"
    assert answer.status_code in ((200, 400) if request.status == EITHER else (request.status,)), said
    body = answer.json()
    if answer.status_code == 200:
        (choice,) = body["choices"]
        assert choice["finish_reason"] in ("stop", "length", "tool_calls"), said
        for call in choice["message"].get("tool_calls") or ():
            assert call["function"]["name"] == "f1", said
    else:
        error = body["error"]
        assert error["type"] == "invalid_request_error", said
        assert request.says in error["message"], said
        assert len(error["message"]) < 700, said


def quiet(server: Server) -> str:
    """What somebody else is answered."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    answer = server.http.post(CHAT, json=body)
    assert answer.status_code == 200
    return json.dumps(answer.json()["choices"])


def check_log(server: Server) -> None:
    """(A busy machine may be warned of.)"""
    assert server.process.poll() is None
    assert [line for line in server.log().splitlines() if " ERROR " in line or "Traceback" in line] == []


@pytest.mark.parametrize("name", HOSTILE)
def test_each_is_an_error_that_names_the_field_or_plain_content(server: Server, name: str) -> None:
    before = quiet(server)
    for request in HOSTILE[name]:
        ask(server, request)
    assert quiet(server) == before
    check_log(server)


def test_schemas_that_are_new_each_time(server: Server) -> None:
    """More of them than a worker keeps compiled."""
    before = quiet(server)
    for request in itertools.islice(thrash(), 70):
        ask(server, request)
    assert quiet(server) == before
    check_log(server)


def test_a_grammar_that_a_worker_cannot_follow_is_its_senders_error(server: Server) -> None:
    """Its check tries a few steps only: what fails later ends this request, also amid a stream."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}}
    options = [{**wide, "required": [f"p{i % 20}"]} for i in range(90)]
    schema = {"prefixItems": [{"type": "boolean"}] * 4 + [{"anyOf": options}], "minItems": 5, "type": "array"}
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 300,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    answer = server.http.post(CHAT, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert error["message"].startswith("response_format.json_schema.schema: the grammar cannot be followed")
    assert "2000" in error["message"]
    last = [line for line in server.http.post(CHAT, json=body | {"stream": True}).text.splitlines() if line]
    assert any('"invalid_request_error"' in line for line in last[-2:]), last[-3:]
    form = {"type": "json_schema", "name": "n", "schema": schema}
    theirs = {
        "/v1/responses": ({"input": "hello", "text": {"format": form}}, "text.format.schema"),
        "/v1/messages": (
            {"messages": body["messages"], "max_tokens": 300, "output_config": {"format": form}},
            "output_config.format.schema",
        ),
        "/v1/completions": ({"prompt": "hello", "max_tokens": 300, "guided_json": schema}, "guided_json"),
    }
    for path, (request, field) in theirs.items():
        answer = server.http.post(path, json=request | {"temperature": 0})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(f"{field}: the grammar cannot"), answer.text
    check_log(server)
