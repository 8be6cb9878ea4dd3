"""A checkpoint's `response_template` is run as transformers runs it, however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.api.tools import read_tools
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import choose
from baton.gateway.parsing.deltas import Call, Content, Delta, Parsed, Reasoning
from baton.gateway.parsing.plan import AnswerParser, Parsing
from baton.gateway.parsing.templates.template import TemplateError, load
from baton.gateway.reading.constraints.calling import structure_of
from baton.gateway.reading.constraints.functions import functions_of
from baton.gateway.reading.constraints.template_calls import written
from tests.gateway.parsing.fixtures import TYPES
from tests.gateway.parsing.test_oracle import TOOLS, template_of

LINES: dict[str, Any] = {
    "start_anchor_pattern": r"A:\s?",
    "fields": {
        "thinking": {"open": ["(", "(("], "close": ")", "repeats": True, "join": "; "},
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+)\n",
            "close_pattern": r"\nEND(?:ED)?",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
        "content": {"close": "<stop>"},
    },
}
LISTED: dict[str, Any] = {
    "start_anchor": "A:",
    "fields": {
        "tool_calls": {
            "open": "[CALLS]",
            "content": "json",
            "transform": {"function": {"name": "{tool}", "arguments": "{args.values}"}},
            "transform_each": True,
        },
        "content": {},
    },
}
VALUES = {"city": "Paris", "days": 3, "unit": {"of": ["C", None]}, "exact": True}
JSON = json.dumps(VALUES)
TAGS = "".join(
    f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in (("city", "Rome"), ("days", 4))
)
CASES: list[tuple[Any, list[str]]] = [
    (
        "qwen3",
        [
            "",
            "Hello <b>you</b>",
            "<think>\nshort\n</think>\n\nHello",
            f'Look:\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
            f'<think>a</think><tool_call>{{"name": "f", "arguments": {JSON}}}</tool_call>\n<tool_call>\n'
            '{"name": "g", "arguments": {}}\n</tool_call><|im_end|>',
        ],
    ),
    (
        "qwen3_5",
        [
            f"<tool_call>\n<function=weather>\n{TAGS}</function>\n</tool_call>",
            f"I call. <tool_call><function=weather>{TAGS}</function></tool_call>"
            "\n<tool_call>\n<function=time>\n</function>\n</tool_call><|im_end|>\n<|endoftext|>",
        ],
    ),
    (
        "gemma4",
        [
            "<|channel>thought\nhm<channel|>Hello",
            'First <|tool_call>call:weather{city:<|"|>Par"is<|"|>,days:3}<tool_call|><turn|>',
            f"<|tool_call>call:f{JSON}<tool_call|><|tool_call>call:g{{}}<tool_call|>",
        ],
    ),
    (LINES, ["(a) (b)Hi <stop>", "((c) well CALL f\na = 1\nb=two\nENDED", "CALL g\n\nEND"]),
    (
        LISTED,
        ['Hi [CALLS] [{"tool": "f", "args": {"values": {"a": 1}}}, {"tool": "g", "args": {"values": {}}}]'],
    ),
]
BROKEN = [
    "<tool_call>{]</tool_call> and <tool_call>[1]</tool_call>",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    f'<tool_call>{{"name": "f", "arguments": {JSON}',
    "</think></tool_call> text <think> no end",
    "<tool" + " " * 50 + "_call>" + "<" * 40,
    "<tool_call>" * 30 + "[" * 2000 + "</tool_call>",
]


def template(name: Any) -> dict[str, Any]:
    found = template_of(name) if isinstance(name, str) else name
    return {**found, "defaults": {}}


def parser_of(source: dict[str, Any], *, calling: bool = True, prefix: str = "") -> AnswerParser:
    formats = choose("{{ tools }}", "hf", "hf", response=json.dumps(source))
    thinking = formats.begins_thinking(prefix)
    return Parsing(formats=formats, thinking=thinking, calling=calling, types=TYPES, tools=[]).parser()


def read(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parsed = Parsed()
    for piece in pieces:
        parsed.add(parser.push(piece))
    parsed.add(parser.finish())
    calls = [(one.name, "".join(one.arguments)) for one in parsed.calls]
    return "".join(parsed.content), "".join(parsed.reasoning), calls


EVERY = [(source, text) for source, texts in CASES for text in texts]


@pytest.mark.parametrize(("source", "text"), EVERY)
def test_transformers_reads_the_same(source: Any, text: str) -> None:
    from transformers.utils.chat_parsing import parse_response

    theirs = parse_response(text, template(source), prefix="", tools=TOOLS)
    content, reasoning, calls = read(parser_of(template(source)), [text])
    assert content == theirs.get("content", "")
    assert reasoning == theirs.get("reasoning_content", theirs.get("thinking", ""))
    named = theirs.get("tool_calls") or []
    functions = [
        one.get("function", one) for one in (named[0] if named and isinstance(named[0], list) else named)
    ]
    assert [(name, json.loads(text)) for name, text in calls] == [
        (one["name"], one["arguments"]) for one in functions
    ]


_LETTERS = st.characters(codec="utf-8", exclude_characters="<>", exclude_categories=("Cs", "Cc"))
WORDS = st.text(_LETTERS, min_size=1)


@settings(max_examples=40)
@given(st.text(_LETTERS), st.text(_LETTERS), st.lists(st.dictionaries(WORDS, WORDS | st.integers())))
def test_what_is_put_together_is_taken_apart_as_transformers_does(
    thoughts: str, words: str, calls: list[dict[str, Any]]
) -> None:
    from transformers.utils.chat_parsing import parse_response

    text = f"<think>{thoughts}</think>{words}" + "".join(
        f"<tool_call>{json.dumps({'name': 'any', 'arguments': call})}</tool_call>" for call in calls
    )
    source = template("qwen3")
    theirs = parse_response(text, source, prefix="")
    content, reasoning, found = read(parser_of(source), [text])
    assert (content, reasoning) == (theirs.get("content", ""), theirs.get("reasoning_content", ""))
    assert [json.loads(arguments) for _, arguments in found] == calls


@pytest.mark.parametrize(
    ("source", "text"),
    [*EVERY, *[("qwen3", text) for text in BROKEN], *[(LINES, text) for text in BROKEN[:3]]],
)
def test_deltas_are_the_same_however_the_text_is_cut(source: Any, text: str) -> None:
    """Whole, every 2-cut, n-cuts by chance, character by character; truncated anywhere as well."""
    source, text = template(source), text[:200]
    chance = random.Random(len(text))
    for end in {len(text), *[chance.randrange(len(text) + 1) for _ in range(2)]}:
        told = text[:end]
        whole = read(parser_of(source), [told])
        cuts = [[told[:at], told[at:]] for at in range(len(told) + 1)] + [list(told)]
        for _ in range(10):
            places = sorted(chance.randrange(len(told) + 1) for _ in range(chance.randrange(2, 9)))
            cuts.append([told[a:b] for a, b in zip([0, *places], [*places, len(told)], strict=True)])
        for pieces in cuts:
            assert read(parser_of(source), pieces) == whole, pieces


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_call_is_text(text: str) -> None:
    content, reasoning, calls = read(parser_of(template("qwen3")), [text])
    assert calls == []
    for word in ("{]", "[1]", "name", "Paris"):
        assert (word in content + reasoning) is (word in text)


def test_unwanted_calls_are_text_and_names_come_once() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {JSON}}}</tool_call>'
    assert read(parser_of(template("qwen3"), calling=False), [text]) == (text, "", [])
    deltas: list[Delta] = parser_of(template("qwen3")).push(text)
    (call,) = deltas
    assert isinstance(call, Call)
    assert (call.index, call.name) == (0, "f")


def test_text_is_given_as_it_comes() -> None:
    parser = parser_of(template("qwen3"), prefix="<|im_start|>user\n<think><|im_start|>assistant\n<think>\n")
    assert parser.push("I th") == [Reasoning("I th")]
    assert parser.push("ink</thi") == [Reasoning("ink")]
    assert (parser.holds, parser.thinking) == (True, True)
    assert parser.push("nk> So") == [Content("So")]
    assert not parser.thinking


def test_a_template_is_chosen_where_no_format_of_ours_is_shown() -> None:
    gemma = choose("{{ tools }}<tool_call>", response=json.dumps(template_of("gemma4")))
    assert (gemma.calls, gemma.think) == ("hf", "hf")
    assert {"<|tool_call>", "<tool_call|>", "<channel|>", "<turn|>"} <= gemma.markers
    assert choose("{{ tools }}", response=json.dumps(template_of("qwen3"))).calls == "hermes"
    assert choose("", "none", "hf", response=json.dumps(LINES)).calls == ""


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"fields": {}}, "fields"),
        ({"fields": {"citations": {"open": "x"}}}, r"fields\.citations"),
        ({"fields": {"content": {"open": "a", "open_pattern": "b"}}}, "only one of 'open'"),
        ({"fields": {"content": {"open_pattern": "("}}}, "open_pattern"),
        ({"fields": {"content": {}, "thinking": {}}}, "only one may have no 'open'"),
        ({"fields": {"content": {"content": "json"}}}, "streamed"),
        ({"fields": {"content": {"colour": 1}}}, "colour"),
        ({"version": 2}, "version"),
        ({"start_anchor_pattern": None}, "start_anchor"),
    ],
)
def test_a_wrong_template_is_refused_by_name(change: dict[str, Any], error: str) -> None:
    with pytest.raises(TemplateError, match=error):
        load(json.dumps({**LINES, **change}))
    with pytest.raises(TemplateError, match="response_template"):
        choose("", "hf")
    with pytest.raises(TemplateError, match="go together"):
        choose("", "hf", "qwen3", response=json.dumps(LINES))


def test_calls_can_be_demanded_where_the_way_to_write_them_is_found() -> None:
    assert written(json.dumps(template_of("gemma4"))) == ("<|tool_call>call:NAME", "<tool_call|>")
    assert written(json.dumps(template_of("qwen3_5"))) is None
    tools = read_tools(TOOLS, "required")
    functions = functions_of(tools)
    for family, possible in (("gemma4", True), ("qwen3_5", False)):
        formats = choose("{{ tools }}", "hf", response=json.dumps(template_of(family)))
        if possible:
            assert structure_of(formats, tools, functions, parallel=True, thinking=False) is not None
        else:
            with pytest.raises(BadRequest, match="--tool-call-parser"):
                structure_of(formats, tools, functions, parallel=True, thinking=False)
