"""A schema that a body has is kept, wherever it stands, or refused: none is left out in silence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from baton.gateway.api.schemas import ChatRequest, CompletionRequest
from baton.gateway.errors import BadRequest
from baton.gateway.reading.constraints.structured import Asked, asked_by
from baton.gateway.responses.schemas import TextFormat
from baton.gateway.responses.translation import _format
from baton.grammar.checking import Checker
from baton.grammar.description import GrammarError
from baton.grammar.vocabulary import matching_tokenizer

BYTES = matching_tokenizer([bytes([byte]) for byte in range(256)], {}, 256)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def takes(asked: Asked | None, text: str) -> bool:
    assert asked is not None
    matcher = LLMatcher(BYTES, Checker({}).check(asked.structure), log_level=0)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
    ],
)
def test_it_binds_the_answer(kind: Any, fields: dict[str, Any]) -> None:
    asked = asked_by(msgspec.convert(fields, kind))
    assert takes(asked, '{"a": 1}')
    assert not takes(asked, '{"b": 1}')
    assert not takes(asked, "{}")


def test_of_responses_and_messages_too() -> None:
    for type_ in ("json_object", "json_schema"):
        form = _format(TextFormat(type_, name="x", schema=SCHEMA))
        asked = asked_by(ChatRequest(response_format=form))
        assert takes(asked, '{"a": 1}')
        assert not takes(asked, "{}")


def test_json_object_is_an_object_whatever_its_schema_says() -> None:
    form = {"response_format": {"type": "json_object", "schema": {"type": ["string", "object"]}}}
    asked = asked_by(msgspec.convert(form, ChatRequest))
    assert takes(asked, "{}")
    assert not takes(asked, '"a"')


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "structured_outputs"),
    ],
)
def test_what_would_be_left_out_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest) as caught:
        asked_by(msgspec.convert(fields, ChatRequest))
    assert caught.value.param == named
    with pytest.raises(BadRequest, match="goes with type json_schema"):
        _format(TextFormat("text", schema=SCHEMA))


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**40, 10**400])
def test_integers_of_any_length_are_read(number: int) -> None:
    """What a bound so far away asks for is kept; a constant so far away is refused by its place."""
    side = "minimum" if number < 0 else "maximum"
    schema = {"properties": {"n": {"type": "integer", side: number}}, "required": ["n"], "type": "object"}
    for fields in ({"guided_json": schema}, {"response_format": {"type": "json_object", "schema": schema}}):
        asked = asked_by(msgspec.convert(fields, ChatRequest))
        assert takes(asked, '{"n": 7}')
        assert msgspec.msgpack.encode(asked)
    asked = asked_by(ChatRequest(guided_json={"items": {"const": number}}))
    with pytest.raises(GrammarError, match=r"^items\.const: the keyword const"):
        takes(asked, "[]")


def test_no_white_space_where_none_is_asked_for() -> None:
    fields = {
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": True}
    }
    asked = asked_by(msgspec.convert(fields, ChatRequest))
    assert takes(asked, '{"a":1}')
    assert not takes(asked, '{"a": 1}')


def test_what_is_too_deep_is_refused_also_beside_long_integers() -> None:
    value: list[Any] = []
    for _ in range(900):
        value = [value]
    with pytest.raises(BadRequest, match="deep"):
        asked_by(ChatRequest(messages=[], guided_json={"minimum": 10**30, "const": value}))
