"""The trail of one sequence: what its gateway noted of it, and what engines told when it ended with them."""

from __future__ import annotations

from typing import NamedTuple

from baton.observe.events.clocks import Alignment, Moment
from baton.protocol.notes import MAX_NOTES, Note, Notes

_MAX_TOLD = 48
"""A request that is continued fails after 20 losses; at each two instances may tell of it."""


class Told(NamedTuple):
    """What one engine told under one id."""

    id: int
    instance: str
    notes: list[Note]
    """On the engine's clock."""
    moment: Moment
    """When they were heard, and what the engine's clock shows."""


class Trail(Notes):
    """`entries` are the gateway's own notes, on its clock (`notes.MEANING`)."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []

    def tell(self, id: int, instance: str, notes: list[Note], clock: Alignment, now: float) -> None:
        """An engine's notes came, and say something of its clock."""
        if not notes:
            return
        clock.heard(notes[-1].at, now)
        if notes[0].what == "arrived":
            for note in self.entries:
                if note.what == "sent" and note.a == id:
                    clock.sent(note.at, notes[0].at)
        if len(self.told) < _MAX_TOLD:
            self.told.append(Told(id, instance, notes[:MAX_NOTES], Moment(clock, now)))
