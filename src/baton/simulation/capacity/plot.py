"""A picture of a day, as SVG: what came, which instances there were, and how many requests went well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 860, 150, 64, 34, 40
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#999999", "#cc79a7")


class Line(NamedTuple):
    name: str
    values: Sequence[float]
    """At equal distances, from the left edge to the right one."""


class Panel(NamedTuple):
    title: str
    unit: str
    lines: Sequence[Line]
    stacked: bool = False
    """Each line begins on top of the one before, and what is between them is filled."""
    least: float = 0.0
    """Of the vertical axis."""


def svg(title: str, panels: Sequence[Panel], hours: int = 24) -> str:
    """One panel below the other, all over the same `hours`."""
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="16" font-size="14">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _TOP + number * (_HEIGHT + _GAP), hours)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int, hours: int) -> list[str]:
    sums = _stack(panel.lines) if panel.stacked else [list(line.values) for line in panel.lines]
    most = _round_up(max((max(values, default=0.0) for values in sums), default=1.0))
    bottom, right = top + _HEIGHT, _WIDTH - 10

    def y(value: float) -> float:
        return bottom - _HEIGHT * 0.86 * (value - panel.least) / max(most - panel.least, 1e-9)

    def x(index: int, count: int) -> float:
        return _LEFT + (right - _LEFT) * index / max(count - 1, 1)

    parts = [f'<text x="{_LEFT}" y="{top + 8}">{escape(panel.title)}</text>']
    for value in (panel.least, (panel.least + most) / 2, most):
        parts.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>'
        )
        told = f"{value:g}{escape(panel.unit)}"
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{told}</text>')
    for hour in range(0, hours + 1, 3):
        place = _LEFT + (right - _LEFT) * hour / hours
        parts.append(f'<text x="{place:.1f}" y="{bottom + 15}" text-anchor="middle">{hour}</text>')
    below = [panel.least] * len(sums[0]) if sums else []
    for number, (line, values) in enumerate(zip(panel.lines, sums, strict=True)):
        color = _COLORS[number % len(_COLORS)]
        points = [f"{x(index, len(values)):.1f},{y(value):.1f}" for index, value in enumerate(values)]
        if panel.stacked:
            points += [
                f"{x(index, len(below)):.1f},{y(below[index]):.1f}" for index in reversed(range(len(below)))
            ]
            parts.append(f'<polygon points="{" ".join(points)}" fill="{color}" fill-opacity="0.75"/>')
            below = values
        else:
            parts.append(
                f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="1.6"/>'
            )
        place = right - 130 * (len(panel.lines) - number)
        parts.append(f'<rect x="{place}" y="{top - 1}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{place + 14}" y="{top + 8}">{escape(line.name)}</text>')
    return parts


def _stack(lines: Sequence[Line]) -> list[list[float]]:
    sums: list[list[float]] = []
    for line in lines:
        before = sums[-1] if sums else [0.0] * len(line.values)
        sums.append([a + b for a, b in zip(before, line.values, strict=True)])
    return sums


def _round_up(value: float) -> float:
    """To one, two or five times a power of ten, or to the next whole number below ten."""
    if value <= 0:
        return 1.0
    if value <= 10:
        return float(-(-value // 1))
    step = 1.0
    while True:
        for factor in (1, 2, 5):
            if value <= factor * step:
                return factor * step
        step *= 10
