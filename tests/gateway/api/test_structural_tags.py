"""Structural tags in the form with `format`: what a grammar lets through is what the format says, judged by a
matcher of the formats that is written down here, and what cannot be kept is refused by its place.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from baton.gateway.reading.constraints.structural import structural_tag
from baton.grammar.checking import Checker
from baton.grammar.description import GrammarError, Structure
from baton.grammar.vocabulary import matching_tokenizer

SPECIAL = {"<s>": 256, "</s>": 257, "<|call|>": 258}
NAMES = {number: name for name, number in SPECIAL.items()}
BYTES = matching_tokenizer([bytes([byte]) for byte in range(256)], SPECIAL, 300)
CHECKER = Checker(SPECIAL)
END = 300


def matcher_of(format: Any) -> LLMatcher:
    return LLMatcher(BYTES, CHECKER.check(Structure(structural_tag({"format": format}))), log_level=0)


def ids_of(text: str) -> list[int]:
    """Names of special tokens are these."""
    found: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text):
        found += [SPECIAL[piece]] if piece in SPECIAL else list(piece.encode())
    return found


def takes(matcher: LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    ids = ids_of(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


# -- the judge


def ends(format: dict[str, Any], text: str, at: int, stops: tuple[str, ...] = ()) -> set[int]:
    """Where in the text the format may end that begins there; `stops`: the ends of the tag around it."""
    match format:
        case {"type": "const_string", "value": value}:
            return {at + len(value)} if text.startswith(value, at) else set()
        case {"type": "regex", "pattern": pattern}:
            return {to for to in range(at, len(text) + 1) if re.fullmatch(pattern, text[at:to])}
        case {"type": "json_schema", "json_schema": {"const": value}}:
            written = json.dumps(value)
            return {at + len(written)} if text.startswith(written, at) else set()
        case {"type": "any_text"}:
            return {
                to
                for to in range(at, len(text) + 1)
                if not any(one in text[at:to] for one in (*format.get("excludes", ()), *stops))
                and to - at <= format.get("max_chars", 1_000)
            }
        case {"type": "sequence", "elements": elements}:
            places = {at}
            for one in elements:
                places = {to for place in places for to in ends(one, text, place, stops)}
            return places
        case {"type": "or", "elements": elements}:
            return {to for one in elements for to in ends(one, text, at, stops)}
        case {"type": "optional", "content": content}:
            return {at} | ends(content, text, at, stops)
        case {"type": "star" | "plus" | "repeat", "content": content}:
            least = {"star": 0, "plus": 1}.get(format["type"], format.get("min", 0))
            return repeated(content, text, at, least, format.get("max", -1), stops)
        case {"type": "tag", "begin": begin, "content": content, "end": end}:
            if not text.startswith(begin, at):
                return set()
            listed = tuple(end) if isinstance(end, list) else (end,)
            inner = ends(content, text, at + len(begin), tuple(one for one in listed if one))
            return {to + len(one) for to in inner for one in listed if text.startswith(one, to)}
        case {"type": "tags_with_separator", "tags": tags, "separator": separator}:
            again = {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": separator},
                    either := {"type": "or", "elements": tags},
                ],
            }
            first = ends(either, text, at)
            found = set() if format.get("at_least_one") else {at}
            if format.get("stop_after_first"):
                return found | first
            return found | {to for place in first for to in repeated(again, text, place, 0, -1)}
        case {"type": "triggered_tags", "tags": tags, "triggers": triggers}:
            rules = [(one["begin"], {**one, "begin": ""}) for one in tags]
            if format.get("at_least_one"):
                first = ends({"type": "or", "elements": tags}, text, at)
                if format.get("stop_after_first"):
                    return first
                return {to for place in first for to in free(format, triggers, rules, text, place, stops)}
            return free(format, triggers, rules, text, at, stops)
        case {"type": "dispatch", "rules": rules}:
            return free(format, [pattern for pattern, _ in rules], rules, text, at, stops)
    raise AssertionError(format)


def free(
    format: dict[str, Any], triggers: list[str], rules: Any, text: str, at: int, stops: tuple[str, ...]
) -> set[int]:
    """Free text, in which a trigger begins a rule."""
    found, places, seen = set(), {at}, set()
    loop = format.get("loop", True) and not format.get("stop_after_first")
    while places:
        place = places.pop()
        if place in seen:
            continue
        seen.add(place)
        for to in range(place, len(text) + 1):
            stretch = text[place:to]
            if any(one in stretch for one in (*triggers, *format.get("excludes", ()), *stops)):
                break
            found.add(to)
            for pattern, content in rules:
                if text.startswith(pattern, to):
                    after = ends(content, text, to + len(pattern))
                    if loop:
                        places |= after
                    else:
                        found |= after
    return found


def repeated(
    content: Any, text: str, at: int, least: int, most: int, stops: tuple[str, ...] = ()
) -> set[int]:
    found, places = set(), {at}
    for count in range(len(text) + least + 2):
        if count >= least:
            found |= places
        if not places or count == most:
            break
        places = {to for place in places for to in ends(content, text, place, stops)}
    return found


# -- formats at random

WORDS = st.sampled_from(["a", "b", "ab", "<", "<x", "</x>", "1", "é"])
LEAVES = st.one_of(
    st.builds(lambda value: {"type": "const_string", "value": value}, WORDS),
    st.builds(
        lambda pattern: {"type": "regex", "pattern": pattern}, st.sampled_from(["a*", "[ab]{1,3}", "(ab|b)?"])
    ),
    st.builds(
        lambda value: {"type": "json_schema", "json_schema": {"const": value}},
        st.sampled_from([1, "a", None]),
    ),
    st.builds(
        lambda excludes, most: {
            "type": "any_text",
            "excludes": excludes,
            **({} if most is None else {"max_chars": most}),
        },
        st.lists(WORDS, max_size=2),
        st.sampled_from([None, None, 0, 2, 5]),
    ),
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tag = st.builds(
        lambda begin, content, end: {"type": "tag", "begin": begin, "content": content, "end": end},
        st.sampled_from(["<x>", "<y>", "<x>a", "("]),
        inner,
        st.sampled_from(["</x>", ")", [")", "]"], "b"]),
    )
    flags = st.fixed_dictionaries(
        {}, optional={"at_least_one": st.booleans(), "stop_after_first": st.booleans()}
    )
    lists = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda elements: {"type": "sequence", "elements": elements}, lists),
        st.builds(lambda elements: {"type": "or", "elements": elements}, lists),
        st.builds(
            lambda kind, content: {"type": kind, "content": content},
            st.sampled_from(["optional", "star", "plus"]),
            inner,
        ),
        st.builds(
            lambda least, more, content: {
                "type": "repeat",
                "min": least,
                "max": -1 if more is None else least + more,
                "content": content,
            },
            st.integers(0, 2),
            st.sampled_from([None, 0, 2]),
            inner,
        ),
        tag,
        st.builds(
            lambda tags, more, excludes: {
                "type": "triggered_tags",
                "triggers": sorted({one["begin"][0] for one in tags}),
                "tags": tags,
                "excludes": excludes,
                **more,
            },
            st.lists(tag, min_size=1, max_size=2),
            flags,
            st.lists(st.just("b"), max_size=1),
        ),
        st.builds(
            lambda tags, separator, more: {
                "type": "tags_with_separator",
                "tags": tags,
                "separator": separator,
                **more,
            },
            st.lists(tag, min_size=1, max_size=2),
            st.sampled_from([",", "", "ab"]),
            flags,
        ),
        st.builds(
            lambda rules, loop: {"type": "dispatch", "rules": rules, "loop": loop},
            st.lists(st.tuples(st.sampled_from(["<x", "("]), inner), min_size=1, max_size=2),
            st.booleans(),
        ),
    )


FORMATS = st.recursive(LEAVES, composed, max_leaves=6)
LIKELY = b"ab<>x/()]1,"


def walk(matcher: LLMatcher, rng: random.Random) -> str | None:
    """A text that the masks allow, token by token at random; None: it did not end in time."""
    matcher = matcher.deep_copy()
    found = bytearray()
    for _ in range(40):
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        may_end = matcher.is_accepting()
        assert allowed or may_end, bytes(found)
        if may_end and (not allowed or rng.random() < 0.3):
            return found.decode() if _is_text(found) else None
        likely = [byte for byte in allowed if byte in LIKELY]
        byte = rng.choice(likely if likely and rng.random() < 0.9 else allowed)
        assert matcher.consume_token(byte)
        found.append(byte)
    return None


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@settings(max_examples=100, deadline=None, derandomize=True)
@given(format=FORMATS, seed=st.integers(0, 1 << 20))
def test_whatever_ends_by_itself_is_what_the_format_says(format: Any, seed: int) -> None:
    try:
        matcher = matcher_of(format)
    except GrammarError:
        return
    rng = random.Random(seed)
    for _ in range(6):
        text = walk(matcher, rng)
        if text is not None:
            # (White space may stand where a value of JSON may begin, also if none does.)
            bare = re.sub(r"[ \r\n\t]+", "", text) if "json_schema" in json.dumps(format) else text
            assert len(text) in ends(format, text, 0) or len(bare) in ends(format, bare, 0), text


TAG = {"type": "tag", "begin": "<f>", "content": {"type": "const_string", "value": "5"}, "end": "</f>"}
TRIGGERED: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}
TEXT: dict[str, Any] = {"type": "any_text"}
THINK = {"type": "tag", "begin": "<t>", "content": TEXT, "end": "</t>"}
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("format", "valid", "invalid"),
    [
        (TRIGGERED, ["", "a<f>5</f>b", "<f>5</f><f>5</f>"], ["a<f", "<f>6"]),
        ({**TRIGGERED, "stop_after_first": True}, ["", "a", "a<f>5</f>"], ["<f>5</f>x"]),
        ({**TRIGGERED, "at_least_one": True}, ["<f>5</f>", "<f>5</f>x<f>5</f>"], ["", "a", "a<f>5</f>"]),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["<f>5</f>"], ["", "<f>5</f>x"]),
        (
            {"type": "sequence", "elements": [THINK, TRIGGERED]},
            ["<t>a</t>", "<t></t>b<f>5</f>"],
            ["a", "<t>a", "<t>a</t><f>6"],
        ),
        (
            {**THINK, "content": TRIGGERED, "end": ["</t>", "|"]},
            ["<t>a<f>5</f>b|", "<t></t>"],
            ["<t>a<f>|", "<t>a|b"],
        ),
        (
            {"type": "sequence", "elements": [TEXT, {"type": "optional", "content": TAG}]},
            ["a", "a<f>5</f>"],
            ["a<f>6", "a<f>5</f>b"],
        ),
        (
            {
                "type": "sequence",
                "elements": [{"type": "regex", "pattern": "[ab]*"}, {"type": "const_string", "value": "ab"}],
            },
            ["ab", "bab", "abab"],
            ["a", "aba"],
        ),
        (
            {
                "type": "dispatch",
                "rules": [["<f>", {"type": "const_string", "value": "5"}]],
                "excludes": ["x"],
            },
            ["a<f>5b<f>5", ""],
            ["a<f>6", "x"],
        ),
        (
            {"type": "qwen_xml_parameter", "json_schema": OBJECT},
            [
                "<parameter=name>\nB\n</parameter>\n<parameter=age>\n7\n</parameter>",
                "<parameter=name>\n\n</parameter>",
            ],
            [
                "<parameter=age>\n7\n</parameter>",
                "<parameter=name>\nB\n</parameter>\n<parameter=age>\nB\n</parameter>",
            ],
        ),
        (
            {"type": "json_schema", "json_schema": OBJECT, "style": "glm_xml"},
            ["<arg_key>name</arg_key>\n<arg_value>B</arg_value>"],
            ["<arg_key>name</arg_key>\n<arg_value>B"],
        ),
        (
            {"type": "json_schema", "json_schema": {"type": "array"}, "max_whitespace_cnt": 1},
            ["[1, 2]", "[1,\n2]"],
            ["[1,\n 2]"],
        ),
        (
            {"type": "json_schema", "json_schema": {"type": "array"}, "max_whitespace_cnt": 0},
            ["[1,2]"],
            ["[1, 2]"],
        ),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, ["yes", "no"], ["y", ""]),
        ({"type": "any_text", "max_chars": 3, "excludes": ["b"]}, ["", "aé€"], ["aaaa", "b"]),
        (
            {**THINK, "end": "</s>", "content": {"type": "any_text", "max_tokens": 2}},
            ["<t>ab</s>", "<t></s>"],
            ["<t>abc</s>", "<t>ab"],
        ),
        (
            {**THINK, "end": "</t>", "content": {"type": "any_text", "max_tokens": 5}},
            ["<t></t>", "<t>a</t>", "<t>abcde</t>", "<t>abcd<</t>", "<t>ab</t</t>"],
            [
                "<t>abcdef</t>",
                "<t>abcde",
                "<t>a</t",
                "<t>abcd</t>",
            ],  # (what is begun of the end is of the five)
        ),
        (
            {**THINK, "end": "</t>", "content": {"type": "any_text", "max_tokens": 0}},
            ["<t></t>"],
            ["<t>a</t>", "<t>"],
        ),
        (
            {**THINK, "end": ["</t>", "."], "content": {"type": "any_text", "max_tokens": 3}},
            ["<t>.", "<t>ab.", "<t>abc.", "<t>abc</t>", "<t></t>"],
            ["<t>abcd.", "<t>abc", "<t>a.."],
        ),
        # tokens
        ({"type": "token", "token": "<|call|>"}, ["<|call|>"], ["", "a"]),
        ({"type": "token", "token": 258}, ["<|call|>"], ["", "a"]),
        ({"type": "exclude_token", "exclude_tokens": ["<s>"]}, ["a", "</s>"], ["", "<s>", "ab"]),
        (
            {
                "type": "tag",
                "begin": {"type": "token", "token": "<s>"},
                "content": {"type": "any_tokens"},
                "end": {"token": "</s>"},
            },
            ["<s>ab<|call|><s></s>", "<s></s>"],
            ["<s>", "<s></s></s>"],
        ),
        (
            {"type": "any_tokens", "max_tokens": 2, "exclude_tokens": ["<s>"]},
            ["", "ab", "</s>"],
            ["abc", "<s>"],
        ),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": ["<|call|>"],
                "tags": [
                    {
                        "begin": {"token": "<|call|>"},
                        "content": {"type": "const_string", "value": "5"},
                        "end": ".",
                    }
                ],
                "exclude_tokens": [256],
            },
            ["", "a<|call|>5.b<|call|>5.", "</s>"],
            ["<|call|>", "<|call|>6.", "<s>"],
        ),
        (
            {
                "type": "token_dispatch",
                "rules": [[258, {"type": "const_string", "value": "5"}]],
                "loop": False,
            },
            ["", "a<|call|>5"],
            ["<|call|>", "a<|call|>5b"],
        ),
    ],
)
def test_formats(format: Any, valid: list[str], invalid: list[str]) -> None:
    matcher = matcher_of(format)
    assert [text for text in valid if not takes(matcher, text)] == []
    assert [text for text in invalid if takes(matcher, text)] == []


@pytest.mark.parametrize(
    ("format", "problem"),
    [
        ({"type": "sequence"}, r"missing required field `elements` - at `format`"),
        ({"type": "xml"}, r"Invalid value 'xml' - at `format.type`"),
        (
            {"type": "or", "elements": [{"type": "any_text", "min_chars": 1}]},
            r"unknown field `min_chars` - at `format.elements",
        ),
        ({"type": "json_schema", "json_schema": {}, "excludes": ["a"]}, "length <= 0 - at `format.excludes`"),
        (
            {"type": "json_schema", "json_schema": {}, "style": "cohere_xml"},
            "'cohere_xml' - at `format.style`",
        ),
        ({"type": "json_schema", "json_schema": {"not": {"multipleOf": 2}}}, "the keyword not cannot"),
        (
            {"type": "qwen_xml_parameter", "json_schema": {"minProperties": 1}},
            r"format.json_schema: the keyword minProp",
        ),
        ({"type": "sequence", "elements": [TEXT, TEXT]}, r"format.elements\[0\]: nothing tells where"),
        ({"type": "star", "content": TEXT}, "format.content: free text cannot be repeated"),
        (
            {**TRIGGERED, "triggers": ["<g"]},
            r"format.tags\[0\].begin: must begin with exactly one trigger, not with 0",
        ),
        ({**TRIGGERED, "triggers": ["<f", "<g"]}, r"format.triggers: no tag begins with '<g'"),
        ({**TRIGGERED, "triggers": ["<", "<f"]}, r"exactly one trigger, not with 2"),
        ({"type": "any_text", "max_chars": 100_000}, "format.max_chars: at most"),
        ({"type": "token", "token": "<nothing>"}, "'<nothing>' is no special token"),
        ({"type": "token", "token": 7}, "7 is no special token"),
        ({"type": "const_string", "value": "a", "type2": 1}, "unknown field `type2`"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(format: Any, problem: str) -> None:
    with pytest.raises(GrammarError, match=problem):
        matcher_of(format)


def test_a_format_that_would_be_written_without_end_is_refused() -> None:
    format: Any = {"type": "const_string", "value": "end"}
    letter = {"type": "const_string", "value": "b"}
    for _ in range(40):
        either = {"type": "or", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "a"}]}
        format = {"type": "sequence", "elements": [either, letter, format]}
    with pytest.raises(GrammarError, match="too long"):
        structural_tag({"format": format})
