"""Where the time of requests went, from what engines recorded (`baton serve --record DIR`).

The recordings of all instances are replayed, and what they sent to their gateways tells the same as it told
them: notes, tokens and ends (`observe/events`).  What gateways noted themselves is not in a recording, so a
request arrives here when the first engine reads it, and ends when the last one says so; that it was lost
shows by its being sent again, and is taken for as late as the last that was heard of it before.  Clocks are
brought together by the time at which each recording began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace as replaced

from baton.engine.recording.recorder import Event, Header, Message, Reported
from baton.engine.recording.replay import find_recordings, replay
from baton.engine.workers.step_notes import leaders_note
from baton.observe.events.clocks import Alignment
from baton.observe.events.steps import Step
from baton.observe.events.story import Story
from baton.protocol.messages.reports import StepReport
from baton.protocol.messages.requests import Finished, FromEngine, Hello, Load, Outputs, Submit
from baton.protocol.step_notes import STEP_NOTES, StepNote

_TOKEN_BYTES = 4
_DAY_S = 86_400.0
_GOES_ON = frozenset({"handed_over", "lost"})
"""Reasons of an engine's end that are not the request's."""


@dataclass
class Recorded:
    """Times are seconds since `base`."""

    base: float = 0.0
    """Seconds since 1970: a day before the first of them began, as a later one may have begun earlier."""

    stories: list[Story] = field(default_factory=list)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    """By instance."""
    end: float = 0.0
    damage: list[str] = field(default_factory=list)
    """What could not be read, or not be replayed the same."""


def stories_of(path: Path) -> Recorded:
    """Of all recordings in a directory.  Raises `DamagedRecording` if there is none."""
    found = Recorded()
    heard: list[_Heard] = []
    for directory in find_recordings(path):
        reader = _Reader(found, heard)
        result = replay(directory, reader)
        reader.ended()
        if result.damage is not None:
            found.damage.append(result.damage)
        elif result.difference is not None:
            found.damage.append(
                f"{directory}: from frame {result.difference.frame} on Baton {result.header.baton}, "
                "which recorded it, decided otherwise than this version; use that one"
            )
    told = _Told(found)
    for one in sorted(heard, key=lambda one: one.at):
        told.take(one)
    return found


@dataclass(slots=True)
class _Heard:
    """That an engine read or said something about a request."""

    at: float
    instance: str
    gateway: str
    id: int
    submit: Submit | None = None
    finished: Finished | None = None
    tokens: int = 0
    ahead: float = 0.0
    """Of the engine's clock."""


