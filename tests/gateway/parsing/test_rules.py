"""Rules that all formats keep: what one forgives, its siblings do too."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from baton.gateway.api.tools import read_tools
from baton.gateway.parsing.deltas import Parsed
from baton.gateway.parsing.formats import CALLS, THINKS
from baton.gateway.parsing.frames import Calls, JsonFrame, LeadingJson, NamedFrame, TaggedFrame, Think
from baton.gateway.parsing.parser import ResponseParser
from baton.gateway.parsing.results import MAX_HELD
from tests.gateway.parsing.fixtures import TYPES, Answer, dump, framed, meaning, read

TAGGED = [name for name, calls in CALLS.items() if any(isinstance(f, TaggedFrame) for f in calls.frames)]
NAMED = [name for name, calls in CALLS.items() if any(isinstance(f, NamedFrame) for f in calls.frames)]
JSON = [
    name
    for name, calls in CALLS.items()
    if any(isinstance(f, JsonFrame | LeadingJson) and not getattr(f, "keyed", False) for f in calls.frames)
]
FRAMED = [name for name in CALLS if name not in ("openai", "llama3_json", "pythonic", "xlam")]
CALLED: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Paris", "days": 3})]


def calls_of(answer: Answer, **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """As the whole text and as any pieces say it."""
    whole = meaning(read(answer, [answer.text], **options))
    rng = random.Random(len(answer.text))
    for _ in range(6):
        places = sorted(rng.choices(range(len(answer.text) + 1), k=rng.randint(1, 12)))
        bounds = zip([0, *places], [*places, len(answer.text)], strict=True)
        assert meaning(read(answer, [answer.text[a:b] for a, b in bounds], **options)) == whole
    assert meaning(read(answer, list(answer.text), **options)) == whole
    content, reasoning, calls = whole
    return content, reasoning, [(name, json.loads(text)) for name, text, _ in calls]


def frame_of(name: str) -> TaggedFrame:
    return next(frame for frame in CALLS[name].frames if isinstance(frame, TaggedFrame))


# -- thoughts that do not end


@pytest.mark.parametrize("think", [THINKS["qwen3"], THINKS["kimi_k2"], THINKS["mistral"], THINKS["gemma4"]])
@pytest.mark.parametrize("name", FRAMED)
def test_a_call_in_thoughts_that_never_end_is_a_call(name: str, think: Think) -> None:
    for opened in (True, False):
        text = ("" if opened else think.open) + "I look it up." + "\n" + framed(name, CALLED)
        content, reasoning, calls = calls_of(Answer(text, think, CALLS[name], opened))
        assert (content, reasoning, calls) == ("", "I look it up.", CALLED), text


@pytest.mark.parametrize("name", FRAMED)
def test_a_draft_in_thoughts_that_end_stays_a_thought(name: str) -> None:
    think = THINKS["qwen3"]
    assert think is not None
    draft = framed(name, [("weather", {"text": "a </think> b", "city": "Rome"})])
    text = f"Maybe {draft} or not.</think>\nIt is\n{framed(name, CALLED)}"
    content, reasoning, calls = calls_of(Answer(text, think, CALLS[name], True))
    assert (content, calls) == ("It is", CALLED)
    assert reasoning.startswith("Maybe ")
    assert reasoning.endswith(" or not.")
    assert "Rome" in reasoning


@pytest.mark.parametrize("name", FRAMED)
def test_markers_in_thoughts_that_begin_no_call_are_thoughts(name: str) -> None:
    think = THINKS["qwen3"]
    marker = CALLS[name].frames[0].open[0]
    text = f"I write {marker} and then"
    assert calls_of(Answer(text, think, CALLS[name], True)) == ("", text, [])
    assert calls_of(Answer(f"{text}</think>Yes", think, CALLS[name], True)) == ("Yes", text, [])


def test_what_thoughts_hold_back_has_a_bound() -> None:
    """A call longer than that is given while it comes."""
    parser = ResponseParser(THINKS["qwen3"], CALLS["qwen3_coder"], types=TYPES, thinking=True)
    parsed = Parsed()
    parsed.add(parser.push("Hm<tool_call>\n<function=weather>\n<parameter=text>\n"))
    assert not parsed.calls
    for _ in range(MAX_HELD // 16 + 1):
        parsed.add(parser.push("x" * 16))
    assert [one.name for one in parsed.calls] == ["weather"]
    assert len("".join(parsed.calls[0].arguments)) > MAX_HELD // 2


# -- what was not closed


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_anywhere_is_never_complete(name: str) -> None:
    called = [("weather", {"city": "Paris", "text": "a </parameter> b </arg_value> c"})]
    text = framed(name, called)
    for end in range(len(text)):
        answer = Answer(text[:end], None, CALLS[name])
        parser = answer.parser()
        parsed = Parsed()
        parsed.add(parser.push(answer.text))
        parsed.add(parser.finish())
        for one in parsed.calls:
            try:
                arguments = json.loads("".join(one.arguments))
            except ValueError:
                assert parser.num_complete == 0
            else:
                assert arguments == called[0][1], answer.text


@pytest.mark.parametrize("name", FRAMED)
def test_what_is_demanded_and_cut_off_has_no_text(name: str) -> None:
    text = framed(name, CALLED)
    for end in range(0, len(text), 3):
        content, _, _ = meaning(read(Answer(text[:end], None, CALLS[name]), [text[:end]], demanded=True))
        assert content == ""


@pytest.mark.parametrize("name", FRAMED)
def test_text_after_a_call_is_parted_from_text_before_it(name: str) -> None:
    for before, between in (("I look.", "\n"), ("I look.\n\n", "\n\n")):
        text = f"{before}{framed(name, CALLED)}Done."
        assert calls_of(Answer(text, None, CALLS[name])) == (f"I look.{between}Done.", "", CALLED)


# -- ends that are forgotten


@pytest.mark.parametrize("name", TAGGED)
def test_ends_that_are_forgotten(name: str) -> None:
    frame, text = frame_of(name), framed(name, CALLED)
    forgotten = [text]
    if frame.foot and frame.close + frame.outer:
        forgotten.append(text.replace(frame.foot, ""))
    if frame.close and frame.foot:
        forgotten.append(text.replace(frame.close, ""))
    if frame.outer:
        forgotten.append(text.replace(frame.outer, ""))
    first = text.index(frame.value_end)
    forgotten.append(text[:first].rstrip("\n") + "\n" + text[first + len(frame.value_end) :].lstrip("\n"))
    for one in forgotten:
        content, _, calls = calls_of(Answer(one, None, CALLS[name]))
        assert (content, calls) == ("", CALLED), one


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_that_shows_a_call(name: str) -> None:
    shown = framed(name, [("get_time", {"city": "Rome", "x": "y"})])
    for value in (f"Write:\n{shown}\nand it runs.", f"{shown}\n", shown):
        called = [("weather", {"text": value, "days": 2}), ("weather", {"days": 1, "text": value})]
        assert calls_of(Answer(framed(name, called), None, CALLS[name]))[2] == called


# -- arguments


@pytest.mark.parametrize("name", [*NAMED, "openai"])
def test_calls_without_arguments(name: str) -> None:
    if name.startswith("mistral"):
        text = "[TOOL_CALLS]weather[ARGS][TOOL_CALLS]weather[ARGS]{}"
    elif name == "openai":
        text = "<|channel|>commentary to=functions.weather<|message|><|call|>"
    else:
        text = framed(name, [("weather", {})]).replace("{}", "")
    _, _, calls = calls_of(Answer(text, None, CALLS[name]))
    assert set(map(str, calls)) == {"('weather', {})"}


def test_a_message_of_harmony_without_arguments_is_a_call_if_the_model_ended_it() -> None:
    for whole in (True, False):
        parser = ResponseParser(None, CALLS["openai"])
        parsed = Parsed()
        parsed.add(parser.push("<|channel|>commentary to=functions.f <|constrain|>json<|message|>"))
        parsed.add(parser.finish(whole=whole))
        assert bool(parser.num_complete) is whole


@pytest.mark.parametrize("name", JSON)
def test_arguments_before_the_name_may_be_long(name: str) -> None:
    if name.startswith("mistral"):
        name = "mistral"
    arguments = {"text": "x" * (3 * MAX_HELD), "city": "</tool_call>"}
    text = framed(name, [("weather", arguments)])
    key = "parameters" if name == "llama3_json" else "arguments"
    turned = dump({key: arguments, "name": "weather"})
    start, end = text.index('{"name"'), text.rindex("}") + 1
    answer = Answer(text[:start] + turned + text[end:], None, CALLS[name])
    pieces = [answer.text[i : i + 1000] for i in range(0, len(answer.text), 1000)]
    for cut in ([answer.text], pieces):
        content, _, calls = meaning(read(answer, cut))
        assert (content, [(one, json.loads(text)) for one, text, _ in calls]) == (
            "",
            [("weather", arguments)],
        )


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("pythonic", "olmo3", "lfm2")])
def test_arguments_that_are_wrapped_once_more(name: str) -> None:
    for wrapper in ("arguments", "input"):
        text = framed(name, [("weather", {wrapper: CALLED[0][1]})])
        if name in ("gemma4", "functiongemma"):
            continue
        assert calls_of(Answer(text, None, CALLS[name]))[2] == CALLED, text
        other = [("weather", {wrapper: {"unknown": 1}})]
        assert calls_of(Answer(framed(name, other), None, CALLS[name]))[2] == other or name in TAGGED


# -- types of values in tags

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "s": {"type": "string"},
        "o": {"type": "object"},
        "a": {"type": "array"},
        "z": {"type": "null"},
        "float": {"type": "float"},
        "int": {"type": "int"},
        "bool": {"type": "bool"},
        "str": {"type": "str"},
        "dict": {"type": "dict"},
        "list": {"type": "list"},
        "union": {"type": ["integer", "null"]},
        "any": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
        "one": {"oneOf": [{"type": "array"}, {"type": "integer"}]},
        "enum": {"enum": [1, 2, "auto"]},
        "const": {"const": True},
        "ref": {"$ref": "#/$defs/a~1b"},
        "deep": {"$ref": "#/$defs/alias"},
        "free": {},
    },
    "$defs": {"a/b": {"type": "integer"}, "alias": {"$ref": "#/$defs/a~1b"}},
}
_VALUES: list[tuple[str, str, Any]] = [
    ("i", "5", 5),
    ("i", "5.0", 5),
    ("i", "1e3", 1000),
    ("i", "-0", 0),
    ("i", "12345678901234567890123", 12345678901234567890123),
    ("i", "five", "five"),
    ("n", "2.50", 2.5),
    ("n", "7", 7),
    ("b", "True", True),
    ("b", "false", False),
    ("b", "1", True),
    ("s", "5", "5"),
    ("s", "true", "true"),
    ("s", '{"a": 1}', '{"a": 1}'),
    ("o", '{"a": [1, "</x>"]}', {"a": [1, "</x>"]}),
    ("o", "{'a': True, 'b': None}", {"a": True, "b": None}),
    ("a", "[1, 2]", [1, 2]),
    ("a", "['x', \"y\"]", ["x", "y"]),
    ("z", "None", None),
    ("float", "0.5", 0.5),
    ("int", "3", 3),
    ("int", "3.0", 3),
    ("bool", "true", True),
    ("str", "3", "3"),
    ("dict", '{"a": 1}', {"a": 1}),
    ("list", "[]", []),
    ("union", "4", 4),
    ("union", "null", None),
    ("any", "true", True),
    ("any", "maybe", "maybe"),
    ("one", "[1]", [1]),
    ("one", "9", 9),
    ("enum", "2", 2),
    ("enum", "auto", "auto"),
    ("const", "true", True),
    ("ref", "8", 8),
    ("deep", "8.0", 8),
    ("free", "8", "8"),
]


@pytest.mark.parametrize("name", TAGGED)
def test_values_in_tags_have_the_types_of_the_tools_schema(name: str) -> None:
    """Whatever the tag itself says of them."""
    types = read_tools([{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}]).types
    says = name.startswith(("deepseek", "kimi"))
    for key, text, value in _VALUES:
        if says and (key, text) in (("any", "true"), ("enum", "2")):
            value = text  # (the model says that it is a text, and it may be one)
        written = framed(name, [("f", {key: text})])
        parser = ResponseParser(None, CALLS[name], tools=["f"], types=types)
        parsed = Parsed()
        parsed.add(parser.push(written))
        parsed.add(parser.finish())
        (call,) = parsed.calls
        found = json.loads("".join(call.arguments))[key]
        assert (found, type(found)) == (value, type(value)), (name, key, text)


@pytest.mark.parametrize("name", [name for name in TAGGED if name.startswith("deepseek")])
def test_what_a_tag_says_of_its_value_counts_where_the_schema_says_nothing(name: str) -> None:
    text = framed(name, [("f", {"a": 5, "b": "5", "c": [1]})])
    bare = text.replace(' string="true"', "").replace(' string="false"', "")
    calls = Calls(CALLS[name].frames, CALLS[name].dropped)
    for one, value in ((text, {"a": 5, "b": "5", "c": [1]}), (bare, {"a": 5, "b": 5, "c": [1]})):
        _, _, found = meaning(read(Answer(one, None, calls), [one]))
        assert json.loads(found[0][1]) == value


# -- names, and characters that are none


def test_names_that_requests_may_have_are_read_in_every_format() -> None:
    for name in CALLS:
        for tool in ("ns:tool", "ns/tool", "ns.my-tool", "2do", "a.b:c/d-e"):
            for key in ("$filter", "@type", "x/y", "a-b", "é", "R&D"):
                types = {tool: {key: ("string",)}}
                called = [(tool, {key: "v"})]
                text = framed(name, called).replace('key="R&D"', 'key="R&amp;D"')
                parser = ResponseParser(None, CALLS[name], tools=types, types=types)
                parsed = Parsed()
                for character in text:
                    parsed.add(parser.push(character))
                parsed.add(parser.finish())
                content, _, calls = meaning(parsed)
                assert [(one, json.loads(a)) for one, a, _ in calls] == called, (name, text)
                assert not content


@pytest.mark.parametrize("line", ["", "\r\n", "\n\n  "])
def test_a_block_of_code_around_arguments_may_have_any_line_breaks(line: str) -> None:
    text = framed("deepseek_v3", CALLED).replace("\n", line)
    assert calls_of(Answer(text, None, CALLS["deepseek_v3"])) == ("", "", CALLED)


@pytest.mark.parametrize("name", [name for name in (*JSON, *NAMED, "openai") if name != "olmo3"])
def test_half_of_a_surrogate_pair_is_no_character(name: str) -> None:
    """No client could send it back."""
    for written, said in (
        (r"a\ud83d", "a\ufffd"),
        (r"\ud83db", "\ufffdb"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\uD83D\uDE00", "😀"),
        (r"\ud83d\u0041", "\ufffdA"),
    ):
        text = framed(name, [("weather", {"text": "qz"})]).replace("qz", written)
        content, _, calls = calls_of(Answer(text, None, CALLS[name]))
        assert (content, calls) == ("", [("weather", {"text": said})]), text
        for end in range(len(text)):
            for call in read(Answer("", None, CALLS[name]), list(text[:end])).calls:
                assert r"\ufffd" not in "".join(call.arguments) or "\ufffd" in said, text[:end]


# -- arguments in other shapes


@pytest.mark.parametrize("name", [*JSON, *NAMED, "openai"])
def test_arguments_may_be_a_text_or_null(name: str) -> None:
    """A text that is an object is that, however long it is; null is none."""
    whole = framed(name, [("weather", {"city": "Paris"})])
    for city in ("Rome", "x" * (2 * MAX_HELD)):
        text = whole.replace('{"city": "Paris"}', dump(dump({"city": city})))
        parsed = meaning(
            read(Answer(text, None, CALLS[name]), [text[i : i + 99] for i in range(0, len(text), 99)])
        )
        assert (parsed[0], json.loads(parsed[2][0][1])) == ("", {"city": city})
    answer = Answer(whole.replace('{"city": "Paris"}', "null"), None, CALLS[name])
    assert calls_of(answer) == ("", "", [("weather", {})])


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("key", ["arguments", "parameters", "input"])
def test_names_of_all_arguments(name: str, key: str) -> None:
    text = framed(name, CALLED).replace('"arguments"', f'"{key}"').replace('"parameters"', f'"{key}"')
    assert calls_of(Answer(text, None, CALLS[name])) == ("", "", CALLED)
