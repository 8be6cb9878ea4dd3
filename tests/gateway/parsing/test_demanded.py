"""Whatever the grammar of demanded calls allows, the parser reads as calls that keep their schemas."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher

from baton.gateway.api.tools import read_tools
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import Formats, choose
from baton.gateway.parsing.formats import CALLS
from baton.gateway.parsing.parser import parse
from baton.gateway.parsing.plan import Parsing
from baton.gateway.reading.constraints.calling import structure_of
from baton.gateway.reading.constraints.functions import functions_of, loosened
from baton.grammar.checking import Checker
from baton.grammar.description import Json, Structure
from baton.grammar.vocabulary import matching_tokenizer
from tests.gateway.parsing.fixtures import meaning

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "city": {"type": "string"},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["unit", "where"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "time": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
LOOSE = [{"type": "function", "function": {"name": name}} for name in SCHEMAS]
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMATS = [name for name in CALLS if name != "openai"]


def special_of(formats: Formats, special: bool) -> dict[str, int]:
    names = sorted(formats.markers) if special or formats.is_harmony else []
    return {name: 256 + i for i, name in enumerate(names)}


def write(
    structure: Structure | None, special: dict[str, int], rng: random.Random, most: int = 1500
) -> str | None:
    """What a model of random choices writes; None: it did not come to an end."""
    assert structure is not None
    grammar, end = Checker(special).check(structure), 256 + len(special)
    tokenizer = matching_tokenizer([bytes([byte]) for byte in range(256)], special, end)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    names = {token: name.encode() for name, token in special.items()}
    text = b""
    for _ in range(most):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: end + 1]).tolist()
        assert allowed, (matcher.get_error(), text)
        if end in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return text.decode()
        closing = [
            token for token in allowed if 256 <= token < end or (token < 256 and chr(token) in _CLOSING)
        ]
        plain = [token for token in allowed if 32 <= token < 127] or [one for one in allowed if one < end]
        token = rng.choice(closing if closing and rng.random() < 0.6 else plain)
        assert matcher.consume_token(token), matcher.get_error()
        text += names.get(token) or bytes([token])
    return None


_CLOSING = '"}]<|,)'


def structure(
    formats: Formats,
    choice: Any,
    thinking: bool = False,
    parallel: bool = True,
) -> Structure:
    tools = read_tools(TOOLS, choice)
    found = structure_of(formats, tools, functions_of(tools), parallel=parallel, thinking=thinking)
    assert found is not None
    return found


def calls_in(formats: Formats, text: str, thinking: bool = False) -> tuple[str, str, list[Any]]:
    parsing = Parsing(formats=formats, thinking=thinking, calling=True, tools=list(SCHEMAS), types=TYPES)
    content, reasoning, calls = meaning(parse(parsing.parser(), text))
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments, _ in calls]


TYPES = read_tools(TOOLS).types


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [*FORMATS, "openai"])
def test_demanded_calls_are_calls(name: str, special: bool) -> None:
    rng = random.Random(name)
    formats = choose("", name, "none" if name != "openai" else "openai_gptoss")
    marks = special_of(formats, special)
    ended = 0
    for number in range(12):
        choice = NAMED if number % 3 == 0 else "required"
        text = write(structure(formats, choice), marks, rng)
        if text is None:
            continue
        ended += 1
        content, _, calls = calls_in(formats, text)
        assert not content.strip(), text
        assert calls, text
        assert {called for called, _ in calls} <= ({"weather"} if choice is NAMED else set(SCHEMAS))
        for called, arguments in calls:
            jsonschema_rs.validate(SCHEMAS[called], arguments)
    assert ended >= 3


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v31", "mistral", "mistral_v11"])
def test_strict_tools_bind_what_is_called_freely(name: str) -> None:
    """Text is free; where a call begins, it is one, whole."""
    rng = random.Random(5)
    formats = choose("", name, "none")
    found = structure(formats, "auto")
    special = special_of(formats, True)
    calling = 0
    for _ in range(20):
        text = write(found, special, rng)
        if text is None:
            continue
        _, _, calls = calls_in(formats, text)
        calling += bool(calls)
        for called, arguments in calls:
            jsonschema_rs.validate(SCHEMAS[called], arguments)
        assert formats.calling is not None
        opened = sum(text.count(frame.open[0]) for frame in formats.calling.frames)
        assert bool(opened) == bool(calls), text
    assert calling


@pytest.mark.parametrize("thinking", [False, True])
def test_thoughts_before_what_is_bound_are_free(thinking: bool) -> None:
    rng = random.Random(3)
    formats = choose("", "hermes", "qwen3")
    special = special_of(formats, True)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    thought = 0
    for _ in range(12):
        text = write(structure(formats, "required", thinking), special, rng)
        if text is not None:
            _, reasoning, calls = calls_in(formats, text, thinking)
            thought += bool(reasoning)
            assert calls
        bound = structure_of(
            formats, read_tools(None), [], parallel=True, thinking=thinking, content=Json(schema)
        )
        text = write(bound, special, rng)
        if text is not None:
            content, _, _ = calls_in(formats, text, thinking)
            jsonschema_rs.validate(schema, json.loads(content))
    assert thought


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_of_thoughts(budget: int, special: bool) -> None:
    """The region is closed after so many tokens, and the rest is free, or bound."""
    rng = random.Random(4)
    thought = 0
    for name, think, thinking in (
        ("hermes", "qwen3", True),
        ("hermes", "qwen3", False),
        ("openai",) * 2 + (False,),
    ):
        formats = choose("", name, "openai_gptoss" if think == "openai" else think)
        marks = special_of(formats, special)
        for choice in ("auto", "required"):
            tools = read_tools(LOOSE, choice)
            found = structure_of(
                formats, tools, functions_of(tools), parallel=False, thinking=thinking, budget=budget
            )
            for _ in range(4):
                text = write(found, marks, rng, 400)
                if text is None:
                    continue
                _, reasoning, _ = calls_in(formats, text, thinking)
                thought += bool(reasoning)
                assert len(reasoning) <= budget, text
    assert bool(thought) is bool(budget)


def test_one_call_where_no_more_are_wanted() -> None:
    rng = random.Random(2)
    formats = choose("", "hermes", "none")
    found = structure(formats, "required", parallel=False)
    for _ in range(8):
        text = write(found, special_of(formats, True), rng)
        assert text is None or len(calls_in(formats, text)[2]) == 1


def test_what_a_format_cannot_keep() -> None:
    formats = choose("", "qwen3_coder", "none")
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$"}}}
    for strict in (True, False):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        tools = read_tools([tool], "required")
        with pytest.raises(BadRequest, match="'pattern' of the parameter 'a' of 'f' cannot be kept"):
            structure_of(formats, tools, functions_of(tools), parallel=True, thinking=False)
        assert (loosened(functions_of(tools), tools) == functions_of(tools)) is strict


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("thoughts", [0, 1, 7, 8, 9, 12, 13, 30])
def test_thoughts_of_a_budget_end_earlier_too(special: bool, thoughts: int) -> None:
    """Where the model ends them, and where it does not, after so many tokens."""
    formats, budget = choose("", "hermes", "deepseek_r1"), 12
    marks = special_of(formats, special)
    tools = read_tools(TOOLS, NAMED)
    bound = structure_of(formats, tools, functions_of(tools), parallel=True, thinking=True, budget=budget)
    assert bound is not None
    grammar, end = Checker(marks).check(bound), 256 + len(marks)
    matcher = LLMatcher(
        matching_tokenizer([bytes([byte]) for byte in range(256)], marks, end), grammar, log_level=0
    )
    ends = [marks["</think>"]] if special else list(b"</think>")
    for number in range(thoughts):
        assert matcher.consume_token(ord("a")) == (number < budget)
        if number == budget:
            return
    call = list(b'{"name": "weather", "arguments": {"unit": "C", ')
    opening = [marks["<tool_call>"]] if special else list(b"<tool_call>")
    begun = min(budget - thoughts, len(ends)) if thoughts + len(ends) > budget and not special else 0
    # (What is begun of the end when the budget is spent was a thought.)
    for token in [*ends[:begun], *ends, *opening, *b"\n", *call]:
        assert matcher.consume_token(token), (token, matcher.get_error())
    assert not matcher.get_error()


@pytest.mark.parametrize("special", [False, True])
def test_thoughts_end_where_the_model_ends_them(special: bool) -> None:
    """Also where their end is a text of several tokens."""
    formats = choose("", "hermes", "deepseek_r1")
    marks = special_of(formats, special)
    grammar, end = Checker(marks).check(structure(formats, NAMED, thinking=True)), 256 + len(marks)
    tokenizer = matching_tokenizer([bytes([byte]) for byte in range(256)], marks, end)
    for thoughts in ("", "a < b, </thin and </think", "</</think"):
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        text = f'{thoughts}</think>\n<tool_call>\n{{"name": "weather", "arguments": {{"unit": "C", '
        for part in re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]:
            for token in [marks[part]] if part in marks else part.encode():
                assert matcher.consume_token(token), (text, matcher.get_error())
        assert not matcher.get_error()


KEYS = ("$filter", "a:b", "x/y", "@type", "é", "R&D", "a b", "", 'q"u', "a'b", "a<b", "</x>", "a=b", "a\nb")


@pytest.mark.parametrize("name", [*FORMATS, "openai"])
def test_names_that_a_format_cannot_hold_are_refused(name: str) -> None:
    """All others are read as they were demanded."""
    kept = 0
    formats = choose("", name, "none" if name != "openai" else "openai_gptoss")
    for tool, key in [*(("f", key) for key in KEYS), ("ns:a/b", "x"), ("2do", "x")]:
        schema = {
            "type": "object",
            "properties": {key: {"type": "boolean"}},
            "required": [key],
            "additionalProperties": False,
        }
        function = {"name": tool, "parameters": schema, "strict": True}
        tools = read_tools([{"type": "function", "function": function}], "required")
        try:
            made = structure_of(formats, tools, functions_of(tools), parallel=False, thinking=False)
        except BadRequest as error:
            assert repr(key) in str(error), error  # noqa: PT017
            continue
        texts = (write(made, special_of(formats, False), random.Random(seed)) for seed in range(9))
        text = next(text for text in texts if text is not None)
        parsing = Parsing(
            formats=formats, thinking=False, calling=True, tools=list(tools.names), types=tools.types
        )
        _, _, calls = meaning(parse(parsing.parser(), text))
        assert [called for called, _, _ in calls] == [tool], text
        jsonschema_rs.validate(schema, json.loads(calls[0][1]))
        kept += 1
    assert kept >= 8
