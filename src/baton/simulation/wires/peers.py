"""The connections between engines, as `engine/shell/peers.py` makes them, without sockets.

Theory.  To each peer that an engine speaks to there is one `Link`, opened by the first message.  What is on
its way when a link breaks is lost, the sender notices after a while, and its next message opens another link
with a higher number.  Who makes it, and whether it takes the place of the one before, is decided by the
production `Callers`; what is left of the earlier link is answered and not read.  So messages of one peer come
in order and none is missing, or `peer_lost` comes; that contract is all that the core may rely on, and this
file breaks it nowhere.

On one host a loss is followed by `dead` as soon as nobody listens any more; between hosts nobody knows.  A
partition freezes the links between two instances in both directions, and fetches that need the network.  A
link that cannot be opened is given up after `CONNECT_S`.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from baton.engine.handover.callers import Callers
from baton.protocol.codec import MalformedMessage
from baton.protocol.messages.handover import PEER, PeerMessage
from baton.protocol.messages.requests import Target
from baton.simulation.checks.books import Violation
from baton.simulation.events import Party
from baton.simulation.wires.network import Channel, Delays

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess
    from baton.simulation.world import World

CONNECT_S = 0.5
_PROBE_EVERY_S = 0.05
_PROBES = 40


class Network:
    """What lies between the instances."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._closed_until: dict[frozenset[int], float] = {}
        self.slow: dict[tuple[int, int], float] = {}
        """(from, to) → what each message takes longer."""
        self.links: list[Link] = []
        self.broken: set[frozenset[str]] = set()
        """Pairs of incarnations of which some link has been lost."""

    def partition(self, one: int, other: int, until: float) -> None:
        """Nothing passes between two instances."""
        self._closed_until[frozenset((one, other))] = until
        for link in self.between(one, other):
            link.wire.stalled_until = max(link.wire.stalled_until, until)

    def open_at(self, one: int, other: int) -> float:
        """When something can pass between them."""
        return self._closed_until.get(frozenset((one, other)), 0.0)

    def between(self, one: int, other: int) -> list[Link]:
        """In both directions; `other` -1: of the one with all others."""
        self.links = [link for link in self.links if not link.over]
        return [
            link
            for link in self.links
            if one in link.ends and (other in link.ends or other == -1) and len(set(link.ends)) == 2
        ]

    def slow_down(self, one: int, other: int, extra: float) -> None:
        """Messages between these take so much longer from now on; 0: as before."""
        count = len(self._world.plan.instances)
        for end in range(count) if other == -1 else (other,):
            self.slow[one, end] = self.slow[end, one] = extra
        for link in self.between(one, other):
            link.delays.extra = extra

    def heal(self) -> None:
        """Nothing is slow or closed any more.  (What stalls ends by itself.)"""
        self.slow.clear()
        for link in self.links:
            link.delays.extra = 0.0

    def died(self, engine: EngineProcess) -> None:
        """Its kernel closes its connections; what it has sent may still arrive."""
        for link in list(self.links):
            if link.target is engine and not link.over:
                link.cut()
            elif link.source is engine:
                link.over = True


class Link:
    """From one engine to one incarnation of another."""

    strange = False

    def __init__(
        self, world: World, source: EngineProcess, to: Target, number: int, routing_id: bytes
    ) -> None:
        self.source = source
        self.to = to
        self.routing_id = routing_id
        self.number = number
        self.claims = source.instance.name
        self.target: EngineProcess | None = world.listening(to.endpoint)
        self.over = False
        """Its owner sends nothing on it any more."""
        self.broken = False
        self.is_open = False
        here = source.instance.index
        self.ends = (here, self.target.instance.index if self.target is not None else here)
        self.wire = Party(f"{source.name}→{to.incarnation}")
        random = world.random_for(f"link {source.name} {to.incarnation} {number}")
        self.delays = Delays(random, 0.0001, world.plan.usual_delay)
        self.delays.extra = world.network.slow.get(self.ends, 0.0)
        self._channel = Channel(world.events, self.wire, self.delays, self._arrive)
        self._waiting: list[bytes] = []
        self._world = world
        self._random = random
        self._connect()

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + self._channel.in_flight

    def send(self, data: bytes) -> None:
        if self.is_open:
            self._channel.send(data)
        else:
            self._waiting.append(data)

    def cut(self) -> None:
        """It breaks: what is on its way is lost, and the owner notices after a while."""
        if not self.broken:
            self.broken = True
            self._note_broken()
            self.wire.alive = False
            self._notice(0.05 * self._random.random())

    def linger(self, until: float) -> None:
        """It breaks for its owner, and what was sent lies before its reader, who comes to it at `until`."""
        self.broken = True
        self._note_broken()
        self.wire.stalled_until = max(self.wire.stalled_until, until)
        self._notice(0.01 * self._random.random())

    def refused(self) -> None:
        """Its reader closes it, which takes a moment to travel."""
        self._note_broken()
        self._world.events.after(self._world.plan.usual_delay, self.wire, self.cut)

    def _note_broken(self) -> None:
        self._world.network.broken.add(frozenset((self.source.instance.name, self.to.incarnation)))

    def _connect(self) -> None:
        now = self._world.events.now
        if self.target is None:
            self._notice(0.01 * self._random.random())
            return
        opens = max(now, self._world.network.open_at(*self.ends)) + self.delays.next()
        if opens > now + CONNECT_S:
            self.broken = True
            self._notice(CONNECT_S)
        else:
            self._world.events.at(opens, self.wire, self._connected)

    def _connected(self) -> None:
        if self.target is None or not self.target.alive:
            self.cut()
            return
        self.is_open = True
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self._channel.send(data)

    def _notice(self, after: float) -> None:
        self._world.events.after(after, self.source, self.source.peers.broke, self)

    def _arrive(self, data: bytes) -> None:
        if self.target is not None and self.target.alive:
            self.target.peers.arrived(self, data)


