"""A fetch as a task: chooses the transport, copies from each rank of the source that has something for us.

Theory.  A fetch is over exactly once: copied, failed, or dropped.  `Fetched` says which, and after it no byte
of the blocks is touched, because the task that would have touched them has ended.

Pages of a pool on a device are copied into main memory and then *land*: the device copies them itself.  What
it was given it cannot be stopped from doing, so while pages land their blocks are the fetch's, whatever
happens: one that is dropped meanwhile, or that takes longer than `LANDS_S` and so has failed, says so when
the device is done.  Until then it keeps nobody waiting but those who want its blocks; and if the device never
is, the engine, which has dropped the fetch at its lease's end, gives the instance up after `step_timeout_s`.

Fetches from one source wait for each other (`Transport.parallel`), so that the first is there first, unless
the transport keeps them in order itself; those from different sources do not, so that a source which hangs
delays nobody else.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.protocol.codec import MalformedMessage, unpack_int32
from baton.protocol.messages.commands import Fetch
from baton.protocol.messages.handover import PoolSource
from baton.protocol.messages.reports import Fetched
from baton.transfer.base import Copy, Int32Array, Landing, PoolView, TransferError, Transport
from baton.transfer.layout import plan
from baton.transfer.tasks import Task, Tasks, Wait

log = logging.getLogger(__name__)

_MAX_REASON = 300
LANDS_S = 10.0
"""A fetch fails whose pages are not on the device after so long; it copies gigabytes a second."""
LEAVES_S = 5.0
"""So long whoever ends this thread waits for a device that still copies."""
_LANDING_S = 0.0002
"""How often it is looked whether pages are on the device."""
_LATE_S = 0.05
"""The same once that takes too long."""

Report = Callable[[Fetched], None]


@dataclass(eq=False, slots=True)
class _Job:
    """A fetch that is not over."""

    command: Fetch
    lane: str
    began: float
    task: Task | None = None
    """None while it waits for its turn."""
    queued: bool = True
    """It runs or waits in its lane, where others wait for it."""
    landing: bool = False
    """The device is about to write into its blocks."""
    instead: Fetched | None = None
    """What is reported when its pages have landed, if it is over for its engine already."""


@dataclass(slots=True)
class _Lane:
    """The fetches from one source."""

    parallel: int
    running: int = 0
    waiting: deque[_Job] = field(default_factory=deque)


class Fetcher:
    """All fetches of one rank.  Used by one thread; `report` is called by it."""

    def __init__(
        self, rank: int, pool: PoolView, transports: Sequence[Transport], tasks: Tasks, report: Report
    ) -> None:
        """`transports` in the order in which they are to be tried."""
        self._rank = rank
        self._pool = pool
        self._transports = tuple(transports)
        self._tasks = tasks
        self._report = report
        self._jobs: dict[int, _Job] = {}
        self._lanes: dict[str, _Lane] = {}

    @property
    def under_way(self) -> int:
        """Fetches that are not over."""
        return len(self._jobs)

    def fetch(self, command: Fetch) -> None:
        """Begins it, or queues it behind others from the same source."""
        ranks = command.source.ranks
        lane = ranks[0].tcp or ranks[0].shared_memory or ranks[0].nixl.hex() if ranks else ""
        job = _Job(command, lane, time.monotonic())
        self._jobs[command.id] = job
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(max((t.parallel for t in self._choices(ranks)), default=1))
        self._lanes[lane].waiting.append(job)
        self._advance(lane)

    def drop(self, ids: Sequence[int]) -> None:
        """Stops those that are not over."""
        for id_ in ids:
            job = self._jobs.get(id_)
            if job is None:
                continue
            dropped = Fetched(self._rank, id_, error="dropped", dropped=True)
            if job.landing:
                job.instead = dropped
                self._leave(job)
                continue
            if job.task is not None:
                self._tasks.cancel(job.task)
            self._end(job, dropped)

    def _choices(self, ranks: Sequence[PoolSource]) -> list[Transport]:
        """For each rank of the source the transport that will be used, as far as there is one."""
        found = (next((t for t in self._transports if not t.why_not(rank)), None) for rank in ranks)
        return [transport for transport in found if transport is not None]

    def _advance(self, name: str) -> None:
        lane = self._lanes[name]
        while lane.waiting and lane.running < lane.parallel:
            job = lane.waiting.popleft()
            lane.running += 1
            job.task = self._tasks.start(self._run(job), self._ended(job))

    def _ended(self, job: _Job) -> Callable[[Any, Exception | None], None]:
        def ended(copied: Any, error: Exception | None) -> None:
            seconds = time.monotonic() - job.began
            id_ = job.command.id
            if job.instead is not None:
                self._end(job, job.instead)
                return
            if error is None:
                num_bytes, transport = copied
                done = Fetched(self._rank, id_, num_bytes=num_bytes, seconds=seconds, transport=transport)
                self._end(job, done)
                return
            if not isinstance(error, TransferError):
                log.error("fetch %d failed unexpectedly", id_, exc_info=error)
            reason = " ".join(f"{error}".split())[:_MAX_REASON] or type(error).__name__
            self._end(job, Fetched(self._rank, id_, error=reason, seconds=seconds))

        return ended

    def _end(self, job: _Job, fetched: Fetched) -> None:
        del self._jobs[job.command.id]
        self._report(fetched)
        self._leave(job)

    def _leave(self, job: _Job) -> None:
        """Those behind it in its lane may go on."""
        if not job.queued:
            return
        job.queued = False
        lane = self._lanes[job.lane]
        if job.task is None:
            lane.waiting.remove(job)
        else:
            lane.running -= 1
        if lane.waiting:
            self._advance(job.lane)
        elif not lane.running:
            del self._lanes[job.lane]

    def _run(self, job: _Job) -> Generator[Wait | None, Any, tuple[int, str]]:
        """Returns the bytes copied, and the name of the transport."""
        command = job.command
        pages, blocks = _ids(command.pages, "pages"), _ids(command.blocks, "blocks")
        copies = plan(
            self._pool,
            command.source.ranks,
            pages,
            blocks,
            command.first_layer,
            command.num_layers,
            reader=self._rank,
        )
        copied, name = 0, ""
        for copy in copies:
            transport = self._transport(copy)
            copied += yield from transport.copy(copy._replace(grant=command.grant))
            name = transport.name
        if copied and self._pool.land is not None:
            yield from self._land(blocks, job)
        return copied, name if copied else ""

    def _land(self, blocks: Int32Array, job: _Job) -> Generator[Wait | None, Any, None]:
        """The pages are in main memory; ends when they are on the device."""
        assert self._pool.land is not None
        command, first = job.command, job.command.first_layer
        layers = self._pool.num_layers - first if command.num_layers < 0 else command.num_layers
        job.landing = True
        landing = self._pool.land(blocks, first, layers)
        deadline = time.monotonic() + LANDS_S
        try:
            while not landing.done():
                late = time.monotonic() >= deadline
                if late and job.instead is None:
                    reason = f"the device has not taken {len(blocks)} pages within {LANDS_S:g} s"
                    log.error("fetch %d failed: %s; their blocks are kept until it has", command.id, reason)
                    job.instead = Fetched(self._rank, command.id, error=reason, seconds=LANDS_S)
                    self._leave(job)
                yield Wait(-1, 0, _LATE_S if late else _LANDING_S)
        except GeneratorExit:  # the thread ends, and the pool goes away next
            _see_out(landing)
            raise

    def _transport(self, copy: Copy) -> Transport:
        reasons = []
        for transport in self._transports:
            reason = transport.why_not(copy.source)
            if not reason:
                return transport
            reasons.append(f"{transport.name}: {reason}")
        raise TransferError(f"rank {copy.source.rank} of the source cannot be reached ({'; '.join(reasons)})")


def _see_out(landing: Landing) -> None:
    """Returns when the device is done with these pages, or has not been for `LEAVES_S`."""
    deadline = time.monotonic() + LEAVES_S
    while not landing.done():
        if time.monotonic() >= deadline:
            log.error("the device has not taken pages within %g s; it hangs", LEAVES_S)
            return
        time.sleep(_LANDING_S)


def _ids(packed: bytes, name: str) -> Int32Array:
    try:
        return np.array(unpack_int32(packed), np.int32)
    except MalformedMessage as error:
        raise TransferError(f"{name} of the fetch: {error}") from None
