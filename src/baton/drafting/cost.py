"""What a step costs by its query tokens, learnt from the steps that were run.

Theory. A step with few tokens is bound by reading the weights, one with many by arithmetic, and where
it turns differs by a factor of a hundred between machines, formats and models. So it is measured. The
model is

    seconds(tokens) = scale * shape(tokens)

`shape` is piecewise linear between *knots* (1, 2, 3, 4, 6, 8, 12, 16, ...). The scale follows what
changes all steps alike: contexts grow, other processes come and go. The shape is the machine's, and
changes little. Logarithms of both are estimated by a Kalman filter that takes their errors as
independent: each number has a variance, which a measurement lowers and time raises, and a measurement's
surprise is divided among scale and shape by their variances. A surprise is bounded by what is likely,
and what is first known of a knot is the median of three steps, so that one which was disturbed counts
little.

*What was never measured* is guessed to be cheap: a token more costs half a percent of a step of one, or
what the last ones cost that were measured; and every cost is taken at the lower end of its uncertainty.
So a size that might pay is tried, and costs three steps if it does not. Steps larger than any that was
measured are tried only up to the next knot: they grow by half, not by ten.

*What was measured at a bad time.* Another process may take the cores for just the steps in which a size is
measured first, and a size that looks too dear is not used, so nothing would ever correct it. So one that was
not measured for `_SECOND_LOOK` steps is guessed again as if it never had been, and if it might pay, tried
once more: one step, of which the lower result counts. If it was as dear as before, the next look comes
after eight times as many steps. (A size that looks too cheap is used, and corrected by that.)

*Monotone.* A smaller step costs no more than a larger one: of two measured ones that say otherwise, the
larger one is believed if it was measured better.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

_NOISE = 0.08
"""Of a measured step, relative; standard deviations throughout."""
_UNKNOWN = 0.5
"""Of a shape that was never measured."""
_SCALE_DRIFT = 0.01
"""From a step to the next."""
_SHAPE_DRIFT = 0.002
_LIKELY = 2.5
"""Standard deviations: a surprise beyond them counts as just these."""
_GUESSED_SLOPE = 0.005
"""Of each token more, where nothing was measured."""
_OPTIMISM = 1.0
"""Standard deviations that a cost is taken below its mean; at most `_MOST_OPTIMISM` in all."""
_MOST_OPTIMISM = 0.1
_FIRST = 3
"""Measurements at a knot, before it counts as measured."""
_STALE = 8
"""Steps after which the table is made anew; it takes some dozen microseconds."""
_SECOND_LOOK, _LATER, _LAST_LOOK = 32, 8, 1 << 14
"""Steps since a size was measured, after which it is guessed anew; what they are multiplied by; at most."""
_SHARE = 0.25
"""A step between two knots measures those that have so much of it."""


def knots_up_to(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 ... and at least one at `most` or above."""
    knots = [1, 2]
    while knots[-1] < most:
        knots.append(knots[-1] * 3 // 2 if knots[-1] & (knots[-1] - 1) == 0 else knots[-1] * 4 // 3)
    return knots


class StepCost:
    """Seconds of steps of 1 to `most` tokens."""

    def __init__(self, most: int) -> None:
        self.most = most
        knots = knots_up_to(most)
        self._knots: Float64Array = np.array(knots, np.float64)
        self._place = {count: place for place, count in enumerate(knots)}
        self._guess = [math.log1p(_GUESSED_SLOPE * (count - 1)) for count in knots]
        self._shape = list(self._guess)
        self._shape_var = [_UNKNOWN**2] * len(knots)
        self._seen = [0] * len(knots)
        """Step of the last measurement."""
        self._doubted_after = [_SECOND_LOOK] * len(knots)
        self._first: list[list[float]] = [[] for _ in knots]
        self._scale, self._scale_var = 0.0, _NOISE**2
        self._largest = 0
        """Place of the largest knot that was measured."""
        self._tokens: Float64Array = np.arange(1, most + 1, dtype=np.float64)
        self._table: Float64Array = np.empty(0)
        self._stale = _STALE
        self.steps = 0

    def add(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if not 1 <= tokens <= self._knots[-1] or seconds <= 0:
            return
        taken = math.log(seconds)
        parts = self._parts(tokens)
        if not self.steps:
            self._scale = taken - sum(part * self._shape[place] for place, part in parts)
        self.steps += 1
        surprise = taken - self._scale - sum(part * self._shape[place] for place, part in parts)
        new = [place for place, part in parts if len(self._first[place]) < _FIRST and part >= _SHARE]
        for place in new:
            self._begin(place, surprise)
        if not new:
            for place in [place for place, part in parts if part >= _SHARE and self._doubted(place)]:
                self._look_again(place, surprise)
            self._correct(parts, surprise)
        self._stale += 1

    def _begin(self, place: int, surprise: float) -> None:
        """One of the first measurements at this knot: of all of them the median counts."""
        first = self._first[place]
        first.append(self._shape[place] + surprise)
        if len(first) == _FIRST:
            self._shape[place] = sorted(first)[_FIRST // 2]
            self._shape_var[place] = _NOISE**2 / 2
            self._seen[place] = self.steps
            self._largest = max(self._largest, place)
            self._stale = _STALE

    def _doubted(self, place: int) -> bool:
        """Whether it may have been measured at a bad time, and was not measured since."""
        return (
            len(self._first[place]) == _FIRST and self.steps - self._seen[place] > self._doubted_after[place]
        )

    def _look_again(self, place: int, surprise: float) -> None:
        """The first measurement of a knot that was doubted."""
        self._doubted_after[place] = min(_LATER * self._doubted_after[place], _LAST_LOOK)
        self._stale = _STALE
        if surprise < 0:  # it is believed almost as if nothing had been known
            self._shape_var[place] = _UNKNOWN**2

    def _correct(self, parts: list[tuple[int, float]], surprise: float) -> None:
        self._scale_var += _SCALE_DRIFT**2
        if max(self._shape_var[place] for place, _ in parts) > _NOISE**2:
            self._stale = _STALE
        for place, _ in parts:
            self._shape_var[place] = self._variance(place)
            self._seen[place] = self.steps
        total = self._scale_var + _NOISE**2
        total += sum(part**2 * self._shape_var[place] for place, part in parts)
        likely = _LIKELY * math.sqrt(total)
        surprise = min(max(surprise, -likely), likely)
        self._scale += self._scale_var / total * surprise
        self._scale_var -= self._scale_var**2 / total
        for place, part in parts:
            gain = part * self._shape_var[place] / total
            self._shape[place] += gain * surprise
            self._shape_var[place] *= 1 - part * gain

    def _parts(self, tokens: int) -> list[tuple[int, float]]:
        """The knots around, and the share of each."""
        if (place := self._place.get(tokens)) is not None:
            return [(place, 1.0)]
        upper = int(np.searchsorted(self._knots, tokens))
        below, above = float(self._knots[upper - 1]), float(self._knots[upper])
        share = (tokens - below) / (above - below)
        return [(upper - 1, 1 - share), (upper, share)]

    def knows(self, tokens: int) -> bool:
        """Whether steps of about so many tokens were measured."""
        if tokens > self._knots[-1]:
            return False
        return all(len(self._first[place]) == _FIRST for place, part in self._parts(tokens) if part >= _SHARE)

    def table(self) -> Float64Array:
        """[most + 1] seconds of a step by its tokens, as they are to be reckoned with; entry 0 is 0, and
        beyond what may be tried they are infinite."""
        if self._stale >= _STALE:
            self._table, self._stale = self._make_table(), 0
        return self._table

    def measured(self) -> dict[int, float]:
        """Seconds by tokens, of the knots that were measured."""
        places = range(self._largest + 1)
        return {
            int(self._knots[place]): math.exp(self._scale + self._shape[place])
            for place in places
            if len(self._first[place]) == _FIRST
        }

    def _variance(self, place: int) -> float:
        """Of a knot's shape, now."""
        return min(
            self._shape_var[place] + (self.steps - self._seen[place]) * _SHAPE_DRIFT**2 / 4, _UNKNOWN**2
        )

    def _make_table(self) -> Float64Array:
        shape = self._complete()
        places = range(len(shape))
        variances = [_UNKNOWN**2 if self._doubted(place) else self._variance(place) for place in places]
        # Of neighbours in the wrong order each is what their variances say of both.
        for place in range(1, len(shape)):
            low = place - 1
            while low >= 0 and shape[low] > shape[low + 1]:
                a, b = variances[low] + 1e-9, variances[low + 1] + 1e-9
                shape[low] = shape[low + 1] = (shape[low] * b + shape[low + 1] * a) / (a + b)
                low -= 1
        lowered = np.array(shape) - np.minimum(_OPTIMISM * np.sqrt(variances), _MOST_OPTIMISM)
        lowered = np.exp(self._scale + np.maximum.accumulate(lowered))
        found: Float64Array = np.zeros(self.most + 1)
        found[1:] = np.interp(self._tokens, self._knots, lowered)
        if self._largest + 1 < len(shape):
            found[int(self._knots[self._largest + 1]) + 1 :] = np.inf
        return found

    def _complete(self) -> list[float]:
        """The shape; what was not measured follows from what was, and what is doubted from what is not, if
        that is less."""
        shape = list(self._shape)
        known = [place for place, first in enumerate(self._first) if len(first) == _FIRST]
        if not known:
            return shape
        for place in range(len(shape)):
            if place < known[0]:
                shape[place] += shape[known[0]] - self._guess[known[0]]
            elif place not in known:
                shape[place] = self._grown(place, known)
        trusted = [place for place in known if not self._doubted(place)]
        for place in known:
            if place not in trusted and trusted and place > trusted[0]:
                shape[place] = min(shape[place], self._grown(place, trusted))
        return shape

    def _grown(self, place: int, known: list[int]) -> float:
        """The shape above known ones: it grows as it did last, or as it is guessed to, whatever is less."""
        below = [other for other in known if other < place][-2:]
        near = below[-1]
        guessed = self._shape[near] + self._guess[place] - self._guess[near]
        if len(below) < 2:
            return guessed
        rise = math.exp(self._shape[near]) - math.exp(self._shape[below[0]])
        slope = max(rise, 0.0) / float(self._knots[near] - self._knots[below[0]])
        grown = math.exp(self._shape[near]) + slope * float(self._knots[place] - self._knots[near])
        return min(math.log(grown), guessed)
