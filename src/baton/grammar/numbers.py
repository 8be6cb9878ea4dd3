"""Numbers of schemas, before the grammar library sees them.

The library holds each as a double, and its integers have 64 bits.  Up to 2^53 both are exact.  Beyond, a
bound is moved *inwards*, to the next number that both hold: every answer is still valid, and some valid
ones will not be given.  Where nothing is left to choose from, or a constant is no such number, the schema
is refused.

It also reads a number of 16 digits or more as its neighbour, at times.  So what is written is the number that
it reads as the right one, and whole numbers without a point.

| given | becomes |
| --- | --- |
| a bound up to 2^53 | itself |
| one of integers up to 10^17 | the next double inwards, itself included |
| one that is farther out on its own side (a minimum of -2^63) | -10^17, or -2^53 where fractions may be |
| one that is farther out on the other side (a minimum of 10^30) | refused |
| one nearer to 0 than 10^-15 | the next of 0 and ±10^-15 inwards |
| of integers: a fraction, or an integer that is excluded | the next integer, included |
| an integer that is excluded, less than 1 from the other bound | the next number, included |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from baton.grammar.description import GrammarError
from baton.grammar.limits import MAX_DEPTH

EXACT = 2**53
_FARTHEST = 10**17
_NEAREST = 1e-15
_MOST_COEFFICIENT, _MOST_FRACTION = 65_535, 6
KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def bounds(schema: Mapping[str, Any], types: Collection[str], place: str) -> dict[str, Any]:
    """The schema's keywords of numbers as the library keeps them.  `types`: of values that they are for.
    Raises `GrammarError`."""
    found: dict[str, Any] = {}
    whole = "number" not in types
    for keyword, sign in (("minimum", 1), ("maximum", -1)):
        exclusive_keyword = "exclusive" + keyword.capitalize()
        inclusive, exclusive = schema.get(keyword), schema.get(exclusive_keyword)
        each: list[tuple[str, Any, bool]] = [
            (keyword, inclusive, False),
            (exclusive_keyword, exclusive, True),
        ]
        if isinstance(exclusive, bool):  # (draft 4)
            each = [(keyword, inclusive, exclusive)]
        for key, value, is_exclusive in each:
            if key not in schema:
                continue
            if not is_number(value) or not math.isfinite(value):
                raise GrammarError(f"{place}{key}: must be a number")
            if not types:
                continue
            moved, still = _inwards(value, sign, whole, is_exclusive)
            if moved is None:
                raise GrammarError(
                    f"{place}{key}: the keyword {key} cannot be enforced with {_shown(value)}: numbers may "
                    f"have up to {_FARTHEST if whole else EXACT:.0e} on either side"
                )
            name = exclusive_keyword if still else keyword
            if name not in found or (moved - found[name]) * sign > 0:
                found[name] = moved
    _open(found)
    _check_order(found, schema, place)
    for name, bound in found.items():
        found[name] = _written_inwards(bound, 1 if name.endswith("inimum") else -1)
    if "multipleOf" in schema:
        multiple = _multiple(schema["multipleOf"], whole, place)
        if multiple is not None:
            found["multipleOf"] = multiple
    return found


def _open(found: dict[str, Any]) -> None:
    """An integer that is excluded, with the other bound less than 1 away: the library would take it for
    allowed, so the bound is the next number."""
    low = found.get("exclusiveMinimum", found.get("minimum"))
    high = found.get("exclusiveMaximum", found.get("maximum"))
    if low is None or high is None or not 0 < high - low < 1:
        return
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        value = found.get(name)
        if value is not None and value == value // 1:
            del found[name]
            step = max(_NEAREST, 4 * math.ulp(value))
            inclusive = name.removeprefix("exclusive").lower()
            moved = value + sign * step
            found[inclusive] = max(moved, found.get(inclusive, moved), key=lambda one: one * sign)


def _check_order(found: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> None:
    """Raises `GrammarError` if bounds that were moved leave nothing between them."""
    low = found.get("exclusiveMinimum", found.get("minimum"))
    high = found.get("exclusiveMaximum", found.get("maximum"))
    if low is None or high is None or low <= high:
        return
    given = [(name, schema[name]) for name in KEYWORDS[:4] if is_number(schema.get(name))]
    moved = [(name, value) for name, value in given if abs(value) > EXACT or 0 < abs(value) < _NEAREST]
    if moved:
        name, value = moved[0]
        raise GrammarError(
            f"{place}{name}: the keyword {name} cannot be enforced with {_shown(value)}: doubles hold no "
            "number that is within these bounds"
        )


def written(value: Any) -> Any:
    """A constant as it is written for the library, so that it reads this one.  None within it: it has no
    such writing."""
    if isinstance(value, Mapping):
        return {name: written(one) for name, one in value.items()}
    if isinstance(value, list):
        return [written(one) for one in value]
    if not isinstance(value, float):
        return value
    found = _writing(value)
    assert found is not None  # (`check_constant`)
    return found


def _writing(value: int | float) -> int | float | None:
    if value == value // 1 and abs(value) < 2**63:
        return int(value)
    if isinstance(value, int):
        return value
    for way in (-math.inf, math.inf):
        one = value
        for _ in range(4):
            if _read(one) == value:
                return None if _has_two_writings(value) else one
            one = math.nextafter(one, way)
    return None


def _has_two_writings(value: float) -> bool:
    """Whether it is in the middle of two decimals of the fewest digits: the library shows the other one."""
    shown = Decimal(repr(value))
    other = (2 * Decimal(value) - shown).normalize()
    return other != shown and len(other.as_tuple().digits) <= len(shown.as_tuple().digits)


def _written_inwards(value: int | float, sign: int) -> int | float:
    """The bound, or the next number inwards that has a writing."""
    while (found := _writing(value)) is None:
        value = math.nextafter(value, sign * math.inf)
    return found


def _read(value: float) -> float:
    """The double that the library reads where this one is written: digits as an integer, times or through a
    power of ten, each rounded."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    found, left = float(int("".join(map(str, digits)))), int(exponent)
    while left < -308:
        found, left = found / 1e308, left + 308
    found = found * float(f"1e{left}") if left >= 0 else found / float(f"1e{-left}")
    return -found if sign else found


