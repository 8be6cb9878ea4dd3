"""Patterns of schemas: from ECMA 262's notation to that of Rust's `regex`, which llguidance reads.

A pattern is read into a tree (`regexes.py`), in which each character is a set of code points, so nothing
is left that means something else in Rust.  What cannot be had of it is refused: references to groups,
boundaries of words, what looks back, and what looks ahead from within.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.grammar.automata import complement
from baton.grammar.characters import (
    ANY,
    DIGITS,
    LINE_ENDS,
    SPACE,
    WORD,
    Ranges,
    inverted,
    joined,
    points,
    text_of,
)
from baton.grammar.description import GrammarError
from baton.grammar.limits import MAX_COUNT
from baton.grammar.regexes import (
    EMPTY,
    Ahead,
    Begin,
    Chain,
    Characters,
    Either,
    End,
    Node,
    NotExpressible,
    Repeated,
    Way,
    alternatives,
    longest_count,
    ways,
    written,
)

_CLASSES = {
    "d": DIGITS,
    "D": inverted(DIGITS),
    "w": WORD,
    "W": inverted(WORD),
    "s": SPACE,
    "S": inverted(SPACE),
}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_HEX = re.compile(r"u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})")
_DEEPEST = 100


class Rust(str):
    """An expression that is in Rust's notation already."""

    __slots__ = ()


def translated(pattern: str, where: str) -> list[list[str]]:
    """Alternatives; each is all of these expressions, in Rust's notation.  Raises `GrammarError`."""
    if isinstance(pattern, Rust):
        return [[str(pattern)]]
    return _expressions(_ways(pattern, where), where)


def counted_in(pattern: str, where: str) -> int:
    """How often something is repeated in it at most.  Raises `GrammarError`."""
    return longest_count(_Reader(pattern, where).read())


def single(pattern: str, where: str) -> str:
    """One expression for it.  Raises `GrammarError`."""
    node = _one_node(_ways(pattern, where), where)
    return _searched(node)


def others(pattern: str, where: str) -> Rust | None:
    """An expression for all strings in which the pattern is not found; None: there are none.  Raises
    `GrammarError`."""
    if isinstance(pattern, Rust):
        raise GrammarError(f"{where}: was turned round already")
    try:
        found = complement(_one_node(_ways(pattern, where), where))
    except NotExpressible as error:
        raise GrammarError(
            f"{where}: the keyword not cannot be enforced with this pattern: {error}"
        ) from None
    return None if found is None else Rust(_searched(found))


def without(texts: Sequence[str]) -> Rust:
    """An expression for all strings but these."""
    return Rust(f"^(?:{_without(sorted(set(texts)))})$")


def _without(texts: Sequence[str]) -> str:
    rest: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rest.setdefault(text[0], []).append(text[1:])
    other = text_of(inverted(points("".join(rest))))
    options = [f"{other}(?s:.)*"]
    for first, behind in rest.items():
        options.append(f"{text_of(points(first))}(?:{_without(behind)})")
    if "" not in texts:
        options.append("")
    return "|".join(options)


def _ways(pattern: str, where: str) -> list[Way]:
    node = _Reader(pattern, where).read()
    if longest_count(node) > MAX_COUNT:
        raise GrammarError(f"{where}: repeats something more than {MAX_COUNT} times")
    try:
        return ways(node)
    except NotExpressible as error:
        raise GrammarError(f"{where}: {error} is not supported in a pattern") from None


def _expressions(found: list[Way], where: str) -> list[list[str]]:
    plain = [way.node for way in found if not way.ahead]
    result = [[_searched(alternatives(plain))]] if plain else []
    for way in found:
        if way.ahead:
            more = [_ahead(node, positive, where) for node, positive in way.ahead]
            if None not in more:
                result.append([_searched(way.node), *(one for one in more if one is not None)])
    return result


def _ahead(node: Node, positive: bool, where: str) -> str | None:
    """None: nothing is like that."""
    try:
        found = node if positive else complement(node)
    except NotExpressible as error:
        raise GrammarError(f"{where}: (?! is not supported in a pattern: {error}") from None
    return None if found is None else _searched(found)


def _one_node(found: list[Way], where: str) -> Node:
    if any(way.ahead for way in found):
        raise GrammarError(f"{where}: looking ahead is not supported here")
    if not found:
        raise GrammarError(f"{where}: no text matches it")
    return alternatives([way.node for way in found])


def _searched(node: Node) -> str:
    """A whole string, as an expression that is searched: without what it begins and ends with, where that is
    anything."""
    parts = node.parts if isinstance(node, Chain) else (node,)
    begins, ends = True, True
    if parts and parts[0] == _ANY_TEXT:
        parts, begins = parts[1:], False
    if parts and parts[-1] == _ANY_TEXT:
        parts, ends = parts[:-1], False
    text = written(Chain(parts))
    return f"{'^' * begins}{text}{'$' * ends}"


_ANY_TEXT = Repeated(Characters("(?s:.)", ANY), 0, None)


