"""Figures: written as soon as they are known, a line of JSON each, and as lines of a table.

So what was measured is there even if the next measurement kills the process.  (Nothing of PyTorch is needed
to read them: `tools/gpu_run.py` does.)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    part: str
    what: str
    seconds: float | None = None
    rate: float | None = None
    unit: str = ""
    limit_s: float | None = None
    goal: str = ""
    reached: bool | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """Of the limit."""
        return self.limit_s / self.seconds if self.limit_s and self.seconds else None


class Figures:
    """Those of one part, printed and written as they come."""

    def __init__(self, part: str, out: Path | None) -> None:
        self._part, self._out = part, out

    def add(self, what: str, **values: Any) -> Figure:
        figure = Figure(self._part, what, **values)
        print(line(figure), flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps({"figure": asdict(figure)}) + "\n")
        return figure


def read(out: Path) -> list[Figure]:
    """What `Figures` have written."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return [Figure(**row["figure"]) for row in rows if "figure" in row]


def line(figure: Figure) -> str:
    """Of a Markdown table."""
    time_ = f"{figure.seconds * 1e3:.3f} ms" if figure.seconds is not None else ""
    rate = f"{figure.rate:,.1f} {figure.unit}" if figure.rate is not None else ""
    limit = f"{figure.limit_s * 1e3:.3f} ms" if figure.limit_s is not None else ""
    share = f"{100 * figure.share:.0f} %" if figure.share is not None else ""
    goal = figure.goal
    if figure.reached is not None:
        goal += ": reached" if figure.reached else ": NOT reached"
    cells = (figure.part, figure.what, time_, rate, limit, share, goal, figure.note)
    return f"| {' | '.join(cells)} |"


COLUMNS = ("part", "what", "time", "rate", "limit", "of it", "goal", "note")
HEAD = "\n".join((f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)))
