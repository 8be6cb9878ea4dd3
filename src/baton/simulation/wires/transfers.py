"""Fetches: the production `Fetcher` over virtual time, and pages that are copied one by one.

Theory.  What is copied is what the source's pool holds at the virtual moment of the copy, so a page that is
freed and used again while a fetch is under way arrives with somebody else's tokens.  On one host the pool is
shared memory: it can be read whatever its owner does, also when it is stopped, and after its death if it had
been opened before.  Between hosts somebody has to serve it, to who shows a grant that stands: nothing comes
while the source is stopped or the network is closed, for `SILENCE_S` at most; what was served lands a little
later; and when the grant ends meanwhile, zeros are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from baton.protocol.messages.commands import DropFetch, Fetch, Grants
from baton.protocol.messages.handover import PoolSource
from baton.protocol.messages.reports import Fetched
from baton.simulation.events import Party
from baton.simulation.wires.network import Channel, Delays
from baton.transfer.base import Copy, Copying, PoolView, TransferError
from baton.transfer.fetcher import Fetcher
from baton.transfer.grants import EARLY, GrantBook
from baton.transfer.tasks import READ, OnEnd, Task, TaskGenerator, Tasks, Wait

if TYPE_CHECKING:
    from baton.simulation.parties.worker import RankProcess

SILENCE_S = 0.4


class VirtualTasks(Tasks):
    """Tasks whose waits are timers."""

    def __init__(self, owner: Party, world: Any) -> None:
        self._owner = owner
        self._events = world.events
        self.alive = set()

    def start(self, generator: TaskGenerator, on_end: OnEnd) -> Task:
        task = Task(generator, on_end)
        self.alive.add(task)
        self._events.after(0.0, self._owner, self._turn, task)
        return task

    def _wait(self, task: Task, wait: Wait) -> None:
        self._events.after(wait.seconds, self._owner, self._turn, task)


class VirtualTransport:
    """See `transfer.base.Transport`."""

    name = "virtual"
    parallel = 1

    def __init__(self, rank: RankProcess, random: Random) -> None:
        self._rank = rank
        self._world = rank.instance.world
        self._random = random
        self._key = reader_key(rank.instance.name, rank.rank)
        self._opened: set[str] = set()
        self.extra_s = 0.0
        """What each page takes longer."""
        self.failing = False
        """The next copy fails."""

    def export(self, source: PoolSource) -> PoolSource:
        return source

    def why_not(self, source: PoolSource) -> str:
        there = self._world.rank_of(source)
        if there is None or not (there.alive or source.shared_memory in self._opened):
            return "the source is gone"
        return ""

    def copy(self, copy: Copy) -> Copying:
        there = self._world.rank_of(copy.source)
        if there is None:
            raise TransferError("the source is gone")
        by_memory = self._world.plan.one_host
        if by_memory:
            self._opened.add(copy.source.shared_memory)
        target = self._rank.executor.pool.array()
        layers = slice(copy.first_layer, copy.first_layer + copy.num_layers)
        heads = slice(copy.head, copy.head + copy.num_heads)
        theirs = slice(copy.source_head, copy.source_head + copy.num_heads)
        watch = self._world.monitor.handover
        granted = by_memory
        for page, block in zip(copy.pages.tolist(), copy.blocks.tolist(), strict=True):
            yield Wait(-1, READ, (self._world.plan.page_s + self.extra_s) * (0.5 + self._random.random()))
            if self.failing:
                self.failing = False
                raise TransferError("the plan says that this one fails")
            if not by_memory:
                yield from self._reach(there)
            if not granted:
                yield from self._show(there, copy)
                granted = True
            found = there.pages.seen(page, copy.first_layer, copy.num_layers)
            if not by_memory and not there.transfers.serves(copy.grant, self._key, (page,)):
                found = np.zeros_like(found)
            if not by_memory:
                yield Wait(-1, READ, self._world.plan.usual_delay * self._random.random())
            watch.writes(self._rank, block)
            target[block, layers, :, heads] = found[:, :, theirs]
        return len(copy.pages)

    def _reach(self, there: RankProcess) -> Copying:
        """Waits until the source can serve."""
        events, network = self._world.events, self._world.network
        until = max(
            network.open_at(self._rank.instance.index, there.instance.index),
            there.transfers.party.stalled_until,
        )
        if until > events.now + SILENCE_S:
            yield Wait(-1, READ, SILENCE_S)
            raise TransferError("the source is silent")
        if until > events.now:
            yield Wait(-1, READ, until - events.now)
        if not there.alive:
            raise TransferError("the connection to the source broke")
        return 0

    def _show(self, there: RankProcess, copy: Copy) -> Copying:
        """Shows the grant, which may be on its way to the source."""
        events, grants = self._world.events, there.transfers.grants
        give_up = events.now + SILENCE_S
        while problem := grants.why_not(copy.grant, self._key, events.now, copy.pages.tolist()):
            if problem != EARLY or events.now >= give_up:
                raise TransferError(problem)
            yield Wait(-1, READ, 0.005)
        return 0

    def tick(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing."""


