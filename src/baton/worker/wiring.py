"""How the processes of one instance are connected: which descriptor is what.

Theory.  The engine's process makes everything before it starts a worker — one command ring for all ranks, a
report ring and a doorbell for each rank, one doorbell of its own, ticket memory if there are followers, and
for hand-overs one more command ring and doorbells for the ranks' transfer threads —
and starts each worker with its `WorkerWiring` as JSON on the command line and the descriptors inherited
under the same numbers.

| from → to | through | wakes |
| --- | --- | --- |
| engine → all ranks | command ring, reader `rank` | the leader's doorbell only |
| engine → all transfer threads | transfer ring, reader `rank` | their own doorbells |
| leader → followers | tickets | the followers' doorbells |
| rank → engine | report ring of the rank | the engine's doorbell |

`Fetch` and `DropFetch` take the transfer ring, because they need not wait for the end of a step, nor be in
order with commands to slots: a fetch writes only blocks that no slot uses.

**Several hosts.**  The ranks of an instance may be on several hosts (`relay/`).  On the leader's host a
*link* process stands for all ranks of the others: it reads the rings as one more follower and writes the
report rings of those ranks.  On each other host the *relay* is what engine and leader are on the leader's
host: it writes the same rings and tickets there.  Workers see no difference.

A reader that frees space rings the ring's writer: workers the engine's doorbell, the engine the workers'.
Order of starting: the leader (rank 0) first, because a follower needs its process id.

    group = GroupWiring(config, rendezvous)
    leader = start(group.worker(0))
    followers = [start(group.worker(rank, leader.pid)) for rank in range(1, size)]
    group.close_worker_ends()

with `start(w) = subprocess.Popen(worker_argv(w), pass_fds=w.descriptors())`, in the main thread.
"""

from __future__ import annotations

import os
import sys
from socket import AF_UNIX, SOCK_SEQPACKET, socketpair

import msgspec

from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingReader, RingWriter, create_ring
from baton.ipc.ticket import TicketWriter, create_tickets
from baton.protocol.config import InstanceConfig


class LinkWiring(msgspec.Struct, frozen=True, kw_only=True):
    """What the link process of the leader's host is given.  Descriptors as in `WorkerWiring`."""

    config: InstanceConfig
    incarnation: str
    engine_pid: int
    command_ring: int
    reader: int
    tickets: int
    follower: int
    doorbell: int
    leader_doorbell: int
    engine_doorbell: int
    report_rings: dict[int, int]
    """By rank: those of the ranks on other hosts."""
    meetings: list[int]
    """The other ends of the ranks here (`WorkerWiring.meeting`)."""
    transfer_ring: int | None = None

    def descriptors(self) -> tuple[int, ...]:
        needed = (self.command_ring, self.tickets, self.doorbell, self.leader_doorbell, self.engine_doorbell)
        ring = () if self.transfer_ring is None else (self.transfer_ring,)
        return (*needed, *self.report_rings.values(), *self.meetings, *ring)


