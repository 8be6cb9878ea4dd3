"""What a step takes, learnt from the steps that were run: seconds by tokens of prompts, rows and context.

Theory.  Two models, as a step that only decodes is bound by reading the weights and one with a prompt by
arithmetic:

    decodes only    base + rows * row + context * read
    with prompts    base + tokens * token + pairs * pair + rows * row + context * read

*Rows* decode one token each, and each draft counts as one; *context* is what they read together; *pairs* are,
summed over the tokens of prompts, the positions that each attends to.  Measured steps are averaged in *cells*
of about the same composition, so that what is seen often does not outweigh what is seen seldom and one slow
step counts little.  The coefficients are those of least squares over the cells, of relative errors, none
below zero, drawn a little towards a guess (so that few cells are enough).  A cell that no step came to for
long counts less.

Pure and deterministic: the seconds are what reports say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.protocol.messages.commands import Pace

_NEWEST = 1 / 8
"""The weight of a step in its cell, at least."""
_OUTLIER = 3.0
"""A step that took so many times what its cell says counts as one that took just that."""
_HALF_LIFE = 256
"""Steps after which a cell that was not visited counts half."""
_FORGOTTEN = 1 / 64
_LATELY = 64
"""Steps: what came in them was on the machine as it is now, whatever else it does."""
_PULL = 1e-3
"""Of the guess, beside all cells."""
_BASE_GUESS = 0.25
"""Of a step with prompts, as a part of the shortest one without."""
_SWEEPS = 200
_EVERY_S = 1.0
"""Of steps, from one fit to the next (half a millisecond): short steps must not pay for many fits.  The first
ones follow when the number of steps has doubled."""
_CHANGED = 0.05
"""The engine sends a new `Pace` when a coefficient's part in a typical step changes by more than this."""


@dataclass(slots=True)
class _Cell:
    features: list[float]
    seconds: float
    count: int = 1
    seen: int = 0
    """The number of the step that came last."""


@dataclass(slots=True)
class Fit:
    """Least squares of seconds over features."""

    cells: dict[tuple[int, ...], _Cell] = field(default_factory=dict)
    steps: int = 0

    def add(self, key: tuple[int, ...], features: Sequence[float], seconds: float) -> None:
        self.steps += 1
        cell = self.cells.get(key)
        if cell is None or seconds < cell.seconds / _OUTLIER:  # (or what was there is the outlier)
            self.cells[key] = _Cell(list(features), seconds, seen=self.steps)
            return
        cell.count, cell.seen = cell.count + 1, self.steps
        newest = max(1 / cell.count, _NEWEST)
        cell.seconds += newest * (min(seconds, _OUTLIER * cell.seconds) - cell.seconds)
        for index, value in enumerate(features):
            cell.features[index] += newest * (value - cell.features[index])

    def solve(self, guess: Sequence[float]) -> list[float]:
        """The coefficients, none below 0."""
        size = len(guess)
        gram = [[0.0] * size for _ in guess]
        right = [0.0] * size
        total = 0.0
        for key, cell in list(self.cells.items()):
            weight = 0.5 ** ((self.steps - cell.seen) / _HALF_LIFE)
            if weight < _FORGOTTEN:
                del self.cells[key]
                continue
            total += weight
            row = [value / cell.seconds for value in cell.features]
            for i in range(size):
                right[i] += weight * row[i]
                for j in range(i + 1):
                    gram[i][j] += weight * row[i] * row[j]
        for i in range(size):
            for j in range(i):
                gram[j][i] = gram[i][j]
        found = [max(value, 0.0) for value in guess]
        scales = [gram[i][i] for i in range(size)]
        for i in range(size):  # each coefficient is drawn to its guess by a part of its own scale
            gram[i][i] += _PULL * scales[i] + 1e-300
            right[i] += _PULL * scales[i] * found[i]
        for _ in range(_SWEEPS):
            largest = 0.0
            for i in range(size):
                before = found[i]
                rest = right[i] - sum(gram[i][j] * found[j] for j in range(size) if j != i)
                found[i] = max(rest / gram[i][i], 0.0)
                largest = max(largest, abs(found[i] - before) * (scales[i] / max(total, 1e-300)) ** 0.5)
            if largest < 1e-4:
                break
        return found

    @property
    def shortest(self) -> float:
        """Seconds of the cell with the shortest steps, of those that came lately; 0 if there are none."""
        lately = self.steps - _LATELY
        return min((cell.seconds for cell in self.cells.values() if cell.seen > lately), default=0.0)


