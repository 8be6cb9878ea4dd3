"""Schemas of every keyword, against a validator: what is taken is valid, and what is valid is taken."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from benchmarks.json_schema_bench import Search
from llguidance import LLMatcher

from baton.grammar.checking import Checker
from baton.grammar.description import GrammarError, Json, Structure
from baton.grammar.limits import parser_limits
from baton.grammar.vocabulary import matching_tokenizer

BYTES = matching_tokenizer([bytes([byte]) for byte in range(256)], {}, 256)
CHECKER = Checker({})
SCALARS = [None, True, False, 0, 1, 2, -1, 3, 0.5, 1.5, "", "a", "ab", "b", "abc", "ba"]
VALUES: list[Any] = [
    *SCALARS,
    [],
    [1],
    ["a"],
    [1, 1],
    ["a", "b"],
    [1, "a", True],
    [[]],
    {},
    {"a": 1},
    {"a": "a"},
    {"b": 1},
    {"b": None},
    {"a": 1, "b": 2},
    {"a": "b", "c": 1},
    {"c": {"a": 1}},
    {"a": 1, "b": "a", "c": None},
    {"ab": 1},
]
NAMES = ["a", "b", "c"]
PATTERNS = ["a", "^a", "b$", "^a$", "^(a|b)+$", "a|^b", "(^|a)b", "^(?!b)", "^(?=.*b)a", "^[^a]*$"]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
COUNTS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
INNER = ["additionalProperties", "items", "not", "contains", "propertyNames", "unevaluatedProperties"]
CONDITIONS = ["if", "then", "else", "not"]
LISTS = ["allOf", "anyOf", "oneOf", "prefixItems"]


class Schemas:
    """Schemas by chance."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)

    def schema(self, depth: int = 0) -> Any:
        if depth > 2 or self.choices.random() < 0.1:
            return self.choices.choice(
                [True, False, {}, {"type": "string"}, {"const": 1}, {"type": "integer"}]
            )
        return dict(self._keyword(depth) for _ in range(self.choices.randint(1, 3 if depth else 4)))

    def _keyword(self, depth: int) -> tuple[str, Any]:
        choose, inner = self.choices.choice, lambda: self.schema(depth + 1)
        match self.choices.randrange(17):
            case 0:
                return "type", choose(TYPES)
            case 1:
                return "type", self._some(TYPES, 3) or "object"
            case 2:
                return choose([("const", choose(VALUES)), ("enum", self._some(VALUES, 4) or [None])])
            case 3:
                return choose(BOUNDS), choose([-1, 0, 0.5, 1, 2])
            case 4:
                return "multipleOf", choose([1, 2, 0.5])
            case 5 | 6:
                return choose(COUNTS), choose([0, 1, 1, 2, 3])
            case 7:
                return "pattern", choose(PATTERNS)
            case 8:
                return "required", self._some(NAMES, 2)
            case 9 | 10:
                return "properties", {name: inner() for name in self._some(NAMES, 3)}
            case 11:
                return "patternProperties", {choose(PATTERNS): inner()}
            case 12:
                return choose(INNER), inner()
            case 13:
                return choose(CONDITIONS), inner()
            case 14:
                return choose(LISTS), [inner() for _ in range(self.choices.randint(1, 3))]
            case 15:
                return choose(
                    [
                        ("dependentRequired", {choose(NAMES): self._some(NAMES, 2)}),
                        ("dependentSchemas", {choose(NAMES): inner()}),
                    ]
                )
        return choose([("uniqueItems", choose([True, False])), ("format", "int32"), ("nullable", True)])

    def _some(self, values: list[Any], most: int) -> list[Any]:
        return self.choices.sample(values, self.choices.randint(0, most))


def grammar_of(schema: Any) -> str | None:
    try:
        return CHECKER.check(Structure(Json(schema)))
    except GrammarError:
        return None


def matcher_of(grammar: str) -> LLMatcher:
    return LLMatcher(BYTES, grammar, log_level=0, limits=parser_limits(grammar))


def walk(grammar: str, choices: random.Random) -> str | None:
    """A text that the masks allow, chosen by chance; None: it did not end."""
    matcher, text = matcher_of(grammar), bytearray()
    for _ in range(200):
        number = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if number >> byte & 1]
        allowed = [byte for byte in allowed if byte not in b"eE"]  # (of numbers that no double holds)
        if matcher.is_accepting() and (not allowed or choices.random() < 0.3):
            return text.decode()
        closing = [byte for byte in allowed if byte in b'"]}:,']
        if not allowed:
            return None
        byte = choices.choice(closing if closing and choices.random() < 0.5 else allowed)
        matcher.consume_token(byte)
        text.append(byte)
    return None


