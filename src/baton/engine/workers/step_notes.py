"""What the engine remembers of the steps that its ranks ran, until it tells its gateways
(`protocol/step_notes.py`).  Pure.

Theory.  The leader runs on the engine's host and shares its clock.  A rank on another host has a clock of its
own, which two facts bound from both sides, as messages do for gateways (`observe/events/clocks.py`): a report
was written before the engine read it; and a rank begins a step only after the leader's ticket, which the
leader writes when its step before is over.
"""

from __future__ import annotations

from collections import deque

from baton.observe.events.clocks import Alignment
from baton.protocol.messages.reports import StepReport, StepsRan
from baton.protocol.step_notes import MAX_STEPS, STEP_NOTES, StepNote

_UNKNOWN = -1.0
_ENDS = 512
"""A rank's report is of the last twentieth of a second, or of as many steps as that took."""


class StepNotes:
    """`wanted` False: nothing is kept.  `ranks_per_host`: ranks from this number on run on other hosts."""

    def __init__(self, *, wanted: bool, ranks_per_host: int) -> None:
        self.wanted = wanted
        self._ranks_per_host = ranks_per_host
        self._waiting: deque[StepNote] = deque(maxlen=MAX_STEPS)
        self._clocks: dict[int, Alignment] = {}
        """By rank, of those on other hosts."""
        self._ends: deque[tuple[int, float]] = deque(maxlen=_ENDS)
        """(number, when it was over) of the leader's last steps."""

    def leader(self, report: StepReport, now: float, prefill_tokens: int, finished: int) -> None:
        """Rank 0 reports a step.  `finished`: prompts that were through with it and gave a token."""
        if report.seconds > 0:  # (a step takes time)
            note = leaders_note(report, now, prefill_tokens, finished)
            self._ends.append((note.step, note.began + note.seconds))
            self._waiting.append(note)

    def ran(self, rank: int, report: StepsRan, now: float) -> None:
        """Another rank says when it ran steps."""
        if not self.wanted:
            return
        offset, error = 0.0, 0.0
        if rank >= self._ranks_per_host:
            offset, error = self._align(rank, report, now)
        for step, (began, seconds) in enumerate(
            zip(report.began, report.seconds, strict=False), report.first
        ):
            self._waiting.append(StepNote(rank, step, began - offset, seconds, error))

    def take(self) -> bytes:
        """All that was not told yet; b"": nothing."""
        if not self._waiting:
            return b""
        notes = list(self._waiting)
        self._waiting.clear()
        return STEP_NOTES.encode(notes)

    def _align(self, rank: int, report: StepsRan, now: float) -> tuple[float, float]:
        """(that rank's clock minus this one's, by how much it can be wrong)."""
        clock = self._clocks.get(rank)
        if clock is None:
            clock = self._clocks[rank] = Alignment()
        clock.heard(report.written, now)
        for step, end in reversed(self._ends):
            index = step + 1 - report.first
            if index < 0:
                break
            if index < len(report.began):
                clock.sent(end, report.began[index])
        offset, error = clock.offset(now)
        return offset, _UNKNOWN if error is None else error


def leaders_note(report: StepReport, now: float, prefill_tokens: int, finished: int) -> StepNote:
    """As of `StepNotes.leader`."""
    rows = len(report.tokens) // 4
    if report.speculation:  # a slot may have a run of tokens
        rows = len(set(memoryview(report.slots).cast("i")))
    _, drafted, *accepted = report.speculation or (0, 0)
    return StepNote(
        0,
        report.step,
        report.began or now - report.seconds,
        report.seconds,
        decode_rows=max(rows - finished, 0),
        prompts=len(report.prefill_slots) // 4,
        prefill_tokens=prefill_tokens,
        tokens=len(report.tokens) // 4,
        drafted=drafted,
        accepted=sum(accepted),
    )
