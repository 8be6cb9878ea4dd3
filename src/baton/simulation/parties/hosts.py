"""An instance over several hosts: the link on the leader's, and what the ranks of the others read and write.

Theory.  `Link` and `Node` are those of production.  Virtual are the rings (`NodeRings`, and what `rings.py`
has), and the connections (`wires/lines.py`): in order, late, stalled, cut with a word or without one, and
with frames that are lost or come again.

Ranks on other hosts live and die with their relay (`relay.py`), and the engine hears of them what the link
passes on.  Once the faults are over, no client waits and all hosts take part, nobody says that it is there,
so that a run ends.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from baton.protocol.messages.nodes import FromNode
from baton.protocol.messages.reports import REPORTS, WorkerFailed
from baton.relay.link import Link
from baton.simulation.events import Party, Timer
from baton.simulation.wires.lines import Line
from baton.simulation.wires.network import Channel, Delays
from baton.simulation.wires.rings import ReportEnd, TicketBoard, TicketEnd

if TYPE_CHECKING:
    from baton.simulation.parties.instance import Instance
    from baton.simulation.parties.relay import Relay
    from baton.simulation.parties.worker import RankProcess
    from baton.simulation.world import World


def _send(channel: Channel, record: bytes) -> None:
    channel.send(record)


class NodeRings:
    """The command ring and the tickets of a host that is not the leader's."""

    def __init__(self, instance: Instance, numbers: range, entries: int) -> None:
        self.records: list[bytes] = []
        self.tickets = TicketBoard(entries, self._ticket)
        self.ranks: list[RankProcess] = []
        self.relay: Relay | None = None
        """The parent of these ranks."""
        self._instance = instance
        self._numbers = numbers
        self._channels: dict[int, Channel] = {}

    def make_ranks(self, random: Random) -> list[RankProcess]:
        from baton.simulation.parties.worker import RankProcess

        instance, events = self._instance, self._instance.world.events
        wire = Party(f"{instance.name}.rings from rank {self._numbers.start}")
        for rank in self._numbers:
            self.ranks.append(RankProcess(instance, rank, random, self))
            deliver = partial(self._reported, rank)
            self._channels[rank] = Channel(events, wire, Delays(random, 1e-6, 2e-4), deliver)
        self.tickets.ends = [rank.ticket_end for rank in self.ranks]
        return self.ranks

    def append(self, record: bytes) -> None:
        """A record for all ranks of the host."""
        self.records.append(record)
        for rank in self.ranks:
            if rank.alive:
                rank.log_grew()

    def report(self, rank: int, record: bytes) -> None:
        """A rank has written a record."""
        self._channels[rank].send(record)

    def wake(self) -> None:
        """A rank has taken a ticket."""
        if self.relay is not None:
            self.relay.wake()

    def _reported(self, rank: int, record: bytes) -> None:
        if self.relay is not None and self.relay.alive:
            self.relay.report_arrived(rank, record)

    def _ticket(self, round_: int, sequence: int) -> None:
        for rank in self.ranks:
            if rank.alive:
                rank.ticket_written(round_, sequence)


