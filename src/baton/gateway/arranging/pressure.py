"""How hard the two kinds of work press on the instances that do them, as they are and as they could be.

Theory.  A pressure of 1 is as much as can be done within what is promised.

*Prefill.*  Instances that prefill at `rate` tokens a second get `demand` tokens a second: each of them is
busy for ρ = demand / (instances · rate) of the time.  With a prompt of s seconds, a first token comes after
about s · (1 + ρ / (1 − ρ)), so ρ may be (x − 1) / x, where the promise is x · s; between LEAST_BUSY and
MOST_BUSY of the time.  What waits already must be computed within the promise as well.

*Decode.*  A step of n sequences takes a + b · n seconds (fitted to what was reported), so the promise allows
so many sequences an instance; slots and KV blocks allow so many.  With another number of instances a step
takes another time, and as many tokens a second are wanted, so

    n(m) = g · a / (m − g · b),   g = m₀ · n₀ / (a + b · n₀),   of which m₀ is the number now.

A `mixed` instance counts half for each: it does both, and each in the other's way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from baton.gateway.arranging.measured import InstanceView, Label, Traffic
from baton.gateway.arranging.slo import Slo

LEAST_BUSY, MOST_BUSY = 0.4, 0.85
_MOST_BLOCKS = 0.9
_ITL_MARGIN = 0.9
"""Steps vary, and prompts that are not worth a hand-over are computed between them."""
_BEYOND = 100.0
"""A pressure that says no more than: far too much."""
_FORGET = 0.98
"""What an older sample counts, of the next one."""
_GUESS = 32.0
"""As many sequences cost as much as a step without any, as long as their number has not varied."""
_TOO_MANY = 0.03
"""Of first tokens or answers, later than promised: then a pressure is 1, whatever is computed."""

PREFILLS: dict[Label, float] = {"prefill": 1.0, "mixed": 0.5, "decode": 0.0}
DECODES: dict[Label, float] = {"prefill": 0.0, "mixed": 0.5, "decode": 1.0}


class StepFit:
    """Seconds of a step that decodes n sequences, as a line, from what instances report."""

    def __init__(self) -> None:
        self._weight = self._n = self._s = self._nn = self._ns = 0.0

    def add(self, sequences: float, seconds: float) -> None:
        self._weight = _FORGET * self._weight + 1.0
        self._n = _FORGET * self._n + sequences
        self._s = _FORGET * self._s + seconds
        self._nn = _FORGET * self._nn + sequences * sequences
        self._ns = _FORGET * self._ns + sequences * seconds

    def line(self) -> tuple[float, float] | None:
        """(a, b); None before anything was seen."""
        if not self._weight or not self._n:
            return None
        n, s = self._n / self._weight, self._s / self._weight
        variance = self._nn / self._weight - n * n
        if variance > (0.1 * n) ** 2 and variance > 0.25:
            b = (self._ns / self._weight - n * s) / variance
        else:
            b = s / (n + _GUESS)  # (all samples are alike)
        b = min(max(b, 0.0), s / n)
        return s - b * n, b


class Pressures(NamedTuple):
    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        return max(self)

    def __str__(self) -> str:
        return f"prefill {self.prefill:.2f}, decode {self.decode:.2f}"


class Load(NamedTuple):
    """What there is to do, from which pressures follow for any arrangement."""

    demand: float
    """Tokens of prompts a second; of all gateways."""
    rate: float
    """Tokens a second that an instance prefills; 0: not known."""
    busy: float
    """How much of the time an instance may prefill."""
    backlog: float
    """Tokens that wait to be computed."""
    patience_s: float
    """Within which they must be."""
    tokens_per_s: float
    """That instances decode; with `idle_s` and `each_s`: of one step, and for each sequence of it."""
    idle_s: float
    each_s: float
    most: float
    """Sequences that one instance may decode."""
    floor: Pressures = Pressures(0.0, 0.0)
    """Measured at the clients, for the arrangement that is now."""

    def pressures(self, prefills: float, decodes: float) -> Pressures:
        """With so many instances for each."""
        return Pressures(min(self._prefill(prefills), _BEYOND), min(self._decode(decodes), _BEYOND))

    def _prefill(self, instances: float) -> float:
        if not self.rate or not (self.demand or self.backlog):
            return 0.0
        if not instances:
            return _BEYOND
        busy = self.demand / (instances * self.rate) / self.busy
        waits = self.backlog / (instances * self.rate) / self.patience_s
        return max(busy, waits)

    def _decode(self, instances: float) -> float:
        if not self.tokens_per_s:
            return 0.0
        left = instances - self.tokens_per_s * self.each_s
        if left <= 0:
            return _BEYOND
        return self.tokens_per_s * self.idle_s / left / self.most


def load_of(
    instances: Sequence[InstanceView], traffic: Traffic, seconds: float, slo: Slo, fit: StepFit
) -> Load | None:
    """What the serving instances have to do; None: too little is known."""
    rates = [one.prefill_tokens_per_s for one in instances if one.prefill_tokens_per_s > 0]
    line = fit.line()
    if seconds <= 0 or not (rates or line):
        return None
    own = sum(one.in_flight for one in instances)
    share = max(sum(one.reported for one in instances) / own, 1.0) if own else 1.0
    rate = sum(rates) / len(rates) if rates else 0.0
    decoders = sum(DECODES[one.label] for one in instances)
    decoding = share * sum(one.decoding for one in instances)
    if line is None:
        return Load(share * traffic.prompt_tokens / seconds, rate, MOST_BUSY, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    idle_s, each_s = line
    mean = decoding / max(decoders, 0.5)
    step_s = idle_s + each_s * mean
    most = _most_sequences(instances, slo, idle_s, each_s, decoding)
    full = mean >= most  # then prompts wait for room, not to be computed
    prompt_s = traffic.prompt_tokens / max(traffic.requests, 1) / rate if rate else 0.0
    patience_s = max(slo.ttft_s - prompt_s, 0.25 * slo.ttft_s) if slo.ttft_s < math.inf else 1.0
    times = slo.ttft_s / prompt_s if prompt_s else math.inf
    busy = MOST_BUSY if times == math.inf else min(max((times - 1) / times, LEAST_BUSY), MOST_BUSY)
    return Load(
        demand=share * traffic.prompt_tokens / seconds,
        rate=rate,
        busy=busy,
        backlog=0.0 if full else float(sum(one.queued_tokens for one in instances)),
        patience_s=patience_s,
        tokens_per_s=decoders * mean / step_s if step_s > 0 else 0.0,
        idle_s=idle_s,
        each_s=each_s,
        most=most,
        floor=_measured(traffic, full),
    )


def _measured(traffic: Traffic, full: bool) -> Pressures:
    late = traffic.late > _TOO_MANY * traffic.first and not full
    slow = traffic.slow > _TOO_MANY * traffic.ended
    return Pressures(float(late), float(slow))


def _most_sequences(
    instances: Sequence[InstanceView], slo: Slo, idle_s: float, each_s: float, decoding: float
) -> float:
    """That one instance may decode: by the promise, by its slots, by its blocks."""
    most = min((float(one.slots) for one in instances), default=1.0)
    if slo.itl_s < math.inf:
        spare = _ITL_MARGIN * slo.itl_s - idle_s
        most = min(most, spare / each_s if each_s > 0 else most) if spare > 0 else 1.0
    held = sum(one.num_blocks - one.free_blocks for one in instances if one.label != "prefill")
    if decoding >= 1 and held > 0:
        smallest = min(one.num_blocks for one in instances)
        most = min(most, _MOST_BLOCKS * smallest / (held / decoding))
    return max(most, 1.0)


def pools(labels: Sequence[Label]) -> tuple[float, float]:
    """How many instances prefill, and how many decode."""
    return sum(PREFILLS[label] for label in labels), sum(DECODES[label] for label in labels)
