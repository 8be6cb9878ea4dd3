"""What the engine counts since it started.  Counters only grow; gauges are read from the books when asked."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from baton.engine.request import Request
from baton.protocol.messages.reports import EXPERT_LOADS, StrangersRefused

REFUSED_AT = ("handshake", "half_open", "peer", "page_connection", "page_grant")
"""Connections without a key of the cluster; those that made room for others, or sent too much before they had
shown one; messages on a connection that is not its peer's; the same of page servers, and questions without a
grant."""


@dataclass
class Sizes:
    """A histogram of token counts: how many were at most each bound, and above the one before it."""

    bounds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    counts: list[int] = field(default_factory=lambda: [0] * 16)
    """One more than `bounds`."""
    sum: int = 0

    def add(self, tokens: int) -> None:
        self.counts[bisect_left(self.bounds, tokens)] += 1
        self.sum += tokens

    def snapshot(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


@dataclass
class Seconds:
    """A histogram of times: how many took at most each bound, and more than the one before it."""

    bounds: tuple[float, ...] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
    counts: list[int] = field(default_factory=lambda: [0] * 14)
    """One more than `bounds`."""
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def snapshot(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


@dataclass
class HandoverCounters:
    """Hand-overs, those out of this instance (departures) and those into it (arrivals)."""

    departures: int = 0
    """Requests that were to be handed over."""
    reserves: int = 0
    """Questions to decode instances."""
    reserved: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By `Refused.code`, and `no_answer`, `passed_over` (it is slow: it was not asked)."""
    credits: int = 0
    """Credits received."""
    stayed: Counter[str] = field(default_factory=Counter)
    """Requests that decode here after all, by why."""
    handed: int = 0
    taken: int = 0
    returned: int = 0
    """Handed over and given back."""
    lost: int = 0
    """Handed over, and nobody knows whether it arrived."""
    reserve_seconds: float = 0.0
    """Sum from `Reserve` to its `Reserved`."""
    taken_seconds: float = 0.0
    """Sum from `Handoff` to its `Taken`."""

    arrivals: int = 0
    """Reservations given."""
    refusals: Counter[str] = field(default_factory=Counter)
    """By `Refused.code`."""
    credits_given: int = 0
    arrived: int = 0
    """Requests that were handed over to this instance."""
    seated: int = 0
    """Of those, how many run with pages that were fetched."""
    pages_shared: int = 0
    """Pages that were not fetched for a reservation, as they were on their way for another one."""
    recomputed: Counter[str] = field(default_factory=Counter)
    """Of those, how many had to be computed again, by why."""
    given_up: Counter[str] = field(default_factory=Counter)
    """Reservations that ended before the request was handed over, by why."""
    fetches: int = 0
    fetch_errors: int = 0
    fetched_bytes: int = 0
    fetched_by: Counter[str] = field(default_factory=Counter)
    """Those bytes by transport."""
    fetch_seconds: float = 0.0
    """Sum over ranks and fetches."""
    fetch_tail_seconds: float = 0.0
    """Sum from `Handoff` to the last page."""
    takes: Seconds = field(default_factory=Seconds)
    """What `taken_seconds` sums up."""
    tails: Seconds = field(default_factory=Seconds)
    """What `fetch_tail_seconds` sums up."""

    def snapshot(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, Seconds):
        return value.snapshot()
    return dict(value) if isinstance(value, Counter) else value