def _inwards(value: int | float, sign: int, whole: bool, exclusive: bool) -> tuple[int | float | None, bool]:
    """(the bound that the library keeps, whether it is still exclusive); `sign`: 1 for a lower bound."""
    farthest = _FARTHEST if whole else EXACT
    if whole and exclusive:
        value, exclusive = math.floor(value) + 1 if sign > 0 else math.ceil(value) - 1, False
    elif whole:
        value = math.ceil(value) if sign > 0 else math.floor(value)
    if not value:
        return 0, exclusive  # (the library takes -0.0 for less than 0)
    if abs(value) < _NEAREST:
        return (sign * _NEAREST if value * sign > 0 else 0), False
    if abs(value) <= EXACT:
        return value, exclusive
    if value * sign < -farthest:
        return -sign * farthest, False
    if value * sign > farthest:
        return None, False
    exact = Fraction(value)
    moved = float(value)
    while Fraction(moved) * sign < exact * sign or (exclusive and Fraction(moved) == exact):
        moved = math.nextafter(moved, sign * math.inf)
    if abs(moved) > farthest:
        return None, False
    return int(moved), False


def _multiple(value: int | float, whole: bool, place: str) -> int | float | None:
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise GrammarError(f"{place}multipleOf: must be a number above 0")
    exact = Decimal(repr(value)).normalize()
    if whole and exact and (1 / Fraction(exact)).denominator == 1:
        return None  # (every integer is one)
    coefficient, exponent = int("".join(map(str, exact.as_tuple().digits))), int(exact.as_tuple().exponent)
    if exponent > 0:
        coefficient, exponent = coefficient * 10 ** min(exponent, 20), 0
    # (The library shifts the double until it is whole, and would go on with what that is.)
    shifted, shifts = float(value), 0
    while shifted % 1 and shifts <= _MOST_FRACTION:
        shifted, shifts = shifted * 10, shifts + 1
    exact_for_library = shifted == coefficient and shifts == -exponent
    if coefficient > _MOST_COEFFICIENT or -exponent > _MOST_FRACTION or not exact_for_library:
        raise GrammarError(
            f"{place}multipleOf: the keyword multipleOf cannot be enforced with {_shown(value)}: it may have "
            f"{_MOST_FRACTION} digits behind the point, and be {_MOST_COEFFICIENT} without it"
        )
    return value


def check_multiples(multiples: Collection[int | float]) -> None:
    """Of a schema that combines schemas: whether the library holds their least common multiple.  Raises
    `GrammarError`."""
    exact = [Fraction(Decimal(repr(value))) for value in set(multiples)]
    if len(exact) < 2:
        return
    unit = math.lcm(*(value.denominator for value in exact))
    scale = 10 ** len(str(unit))
    whole = [int(value * scale) for value in exact]
    if math.lcm(*whole) * max(whole) >= 2**32:
        raise GrammarError("multipleOf: the keyword multipleOf cannot be enforced with such different values")


def check_constant(value: Any, place: str, depth: int = 0) -> None:
    """Of `const` and `enum`.  Raises `GrammarError`."""
    if depth > MAX_DEPTH:
        raise GrammarError(f"{place[:60]}: values may be {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        for name, one in value.items():
            check_constant(one, f"{place}.{name}", depth + 1)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            check_constant(one, f"{place}[{number}]", depth + 1)
    elif is_number(value) and value:
        if not math.isfinite(value):
            raise GrammarError(f"{place}: {value} is no number of JSON")
        if _NEAREST <= abs(value) <= EXACT and _writing(value) is not None:
            return
        if (
            not _NEAREST <= abs(value) <= _FARTHEST
            or Fraction(float(value)) != value
            or _writing(value) is None
        ):
            keyword = place.rpartition(".")[2].partition("[")[0]
            raise GrammarError(
                f"{place}: the keyword {keyword} cannot be enforced with {_shown(value)}: integers above "
                "2^53 may be lost in doubles; give it as a text"
            )


def size(value: Any, place: str, most: int, *, wrong: str = "") -> int:
    """A count: of characters, items, names.  Raises `GrammarError` if it is none, or above `most`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GrammarError(f"{place}: must be an integer, not negative")
    if value > most:
        keyword = place.rpartition(".")[2]
        raise GrammarError(
            f"{place}: the keyword {keyword} cannot be enforced with {_shown(value)}: at most {most} are "
            f"possible{wrong}"
        )
    return value


def _shown(value: Any) -> str:
    text = repr(value) if abs(value) < 10**40 else f"{Decimal(value):.3e}"
    return text[:60]
