"""What is looked at: how instances stand, and what came and went, as counters that only grow."""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from baton.gateway.arranging.slo import Slo

Label = Literal["mixed", "prefill", "decode"]


class InstanceView(NamedTuple):
    """One instance, as it says itself and as its gateway knows it."""

    name: str
    label: Label
    serves: bool = True
    """It is ready, and new requests may be sent there."""
    ready: bool = True
    """It is there; if it does not serve, it drains."""
    age_s: float = 0.0
    """Since its last report; 0 if nothing of it is expected, as it has nothing to do."""
    queued_tokens: int = 0
    """Of prompts that wait there to be computed."""
    decoding: int = 0
    """Sequences whose first token came, and that are there."""
    reported: int = 0
    """Sequences that it says it has, of all gateways."""
    in_flight: int = 0
    """Of them, those of this gateway."""
    slots: int = 1
    num_blocks: int = 1
    free_blocks: int = 1
    prefill_tokens_per_s: float = 0.0
    """0: not known."""
    decode_step_s: float = 0.0
    """0: not known."""
    removable: bool = False
    """It may be drained to have fewer."""


class Traffic(NamedTuple):
    """Counters of one gateway since its start."""

    requests: int = 0
    prompt_tokens: int = 0
    """To be computed: those in prefix caches are left out, as far as is known."""
    first: int = 0
    """First tokens that came."""
    late: int = 0
    """Of these, later than promised."""
    ended: int = 0
    """Answers of several tokens that ended."""
    slow: int = 0
    """Of these, with more time between tokens than promised."""

    def since(self, before: Traffic) -> Traffic:
        return Traffic(*(now - then for now, then in zip(self, before, strict=True)))


class Counting:
    """Counts for `Traffic`, a few additions a request."""

    def __init__(self) -> None:
        self.slo = Slo()
        """What is promised; what exceeds it is late, or slow."""
        self.requests = self.prompt_tokens = 0
        self.first = self.late = 0
        self.ended = self.slow = 0

    def sent(self, tokens: int) -> None:
        """A request with so many tokens to compute is on its way, the first time."""
        self.requests += 1
        self.prompt_tokens += tokens

    def began(self, seconds: float) -> None:
        """Its first token came after so long."""
        self.first += 1
        self.late += seconds > self.slo.ttft_s

    def ended_with(self, tokens: int, seconds: float) -> None:
        """It ended so long after its first token."""
        if tokens > 1:
            self.ended += 1
            self.slow += seconds > self.slo.itl_s * (tokens - 1)

    def now(self) -> Traffic:
        return Traffic(self.requests, self.prompt_tokens, self.first, self.late, self.ended, self.slow)


class Snapshot(NamedTuple):
    """What is known at one time."""

    now: float
    instances: tuple[InstanceView, ...]
    traffic: Traffic
    coming: tuple[str, ...] = ()
    """Instances that somebody starts, or brings back, and that are not there yet."""


class Window:
    """The counters over the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[tuple[float, Traffic]] = deque()

    def clear(self) -> None:
        self._samples.clear()

    def add(self, now: float, traffic: Traffic) -> None:
        self._samples.append((now, traffic))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._seconds:
            self._samples.popleft()

    @property
    def seconds(self) -> float:
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    @property
    def last(self) -> Traffic | None:
        return self._samples[-1][1] if self._samples else None

    def sum(self) -> Traffic:
        """What came in it."""
        return self._samples[-1][1].since(self._samples[0][1]) if self._samples else Traffic()