class VirtualTransfers:
    """The transfer thread of a rank: see `worker.loop.Transfers`."""

    def __init__(self, rank: RankProcess, random: Random) -> None:
        world = rank.instance.world
        self._rank = rank
        self._world = world
        self.party = Party(f"{rank.name}.transfer")
        self.transport = VirtualTransport(rank, random)
        self._fetcher = Fetcher(
            rank.rank,
            rank.executor.pool,
            [self.transport],
            VirtualTasks(self.party, world),
            self._over,
        )
        self._commands = Channel(world.events, self.party, Delays(random, 1e-6, 1e-4), self._apply)
        self.grants = GrantBook()
        self._granting = Channel(world.events, self.party, Delays(random, 1e-6, 1e-4), self._grant)

    def source(self) -> PoolSource:
        """Where others fetch this rank's pages."""
        return describe_pool(self._rank.executor.pool, self._rank.instance.name, self._rank.rank)

    def fetch(self, command: Fetch) -> None:
        self._commands.send(command)

    def drop(self, command: DropFetch) -> None:
        self._commands.send(command)

    def grant(self, grants: Sequence[Grants]) -> None:
        if grants and not self._world.plan.one_host:
            self._granting.send(grants)

    def serves(self, token: bytes, key: bytes, pages: Sequence[int]) -> bool:
        """Whether its page server serves these to who shows this token and has proved this key."""
        now = self._world.events.now
        if self.grants.why_not(token, key, now, pages):
            return False
        self._world.monitor.strangers.grants.serves(self._rank, token, key, pages, now)
        return True

    def _grant(self, grants: Sequence[Grants]) -> None:
        for command in grants:
            self.grants.apply(command, self._world.events.now)
            self._world.monitor.strangers.grants.applied(self._rank, command, self._world.events.now)

    @property
    def granting(self) -> bool:
        """Its page server has not heard of all that its engine granted."""
        return self._granting.in_flight > 0

    @property
    def under_way(self) -> int:
        return self._fetcher.under_way + self._commands.in_flight

    def _apply(self, command: Fetch | DropFetch) -> None:
        if isinstance(command, Fetch):
            self._fetcher.fetch(command)
        else:
            self._fetcher.drop(command.ids)

    def _over(self, fetched: Fetched) -> None:
        self._rank.fetched(msgspec.structs.replace(fetched, seconds=0.0))


def describe_pool(pool: PoolView, incarnation: str, rank: int) -> PoolSource:
    name = f"{incarnation}/{rank}"
    return PoolSource(
        rank=rank,
        host="here",
        num_blocks=pool.num_blocks,
        block_bytes=pool.block_bytes,
        num_layers=pool.num_layers,
        kv_heads=pool.kv_heads,
        head_start=pool.head_start,
        total_kv_heads=pool.total_kv_heads,
        shared_memory=name,
        reader_key=reader_key(incarnation, rank),
    )


def reader_key(incarnation: str, rank: int) -> bytes:
    """What this rank proves to page servers."""
    return f"{incarnation}/{rank}".encode()
