"""One request, as its gateway knows it: when it came, what it asked for, how it ended, and its trails."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.observe.events.context import Trace
from baton.observe.events.trail import Trail
from baton.protocol.params.sampling_params import SamplingParams

MAX_TRAILS = 8
"""Of one request: the first ones.  What is kept is bounded by requests, and one may have 4,096 sequences."""


@dataclass(slots=True, eq=False)
class Story:
    """All times are seconds on the gateway's monotonic clock, but for `wall`."""

    id: str
    """As the client knows it."""
    arrived: float
    started: float
    """Its body was read and its prompts are tokens: it may be sent."""
    wall: float = 0.0
    """Seconds since 1970 when it arrived."""
    prompt_tokens: int = 0
    sequences: int = 1
    max_tokens: int | None = None
    first_at: float | None = None
    """The first token was there."""
    ended: float | None = None
    generated_tokens: int = 0
    cached_tokens: int | None = None
    reasons: tuple[str, ...] = ()
    """How its sequences ended: `stop`, `length`, …, `cancelled`; None of them before the end."""
    error: str | None = None
    """The code of the error that its client got."""
    trails: list[Trail] = field(default_factory=list)
    trace: Trace | None = None
    """It is sent to a collector of traces when it has ended."""
    params: SamplingParams | None = None
    """What was asked for, where it is traced."""

    def trail(self) -> Trail | None:
        """That of its next sequence; None: enough are kept."""
        if len(self.trails) >= MAX_TRAILS:
            return None
        self.trails.append(Trail())
        return self.trails[-1]

    @property
    def failed(self) -> bool:
        return self.error is not None

    def waited(self, now: float) -> float:
        """Seconds until its first token; until now, or until its end, where none came."""
        until = self.first_at if self.first_at is not None else self.ended
        return (now if until is None else until) - self.arrived
