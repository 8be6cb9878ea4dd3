"""What runs on the other hosts of an instance: launchers, and the relays that they start.

A launcher outlives incarnations: it asks the link of the one that there is, starts a relay and the ranks of
its host, and asks again when that has ended.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING

from baton.protocol.messages.nodes import FromLeader, Hello, Refused, Welcome
from baton.relay.node import Node
from baton.simulation.events import Party
from baton.simulation.parties.hosts import LinkProcess, Turning
from baton.simulation.wires.lines import Line, Lines

if TYPE_CHECKING:
    from baton.simulation.parties.instance import Instance
    from baton.simulation.world import World

_ASK_S, _LATER_S = 0.3, 0.05


class Relay(Turning):
    """The relay of one host in one incarnation: parent of the ranks there."""

    def __init__(self, launcher: Launcher, instance: Instance, line: Line, name: str) -> None:
        super().__init__(instance.world, name, instance.world.random_for(name))
        self.instance = instance
        self.launcher = launcher
        self.rings = instance.rings[launcher.number]
        if self.rings.relay is not None:  # of this incarnation there was one before
            self.rings = instance.new_host(launcher.number, instance.world.random_for(name + " ranks"))
        self.rings.relay = self
        self.line = line
        config = instance.config
        window = config.command_ring_bytes
        self.node = Node(config, instance.name, launcher.number, launcher.id, window, self._now())
        self.inbox: deque[FromLeader] = deque()
        self._reports: deque[tuple[int, bytes]] = deque()
        self._tickets: deque[tuple[int, int]] = deque()
        self._dead: list[tuple[str, int]] = []
        self._closed = False

    def arrived(self, message: FromLeader) -> None:
        self.inbox.append(message)
        self.wake()

    def closed(self) -> None:
        self._closed = True
        self.wake()

    def report_arrived(self, rank: int, record: bytes) -> None:
        self._reports.append((rank, record))
        self.wake()

    def rank_died(self, rank: int, how: str) -> None:
        """A pidfd has become readable."""
        self._dead.append((how, rank))
        self.wake()

    def _turn(self) -> None:
        node, now = self.node, self._now()
        for _ in range(len(self.inbox) if self._random.random() < 0.8 else min(1, len(self.inbox))):
            node.on_message(self.inbox.popleft(), now)
        if self._closed and not self.inbox:
            node.on_lost()
        while node.room and self._reports:
            rank, record = self._reports.popleft()
            next(one for one in self.rings.ranks if one.rank == rank).report_end.freed()
            node.report(rank, record)
        commands, node.commands = node.commands, []
        for record in commands:
            self._world.monitor.relay.passed_down(self.instance, self.rings, record)
            self.rings.append(record)
        self._tickets += node.tickets
        node.tickets = []
        while self._tickets and not self.rings.tickets.full:
            round_, sequence = self._tickets.popleft()
            self._world.monitor.relay.ticket(self.instance, self.rings, round_, sequence)
            self.rings.tickets.publish(round_, sequence)
        node.done()
        if not self._world.nobody_waits:
            node.on_clock(now)
        for how, rank in self._dead:
            node.leave(how, rank)
        for message in node.flush(now):
            if not self.line.send_up(message):
                node.on_lost()
                break
        if node.over is not None:
            self._world.note(self, f"ends: {node.over}")
            self.die()
            return
        if self.inbox:
            self.wake()
        self._sleep_until(node.next_deadline())

    def die(self) -> None:
        """Its ranks end with it, its connection is closed, and its launcher sees that."""
        if not self.alive:
            return
        self.alive = False
        for rank in self.rings.ranks:
            rank.die()
        self.line.close(self)
        self._events.after(0.02 * self._random.random(), self.launcher, self.launcher.relay_ended, self)


class Launcher(Party):
    """`baton serve --instance --node N`, which starts relays as long as it lives."""

    def __init__(self, world: World, index: int, number: int, start: int) -> None:
        member = world.plan.instances[index].name
        super().__init__(f"{member}.node{number}.{start}")
        self.id = self.name
        self.index = index
        self.number = number
        self.start = start
        self.relay: Relay | None = None
        self._world = world
        self._events = world.events
        self._random = world.random_for(self.name)
        self._asked = 0
        self._relays = 0
        self._line: Line | None = None

    def ask(self) -> None:
        """Asks what is to be computed; and again, if nothing comes."""
        if self._line is not None:
            self._line.close(self)
        self._asked += 1
        self._line = self._lines.connect(self, f"{self.name}.{self._asked}".encode())
        self._line.send_up(Hello(self.number, self.id))
        self._events.after(_ASK_S, self, self._no_answer, self._asked)

    def chance(self) -> float:
        return self._random.random()

    @property
    def _lines(self) -> Lines:
        return self._world.hosts.lines[self.index]

    def _no_answer(self, asked: int) -> None:
        if asked == self._asked and self.relay is None:
            self.ask()

    def closed(self) -> None:
        """The connection is gone: the question is asked again in time."""

    def arrived(self, message: FromLeader) -> None:
        if self.relay is not None:
            return
        if isinstance(message, Refused):
            self._asked += 1
            self._events.after(_LATER_S * (0.5 + self._random.random()), self, self.ask)
        elif isinstance(message, Welcome):
            self._asked += 1
            engine = self._world.engine_of(message.incarnation)
            assert engine is not None
            self._relays += 1
            name = f"{self.name} relay {self._relays}"
            line = self._lines.connect(None, name.encode())
            relay = self.relay = Relay(self, engine.instance, line, name)
            line.owner = relay
            self._events.after(0.01 * self._random.random(), relay, relay.wake)
            for rank in relay.rings.ranks:
                self._events.after(0.01 + 0.1 * self._random.random(), rank, rank.load)

    def relay_ended(self, relay: Relay) -> None:
        if self.relay is relay:
            self.relay = None
            self.ask()

    def die(self) -> None:
        self.alive = False
        if self.relay is not None:
            self.relay.die()


class OtherHosts:
    """All launchers of a run, and the lines to the links' addresses."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._starts: Counter[tuple[int, int]] = Counter()
        self.launchers: dict[tuple[int, int], Launcher] = {}
        """By instance and number of the host."""
        self.lines = {
            index: Lines(world, partial(self._link_of, index), world.random_for(f"lines of {one.name}"))
            for index, one in enumerate(world.plan.instances)
            if one.nodes.count > 1
        }

    def begin(self) -> None:
        for index in self.lines:
            for number in range(1, self._world.plan.instances[index].nodes.count):
                self.start(index, number)

    def start(self, index: int, number: int) -> None:
        """A launcher begins, or one begins again that was killed."""
        self._starts[index, number] += 1
        launcher = Launcher(self._world, index, number, self._starts[index, number])
        self.launchers[index, number] = launcher
        self._world.events.after(0.02 * launcher.chance(), launcher, launcher.ask)

    def all_take_part(self) -> bool:
        """Every host has a relay.  (An engine that has not noticed that one is gone is ready.)"""
        return all(launcher.relay is not None for launcher in self.launchers.values())

    def heal(self) -> None:
        """The faults are over."""
        for lines in self.lines.values():
            lines.heal()

    def _link_of(self, index: int) -> LinkProcess | None:
        """That listens for the relays of this instance."""
        link = self._world.instances[index].link
        return link if link is not None and link.alive else None
