"""What binds the answers is described where the body is read: the loop gets few bytes, and no schema."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.gateway.api.tools import MAX_TOOLS
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import Formats
from baton.gateway.reading.constraints.structured import Asked
from baton.gateway.reading.jobs import Job, with_more
from baton.gateway.reading.reader import Found, Reader, decode_answer
from baton.gateway.reading.settings import Settings
from baton.grammar.description import Json
from baton.grammar.limits import MAX_DESCRIPTION_BYTES

MESSAGES = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{{ tools | length if tools else 0 }}{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def reader() -> Reader:
    formats = Formats(calls="hermes")
    return Reader(Settings(max_model_len=10_000, vocab_size=1000, template=TEMPLATE, formats=formats))


def schema_of(size: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"description": "d" * 900} for i in range(size // 920)}}


def bodies(schema: Any) -> list[tuple[Job, dict[str, Any]]]:
    """It, asked for in each API."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    named = {"type": "json_schema", "name": "n", "schema": schema}
    return [
        ("chat", {"messages": MESSAGES, "response_format": form}),
        ("chat", {"messages": MESSAGES, "guided_json": schema}),
        ("completion", {"prompt": [1], "structured_outputs": {"json": schema}}),
        ("responses", {"input": "hello", "text": {"format": named}}),
        ("messages", {"messages": MESSAGES, "output_config": {"format": named}, "max_tokens": 4}),
    ]


def answer(reader: Reader, job: Job, body: dict[str, Any]) -> bytes:
    data = msgspec.json.encode(body)
    return reader.answer(job, b"".join(with_more(b"", [data])) if job == "responses" else data)


def read(reader: Reader, job: Job, body: dict[str, Any]) -> tuple[bytes, Found]:
    data = answer(reader, job, body)
    return data, decode_answer(job, data)[1]


def tool(number: int, **more: Any) -> dict[str, Any]:
    properties = {"a": {"type": "string", "description": "d" * 100}}
    parameters = {"type": "object", "properties": properties}
    function = {"name": f"f{number}", "description": "d" * 300, "parameters": parameters, **more}
    return {"type": "function", "function": function}


@pytest.mark.parametrize("number", range(5))
def test_a_schema_of_megabytes_comes_back_as_one_line(reader: Reader, number: int) -> None:
    job, body = bodies(schema_of(3 << 20))[number]
    data, found = read(reader, job, body)
    assert len(data) < 2000
    (binding,) = found.bindings
    assert binding.asked == b""
    assert binding.failure is not None
    with pytest.raises(BadRequest, match=f"at most {MAX_DESCRIPTION_BYTES} are possible"):
        raise binding.failure.error()


@pytest.mark.parametrize("number", range(4))
def test_what_is_described_comes_back_once_as_bytes(reader: Reader, number: int) -> None:
    schema = schema_of(100 << 10)
    job, body = bodies(schema)[number]
    data, found = read(reader, job, body)
    (binding,) = found.bindings
    asked = msgspec.msgpack.decode(binding.asked, type=Asked)
    assert asked.structure.content == Json(schema)
    # (An answer of /v1/responses repeats what was asked.)
    assert len(data) < (2 if job == "responses" else 1) * len(msgspec.json.encode(schema)) + 2000


def test_tools_come_back_as_names_types_and_a_description(reader: Reader) -> None:
    tools = [tool(i, strict=True) for i in range(MAX_TOOLS)]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    data, found = read(reader, "chat", body)
    assert found.tools.schemas == b"{}"
    assert len(found.tools.names) == MAX_TOOLS
    assert len(found.bindings[0].asked) <= MAX_DESCRIPTION_BYTES
    assert len(data) - len(found.bindings[0].asked) < 60 * MAX_TOOLS


def test_a_schema_that_need_not_be_kept_is_tried_first_and_left_out_then(reader: Reader) -> None:
    huge = {"type": "object", "properties": {"a": {"enum": ["x" * 300_000]}}}
    body = {"messages": MESSAGES, "tools": [tool(1, parameters=huge), tool(2)], "tool_choice": "required"}
    first, second = read(reader, "chat", body)[1].bindings
    assert first.failure is not None
    assert second.failure is None
    assert b"xxx" not in second.asked
    assert b'name": "f1"' in second.asked
    strict = {**body, "tools": [tool(1, parameters=huge, strict=True)]}
    (only,) = read(reader, "chat", strict)[1].bindings
    assert only.failure is not None
    assert only.failure.param == "tools"


def test_free_answers_have_no_binding(reader: Reader) -> None:
    assert read(reader, "chat", {"messages": MESSAGES})[1].bindings == []
    assert read(reader, "chat", {"messages": MESSAGES, "tools": [tool(1)]})[1].bindings == []
    assert read(reader, "completion", {"prompt": [1], "response_format": {"type": "text"}})[1].bindings == []
    assert read(reader, "count_tokens", {"messages": MESSAGES})[1].bindings == []


def test_a_budget_that_this_model_cannot_keep(reader: Reader) -> None:
    """Anthropic's clients always give one."""
    body = {"messages": MESSAGES, "thinking_token_budget": 5}
    (binding,) = read(reader, "chat", body)[1].bindings
    assert binding.failure is not None
    assert binding.failure.param == "thinking_token_budget"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": MESSAGES, "thinking": thinking, "max_tokens": 2000}
    assert read(reader, "messages", body)[1].bindings == []


def test_schemas_of_any_depth_are_described_or_refused(reader: Reader) -> None:
    """Never an exception, which would end the helper."""
    for depth in [*range(1, 60), *range(60, 1100, 7), *range(900, 1000)]:
        schema = b'{"items":' * depth + b"{}" + b"}" * depth
        for before, job in ((b'{"prompt":[1],"guided_json":', "completion"), (b'{"prompt":"a",', "chat")):
            if job == "chat":
                before = b'{"messages":[{"role":"user","content":"a"}],"structured_outputs":{"json":'
            data = reader.answer(job, before + schema + b"}" * (2 if job == "chat" else 1))
            try:
                (binding,) = decode_answer(job, data)[1].bindings
            except BadRequest:
                continue
            assert (binding.failure is None) == bool(binding.asked)


@pytest.mark.parametrize("strict", [True, None])
def test_arguments_are_an_object(reader: Reader, strict: bool | None) -> None:
    """Another type would make a call of what nobody can read as one."""
    for kind in ("string", ["object", "null"], 5):
        body = {"messages": MESSAGES, "tools": [tool(1, parameters={"type": kind}, strict=strict)]}
        _, found = read(reader, "chat", body)
        with pytest.raises(BadRequest, match=r"tools\[0\]\.function\.parameters\.type: .* must be 'object'"):
            found.check()
    body = {"messages": MESSAGES, "tool_choice": "required"}
    untyped = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for schema, bound in ((untyped, {"type": "object", **untyped}), ({"$ref": "#"}, {"$ref": "#"})):
        _, found = read(reader, "chat", body | {"tools": [tool(1, parameters=schema, strict=strict)]})
        assert msgspec.msgpack.encode(bound) in found.bindings[0].asked
