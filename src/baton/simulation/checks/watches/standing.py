"""What is checked of orders that concern several gateways, and of gateways that are gone.

An engine owns its standing: it numbers what changes it, upwards, and tells all its gateways.  So when nothing
is left to happen each of them knows what the engine has, and one of them was told that it is the first.  An
engine that is awake finds out at once that a gateway is gone, whatever its requests are doing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.states import State
from baton.protocol.messages.requests import Welcome
from baton.protocol.standing import Standing
from baton.simulation.checks.books import Violation
from baton.simulation.checks.looks import well

if TYPE_CHECKING:
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.wires.network import Connection
    from baton.simulation.world import World

GONE_S = 1.0
_AWAKE_S = 0.5
"""An engine that was stalled, or the way to it, is given so long."""
_NO_WORK = (State.ABORTING, State.HANDED)


def _welcome(instance: Instance) -> Welcome | None:
    return instance.engine.core._announced.welcome


class StandingWatch:
    """The rules `standing` and `gone`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last: dict[str, Standing] = {}
        """By incarnation."""

    def drains(self, instance: Instance) -> bool:
        welcome = _welcome(instance)
        return welcome is not None and welcome.standing.draining

    def after_turn(self, engine: EngineProcess) -> None:
        welcome = _welcome(engine.instance)
        if welcome is None:
            return
        name, now = engine.instance.name, welcome.standing
        before = self._last.get(name)
        if before is not now:
            if before is not None and before != now and now.generation <= before.generation:
                raise Violation("standing", f"of {name}: {before} became {now}")
            self._last[name] = now

    def check_end(self, instance: Instance, gateways: list[GatewayProcess]) -> None:
        welcome = _welcome(instance)
        assert welcome is not None
        connected = 0
        firsts = []
        for gateway in gateways:
            member = gateway.cluster.members.get(instance.member)
            if not gateway.alive or member is None or member.state != "ready" or member.welcome is None:
                continue
            connected += 1
            if member.welcome.first:
                firsts.append(gateway.name)
            if (member.standing, member.paused) != (welcome.standing, welcome.paused):
                raise Violation(
                    "standing",
                    f"{instance.name} has {welcome.standing}, paused {welcome.paused}, at the end; "
                    f"{gateway.name} knows {member.standing}, paused {member.paused}",
                )
        if connected and self._world.plan.notices and len(firsts) != 1:
            raise Violation("standing", f"of {connected} gateways of {instance.name} the first is {firsts}")

    # -- gateways that are gone

    def closed(self, connection: Connection) -> None:
        """A gateway has closed its end, or died."""
        self._world.events.after(GONE_S, self._world.people, self._check_gone, connection)

    def _check_gone(self, connection: Connection) -> None:
        engine, now = connection.engine, self._world.events.now
        if not well(engine):
            return
        awake = max(engine.stalled_until, connection.wire.stalled_until)
        if awake > now - _AWAKE_S or (connection.wire.alive and connection.to_engine.in_flight):
            self._world.events.after(_AWAKE_S, self._world.people, self._check_gone, connection)
            return
        requests = [
            request
            for request in engine.core.scheduler.waiting_requests()
            if request.gateway.identity == connection.identity
        ]
        requests += [
            request
            for request in engine.core.scheduler.slots
            if request is not None
            and request.gateway.identity == connection.identity
            and request.state not in _NO_WORK
        ]
        if requests:
            raise Violation(
                "gone",
                f"{connection.gateway.name} is gone for {GONE_S:g} s, and {engine.instance.name} still has "
                f"{[request.name for request in requests]} for it",
            )
