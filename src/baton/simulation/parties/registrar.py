"""How instances stay registered: a renewal to each gateway each third of the time to live, over HTTP.

Theory.  What `launch/instances/joining/joined.py` does, in virtual time.  A renewal travels, lies in the
gateway's socket until the gateway reads it, and is answered; the next one follows a third of the time to live
after that.  A gateway that stands still reads nothing, and when it goes on its timer runs before it reads, as
with uvloop.  A registrar that is frozen with its instance says nothing.

The rule `verdict` is checked here, by somebody who sees both sides: a gateway gives an instance up for its
silence only if it was silent, that is, if no renewal came to the socket within the time to live and none lies
there unread; and one that is silent while the gateway is awake is given up in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.simulation.checks.books import Violation
from baton.simulation.events import Party
from baton.simulation.wires.network import Channel, Delays

if TYPE_CHECKING:
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.parties.instance import Instance
    from baton.simulation.world import World

_FOUND_S = 2.0
"""Times the time to live: one that is silent for so long before a gateway that is awake must have been
lost."""


@dataclass
class _Heard:
    """What a gateway's socket knows of an instance."""

    arrived: float
    """When the last renewal came."""
    unread: int = 0


class Registrar(Party):
    """Of one incarnation of an instance, with all gateways."""

    def __init__(self, world: World, instance: Instance) -> None:
        super().__init__(f"{instance.name}.registrar")
        self._world = world
        self._instance = instance
        self._random = world.random_for(self.name)
        self._waits: set[str] = set()
        """Gateways (each start is another) that have not answered."""

    def start(self) -> None:
        for gateway in self._world.gateways:
            self.register(gateway)

    def register(self, gateway: GatewayProcess) -> None:
        self._world.events.after(0.01 * self._random.random(), self, self._renew, gateway)

    def _renew(self, gateway: GatewayProcess) -> None:
        ttl_s = self._world.plan.ttl_s
        if ttl_s is None or not (self._instance.alive and gateway.alive):
            return
        if self._world.over:
            return
        if self._instance.engine.core.ready:
            wire = Party(f"{self.name}→{gateway.name}")
            delays = Delays(self._random, 0.0001, self._world.plan.usual_delay)
            Channel(self._world.events, wire, delays, self._arrive).send(gateway)
        else:
            self._world.events.after(ttl_s / 3, self, self._renew, gateway)

    def _arrive(self, gateway: GatewayProcess) -> None:
        """It lies in the gateway's socket."""
        heard = gateway.heard.setdefault(self._instance.member, _Heard(0.0))
        heard.arrived = self._world.events.now
        heard.unread += 1
        self._world.events.after(0.0, gateway, self._read, gateway, heard)

    def _read(self, gateway: GatewayProcess, heard: _Heard) -> None:
        ttl_s = self._world.plan.ttl_s
        assert ttl_s is not None
        heard.unread -= 1
        gateway.renewed(self._instance, ttl_s)
        if self._instance.alive:
            self._world.events.after(ttl_s / 3, self, self._renew, gateway)


def check_lost(world: World, gateway: GatewayProcess, name: str) -> None:
    """A gateway has just given an instance up for its silence."""
    heard, ttl_s = gateway.heard.get(name), world.plan.ttl_s
    if heard is None or ttl_s is None:
        return
    silent = world.events.now - heard.arrived
    if heard.unread and silent * gateway.clock_rate <= ttl_s / 16:
        return  # it came in the last moment, while the gateway stood still for less than it forgives
    if heard.unread or silent < 0.99 * ttl_s / gateway.clock_rate:
        raise Violation(
            "verdict",
            f"{gateway.name} gives {name} up for its silence, which has renewed {silent:.3f} s ago "
            f"({heard.unread} renewals are unread, the time to live is {ttl_s:g} s)",
        )


def check_found(world: World) -> None:
    """Now and then: whoever is silent before a gateway that is awake has been given up."""
    ttl_s = world.plan.ttl_s
    if ttl_s is None:
        return
    for gateway in world.gateways:
        for name, heard in gateway.heard.items():
            member = gateway.cluster.members.get(name)
            if not gateway.alive or member is None or member.state != "ready" or member.lease is None:
                continue
            silent = world.events.now - max(heard.arrived, gateway.stalled_until)
            if silent * gateway.clock_rate > _FOUND_S * ttl_s:
                raise Violation(
                    "verdict",
                    f"{name} has been silent for {silent:.3f} s, and {gateway.name} has it as ready",
                )
