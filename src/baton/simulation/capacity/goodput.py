"""What came of a run: requests whose first token and whose stream were as promised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.gateway.arranging.slo import Slo
from baton.simulation.capacity.machine import Request


class Goodput(NamedTuple):
    asked: int
    good: int
    late: int
    """First token later than promised, or never."""
    slow: int
    """More between tokens than promised, or never ended."""

    @property
    def share(self) -> float:
        return self.good / self.asked if self.asked else 1.0


def is_good(request: Request, slo: Slo) -> bool:
    return not _late(request, slo) and not _slow(request, slo)


def goodput(requests: Sequence[Request], slo: Slo) -> Goodput:
    late = sum(_late(one, slo) for one in requests)
    slow = sum(_slow(one, slo) for one in requests)
    return Goodput(len(requests), sum(is_good(one, slo) for one in requests), late, slow)


def by_time(requests: Sequence[Request], slo: Slo, width_s: float) -> list[Goodput]:
    """Of those that came in each stretch of time."""
    last = max((one.asked.at for one in requests), default=0.0)
    parts: list[list[Request]] = [[] for _ in range(int(last / width_s) + 1)]
    for one in requests:
        parts[int(one.asked.at / width_s)].append(one)
    return [goodput(part, slo) for part in parts]


def _late(request: Request, slo: Slo) -> bool:
    return request.first_at - request.asked.at > slo.ttft_s


def _slow(request: Request, slo: Slo) -> bool:
    return request.asked.output > 1 and request.itl_s > slo.itl_s
