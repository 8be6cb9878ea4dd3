"""The complement of a regular expression: its automaton's, written as an expression again.

A deterministic automaton of the expression is made, its accepting states are exchanged, and its states are
taken out one after the other, each written into the ways around it.  Both are of a bounded size.
"""

from __future__ import annotations

from baton.grammar.characters import Ranges, joined, parts_of, text_of
from baton.grammar.regexes import (
    EMPTY,
    Chain,
    Characters,
    Either,
    Node,
    NotExpressible,
    Repeated,
)

_MOST_STATES = 60
_MOST_NODES = 4000
_MOST_COUNT = 40


def complement(node: Node) -> Node | None:
    """All other strings; None: there are none.  Raises `NotExpressible` if that is too large."""
    machine = _Machine()
    begin, end = machine.build(node)
    parts = parts_of(machine.sets)
    states = {frozenset(machine.closure({begin})): 0}
    rows: list[list[int]] = []
    accepting: set[int] = set()
    todo = list(states)
    while todo:
        state = todo.pop(0)
        if end not in state:
            accepting.add(states[state])
        row = []
        for first, _ in parts:
            after = frozenset(machine.closure(machine.step(state, first)))
            if after not in states:
                if len(states) >= _MOST_STATES:
                    raise NotExpressible("it is too large")
                states[after] = len(states)
                todo.append(after)
            row.append(states[after])
        rows.append(row)
    rows, accepting = _smallest(rows, accepting)
    return _expression(rows, accepting, parts)


class _Machine:
    """A nondeterministic one; states are numbers."""

    def __init__(self) -> None:
        self.sets: list[Ranges] = []
        self._free: list[list[int]] = []
        self._moves: list[tuple[Ranges, int] | None] = []

    def build(self, node: Node) -> tuple[int, int]:
        """(its first state, its last one)."""
        begin = self._state()
        match node:
            case Characters(_, ranges):
                if not ranges:
                    raise NotExpressible("it names a category of characters")
                end = self._state()
                self._moves[begin] = ranges, end
                self.sets.append(ranges)
            case Chain(parts):
                end = begin
                for part in parts:
                    first, last = self.build(part)
                    self._free[end].append(first)
                    end = last
            case Either(options):
                end = self._state()
                for option in options:
                    first, last = self.build(option)
                    self._free[begin].append(first)
                    self._free[last].append(end)
            case Repeated(inner, least, most):
                if max(least, most or 0) > _MOST_COUNT:
                    raise NotExpressible("it repeats something often")
                end = begin
                for _ in range(least):
                    first, last = self.build(inner)
                    self._free[end].append(first)
                    end = last
                end = self._more(inner, end, None if most is None else most - least)
            case _:
                raise NotExpressible("it has an anchor inside")
        return begin, end

    def _more(self, inner: Node, at: int, most: int | None) -> int:
        end = self._state()
        self._free[at].append(end)
        if most is None:
            first, last = self.build(inner)
            self._free[at].append(first)
            self._free[last] += [first, end]
            return end
        for _ in range(most):
            first, last = self.build(inner)
            self._free[at].append(first)
            self._free[last].append(end)
            at = last
        return end

    def _state(self) -> int:
        if len(self._free) > _MOST_NODES:
            raise NotExpressible("it is too large")
        self._free.append([])
        self._moves.append(None)
        return len(self._free) - 1

    def closure(self, states: set[int]) -> set[int]:
        found, todo = set(states), list(states)
        while todo:
            for state in self._free[todo.pop()]:
                if state not in found:
                    found.add(state)
                    todo.append(state)
        return found

    def step(self, states: frozenset[int], point: int) -> set[int]:
        moves = [self._moves[state] for state in states]
        return {move[1] for move in moves if move is not None and any(a <= point <= b for a, b in move[0])}


def _smallest(rows: list[list[int]], accepting: set[int]) -> tuple[list[list[int]], set[int]]:
    """The same automaton with as few states as possible; the first one stays the first."""
    kinds = [int(state in accepting) for state in range(len(rows))]
    while True:
        keys = [(kinds[state], *(kinds[after] for after in row)) for state, row in enumerate(rows)]
        order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        new = [order[key] for key in keys]
        if len(order) == len(set(kinds)):
            break
        kinds = new
    first = [new.index(kind) for kind in range(len(order))]
    return [[new[after] for after in rows[state]] for state in first], {
        kind for kind, state in enumerate(first) if state in accepting
    }


def _expression(rows: list[list[int]], accepting: set[int], parts: list[tuple[int, int]]) -> Node | None:
    begin, end = len(rows), len(rows) + 1
    ways: dict[tuple[int, int], Node] = {(begin, 0): EMPTY}
    for state, row in enumerate(rows):
        for after in set(row):
            ranges = joined(part for part, target in zip(parts, row, strict=True) if target == after)
            ways[state, after] = Characters(text_of(ranges), ranges)
        if state in accepting:
            ways[state, end] = EMPTY
    left = set(range(len(rows)))
    while left:
        state = min(left, key=lambda one: sum(one in pair for pair in ways))
        left.discard(state)
        loop = ways.pop((state, state), None)
        into = {pair[0]: node for pair, node in ways.items() if pair[1] == state}
        out = {pair[1]: node for pair, node in ways.items() if pair[0] == state}
        ways = {pair: node for pair, node in ways.items() if state not in pair}
        for one, before in into.items():
            for other, behind in out.items():
                parts_ = [before, *([Repeated(loop, 0, None)] if loop is not None else []), behind]
                way = _chain(parts_)
                known = ways.get((one, other))
                ways[one, other] = way if known is None else _either(known, way)
        if sum(map(_size, ways.values())) > _MOST_NODES:
            raise NotExpressible("it is too large")
    return ways.get((begin, end))


def _chain(parts: list[Node]) -> Node:
    flat: list[Node] = []
    for part in parts:
        flat += part.parts if isinstance(part, Chain) else [part]
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def _either(one: Node, other: Node) -> Node:
    options = [*(one.options if isinstance(one, Either) else [one])]
    options += other.options if isinstance(other, Either) else [other]
    return Either(tuple(dict.fromkeys(options)))


def _size(node: Node) -> int:
    match node:
        case Chain(parts) | Either(parts):
            return 1 + sum(map(_size, parts))
        case Repeated(inner):
            return 1 + _size(inner)
    return 1
