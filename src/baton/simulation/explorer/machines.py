"""Parties as machines, and messages, each distinct content once.

Theory.  A party is deterministic: what it was, and what it is given, decide what it becomes and what it
sends.  So the explorer keeps each distinct content of a party once, and looks a transition up that it has
seen before; only new ones are computed, on a copy.  A state of everything together is then a handful of small
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.simulation.explorer.copying import clone, freeze


class Broken(Exception):
    """An invariant does not hold; the message begins with its name."""


@dataclass
class Step:
    """What a transition of one party leads to."""

    to: int
    sent: tuple[tuple[int, ...], ...] = ()
    """Messages by number, for each of its queues."""
    broken: Broken | None = None


@dataclass
class Machines:
    """All distinct contents of one kind of party, and the transitions between them."""

    contents: list[Any] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _known: dict[Hashable, Step] = field(default_factory=dict)

    def add(self, party: Any) -> int:
        content = freeze(party)
        number = self._numbers.get(content)
        if number is None:
            number = self._numbers[content] = len(self.contents)
            self.contents.append(party)
        return number

    def move(self, number: int, what: Hashable, act: Callable[[Any], tuple[tuple[int, ...], ...]]) -> Step:
        """What `act`, called `what`, makes of a party.  Raises `Broken`."""
        key = (number, what)
        step = self._known.get(key)
        if step is None:
            party = clone(self.contents[number])
            try:
                sent = act(party)
                if hasattr(party, "check"):
                    party.check()
                step = Step(self.add(party), sent)
            except Broken as broken:
                step = Step(number, broken=broken)
            except Exception as error:
                step = Step(number, broken=Broken(f"defect: {type(error).__name__}: {error}"))
            self._known[key] = step
        if step.broken is not None:
            raise step.broken
        return step


class Messages:
    """Each distinct message once, by number."""

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, messages: Sequence[bytes]) -> tuple[int, ...]:
        numbers = []
        for data in messages:
            number = self._numbers.setdefault(data, len(self.data))
            if number == len(self.data):
                self.data.append(data)
            numbers.append(number)
        return tuple(numbers)

    def all(self, numbers: Sequence[int]) -> list[bytes]:
        return [self.data[number] for number in numbers]
