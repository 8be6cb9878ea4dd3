"""Where a request goes: the choice of a plan.  No I/O, no state.

A plan is the instance that prefills, and those it may hand the request over to, the best first (none: it
stays).  Every plan that is possible now gets a *tier*, which the labels decide, and in it a *cost*, an
estimate of the seconds until the request has its answer, as far as they depend on the choice:

    prefill(m) = (tokens queued at m + tokens of the request that m has not in its cache) / m's prefill rate
    decode(m)  = the time of TYPICAL_TOKENS steps of m × the square of the part of its slots or blocks that
                 is taken, and the same time once more if it has no slot or not enough blocks left
    cost       = prefill(where it prefills) + decode(where it decodes) + fetching what the decoder lacks

| prefills at | decodes at | tier |
| --- | --- | --- |
| `mixed`   | there too | 0 |
| `prefill` | the best of `decode` and `mixed` | 0 |
| `prefill` | there too, as there is neither `decode` nor `mixed` | 0 |
| `prefill` | there too, although there are others | 1 |
| `decode`  | there too, as there is neither `prefill` nor `mixed` | 0 |
| `decode`  | there too, as what it has not cached is *short* | 0; before all others while it has room |
| `decode`  | there too, although it is not short | 1 |

What wants a result of its prompt and no tokens stays where it prefills, at tier 0; an instance labelled
`decode` gets it in tier 1, unless there is no other.  It decodes nowhere, so `decode(m)` is left out.

So labels say what is preferred, and any instance serves when there is no other.  Tier 1 is for requests that
tier 0 refused (its queues are full).  An instance that said so lately, or that is paused, comes after all
others.

*Short* is decided by `disaggregation_threshold`, in tokens.  Without one it is decided by what was measured:
a prompt is short if computing its uncached part at the decoder takes no longer than one decode step there.
That is what the requests which decode there would lose, less than a hand-over costs.

Prefix affinity needs no rule of its own: what is cached costs nothing, so a conversation returns to where its
KV is unless that instance is busier than computing it again elsewhere would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton.gateway.cluster.member import Member
from baton.protocol.messages.requests import Target, Welcome

MAX_DECODERS = 3
TYPICAL_TOKENS = 128
"""Tokens of an answer, where a guess is needed."""
_FETCHED_TOKENS_PER_S = 1e6
"""A guess: it only has to be far above what computing reaches."""
_DEFAULT_RATE = 10_000.0
"""Prefilled tokens a second, as long as nobody has measured any."""
_DEFAULT_STEP_S = 0.02


class Job(NamedTuple):
    """What routing has to know of a request."""

    num_tokens: int
    """Prompt, and what was generated before."""
    stays: bool
    """It decodes where it prefills: a hand-over is not worth it, or impossible."""
    num_cached: Callable[[Member], int]
    """Leading tokens that an instance has cached."""
    decodes: bool = True
    """It generates; else it wants a result of its prompt alone."""


class Plan(NamedTuple):
    at: Member
    decoders: tuple[Member, ...] = ()
    work: int = 0
    """Tokens that `at` has to compute."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.at.name, *(member.name for member in self.decoders))

    def targets(self, gateway: str, request: int) -> tuple[Target, ...]:
        """The decoders, as they are told to the one that prefills this request of this gateway."""
        prefiller = self.at.incarnation
        return tuple(member.target(gateway, request, prefiller) for member in self.decoders)


def choose(members: Iterable[Member], job: Job, threshold: int | None) -> Plan | None:
    """The best plan; None if no instance can serve."""
    serving = [member for member in members if member.serves]
    if len(serving) <= 1:
        return Plan(serving[0], (), job.num_tokens) if serving else None
    return _Choice(serving, job, threshold).best()


def can_hand_over(source: Member, decoder: Member) -> bool:
    """Whether KV pages of one can be used by the other."""
    if source is decoder or not source.hands_over or not decoder.hands_over:
        return False
    ours, theirs = source.welcome, decoder.welcome
    if ours is None or theirs is None or ours.source is None or theirs.source is None:
        return False
    return ours.source.tile == theirs.source.tile and ours.source.block_size == theirs.source.block_size


