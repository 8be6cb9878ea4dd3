"""What happens to one of several gateways: an order that only it is given, and being told to leave."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from baton.gateway.cluster.member import LABELS
from baton.simulation.faults.kinds import fault
from baton.simulation.parties.gateway import GatewayProcess
from baton.simulation.plans.plan import Fault

if TYPE_CHECKING:
    from baton.simulation.world import World

_LOOK_S = 0.01


@fault("order_at_one")
def _order_at_one(world: World, fault: Fault, random: Random) -> None:
    """An operator gives one gateway an order that concerns all of them."""
    gateway, name = world.gateways[fault.target], world.plan.instances[fault.instance].name
    if not gateway.alive or name not in gateway.cluster.members:
        return
    world.struck(fault, gateway)
    what = random.choice(("label", "label", "drain", "undrain"))
    if what == "label":
        gateway.relabel(name, random.choice(LABELS))
    elif what == "undrain":
        gateway.undrain(name)
    else:
        gateway.drain(name, random.choice((None, 0.0, 0.1)))
        other = random.randrange(len(world.gateways))
        world.events.after(0.3 * random.random(), world.people, undrain, world, name, other)


def undrain(world: World, name: str, number: int) -> None:
    """Over this gateway."""
    gateway = world.gateways[number]
    if gateway.alive and name in gateway.cluster.members:
        gateway.undrain(name)


@fault("leave_gateway")
def _leave_gateway(world: World, fault: Fault, random: Random) -> None:
    """A gateway is told to leave: it serves those whom it has, ends, and another one takes its place."""
    gateway = world.gateways[fault.target]
    if gateway.alive and not gateway.leaving:
        gateway.leaving = True
        world.struck(fault, gateway)
        _leave(world, gateway)


def _leave(world: World, gateway: GatewayProcess) -> None:
    if gateway.clients:
        world.events.after(_LOOK_S, gateway, _leave, world, gateway)
    elif gateway.alive:
        world.note(gateway, "has served everybody, and ends")
        world.supervisor.gateway_ends(gateway)