class StepCosts:
    """Learns from every step.  `take()` is what the worker has to be told."""

    def __init__(self) -> None:
        self.decodes = Fit()
        self.prompts = Fit()
        self.pace: Pace | None = None
        """What was learnt last."""
        self._told: Pace | None = None
        self._steps = 0
        self._due = 1
        self._since = 0.0
        """Seconds of steps since the last fit."""

    def add(self, tokens: int, pairs: int, rows: int, context: int, seconds: float) -> None:
        """One step: tokens of prompts, see the module."""
        if seconds <= 0.0:
            return
        self._steps += 1
        self._since += seconds
        if tokens:
            read = 0.0 if self.pace is None else self.pace.read * context
            key = (_half_octave(tokens), (pairs // tokens).bit_length(), rows.bit_length())
            self.prompts.add(key, (1.0, tokens, pairs, rows), max(seconds - read, seconds / 2))
        elif rows:
            self.decodes.add((_half_octave(rows), context.bit_length()), (1.0, rows, context), seconds)

    def take(self) -> Pace | None:
        """The coefficients, if they are due and differ from those that were returned last."""
        if self._steps < self._due and self._since < _EVERY_S:
            return None
        if not self._since or not self.decodes.cells or not self.prompts.cells:
            return None
        self._due, self._since = 2 * self._steps, 0.0
        self.pace = self._fit()
        if self._told is not None and not _differ(self.pace, self._told):
            return None
        self._told = self.pace
        return self.pace

    def _fit(self) -> Pace:
        least = self.decodes.shortest
        alone, alone_row, read = self.decodes.solve((0.9 * least, 0.1 * least, 0.0))
        base = _BASE_GUESS * least
        seconds = sum(max(cell.seconds - base, 0.0) for cell in self.prompts.cells.values())
        tokens = sum(cell.features[1] + cell.features[3] for cell in self.prompts.cells.values())
        token = seconds / max(tokens, 1.0)
        base, token, pair, row = self.prompts.solve((base, token, 0.0, token))
        return Pace(base, token, pair, row, read, alone, alone_row, least)

    def snapshot(self) -> dict[str, float]:
        """For statistics: seconds; empty while nothing is known."""
        pace = self.pace
        if pace is None:
            return {}
        return {name: getattr(pace, name) for name in pace.__struct_fields__}


def _half_octave(count: int) -> int:
    """1, 2, 3, 4-5, 6-7, 8-11, 12-15, …"""
    bits = count.bit_length()
    return 2 * bits + (count >> max(bits - 2, 0) & 1 if bits > 1 else 0)


def _differ(pace: Pace, other: Pace) -> bool:
    """Whether what they say of some step differs noticeably."""
    for tokens, start, rows, context in ((64, 0, 0, 0), (512, 0, 8, 2048), (256, 4096, 1, 512)):
        one, two = (each.with_prompts(tokens, start, rows, context) for each in (pace, other))
        if abs(one - two) > _CHANGED * two:
            return True
    if abs(pace.shortest - other.shortest) > _CHANGED * other.shortest:
        return True
    for rows, context in ((1, 128), (16, 4096)):
        one, two = pace.decoding(rows, context), other.decoding(rows, context)
        if abs(one - two) > _CHANGED * two:
            return True
    return False
