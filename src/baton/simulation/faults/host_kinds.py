"""What goes wrong with an instance over several hosts: relays, the link, launchers, and their connections."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from baton.protocol.messages.nodes import FROM_NODE, Hello
from baton.simulation.events import Party
from baton.simulation.faults.kinds import fault, stall
from baton.simulation.parties.relay import Launcher, Relay
from baton.simulation.plans.plan import Fault
from baton.simulation.wires.lines import Line

if TYPE_CHECKING:
    from baton.simulation.world import World

_HARMLESS = 0.4
"""Of `--node-timeout`: a line that is late for less costs nothing."""


def _launcher(world: World, fault: Fault, random: Random) -> Launcher:
    number = random.randrange(1, world.plan.instances[fault.instance].nodes.count)
    return world.hosts.launchers[fault.instance, number]


def _relay(world: World, fault: Fault, random: Random) -> Relay | None:
    relay = _launcher(world, fault, random).relay
    return relay if relay is not None and relay.alive else None


def _line(world: World, fault: Fault, random: Random) -> Line | None:
    """A relay's."""
    relay = _relay(world, fault, random)
    return relay.line if relay is not None and relay.line.open else None


def _excuse(world: World, fault: Fault, text: str, party: Party) -> None:
    world.instances[fault.instance].excuses.append(text)
    world.struck(fault, party)


@fault("kill_relay")
def _kill_relay(world: World, fault: Fault, random: Random) -> None:
    relay = _relay(world, fault, random)
    if relay is not None:
        _excuse(world, fault, "a relay was killed", relay)
        relay.die()


@fault("kill_link")
def _kill_link(world: World, fault: Fault, random: Random) -> None:
    link = world.instances[fault.instance].link
    if link is not None and link.alive:
        _excuse(world, fault, "the link was killed", link)
        world.supervisor.link_ended(link, "was killed by SIGKILL")


@fault("kill_launcher")
def _kill_launcher(world: World, fault: Fault, random: Random) -> None:
    launcher = _launcher(world, fault, random)
    if launcher.alive:
        _excuse(world, fault, "a launcher was killed", launcher)
        launcher.die()
        world.events.after(0.1, world.people, world.hosts.start, fault.instance, launcher.number)


@fault("cut_line")
def _cut_line(world: World, fault: Fault, random: Random) -> None:
    line = _line(world, fault, random)
    if line is not None:
        _excuse(world, fault, "a line was cut", line.wire)
        line.cut()


@fault("vanish_line")
def _vanish_line(world: World, fault: Fault, random: Random) -> None:
    line = _line(world, fault, random)
    if line is not None:
        _excuse(world, fault, "a line vanished", line.wire)
        line.vanish()


@fault("stall_line")
def _stall_line(world: World, fault: Fault, random: Random) -> None:
    line = _line(world, fault, random)
    if line is not None:
        if fault.amount > _HARMLESS * world.plan.instances[fault.instance].nodes.timeout_s:
            world.instances[fault.instance].excuses.append("a line was stalled")
        stall(world, fault, line.wire)


@fault("stall_relay")
def _stall_relay(world: World, fault: Fault, random: Random) -> None:
    """Or the link."""
    instance = world.instances[fault.instance]
    party = random.choice((_relay(world, fault, random), instance.link))
    if party is not None and party.alive:
        instance.excuses.append("a relay or the link was stalled")
        stall(world, fault, party)


@fault("lose_frame")
def _lose_frame(world: World, fault: Fault, random: Random) -> None:
    line = _line(world, fault, random)
    if line is not None:
        _excuse(world, fault, "a frame was lost", line.wire)
        line.losing = True


@fault("repeat_frames")
def _repeat_frames(world: World, fault: Fault, random: Random) -> None:
    """What earlier relays sent comes to the link that there is now."""
    link, past = world.instances[fault.instance].link, world.hosts.lines[fault.instance].past
    old = [] if link is None else [one for one in past if one[0] not in link.lines]
    if link is not None and link.alive and old:
        for identity, data in old:
            link.arrived(identity, FROM_NODE.decode(data))
        world.struck(fault, link)


@fault("twin_node")
def _twin_node(world: World, fault: Fault, random: Random) -> None:
    """Somebody starts a host once more, which asks and goes, or says that it takes part."""
    instance, lines = world.instances[fault.instance], world.hosts.lines[fault.instance]
    twin = lines.connect(None, f"twin.{world.events.fired}".encode())
    if not twin.open or instance.link is None:
        return
    number = random.randrange(1, instance.config.nodes.count)
    # (One of this incarnation that comes first takes the other one's place: that is its right.)
    of = ["before"] if instance.link.link.missing else ["", instance.name, "before"]
    twin.send_up(Hello(number, "twin", random.choice(of)))
    world.events.after(0.05 * random.random(), world.people, twin.close, None)
    world.struck(fault, world.people)
