"""Numbers at the edges: what the library is given holds for the exact ones, or the schema is refused."""

from __future__ import annotations

import json
import math
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from baton.grammar.checking import Checker
from baton.grammar.description import GrammarError, Json, Structure
from baton.grammar.numbers import _read, bounds
from tests.grammar.test_rewriting import matcher_of, walk

CHECKER = Checker({})
EDGES = [
    *(sign * (2**power + more) for power in (31, 53, 63, 64) for more in (-1, 0, 1, 7) for sign in (1, -1)),
    *(sign * 10**power for power in (15, 16, 17, 18, 19, 30, 300) for sign in (1, -1)),
    *(
        sign * one
        for one in (1e-300, 5e-324, 1e-16, 1e-7, 0.1, 0.3, 1e15, 1e16, 1e22, 1e300)
        for sign in (1, -1)
    ),
    1.7976931348623157e308,
    -0.0,
    0,
    1234567890123456789,
    123456789.123456789,
    9007199254740993,
]


def grammar_of(schema: Any) -> str | None:
    """None: it is refused, with a keyword and where it stands."""
    try:
        return CHECKER.check(
            Structure(Json({"type": "object", "properties": {"n": schema}, "required": ["n"]}))
        )
    except GrammarError as error:
        message = str(error)
        assert message.startswith("properties.n.") or "nsatisfiable" in message or "no text" in message, (
            message
        )
        return None