class Turning(Party):
    """A process that sleeps until something arrives or a deadline has come."""

    def __init__(self, world: World, name: str, random: Random) -> None:
        super().__init__(name, world.draw_rate(random), random.uniform(0, 1e4))
        self._world = world
        self._events = world.events
        self._random = random
        self._turning = False
        self._timer: Timer | None = None

    def wake(self) -> None:
        if not self._turning and self.alive:
            self._turning = True
            self._events.after(2e-5, self, self._wakes)

    def _wakes(self) -> None:
        self._turning = False
        self._turn()

    def _turn(self) -> None:
        raise NotImplementedError

    def _now(self) -> float:
        return self.local(self._events.now)

    def _sleep_until(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None and self.alive and not self._world.nobody_waits:
            self._timer = self._events.at(self.global_time(deadline) + 1e-9, self, self.wake)


class LinkProcess(Turning):
    """What stands for the ranks of other hosts."""

    def __init__(self, instance: Instance, random: Random) -> None:
        world = instance.world
        super().__init__(world, f"{instance.name}.link", random)
        self.instance = instance
        config = instance.config
        self.link = Link(config, instance.name, config.command_ring_bytes)
        self.ticket_end = TicketEnd(instance.ticket_taken)
        self.lines: dict[bytes, Line] = {}
        self.inbox: deque[tuple[bytes, FromNode]] = deque()
        self._gone = False
        self._unreachable: list[bytes] = []
        self._visible = 0
        self._read = 0
        self._round = 0
        self._log_delays = Delays(random, 1e-6, 2e-4)
        self._log_free = 0.0
        self._visible_at: list[float] = []
        wire = Party(f"{instance.name}.link rings")
        self.report_ends: dict[int, ReportEnd] = {}
        for rank in range(config.ranks_per_host, config.tensor_parallel_size):
            channel = Channel(world.events, wire, Delays(random, 1e-6, 2e-4), instance.to_engine(rank))
            self.report_ends[rank] = ReportEnd(world.plan.report_room, partial(_send, channel), self.wake)

    def log_grew(self) -> None:
        at = max(self._events.now + self._log_delays.next(), self._log_free)
        self._log_free = at
        self._visible_at.append(at)
        self._events.at(at, self, self._sees_record)

    def ticket_written(self, round_: int, sequence: int) -> None:
        at = self._events.now + self._log_delays.next()
        if sequence:
            at = max(at, self._visible_at[sequence - 1])
        self._events.at(at, self, self._sees_ticket, round_, sequence)

    def _sees_record(self) -> None:
        self._visible += 1
        self.wake()

    def _sees_ticket(self, round_: int, sequence: int) -> None:
        self.ticket_end.visible[round_] = sequence
        self.wake()

    def arrived(self, identity: bytes, message: FromNode) -> None:
        self.inbox.append((identity, message))
        self.wake()

    def closed(self, identity: bytes) -> None:
        """Some connection has been closed; ZeroMQ does not say which."""
        self._world.monitor.relay.closed(self, identity)
        self._gone = True
        self.wake()

    def begin(self) -> None:
        """It listens."""
        self.wake()

    def _turn(self) -> None:
        link, now = self.link, self._now()
        for _ in range(len(self.inbox) if self._random.random() < 0.8 else min(1, len(self.inbox))):
            identity, message = self.inbox.popleft()
            known = link.takes_part(identity)
            link.on_message(identity, message, now)
            self._world.monitor.relay.reads(self, identity, message, now, known=known)
        if not self.inbox:
            for identity in self._unreachable:
                link.on_lost(identity)
            self._unreachable.clear()
            if self._gone:
                self._gone = False
                link.probe()
        while link.room and (sequence := self.ticket_end.take(self._round + 1)) is not None:
            self._round += 1
            link.ticket(self._round, sequence)
        while link.room and self._read < self._visible:
            link.command(self.instance.records[self._read])
            self._read += 1
        if not self._world.nobody_waits:
            link.on_clock(now)
        reports, link.reports = link.reports, []
        for rank, record in reports:
            self._world.monitor.relay.passed_up(self.instance, rank, record)
            self.report_ends[rank].write(record)
        full = {rank for rank, end in self.report_ends.items() if end.pending}
        for number, ranks in link.nodes().items():
            if not full.intersection(ranks):
                link.done(number)
        if link.lost is None:
            self._send(now)
        if link.lost is not None:
            self._fail(link.lost.rank, link.lost.reason)
            return
        if self.inbox:
            self.wake()
        else:
            self._world.monitor.relay.turned(self, now, timed=not self._world.nobody_waits)
        self._sleep_until(link.next_deadline())

    def _send(self, now: float) -> None:
        for identity, message in self.link.flush(now):
            line = self.lines.get(identity)
            if line is None or not line.send_down(message):
                self._unreachable.append(identity)
                self.wake()

    def _fail(self, rank: int, reason: str) -> None:
        self.link.leave(f"the instance has failed: {reason}")
        self._send(self._now())
        end = self.report_ends[rank]
        end.append(REPORTS.encode(WorkerFailed(rank, reason)))
        end.force()
        self._world.supervisor.link_ended(self, reason)

    def die(self) -> None:
        """Its connections are closed with it."""
        self.alive = False
        for line in self.lines.values():
            line.close(self)
        self.lines.clear()
