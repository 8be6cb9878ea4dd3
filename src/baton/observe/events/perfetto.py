"""Stories as a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing show.

| track | what is on it |
| --- | --- |
| gateway | a row for each request: its spans, whoever works on it |
| instance, slot | `prefill` and `decode` of the requests that had this slot, one after the other |
| instance, queue | who waits there |
| instance, rank | the steps of the model (`steps.py`), and what this rank fetched from others |
| wire P → D | a hand-over, from P's first token to D's seat, with bytes and transport |
| counters of an instance | requests that run and wait, blocks in use |

An arrow leads from the prefill at P to the decoding at D.  Spans of one slot never overlap, as a slot has one
request at a time; whatever can overlap has a row of its own ("async" events).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from baton.observe.events.placing import errors
from baton.observe.events.spans import GATEWAY, Event, Span, events, spans
from baton.observe.events.steps import Step
from baton.observe.events.story import Story
from baton.observe.events.trail import Trail
from baton.protocol.notes import described
from baton.protocol.step_notes import StepNote

_RANK = 2
_SLOT = 100
"""Thread ids of ranks and of slots begin here; 1 is the rest."""


Clock = Callable[[float], float]


class Load(NamedTuple):
    at: float
    """On the gateway's clock."""
    running: int
    waiting: int
    used_blocks: int


def chrome_trace(
    stories: Iterable[Story],
    now: float,
    loads: Mapping[str, Iterable[Load]] | None = None,
    steps: Mapping[str, Iterable[Step]] | None = None,
) -> dict[str, Any]:
    """`loads`, `steps`: of instances by name, in order.  Times are microseconds of the gateway's monotonic
    clock."""
    trace = Chrome()
    trace.stories(stories, now)
    for name, rows in (loads or {}).items():
        for row in rows:
            values = {"running": row.running, "waiting": row.waiting}
            trace.counter(name, "requests", row.at, values)
            trace.counter(name, "KV blocks", row.at, {"used": row.used_blocks})
    for name, ran in (steps or {}).items():
        if ran := list(ran):
            trace.steps(name, ran)
    return trace.made()