class WorkerWiring(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process is given.  Descriptors are numbers in the worker's own table."""

    config: InstanceConfig
    rank: int
    engine_pid: int
    """The parent of every worker."""
    rendezvous: str
    """A path in a directory private to the instance, for `create_executor`; unused with `meeting`."""
    command_ring: int
    report_ring: int
    doorbell: int
    """This rank's own."""
    engine_doorbell: int
    tickets: int | None = None
    """None with one rank."""
    follower_doorbells: list[int] = []
    """For the leader: those of ranks 1, 2, …"""
    leader_doorbell: int | None = None
    """For a follower."""
    leader_pid: int | None = None
    """For a follower."""
    transfer_ring: int | None = None
    """None without hand-overs."""
    transfer_doorbell: int | None = None
    """That of this rank's transfer thread."""
    reader: int = 0
    """Its place among those that read the rings of this host."""
    follower: int = 0
    """Its place among those that wait for tickets on this host; the leader has none."""
    meeting: int | None = None
    """A socket through which ranks of several hosts meet (`relay/meeting.py`); None: all are on this host."""

    def descriptors(self) -> tuple[int, ...]:
        """What the process must inherit (`pass_fds`)."""
        optional = (
            self.tickets,
            self.leader_doorbell,
            self.transfer_ring,
            self.transfer_doorbell,
            self.meeting,
        )
        needed = (self.command_ring, self.report_ring, self.doorbell, self.engine_doorbell)
        return (*needed, *self.follower_doorbells, *(fd for fd in optional if fd is not None))


def worker_argv(wiring: WorkerWiring) -> list[str]:
    """The command line of a worker.  `-P`: the working directory must not shadow installed packages."""
    return [sys.executable, "-P", "-m", "baton.worker.main", msgspec.json.encode(wiring).decode()]


def link_argv(wiring: LinkWiring) -> list[str]:
    """The command line of a link process."""
    return [sys.executable, "-P", "-m", "baton.relay.link_process", msgspec.json.encode(wiring).decode()]


def rendezvous_of(wiring: WorkerWiring) -> str:
    """Where this rank meets the others: a path, or `fd:N` (`model/layers/meeting.py`)."""
    return wiring.rendezvous if wiring.meeting is None else f"fd:{wiring.meeting}"


class GroupWiring:
    """The engine's side of an instance: makes all connections and holds the engine's ends.

    `doorbell` is what the engine sleeps on, `commands` the log's writer, `transfers` that of the transfer
    ring (None without hand-overs), `reports[i]` the reader of rank `ranks[i]`.

    With an instance on several hosts, `node` 0 is the leader's: `link()` is the wiring of the process that
    stands for the ranks elsewhere.  Another node's is the relay's: it has `tickets` to write to.
    """

    def __init__(
        self, config: InstanceConfig, rendezvous: str, engine_pid: int | None = None, node: int = 0
    ) -> None:
        self._config = config
        self._rendezvous = rendezvous
        self._engine_pid = os.getpid() if engine_pid is None else engine_pid
        self._node = node
        here = config.ranks_per_host
        self._here = range(node * here, (node + 1) * here)
        self._leads = node == 0
        linked = self._leads and config.nodes.count > 1
        self.ranks = range(config.tensor_parallel_size) if self._leads else self._here
        """Those whose reports are read here."""
        self.doorbell = Doorbell.create()
        self._worker_doorbells = [Doorbell.create() for _ in self._here]
        self.link_doorbell = Doorbell.create() if linked else None
        """Wakes the link process."""
        others = [] if self.link_doorbell is None else [self.link_doorbell]
        readers = here + len(others)
        followers = readers - 1 if self._leads else here
        self._command_ring = create_ring(config.command_ring_bytes, readers)
        self._report_rings = [create_ring(config.report_ring_bytes, 1) for _ in self.ranks]
        self._tickets = create_tickets(followers) if followers else None
        self.commands = RingWriter(
            self._command_ring, self._worker_doorbells[:1] if self._leads else self._worker_doorbells
        )
        self._transfer_ring: int | None = None
        self._transfer_doorbells: list[Doorbell] = []
        self.transfers: RingWriter | None = None
        if config.peer_endpoint:
            self._transfer_ring = create_ring(config.command_ring_bytes, readers)
            self._transfer_doorbells = [Doorbell.create() for _ in self._here]
            self.transfers = RingWriter(self._transfer_ring, [*self._transfer_doorbells, *others])
        bells = self._worker_doorbells + others * (len(self.ranks) - here)
        self.reports = [
            RingReader(ring, 0, bell) for ring, bell in zip(self._report_rings, bells, strict=True)
        ]
        pairs = [socketpair(AF_UNIX, SOCK_SEQPACKET) for _ in self._here if config.nodes.count > 1]
        self._meetings = [theirs for _, theirs in pairs]
        self.meetings = [ours for ours, _ in pairs]
        """Where the ranks of this host say and ask how they meet those of others: the link's, or the
        relay's, to serve."""

    def tickets(self) -> TicketWriter:
        """Of a relay, which passes on what the leader wrote."""
        if self._leads or self._tickets is None:
            raise ValueError("tickets are the leader rank's to write here")
        return TicketWriter(self._tickets, self._worker_doorbells)

    def worker(self, rank: int, leader_pid: int | None = None) -> WorkerWiring:
        """The wiring of one rank of this host; a follower needs the leader's process id."""
        if rank > 0 and leader_pid is None:
            raise ValueError(f"rank {rank} is a follower: start rank 0 first and give its process id")
        place = rank - self._here.start
        bells = [bell.fileno() for bell in self._worker_doorbells]
        leader_bell = bells[0] if self._leads else self.doorbell.fileno()
        link = [] if self.link_doorbell is None else [self.link_doorbell.fileno()]
        return WorkerWiring(
            config=self._config,
            rank=rank,
            engine_pid=self._engine_pid,
            rendezvous=self._rendezvous,
            command_ring=self._command_ring,
            report_ring=self._report_rings[place],
            doorbell=bells[place],
            engine_doorbell=self.doorbell.fileno(),
            tickets=self._tickets,
            follower_doorbells=bells[1:] + link if rank == 0 else [],
            leader_doorbell=leader_bell if rank > 0 else None,
            leader_pid=leader_pid if rank > 0 else None,
            transfer_ring=self._transfer_ring,
            transfer_doorbell=self._transfer_doorbells[place].fileno() if self._transfer_doorbells else None,
            reader=place,
            follower=place - 1 if self._leads else place,
            meeting=self._meetings[place].fileno() if self._meetings else None,
        )

    def link(self, incarnation: str) -> LinkWiring:
        """The wiring of the process that stands for the ranks of other hosts."""
        if self.link_doorbell is None or self._tickets is None:
            raise ValueError("all ranks of this instance are on one host")
        here = len(self._here)
        return LinkWiring(
            config=self._config,
            incarnation=incarnation,
            engine_pid=self._engine_pid,
            command_ring=self._command_ring,
            reader=here,
            tickets=self._tickets,
            follower=here - 1,
            doorbell=self.link_doorbell.fileno(),
            leader_doorbell=self._worker_doorbells[0].fileno(),
            engine_doorbell=self.doorbell.fileno(),
            report_rings={rank: self._report_rings[rank] for rank in self.ranks[here:]},
            meetings=[one.fileno() for one in self.meetings],
            transfer_ring=self._transfer_ring,
        )

    def close_worker_ends(self) -> None:
        """Closes descriptors that only the other processes, all started, still need.  Idempotent.

        The mappings and the doorbells that the engine rings stay; a relay keeps `meetings`.
        """
        if self._command_ring < 0:
            return
        for fd in (self._command_ring, self._tickets, self._transfer_ring, *self._report_rings):
            if fd is not None:
                os.close(fd)
        for one in (*self._meetings, *(self.meetings if self._leads else ())):
            one.close()
        self._command_ring = -1

    def close(self) -> None:
        """Closes everything; for tests and for an orderly exit."""
        self.close_worker_ends()
        self.commands.close()
        if self.transfers is not None:
            self.transfers.close()
        for reader in self.reports:
            reader.close()
        link = () if self.link_doorbell is None else (self.link_doorbell,)
        for bell in (self.doorbell, *self._worker_doorbells, *self._transfer_doorbells, *link):
            bell.close()
        for one in self.meetings:
            one.close()
