"""Small charts as SVG, without anything but text: values over time, and their distribution.

Colours are classes, which the page around a chart gives; nothing of a chart is larger than some tens of kB,
however many values there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.drawing.latencies import windows

WIDTH, HEIGHT = 640, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 24, 14, 42
MOST_POINTS = 3000
"""That are drawn; of more, the longest tenth of these and every n-th of all."""
_CURVE_POINTS = 400
_WIDE = 12.0
"""An axis whose values go so far beyond their median is logarithmic."""


@dataclass(frozen=True)
class _Axis:
    """From values to places between `begin` and `end`."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round numbers within."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        else:
            step = _round_step((self.high - self.low) / 6)
            found = [step * count for count in range(math.ceil(self.low / step), int(self.high / step) + 1)]
        return [value for value in found if self.low <= value <= self.high]


def _round_step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)


def _of_values(values: Any, begin: float, end: float) -> _Axis:
    """For latencies (milliseconds, at least one).  A logarithmic axis begins at the least above 0, or at a
    hundredth of the median: gaps of 0 ms, between events that came together, stand at its beginning."""
    high, middle = float(values.max()), float(np.median(values))
    if high > _WIDE * middle:
        low = max(float(values[values > 0].min()), middle / 100)
        return _Axis(low / 1.1, high * 1.1, begin, end, logarithmic=True)
    return _Axis(0.0, max(high * 1.05, 1e-3), begin, end)


def over_time(times: Any, values: Any, name: str, when: str, failed: Any = ()) -> str:
    """A point a value with the median and the 99th percentile of each twentieth of the run; `failed`: moments
    that are marked at the foot.  `times` and `values`: float arrays of one length, at least one."""
    last = max(float(times.max()), max(failed, default=0.0), 1e-3)
    across = _Axis(0.0, last * 1.01, _LEFT, WIDTH - _RIGHT)
    up = _of_values(values, HEIGHT - _BOTTOM, _TOP)
    kept = _thinned(values)
    points = "".join(
        f"M{across.place(x):.1f} {up.place(y):.1f}h0" for x, y in zip(times[kept], values[kept], strict=True)
    )
    middles, lines = windows(times, values, (50, 99))
    parts = [_frame(across, up, when, name), f'<path class="points" d="{points}"/>']
    for q, line in zip((50, 99), lines, strict=True):
        places = [(across.place(x), up.place(y)) for x, y in zip(middles, line, strict=True)]
        parts.append(f'<path class="line p{q}" d="{_path(places)}"/>')
    foot = HEIGHT - _BOTTOM
    marks = "".join(f"M{across.place(x):.1f} {foot}v-9" for x in sorted(failed)[:MOST_POINTS])
    if marks:
        parts.append(f'<path class="failed" d="{marks}"><title>failed requests</title></path>')
    said = f"{name} over time: {len(values):,} values"
    return _svg(said, parts)


def distribution(values: Any, name: str) -> str:
    """The share of values that are no larger than each.  `values`: a float array, at least one."""
    ordered = np.sort(values)
    across = _of_values(values, _LEFT, WIDTH - _RIGHT)
    up = _Axis(0.0, 1.0, HEIGHT - _BOTTOM, _TOP)
    shares = np.unique(np.round(np.linspace(0, len(ordered) - 1, min(len(ordered), _CURVE_POINTS))))
    tail = np.arange(max(0, len(ordered) - _CURVE_POINTS // 4), len(ordered))
    index = np.union1d(shares, tail).astype(np.int64)
    curve = [(across.place(float(ordered[i])), up.place((i + 1) / len(ordered))) for i in index.tolist()]
    steps = [(curve[0][0], up.place(0.0)), *curve]
    parts = [_frame(across, up, name, "share of values"), f'<path class="line curve" d="{_path(steps)}"/>']
    for row, q in enumerate((50, 90, 99)):
        value = float(np.percentile(ordered, q))
        x, y = across.place(value), HEIGHT - _BOTTOM - 12 - 18 * (2 - row)
        left = x > WIDTH * 0.7
        parts.append(f'<path class="mark" d="M{x:.1f} {HEIGHT - _BOTTOM}V{_TOP}"/>')
        parts.append(
            f'<text class="said" x="{x + (-5 if left else 5):.1f}" y="{y}" '
            f'text-anchor="{"end" if left else "start"}">p{q} {number(value)}</text>'
        )
    return _svg(f"Distribution of {name}: {len(values):,} values", parts)


def number(value: float) -> str:
    """With three digits that count: 1,234, 56.7, 0.89."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _thinned(values: Any) -> Any:
    """Which are drawn: indices."""
    if len(values) <= MOST_POINTS:
        return np.arange(len(values))
    longest = np.argsort(values)[-MOST_POINTS // 10 :]
    even = np.linspace(0, len(values) - 1, MOST_POINTS - len(longest)).astype(np.int64)
    return np.union1d(longest, even)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _frame(across: _Axis, up: _Axis, below: str, beside: str) -> str:
    foot, parts = HEIGHT - _BOTTOM, []
    for value in up.ticks():
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in across.ticks():
        x = across.place(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{foot}"/>')
        parts.append(f'<text x="{x:.1f}" y="{foot + 16}" text-anchor="middle">{_tick(value)}</text>')
    x, y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + foot) / 2
    for place, name in (
        (f'x="{x}" y="{HEIGHT - 6}"', _named(below, across)),
        (f'x="12" y="{y}" transform="rotate(-90 12 {y})"', _named(beside, up)),
    ):
        parts.append(f'<text text-anchor="middle" {place}>{name}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    return (
        f"{value:,.0f}" if value >= 1000 else f"{value:g}" if value >= 1e-3 or not value else f"{value:.0e}"
    )


def _named(name: str, axis: _Axis) -> str:
    return f"{name}, logarithmic" if axis.logarithmic else name


def _svg(said: str, parts: Sequence[str]) -> str:
    """`said`: for who does not see it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">'
        f"<title>{said}</title>{''.join(parts)}</svg>"
    )
