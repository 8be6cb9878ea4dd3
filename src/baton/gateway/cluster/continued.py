"""What became of requests whose instance was lost, for metrics.

Counted at each loss, and at the first token after one: nothing with every token.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from baton.gateway.cluster.member import lost_error
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import InstanceUnavailable

BOUNDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds."""


class Continued:
    """Of one gateway."""

    def __init__(self) -> None:
        self.times = 0
        """Times that a request went on after a loss."""
        self.tokens = 0
        """Generated tokens that requests had then, and kept."""
        self.failed = 0
        """Requests that failed after losses: too many, or no instance came."""
        self.gaps = [0] * (len(BOUNDS) + 1)
        """From a loss to the next token: how many took at most each bound, and more."""
        self.gap_seconds = 0.0

    def goes_on(self, request: EngineRequest, now: float) -> None:
        """It has lost its instance, and is sent to another one."""
        self.times += 1
        self.tokens += request.num_generated
        if request.lost_at is None:
            request.lost_at = now

    def resumes(self, request: EngineRequest, now: float) -> None:
        """Its first token from an instance came: since a loss, or at all."""
        if request.lost_at is not None:
            seconds, request.lost_at = now - request.lost_at, None
            self.gaps[bisect_left(BOUNDS, seconds)] += 1
            self.gap_seconds += seconds

    def error(self, request: EngineRequest, why: str) -> InstanceUnavailable:
        """It fails, as no instance comes or it lost too many."""
        self.failed += request.losses > 0
        return lost_error(why)
