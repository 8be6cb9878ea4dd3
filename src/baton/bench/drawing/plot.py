"""A picture of a serving benchmark: latencies over the time of the run, and their distributions.

Needs matplotlib, which is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.client import Outcome
from baton.bench.drawing.latencies import latencies_of, windows


def check_matplotlib() -> None:
    """Raises `ValueError` that names the extra, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib, Baton's extra `bench`: pip install matplotlib") from None


def plot(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Writes a picture in the format that the name of `path` ends with.

    Upper row: time to first token; lower row: inter-token latency.  Left: over the seconds of the run, one
    point a request or a gap, with the median (and the 99th percentile) of each twentieth of the run.  Right:
    the share of values that are no larger.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = latencies_of(outcomes)
    if not len(found.ttft):
        raise ValueError("--plot: no request succeeded, there is nothing to draw")
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 2, width_ratios=(3, 2))
    _over_time(axes[0, 0], found.sent, found.ttft, "TTFT (ms)", "sent at (s)")
    _distribution(axes[0, 1], found.ttft, "TTFT (ms)")
    _over_time(axes[1, 0], found.came, found.itl, "ITL (ms)", "came at (s)")
    _distribution(axes[1, 1], found.itl, "ITL (ms)")
    figure.savefig(path, dpi=120)


def _over_time(axis: Any, times: Any, values: Any, name: str, when: str) -> None:
    axis.set(xlabel=when, ylabel=name)
    if not len(values):
        return
    size = 4.0 if len(values) > 2000 else 14.0
    axis.scatter(times, values, s=size, alpha=0.25, linewidths=0, rasterized=True)
    middles, lines = windows(times, values, (50, 99))
    for q, style, line in zip((50, 99), ("-", "--"), lines, strict=True):
        axis.plot(middles, line, style, color="black", linewidth=1, label=f"p{q}")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper right", fontsize="small")


def _distribution(axis: Any, values: Any, name: str) -> None:
    axis.set(xlabel=name, ylabel="share of values", ylim=(0, 1.02))
    if not len(values):
        return
    ordered = np.sort(values)
    axis.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    for q in (50, 99):
        value = np.percentile(ordered, q)
        axis.axvline(value, color="black", linestyle="-" if q == 50 else "--", linewidth=1)
        axis.annotate(f"p{q} {value:.1f}", (value, 0.5 if q == 50 else 0.3), fontsize="small")
    axis.grid(alpha=0.3)
