"""Sets of characters: sorted ranges of code points, each (first, last), that neither meet nor touch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

Ranges = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All of these."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def inverted(ranges: Ranges) -> Ranges:
    """All others; no halves of surrogate pairs."""
    found, at = [], 0
    for first, last in joined([*ranges, _SURROGATES]):
        if at < first:
            found.append((at, first - 1))
        at = last + 1
    if at <= LAST:
        found.append((at, LAST))
    return tuple(found)


def points(text: str) -> Ranges:
    """Of each character of a text."""
    return joined((ord(one), ord(one)) for one in text)


ANY = inverted(())
DIGITS: Ranges = ((48, 57),)
WORD = joined([(48, 57), (65, 90), (95, 95), (97, 122)])
SPACE = joined([*points("\t\n\x0b\x0c\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), (0x2000, 0x200A)])
LINE_ENDS = points("\n\r\u2028\u2029")


def contains(ranges: Ranges, point: int) -> bool:
    return any(first <= point <= last for first, last in ranges)


def parts_of(sets: Sequence[Ranges]) -> list[tuple[int, int]]:
    """All characters in ranges, each of which is in a set as a whole or not at all."""
    borders = {0, LAST + 1, _SURROGATES[0], _SURROGATES[1] + 1}
    for ranges in sets:
        for first, last in ranges:
            borders |= {first, last + 1}
    ordered = sorted(borders)
    pairs = itertools.pairwise(ordered)
    return [(first, after - 1) for first, after in pairs if first != _SURROGATES[0]]


def text_of(ranges: Ranges) -> str:
    """A class in Rust's notation.

    llguidance 1.9.1 takes one with all control characters for one that has quotes and backslashes, too: where
    it has not, this leaves out NUL.  (In a string; fewer are valid then, and none is that should not be.)"""
    if ranges == ANY:
        return "(?s:.)"
    if not all(contains(ranges, ord(one)) for one in '"\\') and all(
        contains(ranges, point) for point in range(32) if point != ord("\n")
    ):
        ranges = tuple((max(first, 1), last) for first, last in ranges)
    return "[" + "".join(_one(a) if a == b else f"{_one(a)}-{_one(b)}" for a, b in ranges) + "]"


def _one(point: int) -> str:
    character = chr(point)
    return character if character.isascii() and character.isalnum() else f"\\x{{{point:x}}}"
