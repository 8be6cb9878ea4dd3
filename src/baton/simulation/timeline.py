"""What happened in a run: a line an event for people, and a trace for Perfetto.

The trace is the one of a real server (`observe/events/perfetto.py`), of the same notes of the same gateways
and engines: where the time of each request went, on slots, wires and in queues, and the steps of each rank.
Beside it each party has a track with the lines.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.observe.events.perfetto import Chrome
from baton.observe.events.steps import StepLog
from baton.observe.events.story import Story
from baton.simulation.events import Party


@dataclass(slots=True)
class Entry:
    at: float
    party: str
    text: str
    request: int | None
    """The number of the request that it is about, if it is about one."""
    phase: str
    """"b" and "e" where the life of a request begins and ends, else "i"."""


class Timeline:
    """The entries of a run, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.stories: list[tuple[Party, Story]] = []
        """Those of requests that have ended, and their gateways."""
        self.steps: dict[tuple[Party, str], StepLog] = {}
        """By gateway and instance: the steps that the gateway was told of."""

    def add(self, at: float, party: str, text: str, request: int | None, phase: str) -> None:
        self.entries.append(Entry(at, party, text, request, phase))

    def render(self, *, request: int | None = None, last: int | None = None) -> str:
        """One line an event: time, party, what.

        Lines of `request`'s life carry ┌ where it begins, ● between, └ where it ends, and │ runs beside it.
        `last`: only so many lines before the end.
        """
        width = max((len(entry.party) for entry in self.entries), default=0)
        lines, alive = [], False
        for entry in self.entries:
            mark = "│" if alive else " "
            if request is not None and entry.request == request:
                mark = {"b": "┌", "e": "└"}.get(entry.phase, "●")
                if entry.phase in "be":
                    alive = entry.phase == "b"
            lines.append(f"{entry.at:10.6f} {mark} {entry.party:<{width}}  {entry.text}")
        return "\n".join(lines if last is None else lines[-last:])

    def chrome_trace(self) -> bytes:
        """Chrome's trace event format, on virtual time."""
        trace = Chrome()
        for gateway, story in self.stories:
            end = story.arrived if story.ended is None else story.ended
            trace.stories([story], end, gateway.name, gateway.global_time)
        seen: set[tuple[str, str, int, int]] = set()
        for (gateway, name), log in self.steps.items():
            fresh = [
                step
                for step in log.between(-math.inf, math.inf)
                if (name, step.incarnation, step.rank, step.number) not in seen
            ]
            seen |= {(name, step.incarnation, step.rank, step.number) for step in fresh}
            if fresh:
                trace.steps(name, fresh, gateway.global_time)
        for entry in self.entries:
            trace.instant(entry.party, entry.at, entry.text.split("(")[0][:60], {"what": entry.text})
        return msgspec.json.encode(trace.made())

    def write_chrome_trace(self, path: Path) -> None:
        path.write_bytes(self.chrome_trace())


@contextmanager
def logs_told(tell: Callable[[str, str], None], level: int) -> Iterator[None]:
    """What the production code logs is told as (level, message), and does not come to the terminal."""
    logger, handler = logging.getLogger("baton"), _Teller(tell)
    propagate, before = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(before)


class _Teller(logging.Handler):
    def __init__(self, tell: Callable[[str, str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.levelname.lower(), record.getMessage())
