"""What can be enforced is compiled and allows what it says; what cannot is refused by its name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.grammar.checking import Checker
from baton.grammar.description import (
    AnyText,
    Choice,
    Content,
    Either,
    Grammar,
    GrammarError,
    Json,
    Regex,
    Repeat,
    Sequence,
    Structure,
    Tag,
    Tagged,
    Text,
)
from baton.grammar.limits import parser_limits
from baton.grammar.vocabulary import matching_tokenizer

SPECIAL = {"<s>": 256, "</s>": 257, "<|call|>": 258}
BYTES = matching_tokenizer([bytes([byte]) for byte in range(256)], SPECIAL, 300)
CHECKER = Checker(SPECIAL)
CALL = Json(
    {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


def takes(content: Content, text: str, thinking_ends: str | None = None) -> bool:
    """Whether the answer may be this text, in which special tokens are written by their names."""
    grammar = CHECKER.check(Structure(content, thinking_ends))
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    data = text.encode()
    tokens: list[int] = []
    while data:
        special = next((name for name in SPECIAL if data.startswith(name.encode())), None)
        tokens.append(data[0] if special is None else SPECIAL[special])
        data = data[1 if special is None else len(special) :]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("content", "valid", "invalid"),
    [
        (Json({"type": "integer"}), ["12", "-3"], ["x", "1.5", " 1", ""]),
        (Json(True), ["null", '{"a": [1, 2.5]}', '"ü"'], ["nul", "{a: 1}"]),
        (CALL, ['{"a": null}', '{\n  "a": null\n}', '{"a":null}'], ['{"a":  null}', '{"a": null, "b": 1}']),
        (Regex(r'a/b\d+"x'), ['a/b12"x'], ["a/b", 'xa/b1"x']),
        (Regex(""), [""], ["a"]),
        (Regex("a\nb"), ["a\nb"], ["ab"]),
        (Choice(['a"b', "ü\n", "😀"]), ['a"b', "ü\n", "😀"], ["a", "ü"]),
        (Grammar('start: "a" B\nB: /[0-9]+/'), ["a12"], ["a"]),
        (Grammar('root ::= "a" [0-9]+'), ["a12"], ["a"]),
        (Text("<s>hi<|call|>"), ["<s>hi<|call|>"], ["hi", "<s>hi"]),
        (AnyText(), ["", "anything {[\n"], ["<s>"]),
        (Sequence([Text("x"), Json({"type": "null"})]), ["xnull"], ["x", "null"]),
        (Either([Text("x"), Grammar('start: "b"')]), ["x", "b"], ["c", "xb"]),
        (Repeat(CALL, 1, 2, "\n"), ['{"a":null}', '{"a":null}\n{"a":null}'], ["", '{"a":null}{"a":null}']),
        (Repeat(CALL, 1, 1, "x"), ['{"a":null}'], ["", '{"a":null}x{"a":null}']),
        (Repeat(CALL, 0, 1, "x"), ["", '{"a":null}'], ['{"a":null}x{"a":null}']),
        (Repeat(CALL, 0, 0), [""], ['{"a":null}']),
        (Repeat(CALL, 0), ["", '{"a":null}{"a":null}'], ["\n"]),
    ],
)
def test_each_kind_allows_what_it_says(content: Content, valid: list[str], invalid: list[str]):
    assert [text for text in valid if not takes(content, text)] == []
    assert [text for text in invalid if takes(content, text)] == []
    for end in ("</think>", "</s>"):
        assert [one for one in valid if not takes(content, f"so {{x}} {end}\n\n{one}", end)] == []
        assert [one for one in invalid if takes(content, f"so {{x}} {end}!{one}", end)] == []
        assert not takes(content, valid[0] + "never ends", end)


def test_a_frame_begins_at_its_trigger():
    """Text is free until then; from the trigger on it is one of the frames, whole."""
    tags = [Tag("<call>", CALL, "</call>"), Tag("<call>x", Text("y"), "z")]
    calls = Tagged(tags, ["<call>"])
    valid = ["", "hello", "hello <ca", '<call>{"a":null}</call>', 'a<call>{"a":null}</call>b<call>xyz']
    invalid = ["<call>", "a<call>q", '<call>{"a":null}', "<call>xy", "<call>{}</call>"]
    assert [text for text in valid if not takes(calls, text)] == []
    assert [text for text in invalid if takes(calls, text)] == []
    one = Tagged([Tag("<|call|>f", CALL, "</s>")], ["<|call|>"], at_least_one=True, stop_after_first=True)
    assert takes(one, 'so <|call|>f{"a":null}</s>')
    assert not takes(one, "so")
    assert not takes(one, 'so <|call|>f{"a":null}</s> and more')
    several = Tagged([Tag("<|call|>f", CALL, "</s>")], ["<|call|>"], at_least_one=True)
    assert takes(several, 'so <|call|>f{"a":null}</s><|call|>f{"a":null}</s> and more')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "no text can satisfy it"),
        ({"not": {"multipleOf": 2}}, "not: the keyword not cannot"),
        ({"type": "array", "items": {"uniqueItems": True}}, "items.uniqueItems: the keyword uniqueItems"),
        ({"properties": {"a": {"if": {"multipleOf": 2}, "then": False}}}, "properties.a.if: the keyword if"),
        (
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"contains": {"const": 1}}}},
            "$defs.a.contains: the keyword contains",
        ),
        (
            {"anyOf": [{}, {"propertyNames": {"pattern": "a", "maxLength": 3}}]},
            "anyOf[1].propertyNames: the keyword propertyNames",
        ),
        ({"oneOf": [{"multipleOf": 2}, {"minimum": 3}]}, "oneOf: the keyword oneOf cannot"),
        ({"$ref": "http://elsewhere/x"}, "http://elsewhere/x"),
        ({"type": "object", "minProperties": 2}, "minProperties above 1"),
        ({"x-guidance": {"lenient": True}, "type": "null"}, "x-guidance: is reserved"),
        ({"type": "whatever"}, "Invalid type: whatever"),
        ({"minimum": "a"}, "minimum"),
        ({"pattern": "a(?=b)"}, "pattern: looking ahead, but from the beginning, is not"),
        ({"pattern": "(?<=a)b"}, "pattern: (?< is not supported"),
        ({"pattern": "(^a|b){2,9}"}, "pattern: an anchor in a repetition"),
        ({"pattern": "a{70000}"}, "pattern: repeats something more than 65536 times"),
        ({"properties": {"a": {"maxLength": 100_000}}}, "properties.a.maxLength: the keyword maxLength"),
        ({"minItems": 5000}, "minItems: the keyword minItems cannot be enforced with 5000"),
        ({"properties": {"a": {"const": 2**60 + 1}}}, "properties.a.const: the keyword const"),
        ({"type": "integer", "minimum": 10**30}, "minimum: the keyword minimum"),
        ({"$dynamicRef": "#a"}, "$dynamicRef: the keyword $dynamicRef"),
        ({"pattern": r"\bx"}, "pattern"),
        ({"pattern": r"(a)\1"}, "pattern"),
        ({"items": 5}, "items: must be an object"),
        ("null", "a schema must be an object"),
        (False, "a schema must be an object"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
        ({"$ref": "#"}, "no text"),
    ],
)
def test_what_cannot_be_kept_is_named(schema: object, named: str):
    with pytest.raises(GrammarError) as caught:
        CHECKER.check(Structure(Json(schema)))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "x-guidance" not in str(caught.value) or "x-guidance" in named


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (Regex("("), "unclosed group"),
        (Regex("(?=a)b"), "look-around"),
        (Grammar("start: x"), "unknown name"),
        (Grammar("root ::= ((("), "GBNF"),
        (Grammar('start: x\nx[temperature=0.5]: "a"'), "temperature"),
        (Choice([]), "at least one"),
        (Tagged([Tag("<a>", CALL, "")], ["<b>"]), "no trigger"),
        (Tagged([], ["<b>"]), "at least one tag"),
        (Repeat(CALL, 3, 2), "repetitions"),
        (Choice([f"text number {i}" * 10 for i in range(10_000)]), "KiB"),
        (Json({"properties": {f"p{i}": {"type": "null"} for i in range(2500)}}), ""),
    ],
)
def test_what_is_malformed_is_refused(content: Content, named: str):
    with pytest.raises(GrammarError) as caught:
        CHECKER.check(Structure(content))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("format_", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-04-31", "24-01-01"]),
        ("time", ["08:30:06Z", "23:59:60+00:00", "08:30:06.5-08:00"], ["24:00:00Z", "22:59:60Z", "08:30:06"]),
        ("date-time", ["1963-06-19T08:30:06Z"], ["1963-06-19", "2023-02-29T00:00:00Z"]),
        (
            "email",
            ["a.b@c.de", '"a b"@c.de', "a@[127.0.0.1]", "a" * 64 + "@b"],
            ["a", "@b", "a..b@c", "a" * 65 + "@b"],
        ),
        ("hostname", ["a.example-b.com", "x"], ["-a", "a_b", "xn--x", "a" * 64, "a." * 127 + "aa"]),
        ("ipv4", ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
        ("ipv6", ["::1", "1::d6:192.168.0.1", "1:2:3:4:5:6:7:8", "::"], ["1::2::3", "12345::", "1:2"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08"]),
    ],
)
def test_formats(format_: str, valid: list[str], invalid: list[str]):
    schema = Json({"type": "string", "format": format_})

    def said(text: str) -> str:
        return '"' + text.replace('"', r"\"") + '"'

    assert [text for text in valid if not takes(schema, said(text))] == []
    assert [text for text in invalid if takes(schema, said(text))] == []
    assert takes(Json({"format": format_}), "12")  # (a format is one of strings)


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        ("^a.c$", ["abc", "a\u0085c"], ["a\\rc", "ac", "abcd"]),
        (r"^\s\S$", ["\ufeffa", " a"], ["\u0085a", "a\ufeff"]),
        (r"^[\s-]/\/$", ["-//", " //"], ["a//"]),
        ("b", ["abc", "b"], ["ac"]),
        ("a|b", ["xxb", "a"], ["x"]),
        ("^(a|b)$", ["a"], ["ab"]),
        ("a|^b", ["xa", "b", "bx"], ["xb"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        (r"(^|\s)x($|\s)", ["x", "a x", "x a"], ["ax", "xa"]),
        ("^[a&&b]$", ["&", "a"], ["ab"]),
        ("^(?=.*[0-9])(?=.*[a-z]).{3,}$", ["a12", "1ab"], ["123", "abc", "a1"]),
        ("^(?!ab)[a-z]+$", ["ba", "a", "acb"], ["ab", "abc"]),
        ("^{x}$", ["{x}"], ["x"]),
        (r'^[^"]+$', ["a", r"a\\b", r"\n"], [r"a\"b", r"\""]),
        (r"^[^\\]+$", ["a", r"a\"b", r"\n"], [r"a\\b", r"\\"]),
        (r"^[^\\\n]+$", ["a"], [r"a\\b", r"a\nb"]),
        ("^[[a]$", ["[", "a"], ["b"]),
    ],
)
def test_patterns_mean_what_they_mean_in_javascript(pattern: str, valid: list[str], invalid: list[str]):
    schema = Json({"type": "string", "pattern": pattern})
    assert [text for text in valid if not takes(schema, f'"{text}"')] == []
    assert [text for text in invalid if takes(schema, f'"{text}"')] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"type": "string"}, "type": "object"},
        {"propertyNames": True},
        {"propertyNames": {}},
        {"dependencies": {}},
        {"dependentRequired": {"a": []}, "dependentSchemas": {"a": True}},
        {"contains": {"const": 1}, "minContains": 0},
        {"minContains": 2},
        {"$defs": {"a": {"contains": {"const": 1}, "not": {"multipleOf": 3}}}},
        {"definitions": {"a": {"pattern": "(?<=a)b"}}},
        {"nullable": True},
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"if": {"multipleOf": 2}},
        {"then": False, "else": False},
        {"not": False},
        {"not": {"not": {}}},
        {"unevaluatedProperties": True, "unevaluatedItems": {}},
        {"minProperties": 0, "minItems": 0, "minLength": 0},
        {"type": "object", "required": ["a"], "minProperties": 1, "properties": {"a": {}, "b": {}}},
        {"maxLength": 2**31 - 1, "maxItems": 2**40, "maxProperties": 2**63},
        {"type": "integer", "multipleOf": 1},
        {
            "type": "string",
            "x-order": 3,
            "$comment": "a",
            "deprecated": True,
            "readOnly": True,
            "examples": ["a"],
        },
        {"contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {"not": {}}},
        {"discriminator": {"propertyName": "kind"}, "xml": {}, "externalDocs": {}, "example": 5},
        *(
            {"format": name}
            for name in ("int32", "int64", "float", "double", "byte", "binary", "password", "url")
        ),
        *({"format": name} for name in ("uri-reference", "iri", "regex", "color", "", "utc-millisec")),
        {"type": "integer", "format": "date"},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_accepted(schema: dict[str, Any]) -> None:
    for place in (schema, {"properties": {"a": schema}}, {"anyOf": [{"items": schema}]}):
        assert CHECKER.check(Structure(Json(place)))


def test_one_of_integer_and_number_is_a_number_that_is_no_integer() -> None:
    schema = Json({"oneOf": [{"type": "integer"}, {"type": "number"}]})
    assert takes(schema, "1.5")
    assert not takes(schema, "1")
    assert not takes(schema, "1.0")


@pytest.mark.parametrize("most", [3000, 5000, 65_535])
def test_long_strings_are_counted_to_their_end(most: int) -> None:
    """Byte by byte, of characters of several bytes, with all masks."""
    grammar = CHECKER.check(Structure(Json({"type": "string", "maxLength": most, "minLength": most - 1})))
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=parser_limits(grammar))
    count, place = 0, 0
    assert matcher.consume_token(ord('"'))
    while count < most:
        character = "😀éa"[place % 3]
        place += 1
        for byte in character.encode():
            if count % 7 == 0 or count > most - 10:
                assert matcher.compute_bitmask()
            assert matcher.consume_token(byte), (count, matcher.get_error())
        count += 1
    assert matcher.try_consume_tokens(list(b"a")) == 0
    assert matcher.try_consume_tokens([ord('"')]) == 1
    assert matcher.is_accepting()


def test_a_schema_that_is_referred_to_is_kept_wherever_it_stands() -> None:
    for place in ("$defs", "definitions", "components", "x-own"):
        schema = {
            "type": "object",
            "properties": {"a": {"$ref": f"#/{place}/b"}},
            place: {"b": {"not": {"type": "string"}}},
        }
        assert takes(Json(schema), '{"a": 1}')
        assert not takes(Json(schema), '{"a": "b"}')
        with pytest.raises(GrammarError, match=rf"{re.escape(place)}\.b\.not: the keyword not"):
            CHECKER.check(Structure(Json({**schema, place: {"b": {"not": {"multipleOf": 3}}}})))


def test_many_choices_are_no_burden():
    choices = Choice([f"choice number {number}" for number in range(5000)])
    assert takes(choices, "choice number 4999")
    assert not takes(choices, "choice number 5000")


def test_a_long_refusal_says_where_and_what():
    schema: dict = {"type": "null"}
    for number in range(100):
        schema = {"properties": {f"a_long_name_{number}": schema}}
    with pytest.raises(GrammarError, match=r"^properties\.a_long_name_99\..* … .*: schemas may be 60 deep$"):
        CHECKER.check(Structure(Json(schema)))
    with pytest.raises(GrammarError, match=r"unclosed group$"):
        CHECKER.check(Structure(Regex("(" * 5000)))


def test_what_is_too_large_behind_white_space_is_seen():
    """The lowest byte that may follow is often a new line, and forty tabs behind it."""
    wide = {f"p{i}": {"type": "string"} for i in range(20)}
    schema = {
        "anyOf": [{"type": "object", "properties": wide, "required": [f"p{i % 20}"]} for i in range(90)]
    }
    for content in (schema, {"type": "array", "items": schema, "minItems": 1}):
        with pytest.raises(GrammarError, match=r"max is 2000|takes more than"):
            CHECKER.check(Structure(Json(content)))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"format": ["date"]}, "format: must be a text"),
        ({"not": {"maxLength": float("inf")}}, "not: the keyword not"),
        ({"const": "\ud800"}, "surrogate"),
        ({"type": "object", "properties": {"\ud800": {}}}, "surrogate"),
        ({"type": "object", "properties": {"a": {"$ref": "#", "type": "object"}}}, r"\$ref: .*itself"),
        ({"type": "string", "allOf": [{"pattern": f".*{one}.*"} for one in "abcdefghijkl"]}, "pattern: "),
        ({"oneOf": [{"minimum": one} for one in range(101)]}, "oneOf: .*100 schemas"),
    ],
)
def test_what_python_would_stumble_over_is_refused(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        CHECKER.check(Structure(Json(schema)))


def test_a_constant_that_is_too_deep_is_refused() -> None:
    value: list[Any] = []
    for _ in range(900):
        value = [value]
    union = {"oneOf": [{"const": value}, {"const": [value]}]}
    for schema in ({"const": value}, {"items": {"enum": [value]}, "type": "array"}, union):
        with pytest.raises(GrammarError, match="deep"):
            CHECKER.check(Structure(Json(schema)))


def test_unions_by_a_tag_may_be_large() -> None:
    """Each option has its own value of a name: nothing is tried in pairs."""
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": f"k{number}"}, "x": {"type": "integer"}},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for number in range(300)
    ]
    named = {"$defs": {f"d{number}": one for number, one in enumerate(options)}}
    for schema in (
        {"oneOf": options},
        {"oneOf": [{"$ref": f"#/$defs/d{number}"} for number in range(300)], **named},
    ):
        assert takes(Json(schema), '{"kind": "k299", "x": 1}')
        assert not takes(Json(schema), '{"kind": "k300"}')
    both = {"oneOf": [options[0], {**options[0], "additionalProperties": True}]}
    with pytest.raises(GrammarError, match="oneOf"):
        CHECKER.check(Structure(Json(both)))
