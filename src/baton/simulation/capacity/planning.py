"""How many instances a load needs, and which: the cluster of `cluster.py` with one instance more, until it
bears the load, with roles as `--auto-labels` changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.gateway.arranging.arranger import Arranger, Rules
from baton.gateway.arranging.measured import Label
from baton.gateway.arranging.slo import Slo
from baton.simulation.capacity.cluster import Capacity
from baton.simulation.capacity.goodput import Goodput, goodput
from baton.simulation.capacity.load import Asked
from baton.simulation.capacity.machine import Machine

ORDER: tuple[Label, ...] = ("prefill", "mixed", "decode")


class Run(NamedTuple):
    """What so many instances bear."""

    instances: int
    goodput: Goodput
    shares: dict[Label, float]
    """Instances of each label, in the mean over the time of the trace."""
    most: dict[Label, int]
    """Of each label, at most."""
    changes: int
    """Labels that were changed."""


class Plan(NamedTuple):
    chosen: Run
    enough: bool
    """False: not even the most that were allowed bear the load."""
    runs: dict[int, Run]
    """All that were tried, by the number of instances."""


def first_labels(instances: int) -> list[Label]:
    """Of a cluster that begins: half of each kind; a single one does both."""
    return ["mixed"] if instances == 1 else split(instances // 2, instances)


def split(prefills: int, instances: int) -> list[Label]:
    """So many prefill, the others decode."""
    return ["prefill" if number < prefills else "decode" for number in range(instances)]


def run_with(
    requests: Sequence[Asked],
    labels: Sequence[Label],
    machine: Machine,
    slo: Slo,
    deaths: Sequence[tuple[float, int]] = (),
    *,
    arranged: bool = True,
) -> Capacity:
    """One cluster under the load, with its labels as they are or as the gateway would change them."""
    arranger = Arranger(Rules(slo=slo)) if arranged else None
    capacity = Capacity(requests, labels, machine, arranger, deaths)
    capacity.run()
    return capacity


def plan_for(
    requests: Sequence[Asked],
    machine: Machine,
    slo: Slo,
    *,
    wanted: float,
    most: int,
    tell: Callable[[Run], None] = lambda run: None,
) -> Plan:
    """The fewest instances that answer the share `wanted` of all requests within the SLO.

    `tell` is given each run.  Doubles their number until it is enough, then halves the interval; one less
    and one more than the chosen number are always among the runs.
    """
    runs: dict[int, Run] = {}

    def share(instances: int) -> float:
        if instances not in runs:
            runs[instances] = _run(requests, instances, machine, slo)
            tell(runs[instances])
        return runs[instances].goodput.share

    low, high = 0, 1
    while share(high) < wanted and high < most:
        low, high = high, min(2 * high, most)
    enough = share(high) >= wanted
    while enough and high - low > 1:
        middle = (low + high) // 2
        if share(middle) >= wanted:
            high = middle
        else:
            low = middle
    if high > 1:
        share(high - 1)
    if high < most:
        share(high + 1)
    return Plan(runs[high], enough, dict(sorted(runs.items())))


def _run(requests: Sequence[Asked], instances: int, machine: Machine, slo: Slo) -> Run:
    capacity = run_with(requests, first_labels(instances), machine, slo)
    shares, most = usage(capacity)
    return Run(instances, goodput(capacity.requests, slo), shares, most, len(capacity.changes))


def usage(capacity: Capacity) -> tuple[dict[Label, float], dict[Label, int]]:
    """Of each label: how many instances had it in the mean, and at most, until the last request came."""
    end = capacity.requests[-1].asked.at if capacity.requests else 0.0
    seconds: dict[Label, float] = dict.fromkeys(ORDER, 0.0)
    most: dict[Label, int] = dict.fromkeys(ORDER, 0)
    times = [*(at for at, _ in capacity.history[1:]), end]
    for (at, labels), until in zip(capacity.history, times, strict=True):
        counts = Counter(labels)
        for label in ORDER:
            seconds[label] += counts[label] * max(min(until, end) - at, 0.0)
            if at <= end:
                most[label] = max(most[label], counts[label])
    last = Counter(capacity.history[-1][1])
    shares = {label: seconds[label] / end if end else float(last[label]) for label in ORDER}
    return shares, most
