"""Regular expressions of ECMA 262 as trees, without what a matcher of whole strings does not have.

An expression is *searched* in a string, and `^`, `$` and what looks ahead from the beginning speak of the
whole of it.  `ways` makes alternatives of it in which an anchor stands at an end only, or stands nowhere
because nothing can match there:

    a|^b$        →  .*a.*  or  b
    (^|\\s)x      →  x.*  or  .*\\sx.*
    ^(?=.*a)b    →  b.*, if it also matches .*a.*

`complement` is the expression for all other strings: its automaton's, turned round (`automata.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.grammar.characters import ANY, Ranges

_MOST_WAYS = 64


class NotExpressible(Exception):
    """Why there is no such expression."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One of these."""

    text: str
    """In Rust's notation."""
    ranges: Ranges = field(compare=False)


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of these."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """Again and again."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Begin:
    """`^`."""


@dataclass(frozen=True, slots=True)
class End:
    """`$`."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What follows matches this, or does not."""

    node: Node
    positive: bool


Node = Characters | Chain | Either | Repeated | Begin | End | Ahead
EMPTY = Chain(())
ANYTHING = Repeated(Characters("(?s:.)", ANY), 0, None)


@dataclass(frozen=True, slots=True)
class Way:
    """A whole string that matches `node`, and each of `ahead` as it says."""

    node: Node
    ahead: tuple[tuple[Node, bool], ...] = ()


def ways(node: Node) -> list[Way]:
    """The whole strings in which the expression is found.  Raises `NotExpressible`."""
    found: list[Way] = []
    for path in _paths(node):
        way = _way(path)
        if way is not None and way not in found:
            found.append(way)
    return found


def written(node: Node) -> str:
    """In Rust's notation."""
    match node:
        case Characters(text):
            return text
        case Chain(parts):
            return "".join(
                f"(?:{written(one)})" if isinstance(one, Either) else written(one) for one in parts
            )
        case Either(options):
            return "|".join(map(written, options))
        case Repeated(inner, least, most):
            text = written(inner)
            if not isinstance(inner, Characters):
                text = f"(?:{text})"
            counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}
            exact = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
            return text + counts.get((least, most), exact)
    raise TypeError(f"{node} is left")


def is_nullable(node: Node) -> bool:
    """Whether it matches the empty string."""
    match node:
        case Characters():
            return False
        case Chain(parts):
            return all(map(is_nullable, parts))
        case Either(options):
            return any(map(is_nullable, options))
        case Repeated(inner, least, _):
            return least == 0 or is_nullable(inner)
    return True


def longest_count(node: Node) -> int:
    """The largest product of counts of repetitions in each other."""
    match node:
        case Chain(parts) | Either(parts):
            return sum((longest_count(one) for one in parts if not isinstance(one, Characters)), 0) or 1
        case Repeated(inner, least, most):
            return max(least, most or 0, 1) * longest_count(inner)
        case Ahead(inner):
            return longest_count(inner)
    return 1


def _is_plain(node: Node) -> bool:
    match node:
        case Begin() | End() | Ahead():
            return False
        case Chain(parts) | Either(parts):
            return all(map(_is_plain, parts))
        case Repeated(inner):
            return _is_plain(inner)
    return True


Path = list[Node]


def _paths(node: Node) -> list[Path]:
    """The expression as alternatives, each a chain in which what is not plain stands by itself."""
    if _is_plain(node):
        return [[node]]
    match node:
        case Chain(parts):
            found: list[Path] = [[]]
            for part in parts:
                found = [[*before, *after] for before in found for after in _paths(part)]
                _check(found)
            return found
        case Either(options):
            return _check([path for option in options for path in _paths(option)])
        case Repeated(inner, least, most):
            return _check(_repeated(_paths(inner), least, most))
    return [[node]]


def _repeated(paths: list[Path], least: int, most: int | None) -> list[Path]:
    if most is not None and most <= 3:
        found: list[Path] = []
        for count in range(least, most + 1):
            for chosen in itertools.product(paths, repeat=count):
                found.append([one for path in chosen for one in path])
                _check(found)
        return found
    if least > 1 or most is not None:
        raise NotExpressible("an anchor in a repetition")
    plain = [Chain(tuple(path)) for path in paths if all(map(_is_plain, path))]
    begins = [path for path in paths if _has(path, Begin) and not _has(path, End, Ahead)]
    ends = [path for path in paths if _has(path, End) and not _has(path, Begin, Ahead)]
    if len(plain) + len(begins) + len(ends) < len(paths):
        raise NotExpressible("an anchor in a repetition")
    # (Nothing comes before the beginning, and nothing after the end: they are in its first and last turn.)
    middle: Path = [Repeated(Either(tuple(plain)), 0, None)] if plain else []
    once: Path = [Repeated(Either(tuple(plain)), 1, None)] if plain else []
    found = [[*first, *middle, *last] for first in [[], *begins] for last in [[], *ends] if first or last]
    if plain:
        found.append(once)
    return found if least else [*found, []]


def _has(path: Path, *kinds: type) -> bool:
    return any(isinstance(one, kinds) for one in path)


def _check(found: list[Path]) -> list[Path]:
    if len(found) > _MOST_WAYS:
        raise NotExpressible("too many alternatives with anchors")
    return found


def _way(path: Path) -> Way | None:
    """None: nothing matches it."""
    begin = max((i for i, one in enumerate(path) if isinstance(one, Begin)), default=-1)
    end = next((i for i, one in enumerate(path) if isinstance(one, End)), len(path))
    outside = [*path[: max(begin, 0)], *path[end + 1 :]] if begin < end else path
    if any(isinstance(one, Ahead) for one in outside):
        raise NotExpressible("looking ahead beside an anchor")
    if not all(isinstance(one, Begin | End) or is_nullable(one) for one in outside):
        return None
    if begin > end:
        return Way(EMPTY)
    inside = path[begin + 1 : end]
    ahead: list[tuple[Node, bool]] = []
    while inside and isinstance(inside[0], Ahead):
        if begin < 0:
            raise NotExpressible("looking ahead, but from the beginning,")
        ahead.append((_looked(inside[0].node), inside[0].positive))
        inside = inside[1:]
    if any(isinstance(one, Ahead) for one in inside):
        raise NotExpressible("looking ahead, but from the beginning,")
    parts: list[Node] = [] if begin >= 0 else [ANYTHING]
    parts += inside
    if end == len(path):
        parts.append(ANYTHING)
    return Way(Chain(tuple(parts)), tuple(ahead))


def _looked(node: Node) -> Node:
    """What a whole string matches from whose beginning this is seen."""
    found = ways(Chain((Begin(), node)))
    if any(way.ahead for way in found):
        raise NotExpressible("looking ahead from what looks ahead")
    return alternatives([way.node for way in found])


def alternatives(nodes: Sequence[Node]) -> Node:
    """One of them; of none nothing matches."""
    return nodes[0] if len(nodes) == 1 else Either(tuple(nodes))
