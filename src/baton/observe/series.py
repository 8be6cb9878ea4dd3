"""Series of numbers that cost next to nothing to count, for what happens with every token or sequence.

prometheus_client's own take a lock and some microseconds for each addition.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

PREFIX = "baton:"
"""Of all names."""


class Tally:
    """A counter for what happens with every token: nothing but an addition.  For one thread."""

    def __init__(self, model_name: str, name: str, text: str) -> None:
        self._model_name, self._name, self._text = model_name, name, text
        self.value = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(PREFIX + self._name, self._text, labels=["model_name"])
        family.add_metric([self._model_name], self.value)
        yield family


class Tallies:
    """Counters by labels, for what happens with every sequence.  For one thread."""

    def __init__(
        self,
        model_name: str,
        name: str,
        text: str,
        labels: tuple[str, ...],
        known: Iterable[tuple[str, ...]] = (),
    ) -> None:
        """`known`: labels that begin at 0; Prometheus' `rate` misses the first of what begins later."""
        self._model_name, self._name, self._text, self._labels = model_name, name, text, labels
        self._values: dict[tuple[str, ...], int] = dict.fromkeys(known, 0)

    def add(self, labels: tuple[str, ...], count: int) -> None:
        self._values[labels] = self._values.get(labels, 0) + count

    @property
    def total(self) -> int:
        return sum(self._values.values())

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", *self._labels]
        family = CounterMetricFamily(PREFIX + self._name, self._text, labels=labels)
        for values, count in self._values.items():
            family.add_metric([self._model_name, *values], count)
        yield family


class Buckets:
    """A histogram for what happens with every token or sequence: a search and two additions.  For one
    thread."""

    def __init__(self, model_name: str, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._model_name, self._name, self._text = model_name, name, text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """So many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(PREFIX + self._name, self._text, labels=["model_name"])
        bounds = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]
        counts = zip(bounds, accumulate(self._counts), strict=True)
        family.add_metric([self._model_name], list(counts), self._sum)
        yield family
