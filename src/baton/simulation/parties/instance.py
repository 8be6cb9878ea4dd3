"""One incarnation of an instance: the process of its engine, which is the parent of its ranks.

Theory.  The engine process does what `engine/shell/loop.py` does around the production `EngineCore`: a turn
takes messages from the gateways, reports from each rank's ring, looks at the clock, flushes, sends.  How
much of what has arrived a turn takes is drawn, so reports and messages meet in every order.  An instance
lives and dies as a whole: when a rank is gone the engine says `Failing` and ends, and when the engine is
gone so are its ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

import msgspec

from baton.engine.core import EngineCore
from baton.protocol.codec import MalformedMessage
from baton.protocol.messages.commands import COMMANDS, Grants
from baton.protocol.messages.reports import REPORTS
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE
from baton.simulation.events import Party, Timer
from baton.simulation.parties.hosts import LinkProcess, NodeRings
from baton.simulation.parties.registrar import Registrar
from baton.simulation.parties.worker import RankProcess
from baton.simulation.wires.gate import StepGate
from baton.simulation.wires.network import Channel, Connection, Delays
from baton.simulation.wires.peers import Peers
from baton.simulation.wires.rings import ReportEnd, TicketBoard

if TYPE_CHECKING:
    from baton.simulation.world import World


class EngineProcess(Party):
    """The engine: the core and what `engine/shell/loop.py` does around it."""

    instance: Instance
    core: EngineCore
    listening: bool

    def __init__(self, instance: Instance, random: Random) -> None:
        world = instance.world
        super().__init__(f"{instance.name}.engine", world.draw_rate(random), random.uniform(0, 1e4))
        self.instance = instance
        self.listening = False
        self.connections: dict[bytes, Connection] = {}
        ranks = range(instance.config.tensor_parallel_size)
        self.core = EngineCore(
            instance.config,
            incarnation=instance.name,
            workers=[1000 + rank for rank in ranks],
            now=self.local(world.events.now),
            peer_endpoint=f"sim://{instance.name}" if instance.config.peer_endpoint else "",
            secret=instance.secret,
        )
        self.peers = Peers(self, random)
        self.inbox: deque[tuple[Connection, bytes]] = deque()
        self.reports: list[deque[tuple[bytes, str]]] = [deque() for _ in ranks]
        """(record, "" or the fault that made it up)."""
        self._world = world
        self._events = world.events
        self._random = random
        self._dead: list[str] = []
        self._ended: list[bytes] = []
        """Connections that have ended and whose gateways were not asked yet."""
        self._turning = False
        self._timer: Timer | None = None
        self._deadline: float | None = None
        self._stopping = False

    # -- what arrives

    def listen(self) -> None:
        """The socket is bound; gateways that waited for it connect."""
        self.listening = True
        for connection in list(self.connections.values()):
            connection.connected()

    def message_arrived(self, connection: Connection, data: bytes) -> None:
        self.inbox.append((connection, data))
        self.wake()

    def connection_ended(self, connection: Connection) -> None:
        """The socket's monitor says so: see `engine/shell/leavers.py`."""
        self._ended.append(connection.identity)
        self.wake()

    def report_arrived(self, rank: int, data: bytes, made_up: str = "") -> None:
        self.reports[rank].append((data, made_up))
        self.wake()

    def rank_died(self, text: str) -> None:
        """A pidfd has become readable."""
        self._dead.append(text)
        self.wake()

    def terminate(self) -> None:
        """SIGTERM."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        if not self._turning:
            self._turning = True
            self._events.after(2e-5, self, self._turn)

    # -- a turn

    def _turn(self) -> None:
        self._turning = False
        core, world = self.core, self._world
        limit = 1000 if self._dead or self._random.random() < 0.8 else 1
        now = self.local(self._events.now)
        self._receive(limit)
        if core.failure is None:  # (else it is here for the first `Hello` alone)
            self.peers.turn(now, limit)
            self._read_reports(limit)
        while self._ended and not self.inbox:
            identity = self._ended.pop()
            if identity in core.gateways():  # (also one lost before of which more was read)
                self._lose(identity)
        if self._dead:
            core.fail("; ".join(self._dead))
        core.on_clock(now)
        if self._stopping:
            core.shut_down()
        self._flush(now)
        world.monitor.after_turn(self, now)
        if core.over:
            world.engine_left(self)
            return
        self._arm()
        if self.inbox or (core.failure is None and (self.peers.pending or any(self.reports))):
            self.wake()

    def _receive(self, limit: int) -> None:
        world = self._world
        for _ in range(min(limit, len(self.inbox))):
            connection, data = self.inbox.popleft()
            world.message_passed("engine", self.instance.index, self)
            try:
                message = TO_ENGINE.decode(data)
            except MalformedMessage as error:
                self.core.violation(f"gateway {connection.identity!r}", str(error))
                world.monitor.engine.refused_malformed(self)
                continue
            world.monitor.reads(self, connection, message)
            self.core.on_message(connection.identity, message, self.local(self._events.now))
            world.monitor.has_read(self, connection, message)

    def _read_reports(self, limit: int) -> None:
        world = self._world
        for rank, queue in enumerate(self.reports):
            for _ in range(min(limit, len(queue))):
                data, made_up = queue.popleft()
                if not made_up:
                    self.instance.report_end(rank).freed()
                world.message_passed("engine", self.instance.index, self)
                if made_up == "stale":
                    world.monitor.engine.refused_stale(self)
                try:
                    report = REPORTS.decode(data)
                except MalformedMessage as error:
                    self.core.fail(f"what worker rank {rank} reports cannot be read: {error}")
                    return
                world.monitor.handover.before_report(self, rank, report)
                self.core.on_report(rank, report, self.local(self._events.now))
                world.monitor.engine.has_read(self, rank, report)
                world.monitor.handover.after_report(self, rank, report)

    def _flush(self, now: float) -> None:
        world = self._world
        while True:
            world.monitor.before_flush(self)
            batch, messages, peers = self.core.flush(now)
            world.monitor.after_flush(self)
            if batch is not None:
                world.message_passed("engine", self.instance.index, self)
                world.monitor.commanded(self, batch)
                self.instance.append(COMMANDS.encode(batch))
            grants = self.core.take_grants()
            if grants:
                world.monitor.strangers.grants.given(self, grants)
                self.instance.grant(grants)
            lost = []
            for identity, message in messages:
                connection = self.connections.get(identity)
                if connection is None or not connection.open:
                    lost.append(identity)
                    continue
                world.message_passed("engine", self.instance.index, self)
                world.monitor.engine.sends(self, connection, message)
                connection.send_to_gateway(FROM_ENGINE.encode(message))
            for to, told in peers:
                world.message_passed("engine", self.instance.index, self)
                world.monitor.peer_sends(self, to, told, now)
                self.peers.send(to, told)
            for identity in lost:
                self._lose(identity)
            if not lost:
                return

    def _lose(self, identity: bytes) -> None:
        """Nobody can be reached behind this connection."""
        self.connections.pop(identity, None)
        self._world.monitor.engine.gateway_lost(self, identity)
        self.core.gateway_lost(identity)

    def _arm(self) -> None:
        """One timer, for the core's next deadline."""
        deadline = self.core.next_deadline()
        if deadline == self._deadline:
            return
        self._deadline = deadline
        if self._timer is not None and (deadline is None or self.global_time(deadline) < self._timer.at):
            self._timer.cancel()
            self._timer = None
        if deadline is not None and self._timer is None:
            self._timer = self._events.at(self.global_time(deadline) + 1e-9, self, self._on_timer)

    def _on_timer(self) -> None:
        """As a sleep that ends: the deadline may have moved since it began."""
        self._timer, self._deadline = None, None
        self._turn_or_wait()

    def _turn_or_wait(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is not None and self.global_time(deadline) > self._events.now:
            self._arm()
        else:
            self.wake()


class Instance:
    """An engine and its ranks: the `start`th life of the instance at place `index` of the plan.

    `name` is the incarnation, `member` what gateways call the instance.
    """

    def __init__(self, world: World, index: int, start: int, random: Random) -> None:
        self.world = world
        self.index = index
        weights = world.newest_weights
        self.config = msgspec.structs.replace(world.plan.instances[index], weights=weights)
        self.member = self.config.name
        self.name = f"{self.member}.{start}"
        self.secret = self.name.encode()
        """Not one to anybody in here, but another one of each incarnation."""
        self.excuses: list[str] = []
        """Injected faults for which this incarnation may fail."""
        self.records: list[bytes] = []
        here = self.config.ranks_per_host
        self.rings: dict[int, NodeRings] = {}
        """By the number of the host, for those beside the leader's."""
        self.link: LinkProcess | None = None
        self.engine = EngineProcess(self, random)
        self.tickets = TicketBoard(world.plan.ticket_entries, self._ticket)
        self.ranks = [RankProcess(self, rank, random) for rank in range(here)]
        self.registrar = Registrar(world, self)
        self.gate = StepGate(
            world.events,
            self.ranks[0],
            self.config.tensor_parallel_size,
            self.config.simulated_layers,
            self.ranks[0].report_end,
        )
        self.tickets.ends = [rank.ticket_end for rank in self.ranks[1:]]
        wire = Party(f"{self.name}.rings")
        self.report_channels = [
            Channel(world.events, wire, Delays(random, 1e-6, 2e-4), _Report(self.engine, rank))
            for rank in range(here)
        ]
        if self.config.nodes.count > 1:
            self.link = LinkProcess(self, random)
            self.tickets.ends.append(self.link.ticket_end)
            for number in range(1, self.config.nodes.count):
                self.new_host(number, random)

    @property
    def alive(self) -> bool:
        return self.engine.alive

    @property
    def ranks_here(self) -> list[RankProcess]:
        """Those on the leader's host."""
        return self.ranks[: self.config.ranks_per_host]

    def new_host(self, number: int, random: Random) -> NodeRings:
        """Another host's rings and ranks, of which nothing has run yet."""
        here = self.config.ranks_per_host
        numbers = range(number * here, (number + 1) * here)
        rings = self.rings[number] = NodeRings(self, numbers, self.world.plan.ticket_entries)
        self.ranks[numbers.start : numbers.stop] = rings.make_ranks(random)
        return rings

    def report_end(self, rank: int) -> ReportEnd:
        """Whose records the engine reads: the rank's, or what the link writes for it."""
        if self.link is None or rank < self.config.ranks_per_host:
            return self.ranks[rank].report_end
        return self.link.report_ends[rank]

    def to_engine(self, rank: int) -> Callable[[bytes], None]:
        """Delivers what is reported for that rank."""
        return _Report(self.engine, rank)

    @property
    def parties(self) -> list[Party]:
        """All that stops when the whole instance is stopped."""
        ranks = [party for rank in self.ranks for party in (rank, rank.transfers.party)]
        return [self.engine, self.registrar, *ranks]

    def append(self, record: bytes) -> None:
        """A record of the command log."""
        self.records.append(record)
        for rank in self.ranks_here:
            if rank.alive:
                rank.log_grew()
        if self.link is not None:
            self.link.log_grew()

    def grant(self, grants: Sequence[Grants]) -> None:
        """What page servers are to know, on the way of the transfer threads."""
        for rank in self.ranks:
            if rank.alive:
                rank.transfers.grant(grants)

    def die(self) -> None:
        """All processes end at once."""
        self.engine.alive = False
        for rank in self.ranks_here:
            rank.die()
        if self.link is not None:
            self.link.die()
        self.world.network.died(self.engine)
        for connection in self.engine.connections.values():
            connection.open = False

    def _ticket(self, round_: int, sequence: int) -> None:
        self.world.monitor.relay.leads(self, sequence)
        for rank in self.ranks_here[1:]:
            if rank.alive:
                rank.ticket_written(round_, sequence)
        if self.link is not None:
            self.link.ticket_written(round_, sequence)

    def ticket_taken(self) -> None:
        """The link has read one: rank 0 may wait for that."""
        if self.ranks[0].alive:
            self.ranks[0].wake()


class _Report:
    """Delivers a rank's report to its engine."""

    def __init__(self, engine: EngineProcess, rank: int) -> None:
        self._engine = engine
        self._rank = rank

    def __call__(self, data: bytes) -> None:
        if self._engine.alive:
            self._engine.report_arrived(self._rank, data)
