"""What happened in a run: a line an event for people, and Chrome trace JSON for Perfetto."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


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
        """Chrome's trace event format: a row a party, a span a request."""
        parties = {
            party: number for number, party in enumerate(dict.fromkeys(e.party for e in self.entries), 1)
        }
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": party}}
            for party, number in parties.items()
        ]
        for entry in self.entries:
            common = {"pid": 1, "tid": parties[entry.party], "ts": round(entry.at * 1e6, 3)}
            name = entry.text.split("(")[0][:60]
            events.append({"name": name, "ph": "i", "s": "t", "args": {"what": entry.text}, **common})
            if entry.request is not None and entry.phase in "be":
                span = {"name": f"request {entry.request}", "cat": "request", "id": entry.request}
                events.append({**span, "ph": entry.phase, **common})
        return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})

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
