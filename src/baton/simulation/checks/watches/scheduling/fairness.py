"""What is checked of newcomers of different flows: none is served much more than another one that waits too.

The watch counts by itself what each key, each user of a key, and each gateway of a user is served at an
engine: tokens of prompts
that first admissions compute, and tokens that are generated.  Of two that both wait without a break, what
they are served meanwhile, each divided by its weight, differs by no more than the theory says
(`protocol/rules/fair_queue.py`): for each of the two one prompt and the answers of all slots, by its weight.
What weights are is taken from the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.request import Request
from baton.engine.states import State
from baton.simulation import describe
from baton.simulation.checks.books import Violation
from baton.simulation.checks.looks import well

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.world import World

Share = tuple[int, str, str | None, str | None]
"""(priority, key, None, None): a key; (…, user, None): a user; (…, user, gateway): a user over a gateway."""


@dataclass
class _Engine:
    """What the watch knows of one incarnation."""

    served: dict[Share, float] = field(default_factory=dict)
    """Tokens by weight."""
    seen: dict[Request, int] = field(default_factory=dict)
    """Of those that run: tokens that were counted."""
    ran: set[Request] = field(default_factory=set)
    together: dict[tuple[Share, Share], float] = field(default_factory=dict)
    """Pairs that wait without a break → by how much more the first had been served when that began."""
    began: dict[Share, dict[Share, float]] = field(default_factory=dict)
    """Of those that wait without a break: what all had been served when that began."""


class FairnessWatch:
    """The rule `fair`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, _Engine] = {}
        specs = world.plan.requests
        self._weights = {spec.flow.key: spec.flow.weight for spec in specs}
        self._prompt = max((len(spec.prompt) for spec in specs), default=0)
        self._answer = max((spec.stopping.max_tokens for spec in specs), default=0)
        self._shares_of: dict[str, list[tuple[Share, float]]] = {}
        """By name of a request."""
        self._matters = len({(spec.flow.key, spec.flow.user, spec.gateway) for spec in specs}) > 1

    def after_turn(self, engine: EngineProcess) -> None:
        if not self._matters or not well(engine):
            return
        known = self._known.get(engine.instance.name)
        if known is None:
            known = self._known[engine.instance.name] = _Engine()
        self._count(engine, known)
        if engine.core.counters.handovers.arrivals:
            return  # (what arrives does not wait here, and is charged all the same)
        self._compare(engine.instance, known, self._waiting(engine, known))

    def _count(self, engine: EngineProcess, known: _Engine) -> None:
        scheduler = engine.core.scheduler
        for request in scheduler.slots:
            if request is not None and request not in known.seen and request.state is not State.FOLLOWING:
                known.seen[request] = len(request.tokens)
                if request not in known.ran:
                    known.ran.add(request)
                    if not request.num_generated:
                        self._serve(known, request, len(request.tokens) - request.num_cached)
        there = {request for request in scheduler.slots if request is not None}
        for request, count in list(known.seen.items()):
            self._serve(known, request, len(request.tokens) - count)
            if request in there:
                known.seen[request] = len(request.tokens)
            else:
                del known.seen[request]

    def _serve(self, known: _Engine, request: Request, tokens: int) -> None:
        for share, weight in self._shares(request):
            known.served[share] = known.served.get(share, 0.0) + tokens / weight

    def _shares(self, request: Request) -> list[tuple[Share, float]]:
        """With their weights, as the client has them."""
        shares = self._shares_of.get(request.name)
        if shares is None or shares[0][0][0] != request.rank[0]:
            shares = self._shares_of[request.name] = self._work_out_shares(request)
        return shares

    def _work_out_shares(self, request: Request) -> list[tuple[Share, float]]:
        number = describe.number_in(request.name)
        client = None if number is None else self._world.client(number)
        flow = request.flow if client is None else client.spec.flow
        gateway = client.gateway.cluster.name if client is not None and client.gateway is not None else ""
        priority = request.rank[0]
        key: Share = (priority, flow.key, None, None)
        user: Share = (priority, flow.key, flow.user, None)
        one: Share = (priority, flow.key, flow.user, gateway)
        shares = [(key, self._weights.get(flow.key, 1.0)), (user, 1.0)]
        return [*shares, (one, 1.0)] if self._world.plan.num_gateways > 1 else shares

    def _waiting(self, engine: EngineProcess, known: _Engine) -> list[Share]:
        """Of newcomers that wait in turn."""
        found: dict[Share, None] = {}
        for request in engine.core.scheduler.waiting_requests():
            if request not in known.ran and not request.num_generated and not request.lets_pass:
                for share, _ in self._shares(request):
                    found[share] = None
        return sorted(found, key=_in_order)

    def _compare(self, instance: Instance, known: _Engine, waiting: list[Share]) -> None:
        together: dict[tuple[Share, Share], float] = {}
        for index, one in enumerate(waiting):
            for other in waiting[index + 1 :]:
                if _parent(one) != _parent(other):
                    continue
                lead = known.served.get(one, 0.0) - known.served.get(other, 0.0)
                began = together[one, other] = known.together.get((one, other), lead)
                self._check(instance, one, other, lead - began)
        known.together = together
        self._compare_with_all(instance, known, waiting)

    def _compare_with_all(self, instance: Instance, known: _Engine, waiting: list[Share]) -> None:
        """Who waits all the time falls behind nobody, also not behind one that leaves and comes again."""
        began = known.began
        known.began = {}
        for one in waiting:
            at_first = known.began[one] = began[one] if one in began else dict(known.served)
            mine = known.served.get(one, 0.0) - at_first.get(one, 0.0)
            for other, served in known.served.items():
                if other == one or _parent(one) != _parent(other):
                    continue
                theirs = served - at_first.get(other, 0.0)
                if theirs > mine:
                    self._check(instance, other, one, theirs - mine)

    def _check(self, instance: Instance, one: Share, other: Share, lead: float) -> None:
        most = self._prompt + instance.config.max_num_seqs * self._answer
        weights = [self._weights.get(share[1], 1.0) if share[2] is None else 1.0 for share in (one, other)]
        bound = sum(most / weight for weight in weights)
        if abs(lead) > bound:
            first, second = (one, other) if lead > 0 else (other, one)
            raise Violation(
                "fair",
                f"{_name(first)} was served {abs(lead):.0f} tokens by weight more than {_name(second)} at "
                f"{instance.name}, while {_name(second)} waited; {bound:.0f} at most is fair",
            )


def _in_order(share: Share) -> tuple[object, ...]:
    return (*share[:2], share[2] or "", share[3] or "", share[2] is not None, share[3] is not None)


def _parent(share: Share) -> tuple[object, ...]:
    """Two shares are compared if it is the same one."""
    priority, key, user, gateway = share
    if gateway is not None:
        return priority, key, user
    return (priority,) if user is None else (priority, key)


def _name(share: Share) -> str:
    _, key, user, gateway = share
    if user is None:
        return f"key {key!r}"
    over = "" if gateway is None else f" over gateway {gateway}"
    return f"user {user!r} of key {key!r}{over}"
