"""The last steps of one instance, as it has told them (`protocol/step_notes.py`), on the gateway's clock.

What came is kept as bytes and read when somebody looks; the oldest goes when `MAX_BYTES` are kept, which is
some 20,000 steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from baton.observe.events.clocks import Alignment, Moment
from baton.protocol.codec import MalformedMessage
from baton.protocol.step_notes import STEP_NOTES, StepNote

MAX_BYTES = 1 << 20


class Step(NamedTuple):
    """One run of the model by one rank, on the gateway's clock."""

    begin: float
    end: float
    rank: int
    number: int
    error: float | None = 0.0
    """By so many seconds the times can be wrong; None: it is not known."""
    computed: StepNote | None = None
    """What it computed, as rank 0 says; None: it has not."""
    incarnation: str = ""
    """Of the instance."""


class StepLog:
    """Of one instance, whichever incarnation ran them."""

    def __init__(self) -> None:
        self._told: deque[tuple[Moment, str, bytes]] = deque()
        """(when it was heard, of which incarnation, what)."""
        self._bytes = 0

    def add(self, incarnation: str, told: bytes, clock: Alignment, now: float) -> None:
        """`Load.steps` has come."""
        self._told.append((Moment(clock, now), incarnation, told))
        self._bytes += len(told)
        while self._bytes > MAX_BYTES and len(self._told) > 1:
            self._bytes -= len(self._told.popleft()[2])

    def copy(self) -> StepLog:
        """For another thread."""
        found = StepLog()
        found._told, found._bytes = self._told.copy(), self._bytes
        return found

    def between(self, begin: float, end: float) -> list[Step]:
        """The steps that ran then, in order of time."""
        found: list[Step] = []
        computed: dict[tuple[str, int], StepNote] = {}
        for moment, incarnation, told in self._told:
            if moment.at < begin:  # (what ended before it was told, ended before `begin`)
                continue
            for note, step in _read(moment, incarnation, told):
                if not note.rank:
                    computed[incarnation, note.step] = note
                if step.end >= begin and step.begin <= end:
                    found.append(step)
        steps = [step._replace(computed=computed.get((step.incarnation, step.number))) for step in found]
        return sorted(steps, key=lambda step: step[:4])


def _read(moment: Moment, incarnation: str, told: bytes) -> Iterable[tuple[StepNote, Step]]:
    offset, error = moment.offset()
    try:
        notes = STEP_NOTES.decode(told)
    except MalformedMessage:  # (a version of Baton that tells it otherwise)
        return
    for note in notes:
        begin = note.began - offset
        wrong = None if error is None or note.error < 0 else error + note.error
        yield note, Step(begin, begin + note.seconds, note.rank, note.step, wrong, None, incarnation)
