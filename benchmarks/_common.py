"""What the benchmarks share: a description of the machine, percentiles, tables, JSON results."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from baton.bench.machine import machine as machine  # for the benchmarks


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, median, p99 and maximum."""
    return {
        "count": len(values),
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "max": max(values, default=math.nan),
    }


class Table:
    """A table on the terminal: the first column to the left, numbers to the right."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self._table = RichTable(title=title, title_justify="left")
        for index, column in enumerate(columns):
            self._table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")

    def row(self, *cells: object) -> None:
        self._table.add_row(*map(str, cells))

    def print(self) -> None:
        Console(width=None if sys.stdout.isatty() else 120).print(self._table)


def bandwidth() -> float:
    """Bytes a second that PyTorch's threads reach reading a large tensor; the best of some."""
    import torch

    big = torch.ones(64 << 20)
    best = 0.0
    for _ in range(6):
        begin = time.perf_counter()
        big.sum()
        best = max(best, big.numel() * 4 / (time.perf_counter() - begin))
    return best


def print_machine(facts: dict[str, Any]) -> None:
    """One paragraph that belongs above every table."""
    memory = f"{facts['memory_gib']} GiB, Linux {facts['kernel']}, Python {facts['python']}"
    print(f"{facts['cpu']}, {facts['cores']} cores, {memory}, load {facts['load_average'][0]}")
    print(f"$ {facts['command']}\n")


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Writes a result where `--out` says; nothing if it was not given."""
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {path}")