class _Choice:
    """One choice among at least two instances."""

    def __init__(self, serving: Sequence[Member], job: Job, threshold: int | None) -> None:
        self._serving = serving
        self._job = job
        self._threshold = threshold
        self._work = {member.name: max(job.num_tokens - job.num_cached(member), 1) for member in serving}
        rates = [m.load.prefill_tokens_per_s for m in serving if m.load and m.load.prefill_tokens_per_s > 0]
        self._usual_rate = sum(rates) / len(rates) if rates else _DEFAULT_RATE
        steps = [m.load.decode_step_s for m in serving if m.load and m.load.decode_step_s > 0]
        self._usual_step = sum(steps) / len(steps) if steps else _DEFAULT_STEP_S
        self._can_prefill = any(member.label != "decode" for member in serving)
        self._can_decode = any(member.label != "prefill" for member in serving)

    def best(self) -> Plan:
        plans = [self._plan(member) for member in self._serving]
        return min(plans, key=lambda ranked: ranked[0])[1]

    def _plan(self, member: Member) -> tuple[tuple[float, ...], Plan]:
        """The best plan with the prefill at `member`, and its rank: less is better."""
        work = self._work[member.name]
        decoders = self._decoders(member)
        prefill_s = (member.queued_tokens + work) / self._rate(member)
        if decoders:
            first = decoders[0]
            tier = 0
            cost = prefill_s + self._decode_s(first) + self._work[first.name] / _FETCHED_TOKENS_PER_S
        else:
            tier = self._tier_of_staying(member)
            cost = prefill_s + (self._decode_s(member) if self._job.decodes else 0.0)
        rank = (member.full or member.paused, max(tier, 0), min(tier, 0), cost, member.turn)
        return rank, Plan(member, decoders, work)

    def _decoders(self, member: Member) -> tuple[Member, ...]:
        if member.label != "prefill" or self._job.stays:
            return ()
        able = [other for other in self._serving if other.label != "prefill" and can_hand_over(member, other)]
        able.sort(key=lambda other: (other.full or other.paused, self._hand_over_s(other), other.turn))
        return tuple(able[:MAX_DECODERS])

    def _tier_of_staying(self, member: Member) -> int:
        """-1: before all of tier 0, whatever it costs."""
        if not self._job.decodes:
            return int(member.label == "decode" and self._can_prefill)
        if member.label == "mixed" or self._job.stays:
            return 0
        if member.label == "prefill":
            return 1 if self._can_decode else 0
        if not self._can_prefill:
            return 0
        if not self._short(member):
            return 1
        return -1 if self._has_room(member) else 0

    def _short(self, member: Member) -> bool:
        work = self._work[member.name]
        if self._threshold is not None:
            return work < self._threshold
        return work <= self._step_s(member) * self._rate(member)

    def _hand_over_s(self, decoder: Member) -> float:
        return self._decode_s(decoder) + self._work[decoder.name] / _FETCHED_TOKENS_PER_S

    def _decode_s(self, member: Member) -> float:
        welcome = member.welcome
        assert welcome is not None  # (it serves)
        slots = member.sequences / max(welcome.max_num_seqs, 1)
        blocks = 1.0 - (member.free_blocks - self._blocks(welcome)) / max(welcome.num_blocks, 1)
        cost = max(slots, blocks, 0.0) ** 2  # half empty is as good as empty, almost full is not
        if not self._has_room(member):
            cost += 1.0
        return cost * TYPICAL_TOKENS * self._step_s(member)

    def _has_room(self, member: Member) -> bool:
        welcome = member.welcome
        assert welcome is not None  # (it serves)
        return member.sequences < welcome.max_num_seqs and member.free_blocks >= self._blocks(welcome)

    def _blocks(self, welcome: Welcome) -> int:
        return self._job.num_tokens // welcome.block_size + 1

    def _rate(self, member: Member) -> float:
        measured = member.load.prefill_tokens_per_s if member.load else 0.0
        return measured if measured > 0 else self._usual_rate

    def _step_s(self, member: Member) -> float:
        measured = member.load.decode_step_s if member.load else 0.0
        return measured if measured > 0 else self._usual_step