class _Reader:
    """Watches one replay."""

    def __init__(self, found: Recorded, heard: list[_Heard]) -> None:
        self._found, self._heard = found, heard
        self._instance, self._ahead, self._now = "", 0.0, 0.0
        self._gateways: dict[bytes, str] = {}
        self._steps: dict[tuple[int, int], Step] = {}
        """By rank and number."""
        self._told = b""
        """The last steps that the engine told its gateways of; each of them gets the same."""

    def began(self, header: Header) -> None:
        if not self._found.base:
            self._found.base = header.started - _DAY_S
        self._ahead = header.started - header.now - self._found.base
        self._now = header.now + self._ahead
        self._instance = header.config.name

    def ended(self) -> None:
        """The recording is over."""
        computed = {number: step.computed for (rank, number), step in self._steps.items() if not rank}
        steps = self._found.steps.setdefault(self._instance, [])
        steps += [step._replace(computed=computed.get(step.number)) for step in self._steps.values()]
        steps.sort(key=lambda step: step[:4])
        self._steps = {}

    def reads(self, event: Event) -> None:
        now = getattr(event, "now", None)
        if now is not None:
            self._now = now + self._ahead
            self._found.end = max(self._found.end, self._now)
        if isinstance(event, Reported) and isinstance(event.report, StepReport):
            self._ran(event.report)
        elif isinstance(event, Message):
            message = event.message
            if isinstance(message, Hello):
                self._gateways[event.gateway] = message.gateway
            elif isinstance(message, Submit):
                gateway = self._gateways.get(event.gateway, "")
                self._heard.append(_Heard(self._now, self._instance, gateway, message.id, submit=message))

    def sends(self, messages: Sequence[tuple[bytes, FromEngine]]) -> None:
        for identity, message in messages:
            if isinstance(message, Load) and message.steps != self._told:
                self._steps_told(message.steps)
            if not isinstance(message, Outputs):
                continue
            gateway = self._gateways.get(identity, "")
            counts: dict[int, int] = {}
            for number in memoryview(message.ids).cast("q"):
                counts[number] = counts.get(number, 0) + 1
            for number, count in counts.items():
                self._heard.append(_Heard(self._now, self._instance, gateway, number, tokens=count))
            for end in message.finished:
                heard = _Heard(self._now, self._instance, gateway, end.id, finished=end, ahead=self._ahead)
                self._heard.append(heard)

    def _ran(self, report: StepReport) -> None:
        if report.step and report.seconds > 0:
            slots, prefilled = (
                set(memoryview(some).cast("i")) for some in (report.slots, report.prefill_slots)
            )
            note = leaders_note(report, self._now - self._ahead, 0, len(slots & prefilled))
            self._add(note)

    def _steps_told(self, told: bytes) -> None:
        """These know more: how many tokens of prompts, and the other ranks."""
        self._told = told
        for note in STEP_NOTES.decode(told) if told else ():
            self._add(note)

    def _add(self, note: StepNote) -> None:
        begin = note.began + self._ahead
        error = None if note.error < 0 else note.error
        step = Step(begin, begin + note.seconds, note.rank, note.step, error, None if note.rank else note)
        self._steps[note.rank, note.step] = step


class _Told:
    """Makes stories of what was heard, in order of time."""

    def __init__(self, found: Recorded) -> None:
        self._found = found
        self._by_name: dict[tuple[str, str], Story] = {}
        self._by_id: dict[tuple[str, int], Story] = {}
        self._last: dict[int, float] = {}
        """When something was heard of a story last."""
        self._clock = Alignment()
        self._clock.shared = True  # (its notes are put on the common clock here)

    def take(self, one: _Heard) -> None:
        if one.submit is not None:
            self._sent(one, one.submit)
            return
        story = self._by_id.get((one.gateway, one.id))
        if story is None:
            return
        trail = story.trails[0]
        if one.tokens:
            story.generated_tokens += one.tokens
            if story.first_at is None:
                story.first_at = one.at
            if not any(
                (note.what, note.a, note.text) == ("heard", one.id, one.instance) for note in trail.entries
            ):
                trail.add(one.at, "heard", one.id, 0, 0, one.instance)
        if one.finished is not None:
            end = one.finished
            notes = [replaced(note, at=note.at + one.ahead) for note in end.notes]
            trail.tell(one.id, one.instance, notes, self._clock, one.at)
            if end.reason not in _GOES_ON:
                story.ended, story.reasons = one.at, (end.reason,)
                story.cached_tokens = end.num_cached
                if end.code:
                    story.error = end.code
        self._last[id(story)] = one.at

    def _sent(self, one: _Heard, submit: Submit) -> None:
        key = (one.gateway, submit.name)
        story = self._by_name.get(key)
        if story is None or story.ended is not None or (story.generated_tokens and not submit.generated):
            wall = one.at + self._found.base
            story = Story(submit.name, one.at, one.at, wall, len(submit.prompt) // _TOKEN_BYTES)
            story.max_tokens = submit.stopping.max_tokens
            story.trail()
            self._by_name[key] = story
            self._found.stories.append(story)
        trail = story.trails[0]
        if trail.entries:
            lost = self._last[id(story)]
            trail.add(
                lost, "lost", trail.entries[0].a, len(submit.generated) // _TOKEN_BYTES, 0, "sent again"
            )
        plan = ">".join((one.instance, *(target.incarnation for target in submit.decoders)))
        trail.add(one.at, "sent", submit.id, 0, 0, plan[:200])
        self._by_id[one.gateway, submit.id] = story
        self._last[id(story)] = one.at