def takes(grammar: str, text: str) -> bool:
    matcher = matcher_of(grammar)
    data = list(f'{{"n": {text}}}'.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("type_", ["integer", "number"])
def test_no_answer_is_outside_of_its_bounds(type_: str) -> None:
    """Whatever the two are: a text that ends has a number between them, as exact as it is written."""
    choices, walked = random.Random(0), 0
    for _ in range(250):
        low, high = choices.choice(EDGES), choices.choice(EDGES)
        lower, upper = (
            choices.choice(["minimum", "exclusiveMinimum"]),
            choices.choice(["maximum", "exclusiveMaximum"]),
        )
        schema: dict[str, Any] = {"type": type_, lower: low, upper: high}
        if choices.random() < 0.3:
            del schema[choices.choice([lower, upper])]
        grammar = grammar_of(schema)
        if grammar is None:
            continue
        for _ in range(4):
            text = walk(grammar, choices)
            if text is None:
                continue
            walked += 1
            number = Fraction(json.loads(text, parse_float=Fraction)["n"])
            assert type_ == "number" or number.denominator == 1
            if lower in schema:
                assert number > Fraction(repr(low)) or (
                    lower == "minimum" and number == Fraction(repr(low))
                ), (schema, text)
            if upper in schema:
                assert number < Fraction(repr(high)) or (
                    upper == "maximum" and number == Fraction(repr(high))
                ), (schema, text)
    assert walked > 100


def test_bounds_only_move_inwards() -> None:
    choices = random.Random(1)
    for _ in range(5000):
        value: int | float = choices.choice(EDGES)
        if isinstance(value, int):
            value += choices.randint(-1000, 1000)
        keyword = choices.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
        types = choices.choice([{"integer"}, {"integer", "number"}])
        try:
            found = bounds({keyword: value}, types, "")
        except GrammarError:
            assert abs(value) > 2**53
            continue
        ((name, moved),) = found.items()
        moved = _read(moved) if isinstance(moved, float) else moved
        assert float(moved) == moved
        sign = 1 if "inimum" in keyword else -1
        assert Fraction(moved) * sign >= Fraction(value) * sign
        if keyword != name:
            assert Fraction(moved) * sign > Fraction(value) * sign
        if abs(value) > 2**53 or 0 < abs(value) < 1e-15:
            continue
        if types == {"integer"}:
            beyond = Fraction(value) * sign + ("exclusive" in keyword and Fraction(value).denominator == 1)
            assert (name, moved * sign) == ("minimum" if sign > 0 else "maximum", math.ceil(beyond))
        else:
            assert name == keyword
            assert abs(moved - value) <= 4 * math.ulp(value)


@pytest.mark.parametrize(
    "number", [1234567890123456789, 9007199254740993, 2**63 - 1, 2**64 + 1, 10**30, 1e300, 5e-324]
)
def test_a_constant_is_kept_or_refused(number: int | float) -> None:
    for schema in (
        {"const": number},
        {"enum": [1, number]},
        {"minimum": number, "maximum": number, "type": "integer"},
    ):
        grammar = grammar_of(schema)
        if grammar is None:
            continue
        text = walk(grammar, random.Random(0))
        assert text is not None
        assert json.loads(text)["n"] in (1, number)


@pytest.mark.parametrize(
    "number", [0, 1, -7, 2**53, -(2**53), 2**53 + 2, 2**60, 10**15, 0.1, 0.30000000000000004, 1.5e10]
)
def test_constants_that_doubles_hold_are_kept(number: int | float) -> None:
    grammar = grammar_of({"const": number})
    if abs(number) > 10**17:
        assert grammar is None
        return
    assert grammar is not None
    assert takes(grammar, json.dumps(int(number) if number == number // 1 else number))
    assert not takes(grammar, json.dumps(number + 1))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        {"type": "integer", "format": "int64", "minimum": -(2**63)},
        {"type": "integer", "maximum": 10**40},
    ],
)
def test_the_ranges_of_types_ask_for_nothing(schema: dict[str, Any]) -> None:
    grammar = grammar_of(schema)
    assert grammar is not None
    assert takes(grammar, "0")
    assert takes(grammar, "1234567890123456")


@pytest.mark.parametrize(
    ("multiple", "valid", "invalid"),
    [
        (1, ["3"], []),
        (0.01, ["0.25", "3", "1.1"], ["0.255"]),
        (7, ["0", "14", "-7"], ["15"]),
        (2.5, ["5", "7.5"], ["6"]),
        (0.07, None, None),
        (1e-300, None, None),
        (1e300, None, None),
        (123456789, None, None),
        (0, None, None),
        (-1, None, None),
        (math.inf, None, None),
    ],
)
def test_multiples(multiple: float, valid: list[str] | None, invalid: list[str] | None) -> None:
    grammar = grammar_of({"type": "number", "multipleOf": multiple})
    assert (grammar is None) == (valid is None)
    if grammar is not None:
        assert [text for text in valid or () if not takes(grammar, text)] == []
        assert [text for text in invalid or () if takes(grammar, text)] == []


def test_multiples_that_meet_are_held_together_or_refused() -> None:
    ok = {"type": "integer", "multipleOf": 4, "allOf": [{"multipleOf": 6}]}
    grammar = grammar_of(ok)
    assert grammar is not None
    assert takes(grammar, "24")
    assert not takes(grammar, "8")
    with pytest.raises(GrammarError, match="multipleOf"):
        CHECKER.check(
            Structure(Json({"type": "number", "multipleOf": 60001, "allOf": [{"multipleOf": 0.0001}]}))
        )


LONG = [
    0.9820725659870917,
    -0.00010828090007240855,
    123456789.12345679,
    8.409428475157521e-10,
    -3.587020163385988e-08,
    9007199254740991.0,
    -8809580624282383.0,
    799948035030196.2,
]
"""Of sixteen digits and more, which the library reads as their neighbours, or shows otherwise."""


def shown(number: float) -> str:
    return format(Decimal(repr(number)), "f")


@pytest.mark.parametrize("number", [*LONG, 0.1, 1 / 3, 2.5])
def test_a_number_of_many_digits_is_that_number(number: float) -> None:
    """As a constant and as a bound, or it is refused: its neighbours are outside."""
    beside = [math.nextafter(number, math.inf), math.nextafter(number, -math.inf)]
    constant = grammar_of({"const": number})
    if constant is not None:
        assert takes(constant, shown(number).removesuffix(".0"))
        assert not any(takes(constant, shown(other)) for other in beside)
    within = grammar_of({"type": "number", "minimum": number, "maximum": number})
    assert within is None or not any(takes(within, shown(other)) for other in beside)
    for bound, step in (("Minimum", -math.inf), ("Maximum", math.inf)):
        grammar = grammar_of({"type": "number", f"exclusive{bound}": number})
        assert grammar is not None
        assert not takes(grammar, shown(number))
        assert not takes(grammar, shown(math.nextafter(number, step)))
        farther = number + (abs(number) if bound == "Minimum" else -abs(number))
        assert takes(grammar, shown(farther).removesuffix(".0"))


def test_most_numbers_of_many_digits_can_be_constants() -> None:
    choices = random.Random(3)
    numbers = [choices.uniform(-1000, 1000) for _ in range(60)]
    kept = [one for one in numbers if grammar_of({"const": one}) is not None]
    assert len(kept) > 40
    for number in kept:
        grammar = grammar_of({"enum": [[number], {"a": number}]})
        assert grammar is not None
        assert takes(grammar, f"[{shown(number)}]")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ["1"], ["0"]),
        ({"type": "number", "maximum": 1.5, "exclusiveMaximum": True}, ["1.4"], ["1.5"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, ["3"], ["2"]),
        ({"type": "integer", "exclusiveMinimum": 2**53, "multipleOf": 2}, [], [str(2**53)]),
        ({"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 2}, ["1"], ["0", "2"]),
        ({"type": ["integer", "null"], "minimum": 1.0, "maximum": 3.0}, ["1", "3"], ["0", "4"]),
    ],
)
def test_bounds_in_every_form(schema: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    """Those of draft 4 as well, which says with `true` that the other bound is excluded."""
    grammar = grammar_of(schema)
    assert grammar is not None
    assert [text for text in valid if not takes(grammar, text)] == []
    assert [text for text in invalid if takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": math.nan}, "const"),
        ({"enum": [1, {"a": math.inf}]}, r"enum\[1\]\.a"),
        ({"minProperties": math.nan, "properties": {"a": {}}}, "minProperties"),
        ({"minProperties": math.inf, "properties": {"a": {}}}, "minProperties"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "minimum: the keyword minimum"),
    ],
)
def test_what_is_no_number_of_an_answer_is_refused_by_its_place(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(GrammarError, match=f"properties.n.{named}"):
        CHECKER.check(Structure(Json({"type": "object", "properties": {"n": schema}})))


def test_bounds_of_what_is_no_number_ask_for_nothing() -> None:
    grammar = grammar_of({"type": "string", "minimum": 10**30, "maximum": -(10**30)})
    assert grammar is not None
    assert takes(grammar, '"a"')
