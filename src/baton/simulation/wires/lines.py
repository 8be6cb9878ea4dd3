"""Connections between relays and the link of an instance over several hosts.

A line is ordered in each direction.  What can happen to it: everything is late (its wire stalls), it is cut
and both ends hear of that, it vanishes and none does, a frame is lost, and what was sent long ago comes
again, at the link of whichever incarnation listens at the address by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from baton.protocol.messages.nodes import FROM_LEADER, FROM_NODE, FromLeader, FromNode, Up
from baton.simulation.events import Party
from baton.simulation.wires.network import Channel, Delays

if TYPE_CHECKING:
    from baton.simulation.parties.hosts import LinkProcess
    from baton.simulation.world import World

KEPT = 8
"""Frames of the past that may come again."""


class Owner(Protocol):
    """Of a line's lower end."""

    alive: bool

    def arrived(self, message: FromLeader) -> None: ...

    def closed(self) -> None: ...


class Line:
    """One connection.  `owner`: who connected."""

    def __init__(self, lines: Lines, owner: Owner | None, identity: bytes, link: LinkProcess | None) -> None:
        world = lines.world
        self.owner = owner
        self.identity = identity
        self.link = link
        self.wire = Party(f"line of {identity.decode()}")
        self.open = link is not None
        """The node's end: what it sends is sent."""
        self.vanished = False
        self.losing = False
        """The next frame to the node is lost."""
        self._lines = lines
        self._events = world.events
        usual = world.plan.usual_delay
        delays = Delays(lines.random, 5e-5, usual)
        self._up = Channel(world.events, self.wire, delays, self._at_link)
        self._down = Channel(world.events, self.wire, delays, self._at_node)

    def send_up(self, message: FromNode) -> bool:
        """False: there is no connection."""
        if not self.open:
            return False
        if not self.vanished:
            data = FROM_NODE.encode(message)
            if isinstance(message, Up) and message.reports:
                self._lines.past.append((self.identity, data))
            self._up.send(data)
        return True

    def send_down(self, message: FromLeader) -> bool:
        if self.link is None or self.link.lines.get(self.identity) is not self:
            return False
        if self.losing:
            self.losing = False
        elif not self.vanished:
            self._down.send(FROM_LEADER.encode(message))
        return True

    def close(self, by: object) -> None:
        """An end closes it: the other one hears of it after everything that was sent."""
        if by is self.owner:
            if self.open and not self.vanished:
                self._up.send(None)
            self.open = False
        elif not self.vanished:
            self._down.send(None)

    def cut(self) -> None:
        """What is on its way is lost, and both ends hear that it is cut."""
        self.wire.alive = False
        lines = self._lines
        for call in (self._link_hears, self._hears):
            self._events.after(0.02 * lines.random.random(), lines.network, call, None)

    def vanish(self) -> None:
        """Nothing passes any more, and nobody hears of it."""
        self.vanished = True
        self.wire.alive = False

    def _at_link(self, data: bytes | None) -> None:
        if data is None:
            self._link_hears(None)
        elif self.link is not None and self.link.alive:
            self.link.arrived(self.identity, FROM_NODE.decode(data))

    def _link_hears(self, _: Any) -> None:
        if self.link is not None and self.link.alive:
            self.link.lines.pop(self.identity, None)
            self.link.closed(self.identity)

    def _at_node(self, data: bytes | None) -> None:
        if data is None:
            self._hears(None)
        elif self.owner is not None and self.owner.alive:
            self.owner.arrived(FROM_LEADER.decode(data))

    def _hears(self, _: Any) -> None:
        self.open = False
        if self.owner is not None and self.owner.alive:
            self.owner.closed()


class Lines:
    """All connections to the address at which the links of one instance listen, one after the other."""

    def __init__(self, world: World, listening: Callable[[], LinkProcess | None], random: Random) -> None:
        self.world = world
        self.random = random
        self.network = Party("network")
        self.past: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        self.all: list[Line] = []
        self._listening = listening

    def connect(self, owner: Owner | None, identity: bytes) -> Line:
        """If nobody listens, the line is never open."""
        link = self._listening()
        line = Line(self, owner, identity, link)
        self.all = [one for one in self.all if one.open]
        self.all.append(line)
        if link is not None:
            link.lines[identity] = line
        else:
            self.world.events.after(0.001, self.network, line._hears, None)
        return line

    def heal(self) -> None:
        """The faults are over.  (What has vanished has: its ends find out.)"""
        for line in self.all:
            line.losing = False