@pytest.mark.parametrize("seed", range(3))
def test_what_is_taken_is_valid_and_what_is_valid_is_taken(seed: int) -> None:
    schemas, served, walked = Schemas(seed), 0, 0
    narrower: list[tuple[Any, Any]] = []
    for _ in range(60):
        schema = schemas.schema()
        grammar = grammar_of({"allOf": [schema]} if isinstance(schema, bool) else schema)
        if grammar is None:
            continue
        served += 1
        judge, matcher = jsonschema_rs.Draft202012Validator(schema), matcher_of(grammar)
        for value in VALUES:
            taken, valid = Search(list).takes(matcher, value), judge.is_valid(value)
            assert valid or not taken, (schema, value)
            if valid and not taken:
                narrower.append((schema, value))
        for _ in range(3):
            text = walk(grammar, schemas.choices)
            if text is not None:
                walked += 1
                assert judge.is_valid(json.loads(text)), (schema, text)
    assert served > 30
    assert walked > 30
    assert len(narrower) <= 3, narrower


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"enum": ["a", "a"]}, [["a"]], [["a", "a"]]),
        ({"enum": [1, 1.0, True]}, [[1, True]], [[1, 1], [1, 1.0]]),
        ({"enum": [0, -0.0, False]}, [[0, False]], [[0, 0]]),
    ],
)
def test_a_value_that_is_listed_twice_is_one(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    grammar = grammar_of({"type": "array", "items": schema, "uniqueItems": True})
    assert grammar is not None
    assert all(Search(list).takes(matcher_of(grammar), value) for value in valid)
    assert not any(Search(list).takes(matcher_of(grammar), value) for value in invalid)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "string",
            "not": {"type": "string"},
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "string"}},
        },
        {"not": True, "$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
    ],
)
def test_nothing_that_is_valid_beside_a_reference_is_refused(schema: Any) -> None:
    assert grammar_of(schema) is None


def test_what_stands_beside_a_reference_proves_nothing_in_older_drafts() -> None:
    """There both of these may hold of a text, so it is no answer."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "oneOf": [{"maxLength": 2}, {"type": "object", "$ref": "#/definitions/a"}],
        "type": "string",
        "definitions": {"a": {"type": "string"}},
    }
    grammar = grammar_of(schema)
    assert grammar is None or not Search(list).takes(matcher_of(grammar), "a")
    del schema["$schema"]
    grammar = grammar_of(schema)
    assert grammar is not None
    assert Search(list).takes(matcher_of(grammar), "a")


@pytest.mark.parametrize(
    ("names", "valid", "invalid"),
    [
        ({"type": "boolean"}, [], ["a", "true"]),
        ({"type": "integer", "enum": ["a"]}, [], ["a"]),
        ({"enum": ["a", 1]}, ["a"], ["b", "1"]),
        ({"$ref": "#/$defs/color"}, ["red"], ["blue"]),
        ({"anyOf": [{"const": "a", "type": "string"}, {"$ref": "#/$defs/color"}]}, None, None),
        ({"anyOf": [{"const": "a", "type": "string"}, {"const": "b"}]}, ["a", "b"], ["c"]),
        ({"type": "string", "format": "uuid"}, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8", ""]),
        ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "a"]),
        ({"format": "int64", "minLength": 2}, ["ab"], ["a"]),
        ({"pattern": "^a+$", "maxLength": 2}, None, None),
    ],
)
def test_names_of_an_object(names: Any, valid: list[str] | None, invalid: list[str] | None) -> None:
    """As records of pydantic and zod have them: of an enumeration, a format, literals."""
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    grammar = grammar_of({**schema, "$defs": {"color": {"enum": ["red", "green"], "title": "Color"}}})
    assert (grammar is None) == (valid is None)
    for name in valid or ():
        assert grammar is not None
        assert Search(list).takes(matcher_of(grammar), {name: 1})
        assert not Search(list).takes(matcher_of(grammar), {name: "x"})
    for name in invalid or ():
        assert grammar is not None
        assert not Search(list).takes(matcher_of(grammar), {name: 1})


def test_items_that_a_list_does_not_name_are_unevaluated() -> None:
    """In the form of 2019-09."""
    grammar = grammar_of(
        {"type": "array", "items": [{"type": "null"}], "unevaluatedItems": {"type": "boolean"}}
    )
    assert grammar is not None
    assert Search(list).takes(matcher_of(grammar), [None, True])
    assert not Search(list).takes(matcher_of(grammar), [None, "a"])
