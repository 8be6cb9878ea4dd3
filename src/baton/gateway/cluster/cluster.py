"""What a gateway knows of its instances and requests, and what it does about it.  No I/O, the clock an
argument.

Theory.  The cluster has any number of instances by name (`member.py`: the states of one) and a table of
requests (`table.py`: where each is, and how it goes on after a loss); `routing.py` decides where one goes.

Its shell (`client.py`) calls `attach` when there is a new incarnation of an instance to talk to,
`lost` when the instance died or the connection broke, `failed` when nothing will come any more, `receive`
with each message and `on_clock` at `next_deadline`.  After every call it sends what `take_outgoing` gives, on
the connections of the newest `attach`, and closes those of instances that failed or are no members any more.

Each request ends in exactly one way that its consumer sees: an instance's `Finished`, or an `ApiError`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import Any, Literal

from baton.gateway.cluster import facts
from baton.gateway.cluster.facts import Requirements
from baton.gateway.cluster.member import Answer, Label, Member, State, ignore
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.cluster.roles import Roles
from baton.gateway.cluster.table import RequestTable
from baton.gateway.errors import ApiError, InstanceUnavailable
from baton.protocol.messages.requests import (
    Failing,
    FromEngine,
    Hello,
    Load,
    Outputs,
    QueryKind,
    QueryReply,
    Routed,
    ToEngine,
    Welcome,
)
from baton.protocol.rules.silence import Silence
from baton.protocol.standing import Stand
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

_MOVE_AGAIN_S = 1.0
"""Between two attempts to move what runs on a draining instance."""


class Cluster:
    """The instances and requests of one gateway.  Every call with a name that was not added is a `KeyError`.

    `name` is what the gateway calls itself in `Hello`; unique for each start of a gateway process.
    """

    def __init__(
        self, name: str, *, retry_wait_s: float, disaggregation_threshold: int | None = None
    ) -> None:
        self.name = name
        self.members: dict[str, Member] = {}
        self.weights = Weights()
        """What all instances are to have."""
        self.start_name = ""
        """What tells the weights of the start apart, if that is known."""
        self._generation = 0
        """The highest that was seen."""
        self.requirements = Requirements()
        """Instances that join are checked against these."""
        self._retry_wait_s = retry_wait_s
        self._ids = itertools.count(1)
        self._farewells: list[tuple[str, ToEngine]] = []
        """Outgoing messages to instances that were removed."""
        self._asked: dict[int, str] = {}
        """Query → instance."""
        self.table = RequestTable(self.members, self._ids, retry_wait_s, self.unavailable)
        self.table.threshold = disaggregation_threshold
        self.table.gateway = name
        self.roles = Roles(self)

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self.table)

    @property
    def requests(self) -> dict[int, EngineRequest]:
        """Those that are at an instance, by the id under which it knows them."""
        return self.table.running

    @property
    def parked(self) -> tuple[EngineRequest, ...]:
        """Requests that wait for an instance."""
        return tuple(self.table.parked)

    def next_deadline(self) -> float | None:
        """When `on_clock` must be called at the latest; None: nothing is timed."""
        times = [self.table.next_deadline(), self.roles.next_deadline()]
        for member in self.members.values():
            times.append(member.move_at)
            times += (watch.deadline for watch in (member.lease, member.absence) if watch is not None)
        return min((at for at in times if at is not None), default=None)

    def take_outgoing(self) -> list[tuple[str, ToEngine]]:
        """What is to be sent now: (instance, message), for each instance in order."""
        outgoing, self._farewells = self._farewells, []
        for member in self.members.values():
            if member.outgoing:
                outgoing += [(member.name, message) for message in member.outgoing]
                member.outgoing = []
        return outgoing

    # -- instances

    def add(self, name: str, label: Label = "mixed", *, joined: bool = False) -> Member:
        """A new instance, of which nothing is known yet.  Raises `ValueError` for a name that is taken."""
        if name in self.members:
            raise ValueError(f"instance {name!r} is there already; give another name")
        facts.check_label(label)
        member = self.members[name] = Member(name, label, joined=joined)
        return member

    def attach(
        self, name: str, incarnation: str, now: float, hello: Hello | None = None, proof: bytes = b""
    ) -> None:
        """There is a new connection, to this incarnation ("": whichever answers).  `hello`: with what it is
        asked to prove itself; `proof`: what its `Welcome` must carry."""
        member = self.members[name]
        if member.state == "ready":
            self.lost(name, "another incarnation takes over", now)
        member.attach(incarnation, hello or Hello(self.name), proof)

    def lost(self, name: str, reason: str, now: float) -> None:
        """The instance or the connection to it is gone: what was there goes on elsewhere, or waits."""
        member = self.members[name]
        if member.state == "failed":
            return
        member.leave("restarting" if member.was_ready else "starting", reason)
        self.table.lost(name, reason, now)

    def failed(self, name: str, reason: str, now: float) -> None:
        """The instance will not come back."""
        self.members[name].leave("failed", reason)
        self.table.lost(name, reason, now)

    def remove(self, name: str, now: float, reason: str = "it left the cluster") -> None:
        """Forgets an instance; what is there goes on elsewhere."""
        member = self.members[name]
        for request in self.table.at(name):
            member.cancel(request.id, has_it=True)
        self._farewells += [(name, message) for message in member.outgoing]
        member.leave("failed", reason)
        del self.members[name]
        self.table.lost(name, reason, now)

    def renew(self, name: str, ttl_s: float, now: float) -> None:
        """An instance that joined lives: if it does not say so again within `ttl_s`, it is lost."""
        member = self.members[name]
        member.absence = None
        if member.lease is None or member.lease.patience_s != ttl_s:
            member.lease = Silence(ttl_s, now)
        member.lease.heard(now)

    def renew_no_more(self) -> None:
        """Nobody hears renewals from now on: what joined counts as there while its connection lasts."""
        for member in self.members.values():
            member.lease = None

    def set_label(
        self,
        name: str,
        label: Label,
        now: float,
        only_if: int | None = None,
        *,
        answer: Answer = ignore,
    ) -> int:
        """What is sent there from now on, by all gateways.  `only_if`: the number of the standing for which
        this was decided; the engine refuses it if there is a newer one.  Returns the query's number.  Raises
        `ValueError` for a label that does not exist."""
        facts.check_label(label)
        member = self.members[name]
        if only_if is not None and only_if != member.standing.generation:
            answer({"error": "somebody else has changed it meanwhile", "code": "stale"})
            return 0
        how: Literal["order", "only_if"] = "order" if only_if is None else "only_if"
        return self._order(member, Stand(how, label=label), now, answer)

    def drain(
        self, name: str, now: float, move_after_s: float | None = None, *, answer: Answer = ignore
    ) -> int:
        """Nothing new is sent there; what still runs there after `move_after_s` is continued elsewhere."""
        stand = Stand(draining=True, move_after_s=move_after_s)
        return self._order(self.members[name], stand, now, answer)

    def undrain(self, name: str, now: float, *, answer: Answer = ignore) -> int:
        member = self.members[name]
        number = self._order(member, Stand(draining=False), now, answer)
        self._can_serve(member, now)
        return number

    def _order(self, member: Member, stand: Stand, now: float, answer: Answer) -> int:
        self._asked[number := next(self._ids)] = member.name
        member.order(stand, number, answer, now)
        return number

    @property
    def leads(self) -> bool:
        """Where one gateway is to act for all, it is this one."""
        return facts.leads(self.members.values())

    def drained(self, name: str) -> bool:
        """It drains, and nothing of this gateway runs there or may still come there."""
        return self.members[name].draining and not self.table.involving(name)

    def receive(self, name: str, message: FromEngine, now: float) -> None:
        """Takes in one message.  Raises `MalformedMessage` for one that makes no sense: call `lost` then."""
        member = self.members[name]
        if isinstance(message, Outputs):
            self.table.distribute(member, message, now)
        elif isinstance(message, Routed):
            self.table.routed(member, message)
        elif isinstance(message, Load):
            member.loaded(message, now)
            self.roles.look(now)
        elif isinstance(message, QueryReply):
            self._asked.pop(message.id, None)
            member.replied(message)
        elif isinstance(message, Welcome):
            self._welcomed(member, message, now)
        elif isinstance(message, Failing):
            level = logging.ERROR if member.was_ready else logging.DEBUG  # a failed start is told once
            log.log(level, "%s: the instance is failing: %s", name, message.message)
            self.lost(name, message.message, now)

    def on_clock(self, now: float) -> None:
        for member in list(self.members.values()):
            if member.lease is not None and member.lease.look(now):
                member.lease = None
                member.absence = Silence(self._retry_wait_s, now)
                self.lost(member.name, "it did not renew its registration in time", now)
            if member.absence is not None and member.absence.look(now):
                self.remove(member.name, now, member.failure or "it did not come back")
            elif member.move_at is not None and now >= member.move_at:
                again = not self.table.move(member.name, now) or self.table.involving(member.name)
                member.move_at = now + _MOVE_AGAIN_S if again else None
        self.table.on_clock(now)
        self.roles.on_clock(now)

    # -- requests

    def check_ready(self) -> None:
        """Raises `InstanceUnavailable` with the reason unless a request can be submitted now."""
        if not any(member.serves for member in self.members.values()):
            raise self.unavailable()

    def submit(self, request: EngineRequest, now: float) -> None:
        """Sends a new request.  Raises as `check_ready`."""
        self.check_ready()
        self.table.enqueue(request, now)

    def enqueue(self, request: EngineRequest, now: float) -> None:
        """Sends one more sequence of something that was accepted before.  Never raises: if no instance can
        serve, the sequence waits for one, or fails, like those that ran."""
        self.table.enqueue(request, now)

    def cancel(self, request: EngineRequest) -> None:
        """No more output is wanted.  Harmless after the end; nothing arrives afterwards."""
        self.table.cancel(request)

    def cancel_all(self, error: ApiError) -> None:
        """Cancels everything; each consumer gets the error."""
        self.table.cancel_all(error)

    # -- questions and orders

    def query(self, name: str, what: QueryKind, answer: Answer, argument: str = "") -> int:
        """Asks one instance; returns the number for `forget`.  Raises `InstanceUnavailable`."""
        member = self.members[name]
        if member.state != "ready":
            raise member.unavailable(self.call(member.name))
        number = next(self._ids)
        self._asked[number] = name
        member.query(number, what, answer, argument)
        return number

    def forget(self, number: int) -> None:
        """Nobody waits for the answer to this query any more."""
        member = self.members.get(self._asked.pop(number, ""))
        if member is not None:
            member.forget(number)

    # -- weights

    def next_weights(self, name: str, path: str) -> Weights:
        """For `decide`: newer than all that was seen."""
        return Weights(self._generation + 1, name, path)

    def decide(self, weights: Weights) -> list[Member]:
        """Every instance is to have these.  Returns those that were told; others are when they are ready."""
        self.weights = weights
        self._generation = max(self._generation, weights.generation)
        told = [member for member in self.members.values() if member.state == "ready"]
        for member in told:
            self._order_weights(member)
        return told

    def release_weights(self, names: Iterable[str]) -> None:
        """Nothing was decided: what these instances keep for it is not needed."""
        for name in names:
            member = self.members.get(name)
            if member is not None and member.state == "ready":
                member.query(next(self._ids), "release_weights", ignore, "")

    def _order_weights(self, member: Member) -> None:
        log.info("%s is to load %s", member.name, self.weights.path)
        member.order_weights(next(self._ids), self.weights)

    def _hear_weights(self, theirs: Weights) -> bool:
        """Whether an instance has what it is to have.  If it has something newer, another gateway has decided
        that, and all others are to have it as well."""
        self._generation = max(self._generation, theirs.generation)
        ours = self.weights
        if theirs.name == ours.name or {theirs.name, ours.name} == {"", self.start_name}:
            return True
        if theirs.newer(ours):
            self.weights = theirs
            for member in self.members.values():
                if member.welcome is not None and theirs.newer(member.welcome.weights):
                    self._order_weights(member)
            return True
        return False

    # -- how it stands

    @property
    def state(self) -> State:
        """That of the cluster as a whole: the best that an instance is in."""
        states = {member.state for member in self.members.values()}
        if any(member.serves for member in self.members.values()):
            return "ready"
        order: tuple[State, ...] = ("restarting", "starting", "failed")
        return next((state for state in order if state in states), "starting")

    @property
    def settled(self) -> bool:
        """Every instance that this process runs has been ready once, or has failed."""
        return all(
            member.was_ready or member.state == "failed"
            for member in self.members.values()
            if not member.joined
        )

    def unavailable(self) -> InstanceUnavailable:
        """Why nothing can be submitted now, for the client."""
        return facts.unavailable(self.members.values(), self.call)

    def call(self, name: str) -> str:
        """How an instance is called in what clients read: a server of one does not speak of names."""
        return "the instance" if len(self.members) == 1 else f"instance {name}"

    def snapshot(self, now: float) -> list[dict[str, Any]]:
        """The instances, for people and programs."""
        return [self.describe(name, now) for name in self.members]

    def describe(self, name: str, now: float) -> dict[str, Any]:
        member = self.members[name]
        return facts.describe(member, now, drained=self.drained(name), requests=self.table.at(name))

    # -- inside

    def _welcomed(self, member: Member, welcome: Welcome, now: float) -> None:
        reason = None
        if not member.is_proven(welcome):
            reason = (
                "who answers at its endpoint did not prove to be who registered it; register the endpoint of "
                "an engine that was started with the same secret"
            )
        elif member.joined:
            reason = self.requirements.misfit(welcome)
        if reason is not None:
            log.error("%s cannot take part: %s", member.name, reason)
            self.failed(member.name, reason, now)
        else:
            has_them = self._hear_weights(welcome.weights)
            served = member.serves
            if member.welcomed(welcome, now):
                if not has_them:
                    self._order_weights(member)
            elif member.welcome is not welcome:
                return
            member.hear_standing(welcome.standing, next(self._ids), now)
            if member.serves and not served:
                self._can_serve(member, now)

    def _can_serve(self, member: Member, now: float) -> None:
        if member.serves and self.table.parked:
            self.table.retry(now)


__all__ = ["Answer", "Cluster", "Label", "Member", "QueryKind", "Requirements", "State"]
