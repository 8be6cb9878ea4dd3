"""What is checked of the order of requests: who is served first, who gives way, who is refused.

The watch takes the priorities of requests from the plan, and knows when each came to an engine.  Of two that
wait, the one of the better priority goes first; then the one that ran before; then, of two that ran or of two
newcomers of one flow, the one that came first.  (How newcomers of different flows take turns is another
matter.)  A request that lets others pass (`departures.py`) counts as if it had come later by so many.  Of two
that run the one that would be served later gives way.  The same order holds for those of other instances that
wait for credit, and for who is refused when a queue is full: a newcomer, and none that is better
than one that stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.engine.request import Request
from baton.engine.states import State
from baton.protocol.messages.handover import Cancel, Credit, PeerMessage, Refused, Reserve
from baton.protocol.messages.requests import Submit, ToEngine
from baton.protocol.rules.fair_queue import Flow
from baton.simulation import describe
from baton.simulation.checks.books import Violation
from baton.simulation.checks.looks import arrivals_of, waiters, well

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.wires.network import Connection
    from baton.simulation.world import World


@dataclass(frozen=True)
class Came:
    """A request as it came to an engine."""

    priority: int
    place: int
    ran: bool
    """It had tokens already."""


@dataclass
class _Before:
    """What was before a call of the core."""

    waiting: list[tuple[Request, bool]] = field(default_factory=list)
    """And whether it had run."""
    running: list[Request] = field(default_factory=list)
    waiters: dict[Request, list[tuple[Request, int]]] = field(default_factory=dict)
    """Of those that run: who waits for what it computes, and in which epoch."""
    occupying: set[tuple[Request, int]] = field(default_factory=set)
    arriving: set[Request] = field(default_factory=set)
    line: set[tuple[str, int]] = field(default_factory=set)
    promised: set[tuple[str, int]] = field(default_factory=set)
    reservations: int = 0


@dataclass
class _Engine:
    """What the watch knows of one incarnation."""

    came: dict[Request, Came] = field(default_factory=dict)
    ran_elsewhere: set[Request] = field(default_factory=set)
    """Those that had tokens when they came."""
    last: int = 0
    submitted: dict[tuple[bytes, int], tuple[int, Request | None]] = field(default_factory=dict)
    """(gateway, id) → priority, and what the engine made of it."""
    refused: int = 0
    asked: dict[tuple[str, int], tuple[int, Flow]] = field(default_factory=dict)
    """(P, id) → priority and flow of its last `Reserve`."""
    line: dict[tuple[str, int], tuple[int, Flow, int]] = field(default_factory=dict)
    """(P, id) → priority, flow, and how many were told before it that they will get credit."""
    count: int = 0
    before: _Before | None = None


class OrderWatch:
    """The rule `order`, and of `queue` who is refused."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, _Engine] = {}

    def _of(self, instance: Instance) -> _Engine:
        known = self._known.get(instance.name)
        if known is None:
            known = self._known[instance.name] = _Engine()
        return known

    def _priority(self, name: str, otherwise: int) -> int:
        """As the client wants it."""
        number = describe.number_in(name)
        return otherwise if number is None else self._world.client(number).spec.priority

    # -- around the calls of the core that may admit

    def before(self, engine: EngineProcess) -> None:
        """Before a `Submit`, a `Reserve` or a flush."""
        core: Any = engine.core
        known = self._of(engine.instance)
        known.before = None
        if not well(engine):
            return
        scheduler, credits = core.scheduler, arrivals_of(engine).credits
        there = [request for request in scheduler.slots if request is not None]
        known.before = _Before(
            self._with_ran(known, scheduler.waiting_requests()),
            [request for request in there if request.state in (State.RUNNING, State.FOLLOWING)],
            {
                request: [(one, one.epoch) for one in sorted(found, key=lambda one: one.number)]
                for request, found in waiters(engine).items()
            },
            {(request, request.epoch) for request in there},
            set(scheduler.arriving.values()),
            set(credits._waiting),
            set(credits._promised),
            core.counters.handovers.arrivals,
        )

    def after(self, engine: EngineProcess) -> None:
        """After it."""
        known = self._of(engine.instance)
        before = known.before
        if before is None or not well(engine):
            return
        for request in engine.core.scheduler.slots:
            if request is None or request in before.arriving or request in before.running:
                continue  # (one that followed may have given way, and may have got a slot again)
            if (request, request.epoch) not in before.occupying:
                self._check_admission(engine, known, before, request)
        gave_way = (State.PREEMPTING, State.WAITING)  # (who followed waits again at once)
        victims = [request for request in before.running if request.state in gave_way]
        for victim in victims:
            wait = [
                one
                for one, epoch in before.waiters.get(victim, ())
                if one.state is State.FOLLOWING and one.epoch == epoch
            ]
            for other in before.running:
                stays = other.state in (State.RUNNING, State.FOLLOWING)
                others = [other, *(one for one, _ in before.waiters.get(other, ()))]
                if stays and any(
                    all(self._first(engine, known, one, True, there, True) for there in others)
                    for one in [victim, *wait]
                ):
                    raise Violation(
                        "order",
                        f"{victim.name} gives way at {engine.instance.name}, and {other.name} runs on",
                    )

    def _check_admission(
        self, engine: EngineProcess, known: _Engine, before: _Before, admitted: Request
    ) -> None:
        came = known.came.get(admitted)
        newcomer = came is not None and came.ran  # (it came in this very call, perhaps with tokens)
        ran = next((ran for request, ran in before.waiting if request is admitted), newcomer)
        for other, other_ran in before.waiting:
            if other.state is State.WAITING and self._first(engine, known, other, other_ran, admitted, ran):
                raise Violation(
                    "order",
                    f"{admitted.name} is admitted at {engine.instance.name}, and {other.name}, which goes "
                    f"first, waits: {known.came[admitted]} and {known.came[other]}",
                )

    def _with_ran(self, known: _Engine, requests: Iterable[Request]) -> list[tuple[Request, bool]]:
        ran_elsewhere = known.ran_elsewhere
        return [
            (request, request.first_admitted is not None or request in ran_elsewhere) for request in requests
        ]

    def _ran(self, known: _Engine, request: Request) -> bool:
        return request.first_admitted is not None or request in known.ran_elsewhere

    def _first(
        self,
        engine: EngineProcess,
        known: _Engine,
        one: Request,
        one_ran: bool,
        other: Request,
        other_ran: bool,
    ) -> bool:
        """Whether one must be served before the other."""
        mine, theirs = known.came.get(one), known.came.get(other)
        if mine is None or theirs is None:
            return False
        if mine.priority != theirs.priority:
            return mine.priority < theirs.priority
        if one_ran != other_ran:
            return one_ran
        if not one_ran and one.flow != other.flow and not (one.lets_pass or other.lets_pass):
            return False
        passes = engine.instance.config.max_waiting + 0.5
        there = theirs.place + passes * other.lets_pass
        if other.lets_pass and not (one_ran or one.lets_pass) and self._has_turn_after(known, one, there):
            return False  # (it goes before the newcomer whose turn it is, and that may be another flow's)
        return mine.place + passes * one.lets_pass < there

    def _has_turn_after(self, known: _Engine, one: Request, place: float) -> bool:
        """Whether it may be the turn of a newcomer of another flow than `one`, that came after this place."""
        mine = known.came[one]
        for request, ran in known.before.waiting if known.before is not None else ():
            came = known.came.get(request)
            if ran or request.lets_pass or came is None or request.flow == one.flow:
                continue
            if came.priority == mine.priority and came.place > place:
                return True
        return False

    # -- who comes

    def submitted(self, engine: EngineProcess, connection: Connection, message: ToEngine) -> None:
        """After the core took in a message of a gateway."""
        if not isinstance(message, Submit) or not well(engine):
            return
        core: Any = engine.core
        known = self._of(engine.instance)
        identity, wanted = connection.identity, self._priority(message.name, message.priority)
        if message.priority != wanted:
            raise Violation(
                "order", f"{message.name} is of priority {wanted}, its Submit of {message.priority}"
            )
        request = core._outboxes.of(identity).requests.get(message.id)
        known.submitted[identity, message.id] = (wanted, request)
        if request is not None:
            self._comes(engine, known, request, wanted)
        if core.counters.rejected["queue_full"] != known.refused:
            known.refused = core.counters.rejected["queue_full"]
            self._check_refusal(engine, known)

    def _comes(self, engine: EngineProcess, known: _Engine, request: Request, priority: int) -> None:
        if request in known.came:
            return
        if request.rank[0] != priority:
            raise Violation(
                "order",
                f"{request.name} of priority {priority} has {request.rank[0]} at {engine.instance.name}",
            )
        if request.number <= known.last:
            raise Violation(
                "order",
                f"{request.name} comes to {engine.instance.name} as {request.number}, a later one has it",
            )
        known.last = request.number
        known.came[request] = Came(priority, request.number, request.num_generated > 0)
        if known.came[request].ran:
            known.ran_elsewhere.add(request)

    def _check_refusal(self, engine: EngineProcess, known: _Engine) -> None:
        """Somebody is refused only while the queue is full, and then nobody better than one that stays."""
        core: Any = engine.core
        name, limit = engine.instance.name, engine.instance.config.max_waiting
        outboxes = core._outboxes._of.values()
        waiting = [
            request
            for outbox in outboxes
            for request in outbox.requests.values()
            if request.state in (State.WAITING, State.PREPARING)
        ]
        if len(waiting) < limit:
            raise Violation("queue", f"{name} refuses a request while {len(waiting)} wait of {limit}")
        newcomers = [request for request in waiting if not self._ran(known, request)]
        for outbox in outboxes:
            for finished in outbox.finished:
                which = (outbox.identity, finished.id)
                if finished.code == "queue_full" and which in known.submitted:  # (each is looked at once)
                    self._check_kept(engine, known, finished.id, known.submitted.pop(which), newcomers)

    def _check_kept(
        self,
        engine: EngineProcess,
        known: _Engine,
        number: int,
        submitted: tuple[int, Request | None],
        newcomers: list[Request],
    ) -> None:
        priority, refused = submitted
        for other in newcomers:
            came = known.came.get(other)
            if came is None:
                continue
            earlier = refused is not None and known.came[refused].place < came.place
            same = refused is not None and came.priority == priority and other.flow == refused.flow
            if came.priority > priority or (same and earlier):
                raise Violation(
                    "queue",
                    f"{engine.instance.name} refuses {number} of priority {priority} and keeps {other.name}, "
                    f"{came}",
                )

    # -- who comes from other instances

    def reads(self, engine: EngineProcess, peer: str, message: PeerMessage) -> None:
        """Before the core takes it in."""
        known = self._of(engine.instance)
        match message:
            case Reserve():
                wanted = self._priority(message.name, message.priority)
                known.asked[peer, message.id] = (wanted, message.flow)
                known.line.pop((peer, message.id), None)
                if message.priority != wanted:
                    raise Violation(
                        "order", f"{message.name} is of priority {wanted}, its Reserve of {message.priority}"
                    )
                self.before(engine)
            case Cancel(by_p=True):
                known.line.pop((peer, message.id), None)

    def has_read(self, engine: EngineProcess, peer: str, message: PeerMessage) -> None:
        """After it."""
        if not isinstance(message, Reserve) or not well(engine):
            return
        known = self._of(engine.instance)
        self.after(engine)
        arrival = arrivals_of(engine)._arrivals.get((peer, message.id, message.attempt))
        if arrival is None:
            return
        priority, _ = known.asked[peer, message.id]
        self._comes(engine, known, arrival.request, priority)
        before, name = known.before, engine.instance.name
        new = before is not None and engine.core.counters.handovers.arrivals > before.reservations
        if before is None or not new or (peer, message.id) in before.promised:
            return
        for key in before.line & set(known.line):
            if known.line[key][0] <= priority:
                raise Violation(
                    "order", f"{message.name} gets room at {name}, for which {key} stands in line before it"
                )
        waiting = [request.name for request in engine.core.scheduler.waiting_requests()]
        if waiting:
            raise Violation("order", f"{message.name} gets room at {name}, where {waiting} wait for some")

    def sends(self, engine: EngineProcess, to: str, message: PeerMessage) -> None:
        """To another engine."""
        known, key = self._of(engine.instance), (to, getattr(message, "id", 0))
        if isinstance(message, Refused) and message.credit:
            known.count += 1
            priority, flow = known.asked[key]
            known.line[key] = (priority, flow, known.count)
        elif isinstance(message, Credit):
            mine = known.line.pop(key, None)
            waiting = arrivals_of(engine).credits._waiting
            ahead = [
                other
                for other, (priority, flow, count) in known.line.items()
                if mine is not None and other in waiting
                and (priority < mine[0] or ((priority, flow) == mine[:2] and count < mine[2]))
            ]  # fmt: skip
            if ahead:
                raise Violation(
                    "order", f"{key} gets credit of {engine.instance.name} before {ahead}, which goes first"
                )

    # -- what gateways send

    def gateway_sends(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            wanted = self._priority(message.name, message.priority)
            if message.priority != wanted:
                raise Violation(
                    "order", f"{message.name} is of priority {wanted}, its Submit of {message.priority}"
                )
