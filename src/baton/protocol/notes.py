"""Notes: what an engine tells its gateway of a request's way, with the message that ends the request there.

Theory.  An engine knows when a request was admitted, computed, handed over; its gateway, when it was sent and
answered.  To see the whole way somebody must have both.  So a gateway that wants it says so in `Submit`, P
passes the wish on in `Reserve`, and each engine writes a few `Note`s as it decides, on its own clock: one for
each decision, none for a token.  They leave in `Finished`, a message that goes anyway.  An engine that is
killed takes its notes along; what its gateway has noted itself remains.

A request has at most `MAX_NOTES` of them: pieces of a long prompt, and fetches, are added up once there are
many, and a request that is preempted without end keeps its first notes and its last one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_NOTES = 64
_MANY = 24
"""From so many notes on, pieces and fetches are added to the last one of their kind."""


class Note(msgspec.Struct, array_like=True, frozen=True, gc=False):
    at: float
    """Seconds, on the clock of who wrote it."""
    what: Annotated[str, msgspec.Meta(max_length=32)]
    """One of `MEANING`."""
    a: int = 0
    b: int = 0
    c: int = 0
    text: Annotated[str, msgspec.Meta(max_length=1024)] = ""


MEANING: dict[str, tuple[str, str, str, str]] = {
    "arrived": ("prompt_tokens", "generated_tokens", "", ""),
    "asks": ("attempt", "", "", "decoder"),
    "room": ("attempt", "cached_blocks", "", "decoder"),
    "no_room": ("attempt", "", "", "why"),
    "stays": ("", "", "", "why"),
    "reserved": ("attempt", "tokens", "", "prefiller"),
    "follows": ("slot", "", "", ""),
    "admitted": ("slot", "computed_tokens", "tokens", ""),
    "chunk": ("tokens", "computed_tokens", "slot", ""),
    "prefilled": ("tokens", "", "slot", ""),
    "preempted": ("tokens", "", "slot", ""),
    "handed": ("pages", "tokens", "", "decoder"),
    "taken": ("", "", "", "decoder"),
    "returned": ("", "", "", "why"),
    "received": ("pages", "tokens", "", "prefiller"),
    "fetched": ("bytes", "microseconds", "rank", "transport"),
    "recompute": ("", "", "", "why"),
    "ended": ("generated_tokens", "preemptions", "accepted_drafts", "reason"),
    # What a gateway writes itself, with its id of the attempt in `a`:
    "sent": ("", "work_tokens", "", "plan"),
    "parked": ("", "", "", ""),
    "heard": ("", "", "", "instance"),
    "refused": ("", "", "", "why"),
    "moved": ("", "tokens", "", "instance"),
    "lost": ("", "tokens", "", "why"),
}
"""What a note's `a`, `b`, `c` and `text` mean, by its kind; "": nothing.  `prefilled`: the last piece is
computed, and gave a token.  `received`: D has the first token and knows all pages.  `plan`: the instance that
prefills, then those that may decode, each after a ">"."""


class Notes:
    """Those of one request in one process, in order."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Note] = []

    def add(self, at: float, what: str, a: int = 0, b: int = 0, c: int = 0, text: str = "") -> None:
        entries = self.entries
        if len(entries) >= _MANY:
            if what == "chunk" or what == "fetched":
                self._add_up(Note(at, what, a, b, c, text))
                return
            if len(entries) >= MAX_NOTES:
                entries[-1] = Note(at, what, a, b, c, text)
                return
        entries.append(Note(at, what, a, b, c, text))

    def _add_up(self, note: Note) -> None:
        """To the last of its kind and rank, or slot: tokens and bytes are sums, so are fetches' times."""
        entries = self.entries
        for index in range(len(entries) - 1, -1, -1):
            last = entries[index]
            if (last.what, last.c) == (note.what, note.c):
                b = note.b if note.what == "chunk" else last.b + note.b
                del entries[index]
                entries.append(Note(note.at, note.what, last.a + note.a, b, note.c, note.text))
                return
        if len(entries) < MAX_NOTES:
            entries.append(note)


def described(note: Note) -> dict[str, int | str]:
    """What it says besides its time and kind, by names."""
    names = MEANING.get(note.what, ("a", "b", "c", "text"))
    values: tuple[int | str, ...] = (note.a, note.b, note.c, note.text)
    return {name: value for name, value in zip(names, values, strict=True) if name}


__all__ = ["MAX_NOTES", "MEANING", "Note", "Notes", "described"]
