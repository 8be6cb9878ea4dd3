"""A text that comes in pieces, and generators that read it: they yield where more of it is needed.

Theory.  Each generator decides by the characters at its place alone, and yields as long as further
characters could change what it decides.  So what it gives is a function of the text, not of the pieces, if
only no place in the buffer is remembered over a yield: the buffer moves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]
Give = Callable[[str], None]

_SPACES = re.compile(r"\s*")


class Markers:
    """Texts that are looked for.  None begins with another one."""

    __slots__ = ("_firsts", "_longest", "_markers", "_pattern")

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(dict.fromkeys(markers))
        for one in self._markers:
            if any(one.startswith(other) and one != other for other in self._markers):
                raise ValueError(f"{one!r} begins with another marker")
        self._pattern = re.compile("|".join(map(re.escape, markers))) if markers else None
        self._firsts = frozenset(marker[0] for marker in markers)
        self._longest = max(map(len, markers), default=0)

    def find(self, text: str, start: int, *, ended: bool) -> tuple[int, str]:
        """(where the text stops to be certainly free of markers, the marker that is there or "")."""
        if self._pattern is None:
            return len(text), ""
        found = self._pattern.search(text, start)
        pending = len(text) if ended else self._pending(text, start)
        if found is not None and found.start() <= pending:
            return found.start(), found[0]
        return pending, ""

    def _pending(self, text: str, start: int) -> int:
        """Where a marker may have begun that is not complete."""
        for place in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[place] in self._firsts:
                rest = text[place:]
                if any(len(rest) < len(marker) and marker.startswith(rest) for marker in self._markers):
                    return place
        return len(text)


@lru_cache(maxsize=256)
def markers_of(markers: tuple[str, ...]) -> Markers:
    return Markers(markers)


class Reading:
    """The text that is not read yet; since a `mark`, what is read too."""

    __slots__ = ("_mark", "at", "buffer", "ended")

    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self.buffer = text
        self.at = 0
        """Place of the next character in the buffer."""
        self.ended = ended
        """Nothing more will come."""
        self._mark: int | None = None

    def push(self, text: str) -> None:
        drop = self.at if self._mark is None else self._mark
        self.buffer = self.buffer[drop:] + text
        self.at -= drop
        if self._mark is not None:
            self._mark = 0

    def mark(self) -> None:
        """Keeps what is read from here on."""
        self._mark = self.at

    @property
    def held(self) -> int:
        """Characters since the mark; 0 without one."""
        return 0 if self._mark is None else self.at - self._mark

    def back(self) -> None:
        """To the mark, which is lifted."""
        if self._mark is not None:
            self.at, self._mark = self._mark, None

    def release(self) -> None:
        """Lifts the mark."""
        self._mark = None

    def ahead(self, step: Step[T]) -> Step[T]:
        """Runs it and goes back to where it began; marks within it, and lifting this one, are not its
        business."""
        lifts = self._mark is None
        if self._mark is None:
            self._mark = self.at
        offset = self.at - self._mark
        result = yield from step
        self.at = self._mark + offset
        if lifts:
            self._mark = None
        return result

    def unread(self, text: str) -> None:
        """This was read last, and is to be read again."""
        if self._mark is None:
            self.buffer, self.at = text + self.buffer[self.at :], 0
        else:
            self.at -= len(text)

    @property
    def rest(self) -> str:
        """What is there and not read yet."""
        return self.buffer[self.at :]

    # -- generators

    def peek(self) -> Step[str]:
        """The next character, "" at the end."""
        while self.at == len(self.buffer):
            if self.ended:
                return ""
            yield
        return self.buffer[self.at]

    def run(self, pattern: re.Pattern[str], give: Give) -> Step[None]:
        """Reads as far as the pattern goes, which must match any beginning of what it matches, and gives it
        as it comes."""
        while True:
            found = pattern.match(self.buffer, self.at)
            if found is not None and found.end() > self.at:
                self.at = found.end()
                give(found[0])
            if self.at < len(self.buffer) or self.ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Step[str]:
        """The same as one text."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def spaces(self) -> Step[str]:
        return (yield from self.word(_SPACES))

    def literal(self, text: str) -> Step[bool]:
        """Whether this follows; it is read then."""
        size = len(text)
        while True:
            there = self.buffer[self.at : self.at + size]
            if len(there) == size or self.ended or not text.startswith(there):
                break
            yield
        if there != text:
            return False
        self.at += size
        return True

    def one_of(self, texts: Sequence[str]) -> Step[str]:
        """Which of these follows, the first in their order; "" if none does."""
        for text in texts:
            if (yield from self.literal(text)):
                return text
        return ""

    def until(self, markers: Markers, give: Give) -> Step[str]:
        """Reads to the end of the first marker and gives what stands before it; "" at the text's end."""
        while True:
            place, found = markers.find(self.buffer, self.at, ended=self.ended)
            if place > self.at:
                give(self.buffer[self.at : place])
            self.at = place + len(found)
            if found or self.ended:
                return found
            yield

    def upto(self, markers: Markers) -> Step[tuple[str, str]]:
        """(what stands before the first marker, the marker, "" at the text's end)."""
        pieces: list[str] = []
        found = yield from self.until(markers, pieces.append)
        return "".join(pieces), found


def nothing(_: str) -> None:
    """Takes text that nobody wants."""
