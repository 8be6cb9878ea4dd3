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

import msgspec

from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingReader, RingWriter, create_ring
from baton.ipc.ticket import create_tickets
from baton.protocol.config import InstanceConfig


class WorkerWiring(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process is given.  Descriptors are numbers in the worker's own table."""

    config: InstanceConfig
    rank: int
    engine_pid: int
    """The parent of every worker."""
    rendezvous: str
    """A path in a directory private to the instance, for `create_executor`."""
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

    def descriptors(self) -> tuple[int, ...]:
        """What the process must inherit (`pass_fds`)."""
        optional = (self.tickets, self.leader_doorbell, self.transfer_ring, self.transfer_doorbell)
        needed = (self.command_ring, self.report_ring, self.doorbell, self.engine_doorbell)
        return (*needed, *self.follower_doorbells, *(fd for fd in optional if fd is not None))


def worker_argv(wiring: WorkerWiring) -> list[str]:
    """The command line of a worker.  `-P`: the working directory must not shadow installed packages."""
    return [sys.executable, "-P", "-m", "baton.worker.main", msgspec.json.encode(wiring).decode()]


class GroupWiring:
    """The engine's side of an instance: makes all connections and holds the engine's ends.

    `doorbell` is what the engine sleeps on, `commands` the log's writer, `transfers` that of the transfer
    ring (None without hand-overs), `reports[rank]` the readers.
    """

    def __init__(self, config: InstanceConfig, rendezvous: str, engine_pid: int | None = None) -> None:
        self._config = config
        self._rendezvous = rendezvous
        self._engine_pid = os.getpid() if engine_pid is None else engine_pid
        ranks = range(config.tensor_parallel_size)
        self.doorbell = Doorbell.create()
        self._worker_doorbells = [Doorbell.create() for _ in ranks]
        self._command_ring = create_ring(config.command_ring_bytes, len(ranks))
        self._report_rings = [create_ring(config.report_ring_bytes, 1) for _ in ranks]
        self._tickets = create_tickets(len(ranks) - 1) if len(ranks) > 1 else None
        self.commands = RingWriter(self._command_ring, self._worker_doorbells[:1])
        self._transfer_ring: int | None = None
        self._transfer_doorbells: list[Doorbell] = []
        self.transfers: RingWriter | None = None
        if config.peer_endpoint:
            self._transfer_ring = create_ring(config.command_ring_bytes, len(ranks))
            self._transfer_doorbells = [Doorbell.create() for _ in ranks]
            self.transfers = RingWriter(self._transfer_ring, self._transfer_doorbells)
        self.reports = [
            RingReader(ring, 0, bell)
            for ring, bell in zip(self._report_rings, self._worker_doorbells, strict=True)
        ]

    def worker(self, rank: int, leader_pid: int | None = None) -> WorkerWiring:
        """The wiring of one rank; a follower needs the leader's process id."""
        if rank > 0 and leader_pid is None:
            raise ValueError(f"rank {rank} is a follower: start rank 0 first and give its process id")
        bells = [bell.fileno() for bell in self._worker_doorbells]
        return WorkerWiring(
            config=self._config,
            rank=rank,
            engine_pid=self._engine_pid,
            rendezvous=self._rendezvous,
            command_ring=self._command_ring,
            report_ring=self._report_rings[rank],
            doorbell=bells[rank],
            engine_doorbell=self.doorbell.fileno(),
            tickets=self._tickets,
            follower_doorbells=bells[1:] if rank == 0 else [],
            leader_doorbell=bells[0] if rank > 0 else None,
            leader_pid=leader_pid if rank > 0 else None,
            transfer_ring=self._transfer_ring,
            transfer_doorbell=self._transfer_doorbells[rank].fileno() if self._transfer_doorbells else None,
        )

    def close_worker_ends(self) -> None:
        """Closes descriptors that only the workers, all started, still need.  Idempotent.

        The mappings and the doorbells that the engine rings stay.
        """
        if self._command_ring < 0:
            return
        for fd in (self._command_ring, self._tickets, self._transfer_ring, *self._report_rings):
            if fd is not None:
                os.close(fd)
        self._command_ring = -1

    def close(self) -> None:
        """Closes everything; for tests and for an orderly exit."""
        self.close_worker_ends()
        self.commands.close()
        if self.transfers is not None:
            self.transfers.close()
        for reader in self.reports:
            reader.close()
        for bell in (self.doorbell, *self._worker_doorbells, *self._transfer_doorbells):
            bell.close()
