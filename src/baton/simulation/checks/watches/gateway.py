"""What is checked where a gateway gives up an id, or tells its client that there is no room.

A request has a new id each time that it is submitted.  The instances of the plan of an id that was given up
are told so at once, unless they said themselves that it is over, or the connection to them is no more.  And
what an engine works on under an id, while nothing is on its way between the two, is what its gateway waits
for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.engine.states import State
from baton.protocol.codec import unpack_int64
from baton.protocol.messages.requests import Cancel, FromEngine, Outputs, Submit, ToEngine
from baton.simulation import describe
from baton.simulation.checks.books import Violation
from baton.simulation.checks.looks import well

if TYPE_CHECKING:
    from baton.gateway.cluster.request import EngineRequest
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.wires.network import Connection
    from baton.simulation.world import World

_NO_WORK = (State.ABORTING, State.HANDED)
"""It is being closed; or another instance has it, and this one waits for its word to free the pages."""
_ELSEWHERE = ("queue_full", "shutting_down", "never_fits")


@dataclass
class _Gateway:
    """What the watch knows of one life of a gateway."""

    holders: dict[int, dict[str, Connection]] = field(default_factory=dict)
    """Id → instances that may have it and were not told that it is given up."""
    names: dict[int, int] = field(default_factory=dict)
    """Id → number of its request."""
    refusers: dict[int, set[str]] = field(default_factory=dict)
    """Number of a request → instances that refused it."""
    full: set[int] = field(default_factory=set)
    """Numbers of requests that were refused for a full queue in this call."""


class GatewayWatch:
    """The rule `retired`, and of `queue` whom a client is told that there is no room."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, _Gateway] = {}

    def _of(self, gateway: GatewayProcess) -> _Gateway:
        known = self._known.get(gateway.cluster.name)
        if known is None:
            known = self._known[gateway.cluster.name] = _Gateway()
        return known

    def sends(self, gateway: GatewayProcess, to: str, message: ToEngine) -> None:
        known = self._of(gateway)
        if isinstance(message, Submit):
            incarnations = {target.incarnation for target in message.decoders}
            names = {to} | {
                member.name
                for member in gateway.cluster.members.values()
                if member.incarnation in incarnations
            }
            known.holders[message.id] = {
                name: connection for name, connection in gateway.connections.items() if name in names
            }
            number = describe.number_in(message.name)
            if number is not None:
                known.names[message.id] = number
        elif isinstance(message, Cancel):
            known.holders.get(message.id, {}).pop(to, None)

    def reads(self, gateway: GatewayProcess, instance: Instance, message: FromEngine) -> None:
        """Before the cluster takes it in."""
        if not isinstance(message, Outputs):
            return
        known, name = self._of(gateway), instance.member
        for number in set(unpack_int64(message.ids)):
            holders = known.holders.get(number)
            if holders is not None and name in holders:  # (only one streams: the others hold nothing)
                known.holders[number] = {name: holders[name]}
        for finished in message.finished:
            holders = known.holders.get(finished.id)
            if holders is None:
                continue
            if finished.reason == "handed_over":
                self._handed_over(gateway, known, finished.id, name, finished.message)
            elif finished.reason == "lost":
                holders.pop(name, None)
            elif name in holders:
                del known.holders[finished.id]
                if finished.code in _ELSEWHERE and (of := known.names.get(finished.id)) is not None:
                    known.refusers.setdefault(of, set()).add(name)
                    if finished.code == "queue_full":
                        known.full.add(of)

    def _handed_over(
        self, gateway: GatewayProcess, known: _Gateway, number: int, sender: str, incarnation: str
    ) -> None:
        """The others of its plan were not asked, or have refused, or were told by the one that prefilled."""
        holders, members = known.holders[number], gateway.cluster.members
        holders.pop(sender, None)
        there = {name: to for name, to in holders.items() if members[name].incarnation == incarnation}
        known.holders[number] = there or holders

    def after(self, gateway: GatewayProcess) -> None:
        """After each call of the cluster, when all that it wanted sent was sent."""
        known = self._of(gateway)
        running: dict[int, EngineRequest] = gateway.cluster.table.running
        for number in known.holders.keys() - running.keys():
            self._check_told(gateway, number, known.holders.pop(number))
        if known.full:
            self._check_refused(gateway, known)

    def _check_told(self, gateway: GatewayProcess, number: int, holders: dict[str, Connection]) -> None:
        for name, connection in holders.items():
            if gateway.connections.get(name) is connection and connection.open:
                raise Violation(
                    "retired",
                    f"{gateway.name} has given up id {number} and does not tell {name}, which may have it",
                )

    def _check_refused(self, gateway: GatewayProcess, known: _Gateway) -> None:
        """Nobody is told that there is no room while an instance was not asked."""
        alive = {describe.number_in(request.name) for request in _all(gateway)}
        for number in known.full:
            if number in alive:
                continue
            for member in gateway.cluster.members.values():
                if member.serves and member.name not in known.refusers[number]:
                    raise Violation(
                        "queue",
                        f"{gateway.name} tells request {number} that all queues are full, and has not asked "
                        f"{member.name}",
                    )
        known.full.clear()

    # -- what engines work on

    def after_turn(self, engine: EngineProcess) -> None:
        """After each turn of an engine: what it has under an id is what its gateway waits for."""
        if not well(engine):
            return
        core: Any = engine.core
        for identity, outbox in core._outboxes._of.items():
            if not outbox.requests:
                continue
            connection = engine.connections.get(identity)
            if connection is None or not self._idle(engine, connection):
                continue
            running = connection.gateway.cluster.table.running
            for number, request in outbox.requests.items():
                if number not in running and request.state not in _NO_WORK:
                    raise Violation(
                        "retired",
                        f"{engine.instance.name} has {request.name} as {request.state.value} under id "
                        f"{number}, which {connection.gateway.name} has given up",
                    )

    def _idle(self, engine: EngineProcess, connection: Connection) -> bool:
        """Nothing is on its way between the two."""
        gateway = connection.gateway
        return (
            connection.open
            and connection.attached
            and gateway.alive
            and gateway.stalled_until < self._world.events.now
            and gateway.connections.get(engine.instance.member) is connection
            and not connection.to_engine.in_flight
            and not connection.to_gateway.in_flight
            and not any(other is connection for other, _ in engine.inbox)
        )


def _all(gateway: GatewayProcess) -> Iterable[EngineRequest]:
    table = gateway.cluster.table
    return (*table.running.values(), *table.parked)