class _Reader:
    """Of one pattern."""

    def __init__(self, pattern: str, where: str) -> None:
        self._pattern, self._where = pattern, where
        self._at, self._depth = 0, 0

    def read(self) -> Node:
        node = self._options()
        if self._at < len(self._pattern):
            raise GrammarError(f"{self._where}: a ) without its group")
        return node

    def _options(self) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise GrammarError(f"{self._where}: its groups are more than {_DEEPEST} deep")
        options = [self._chain()]
        while self._take("|"):
            options.append(self._chain())
        self._depth -= 1
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _chain(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._counted(self._atom()))
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _counted(self, node: Node) -> Node:
        count = _COUNT.match(self._pattern, self._at)
        if count:
            self._at = count.end()
            least = int(count[1])
            most = least if count[2] is None else int(count[3]) if count[3] else None
        elif self._at < len(self._pattern) and self._pattern[self._at] in "*+?":
            sign = self._pattern[self._at]
            self._at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        else:
            return node
        if isinstance(node, Begin | End):
            raise GrammarError(f"{self._where}: an anchor that is repeated is not supported in a pattern")
        if most is not None and most < least:
            raise GrammarError(f"{self._where}: a repetition's numbers are out of order")
        self._take("?")  # (how much it prefers makes no difference to what it matches)
        if self._at < len(self._pattern) and (
            self._pattern[self._at] in "*+?" or _COUNT.match(self._pattern, self._at)
        ):
            raise GrammarError(f"{self._where}: nothing to repeat at character {self._at}")
        return EMPTY if most == 0 else Repeated(node, least, most)

    def _atom(self) -> Node:
        character = self._pattern[self._at]
        self._at += 1
        match character:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case "^":
                return Begin()
            case "$":
                return End()
            case ".":
                return _characters(inverted(LINE_ENDS))
            case "*" | "+" | "?":
                raise GrammarError(f"{self._where}: nothing to repeat at character {self._at - 1}")
        return self._literal(character)

    def _literal(self, character: str) -> Node:
        if 0xD800 <= ord(character) < 0xE000:
            raise GrammarError(f"{self._where}: half of a surrogate pair is not supported in a pattern")
        return _characters(points(character))

    def _group(self) -> Node:
        rest = self._pattern[self._at :]
        ahead = None
        if rest.startswith("?"):
            named = re.match(r"\?<[A-Za-z_$][\w$]*>", rest)
            if rest.startswith(("?=", "?!")):
                ahead = rest[1] == "="
                self._at += 2
            elif rest.startswith("?:"):
                self._at += 2
            elif named:
                self._at += named.end()
            else:
                raise GrammarError(f"{self._where}: ({rest[:2]} is not supported in a pattern")
        node = self._options()
        if not self._take(")"):
            raise GrammarError(f"{self._where}: unclosed group")
        return node if ahead is None else Ahead(node, ahead)

    def _escape(self) -> Node:
        found = self._escaped(in_class=False)
        return found if isinstance(found, Characters) else _characters(found)

    def _escaped(self, *, in_class: bool) -> Ranges | Characters:
        """Behind a backslash."""
        if self._at == len(self._pattern):
            raise GrammarError(f"{self._where}: ends with a backslash")
        escaped = self._pattern[self._at]
        self._at += 1
        if escaped in _CLASSES:
            return _CLASSES[escaped]
        if escaped == "b" and in_class:
            return points("\b")
        if escaped in _CONTROLS and not self._pattern[self._at : self._at + 1].isdigit():
            return ((_CONTROLS[escaped], _CONTROLS[escaped]),)
        if escaped in "ux":
            found = _HEX.match(self._pattern, self._at - 1)
            if found:
                self._at = found.end()
                return self._code(int(found[1] or found[2] or found[3], 16))
        if escaped == "c" and self._pattern[self._at : self._at + 1].isalpha():
            self._at += 1
            return self._code(ord(self._pattern[self._at - 1]) % 32)
        if escaped in "pP" and not in_class:
            found = re.compile(r"\{[A-Za-z_=]{1,60}\}").match(self._pattern, self._at)
            if found:
                self._at = found.end()
                return Characters(f"\\{escaped}{found[0]}", ())
        if escaped.isalnum():
            raise GrammarError(f"{self._where}: \\{escaped} is not supported in a pattern")
        return points(escaped)

    def _code(self, point: int) -> Ranges:
        if 0xD800 <= point < 0xDC00:
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._pattern, self._at)
            if low:
                self._at = low.end()
                point = 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= point < 0xE000 or point > 0x10FFFF:
            raise GrammarError(f"{self._where}: half of a surrogate pair is not supported in a pattern")
        return ((point, point),)

    def _class(self) -> Node:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            first = self._member()
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                last = self._member()
                if (
                    len(first) == 1
                    and len(last) == 1
                    and first[0][0] == first[0][1]
                    and last[0][0] == last[0][1]
                ):
                    if first[0][0] > last[0][0]:
                        raise GrammarError(f"{self._where}: a range of a class is out of order")
                    ranges.append((first[0][0], last[0][0]))
                    continue
                ranges += [*points("-"), *last]
            ranges += first
        found = joined(ranges)
        if negated:
            found = inverted(found)
        if not found:
            raise GrammarError(f"{self._where}: an empty class is not supported")
        return _characters(found)

    def _member(self) -> Ranges:
        if self._at == len(self._pattern):
            raise GrammarError(f"{self._where}: unclosed class")
        character = self._pattern[self._at]
        self._at += 1
        if character == "\\":
            found = self._escaped(in_class=True)
            assert not isinstance(found, Characters)
            return found
        self._literal(character)
        return points(character)

    def _take(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True


def _characters(ranges: Ranges) -> Characters:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        character = chr(ranges[0][0])
        return Characters(re.escape(character) if character.isprintable() else text_of(ranges), ranges)
    surrogates_out = tuple(one for one in inverted(inverted(ranges)))
    return Characters(text_of(surrogates_out), surrogates_out)