class Stranger:
    """A connection of somebody who is no engine, and says with its id that he is one."""

    strange = True

    def __init__(self, routing_id: bytes, claims: str, number: int) -> None:
        self.routing_id = routing_id
        self.claims = claims
        self.number = number
        self.wire = Party("stranger")

    def refused(self) -> None:
        """He does not care."""


class _Loss(NamedTuple):
    peer: str
    dead: bool


class Peers:
    """One engine's links, and what others send to it."""

    def __init__(self, engine: EngineProcess, random: Random) -> None:
        self._engine = engine
        self._world = engine.instance.world
        self._random = random
        self._numbers = 0
        self._links: dict[str, Link] = {}
        self._callers = Callers(engine.instance.name, engine.instance.secret)
        self.inbox: deque[tuple[Link | Stranger, bytes]] = deque()
        self._losses: deque[_Loss] = deque()

    @property
    def pending(self) -> bool:
        return bool(self.inbox or self._losses)

    def link(self, peer: str) -> Link | None:
        return self._links.get(peer)

    def send(self, to: Target, message: PeerMessage) -> None:
        self._callers.know(to.incarnation, to.key)
        link = self._links.get(to.incarnation)
        if link is None:
            self._numbers += 1
            routing_id = self._callers.introduce(to.incarnation, to.key, self._numbers)
            link = Link(self._world, self._engine, to, self._numbers, routing_id)
            self._links[to.incarnation] = link
            self._world.network.links.append(link)
        link.send(PEER.encode(message))

    def arrived(self, link: Link | Stranger, data: bytes) -> None:
        self.inbox.append((link, data))
        self._engine.wake()

    def broke(self, link: Link) -> None:
        """A monitor says so."""
        if link.over:
            return
        link.over = link.broken = True
        self._world.network.broken.add(frozenset((self._engine.instance.name, link.to.incarnation)))
        del self._links[link.to.incarnation]
        dead = self._nobody_listens(link)
        self._losses.append(_Loss(link.to.incarnation, dead))
        if not dead and self._world.plan.one_host:
            self._probe(link, _PROBES)
        self._engine.wake()

    def turn(self, now: float, limit: int) -> None:
        """Takes messages, then losses, as the shell does."""
        for _ in range(min(limit, len(self.inbox))):
            link, data = self.inbox.popleft()
            self._world.message_passed("engine", self._engine.instance.index, self._engine)
            self._take(link, data, now)
        losses, self._losses = self._losses, deque()
        for loss in losses:
            self._lost(loss.peer, now, loss.dead)

    def _take(self, link: Link | Stranger, data: bytes, now: float) -> None:
        core = self._engine.core
        heard = self._callers.hear(link.routing_id)
        self._world.monitor.strangers.links.heard(self._engine, link, heard)
        if heard.refusal:
            if heard.stranger and not link.strange:
                raise Violation("stranger", f"{self._engine.name} refuses {link.wire.name}: {heard.refusal}")
            link.refused()
        peer = heard.peer
        if not peer:
            return
        if heard.reconnected:
            self._lost(peer, now, False)
        try:
            message = PEER.decode(data)
        except MalformedMessage as error:
            refusal = self._callers.refuse(link.routing_id, str(error))
            self._world.monitor.strangers.links.heard(self._engine, link, refusal)
            core.violation(f"peer {peer}", str(error))
            self._world.monitor.engine.refused_malformed(self._engine)
            link.refused()
            self._lost(peer, now, False)
            return
        monitor = self._world.monitor
        monitor.peer_reads(self._engine, peer, message, now)
        core.on_peer(peer, message, now)
        monitor.peer_has_read(self._engine, peer, message)

    def _lost(self, peer: str, now: float, dead: bool) -> None:
        self._world.monitor.handover.peer_lost(self._engine, peer, dead)
        self._engine.core.peer_lost(peer, now, dead=dead)

    def _nobody_listens(self, link: Link) -> bool:
        return self._world.plan.one_host and (link.target is None or not link.target.alive)

    def _probe(self, link: Link, left: int) -> None:
        """Is a peer that was lost dead?"""
        if self._nobody_listens(link):
            self._losses.append(_Loss(link.to.incarnation, True))
            self._engine.wake()
        elif left:
            self._world.events.after(_PROBE_EVERY_S, self._engine, self._probe, link, left - 1)
