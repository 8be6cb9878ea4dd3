"""What pictures of a serving benchmark show, whoever draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.client import Outcome

WINDOWS = 20
"""The run is cut into so many pieces of the same length, each with percentiles of its own."""


@dataclass(frozen=True)
class Latencies:
    """Times in seconds since the first request was sent, values in milliseconds; arrays of float64."""

    sent: Any
    """[requests that succeeded]: when each was sent."""
    ttft: Any
    """[requests that succeeded]"""
    came: Any
    """[gaps]: when the later one of two events came."""
    itl: Any
    """[gaps]"""
    failed: Any
    """[requests that failed]: when each was sent."""


def latencies_of(outcomes: Sequence[Outcome]) -> Latencies:
    start = min((outcome.start for outcome in outcomes), default=0.0)
    good = [outcome for outcome in outcomes if outcome.succeeded]
    return Latencies(
        sent=np.array([outcome.start - start for outcome in good]),
        ttft=np.array([outcome.ttft * 1e3 for outcome in good]),
        came=np.array([moment - start for outcome in good for moment in outcome.times[1:]]),
        itl=np.array([gap * 1e3 for outcome in good for gap in outcome.itls]),
        failed=np.array([outcome.start - start for outcome in outcomes if not outcome.succeeded]),
    )


def windows(times: Any, values: Any, percentiles: Sequence[float]) -> tuple[list[float], list[list[float]]]:
    """(middles of the pieces of the run that have values, for each percentile its value in each of these)."""
    edges = np.linspace(times.min(), times.max(), WINDOWS + 1)
    place = np.clip(np.digitize(times, edges) - 1, 0, WINDOWS - 1)
    used = [index for index in range(WINDOWS) if (place == index).any()]
    middles = [float(edges[index] + edges[index + 1]) / 2 for index in used]
    lines = [[float(np.percentile(values[place == index], q)) for index in used] for q in percentiles]
    return middles, lines