class Chrome:
    """A trace in the making.  `chrome_trace` makes that of one gateway; the simulator adds several."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, int], str] = {}
        self._gateway = 0
        self._clock: Clock = _as_it_is
        self._flows = 0
        self._rows = 0

    def made(self) -> dict[str, Any]:
        self._cut()
        return {"traceEvents": self._named() + self.events, "displayTimeUnit": "ms"}

    def stories(
        self, stories: Iterable[Story], now: float, gateway: str = GATEWAY, clock: Clock | None = None
    ) -> None:
        """Of one gateway.  `clock`: from what its clock shows, as `now` does, to the trace's seconds."""
        self._clock = clock or _as_it_is
        self._gateway = self._process(gateway)
        self._thread(self._gateway, 1, "requests")
        for story in stories:
            if not story.trails:
                self.spans(story, None, 0, now)
            for index, trail in enumerate(story.trails):
                self.spans(story, trail, index, now)
        self._clock = _as_it_is

    def instant(self, process: str, at: float, name: str, args: Mapping[str, Any]) -> None:
        """Something happened in a process."""
        pid = self._process(process)
        common = {"pid": pid, "tid": self._thread(pid, 1, "what happens"), "ts": self._us(at)}
        self.events.append({"name": name, "ph": "i", "s": "t", "args": args, **common})

    def _cut(self) -> None:
        """A slice ends where the next one on its track begins, whatever clocks of several hosts add to it."""
        last: dict[tuple[int, int], dict[str, Any]] = {}
        slices = [event for event in self.events if event["ph"] == "X"]
        for event in sorted(slices, key=lambda event: event["ts"]):
            place = event["pid"], event["tid"]
            before, last[place] = last.get(place), event
            if before is not None and before["ts"] + before["dur"] > event["ts"]:
                before["dur"] = round(event["ts"] - before["ts"], 3)

    def _named(self) -> list[dict[str, Any]]:
        """Says how processes and threads are called."""
        found = []
        for name, pid in self._processes.items():
            found.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        for (pid, tid), name in self._threads.items():
            found.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
        return found

    def spans(self, story: Story, trail: Trail | None, index: int, now: float) -> None:
        title = story.id if story.sequences == 1 else f"{story.id}[{index}]"
        row = self._row()
        found = spans(story, trail, now)
        if not found:
            return
        args = {"request": story.id, "error": story.error, "reasons": list(story.reasons)}
        own, wrong = self._gateway, {} if trail is None else errors(trail.told)
        self._async(own, 1, "request", title, row, found[0].begin, found[-1].end, args)
        for span in found:
            more = {"where": span.where, "attempt": span.id}
            self._async(own, 1, "request", span.name, row, span.begin, span.end, more)
            self._at_instance(span, title, wrong.get(span.where, 0.0))
        happened = [] if trail is None else events(trail)
        self._handovers(found, happened, title)
        self._notes(happened, title, row)

    def counter(self, process: str, name: str, at: float, values: Mapping[str, int]) -> None:
        self.events.append(
            {
                "name": name,
                "ph": "C",
                "pid": self._process(process),
                "tid": 0,
                "ts": self._us(at),
                "args": values,
            }
        )

    def steps(self, process: str, ran: Iterable[Step], clock: Clock | None = None) -> None:
        """`clock`: as of `stories`."""
        self._clock = clock or _as_it_is
        pid = self._process(process)
        for step in ran:
            tid = self._thread(pid, _RANK + step.rank, f"rank {step.rank}")
            args = {"step": step.number, **_computed(step.computed), **_wrong(step.error)}
            self._slice(pid, tid, "step", _kind(step.computed), step.begin, step.end, args)
        self._clock = _as_it_is

    def _at_instance(self, span: Span, title: str, error: float | None) -> None:
        if span.where == GATEWAY or span.name in ("handover", "finish"):  # (the wire's, the gateway's)
            return
        pid = self._process(span.where)
        more = {"attempt": span.id, **_wrong(error)}
        if span.slot < 0 or span.name == "queue":
            tid = self._thread(pid, 1, "queue" if span.name == "queue" else "slot not known")
            self._async(pid, tid, span.name, title, self._row(), span.begin, span.end, more)
            return
        tid = self._thread(pid, _SLOT + span.slot, f"slot {span.slot}")
        self._slice(pid, tid, span.name, f"{span.name} {title}", span.begin, span.end, more)

    def _handovers(self, found: list[Span], happened: list[Event], title: str) -> None:
        """The wire, and the arrow over it."""
        for before, span, after in zip(found, found[1:], [*found[2:], None], strict=False):
            if span.name != "handover" or after is None:
                continue
            fetched = [
                event
                for event in happened
                if event.note.what == "fetched" and event.id == span.id and event.where == after.where
            ]
            args = {
                "bytes": sum(event.note.a for event in fetched),
                "transport": ",".join(sorted({event.note.text for event in fetched} - {""})),
                "outcome": after.name,
            }
            pid = self._process(f"wire {before.where} → {after.where}")
            tid = self._thread(pid, 1, "hand-overs")
            self._async(pid, tid, "handover", title, self._row(), span.begin, span.end, args)
            if before.slot >= 0 and after.slot >= 0:
                self._arrow(before, after)

    def _arrow(self, before: Span, after: Span) -> None:
        self._flows += 1
        for phase, span, at in (("s", before, before.begin), ("f", after, after.begin)):
            pid = self._process(span.where)
            flow = {"name": "hand-over", "cat": "handover", "ph": phase, "id": self._flows, "pid": pid}
            flow |= {"tid": _SLOT + span.slot, "ts": self._us(at)}
            self.events.append(flow | ({"bp": "e"} if phase == "f" else {}))

    def _notes(self, happened: list[Event], title: str, row: int) -> None:
        for event in happened:
            note = event.note
            if note.what == "fetched":
                pid = self._process(event.where)
                tid = self._thread(pid, _RANK + note.c, f"rank {note.c}")
                begin, args = event.at - note.b / 1e6, described(note)
                self._async(pid, tid, f"rank {note.c}", title, self._row(), begin, event.at, args)
                continue
            self.events.append(
                {
                    "name": f"{note.what} {event.where}",
                    "cat": "request",
                    "ph": "n",
                    "id": row,
                    "pid": self._gateway,
                    "tid": 1,
                    "ts": self._us(event.at),
                    "args": described(note),
                }
            )

    def _slice(
        self, pid: int, tid: int, category: str, name: str, begin: float, end: float, args: Mapping[str, Any]
    ) -> None:
        event = {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, "ts": self._us(begin)}
        self.events.append({**event, "dur": round(self._us(end) - self._us(begin), 3), "args": args})

    def _async(
        self,
        pid: int,
        tid: int,
        category: str,
        name: str,
        row: int,
        begin: float,
        end: float,
        args: Mapping[str, Any],
    ) -> None:
        common = {"name": name, "cat": category, "id": row, "pid": pid, "tid": tid}
        self.events.append({**common, "ph": "b", "ts": self._us(begin), "args": args})
        self.events.append({**common, "ph": "e", "ts": self._us(end)})

    def _row(self) -> int:
        self._rows += 1
        return self._rows

    def _us(self, seconds: float) -> float:
        return round(self._clock(seconds) * 1e6, 3)

    def _process(self, name: str) -> int:
        return self._processes.setdefault(name, len(self._processes) + 1)

    def _thread(self, pid: int, tid: int, name: str) -> int:
        self._threads.setdefault((pid, tid), name)
        return tid


def _as_it_is(seconds: float) -> float:
    return seconds


def _wrong(error: float | None) -> dict[str, float | None]:
    """By how much times of another host can be wrong, beside the slices that have them."""
    return {} if error == 0 else {"clock_error_ms": None if error is None else round(error * 1000, 3)}


def _kind(note: StepNote | None) -> str:
    """How a step is called."""
    if note is None or not (note.prompts or note.decode_rows):
        return "step"
    kinds = [name for name, count in (("prefill", note.prompts), ("decode", note.decode_rows)) if count]
    return " + ".join(kinds)


def _computed(note: StepNote | None) -> dict[str, int]:
    if note is None:
        return {}
    found = {
        "decode_rows": note.decode_rows,
        "prompts": note.prompts,
        "prefill_tokens": note.prefill_tokens,
        "tokens": note.tokens,
    }
    if note.drafted:
        found |= {"drafted": note.drafted, "accepted": note.accepted}
    return found