@dataclass
class Counters:
    prompt_tokens: int = 0
    """Of requests that were admitted, once each."""
    generation_tokens: int = 0
    preemptions_of: Sizes = field(default_factory=lambda: Sizes((0, 1, 2, 3, 5, 10, 20, 50), [0] * 9))
    """Preemptions of each request that ended here."""
    recomputed_tokens: int = 0
    """Tokens whose KV was or is computed again after a preemption."""
    preemptions: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache at first admissions."""
    prefix_hit_tokens: int = 0
    prefix_followed_tokens: int = 0
    """Of those, the ones that another request was computing when this one got its slot."""
    finished: Counter[str] = field(default_factory=Counter)
    """By `FinishReason`."""
    rejected: Counter[str] = field(default_factory=Counter)
    """By `Finished.code`."""
    displaced: int = 0
    """Of those rejected with `queue_full`, how many had waited and made place for another one."""
    steps: int = 0
    step_seconds: float = 0.0
    step_tokens: Sizes = field(default_factory=Sizes)
    """Of each step: prompt tokens that it computed, and tokens that it generated."""
    step_prompt_tokens: Sizes = field(default_factory=Sizes)
    """Of each step that computed prompts: their tokens."""
    expert_tokens: list[int] = field(default_factory=list)
    """As `StepReport.expert_tokens`, together; empty without experts."""
    drafts: int = 0
    """Times that a step computed drafts of a slot."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Of these, the ones that were right."""
    accepted_by_place: list[int] = field(default_factory=list)
    """The same by their place behind the slot's token, from the first on."""
    queue_seconds: float = 0.0
    """Sum over first admissions."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Of those who are no members of the cluster, by where they came (`REFUSED_AT`): at the engine's own
    sockets."""
    refusals_elsewhere: Counter[str] = field(default_factory=Counter)
    """At page servers, and at the link of an instance on several hosts, as they have reported."""
    violations: int = 0
    """Messages that could not be: stale slots, unknown epochs, bytes that are no message."""

    handovers: HandoverCounters = field(default_factory=HandoverCounters)

    def count_step(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts and generated so many, together."""
        self.steps += 1
        self.step_seconds += seconds
        sizes = self.step_tokens
        sizes.counts[bisect_left(sizes.bounds, tokens)] += 1
        sizes.sum += tokens

    def count_speculation(self, counts: list[int]) -> None:
        """As `StepReport.speculation`."""
        if len(counts) < 2:
            return
        drafts, tokens, *right = counts
        self.drafts += drafts
        self.draft_tokens += tokens
        self.accepted_tokens += sum(right)
        self.accepted_by_place += [0] * (len(right) - len(self.accepted_by_place))
        for place, count in enumerate(right):
            self.accepted_by_place[place] += count

    def count_experts(self, tokens: list[int]) -> None:
        if tokens and len(tokens) == len(EXPERT_LOADS) + 1:
            before = self.expert_tokens or [0] * len(tokens)
            self.expert_tokens = [old + new for old, new in zip(before, tokens, strict=True)]

    def count_admission(self, request: Request, *, caching: bool, num_followed: int = 0) -> None:
        """The engine sends the first `Admit` of a request."""
        self.prompt_tokens += request.num_prompt
        self.queue_seconds += (request.first_admitted or request.arrived) - request.arrived
        if caching:
            self.prefix_query_tokens += request.num_prompt
            self.prefix_hit_tokens += request.num_cached
            self.prefix_followed_tokens += num_followed

    def snapshot(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["expert_tokens"] = {
            str(load): count for load, count in zip((*EXPERT_LOADS, "more"), self.expert_tokens, strict=False)
        }
        values["accepted_by_place"] = {str(place): n for place, n in enumerate(self.accepted_by_place)}
        values["finished"] = dict(self.finished)
        values["rejected"] = dict(self.rejected)
        there = values.pop("refusals_elsewhere")
        values["refusals"] = {at: self.refusals[at] + there[at] for at in REFUSED_AT}
        values["handovers"] = self.handovers.snapshot()
        values["preemptions_of"] = self.preemptions_of.snapshot()
        values["step_tokens"] = self.step_tokens.snapshot()
        values["step_prompt_tokens"] = self.step_prompt_tokens.snapshot()
        return values


class Counting:
    """The part of the core that only counts."""

    counters: Counters

    def refused(self, where: str, count: int) -> None:
        """So many at one of `REFUSED_AT` since the start, who have no part in the cluster."""
        self.counters.refusals[where] = count

    def strangers_refused(self, report: StrangersRefused) -> None:
        """Elsewhere than at this process' sockets."""
        there = self.counters.refusals_elsewhere
        found = (report.handshakes, report.half_open, report.messages, report.strangers, report.grants)
        for where, count in zip(REFUSED_AT, found, strict=True):
            there[where] += count
