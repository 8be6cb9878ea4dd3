"""The engine and the worker that the explorer moves: the production core and token loop, small and bare.

Theory.  What is virtual is only what would be shared with other processes: the rings are lists, and a rank
that would sleep returns instead.  The invariants that concern one party are checked by its `check` after
everything that happens to it, those between engine and worker by `check_pair`, for each pair of contents that
occurs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from baton.engine.core import EngineCore
from baton.engine.request import Request
from baton.engine.scheduling.ledger import LedgerError
from baton.engine.states import State
from baton.executor.simulated.executor import SimulatedExecutor
from baton.ipc.ring import PUBLISHED_WORD, RingReader, RingWriter
from baton.protocol.codec import unpack_int32
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import COMMANDS, Admit, DropFetch, Fetch
from baton.protocol.messages.handover import PEER
from baton.protocol.messages.reports import REPORTS, Fetched, StepReport, WorkerReady
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Cancel
from baton.simulation.explorer.explored_gateway import NOW
from baton.simulation.explorer.machines import Broken
from baton.simulation.wires.transfers import describe_pool
from baton.worker.command_log import CommandLog
from baton.worker.loop import WorkerLoop
from baton.worker.rounds import Rounds
from baton.worker.slots.composition import composition_of
from baton.worker.slots.slots import Slots

GATEWAY = b"gateway"


class Engine:
    """The engine core, and what `engine/shell/loop.py` does around it."""

    def __init__(self, config: InstanceConfig, incarnation: str, lookahead: int) -> None:
        endpoint = config.peer_endpoint
        self.core = EngineCore(config, incarnation=incarnation, workers=[1], now=NOW, peer_endpoint=endpoint)
        self.unsent = False
        """Something was read since the last flush."""
        pool = SimulatedExecutor.from_config(config).pool
        source = describe_pool(pool, incarnation, 0) if endpoint else None
        ready = WorkerReady(
            0, config.num_blocks or 0, config.block_size, "", 0, config.vocab_size, source=source
        )
        self.core.on_report(0, ready, NOW)
        # Production looks further ahead, so that a fast worker never waits; a pool of a few tokens would have
        # no room for that.
        self.core.scheduler.room.lookahead = lookahead

    def message(self, data: bytes) -> None:
        message = TO_ENGINE.decode(data)
        self.core.on_message(GATEWAY, message, NOW)
        self.unsent = True
        if isinstance(message, Cancel):
            alive = cast(Any, self.core)._outboxes.of(GATEWAY).requests.get(message.id)
            if alive is not None and alive.state is not State.ABORTING:
                raise Broken(f"cancel: {alive.name} was cancelled and is {alive.state.value}")

    def report(self, data: bytes) -> None:
        self.core.on_report(0, REPORTS.decode(data), NOW)
        self.unsent = True

    def peer(self, sender: str, data: bytes) -> None:
        self.core.on_peer(sender, PEER.decode(data), NOW)
        self.unsent = True

    def peer_died(self, peer: str) -> None:
        self.core.peer_lost(peer, NOW, dead=True)
        self.unsent = True

    def worker_died(self) -> None:
        self.core.fail("the worker died")
        self.unsent = True

    def flush(self, gateway_alive: bool) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Records for the log, messages for the gateway, and for the peer."""
        records, sent, told = [], [], []
        while True:
            batch, messages, peers = self.core.flush(NOW)
            self.core.take_grants()  # (pages are read from memory)
            told += [PEER.encode(message) for _, message in peers]
            if batch is not None:
                records.append(COMMANDS.encode(batch))
            if not messages:
                break
            if gateway_alive:
                sent += [FROM_ENGINE.encode(message) for _, message in messages]
                break
            self.core.gateway_lost(GATEWAY)
        self.unsent = False
        return records, sent, told

    def check(self) -> None:
        core, scheduler = self.core, self.core.scheduler
        try:
            scheduler.ledger.check()
        except LedgerError as error:
            raise Broken(f"ledger: {error}") from None
        if core.counters.violations:
            raise Broken("protocol: the engine read something that cannot be")
        if core.failure is not None:
            return
        for slot, request in enumerate(scheduler.slots):
            held = len(scheduler.ledger.table(slot))
            if request is None and held:
                raise Broken(f"ledger: slot {slot} is free and holds {held} blocks")
            if request is not None and (request.slot != slot or request.held != held):
                raise Broken(f"ledger: {request.name} on slot {slot} counts {request.held} of {held} blocks")
        if (
            not self.unsent
            and not scheduler.paused
            and scheduler.num_occupied
            and core.next_deadline() is None
        ):
            raise Broken("deadline: requests run and the engine's wait for reports has no limit")
        for request in scheduler.slots:
            if request is None or request.state is not State.FOLLOWING or self.unsent or scheduler.paused:
                continue
            if not any(_awaited(scheduler, request, index) for index in range(request.indexed)):
                raise Broken(f"follow: {request.name} waits for blocks, and nobody computes any of them")


class _Log:
    """The reader's end of the command ring."""

    def __init__(self) -> None:
        self.words = [0] * (PUBLISHED_WORD + 1)
        self.cursor = 0
        self.partial = False
        self.records: deque[bytes] = deque()

    def read(self) -> bytes | None:
        if not self.records:
            return None
        self.cursor += 1
        return self.records.popleft()


class _Reports:
    """The writer's end of the report ring."""

    pending = False

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, record: bytes, ring: bool = True) -> bool:
        report = REPORTS.decode(record)
        if isinstance(report, StepReport):  # how long a step took is nobody's business here
            record = REPORTS.encode(msgspec.structs.replace(report, seconds=0.0, began=0.0))
        self.written.append(record)
        return True

    def flush(self) -> bool:
        return True

    def ring(self) -> None:
        """Nothing: the explorer chooses when the engine looks."""


class _Rounds:
    """Rounds of a single rank that returns where it would sleep."""

    def __init__(self, log: CommandLog) -> None:
        self._log = log

    def enter(self, busy: bool) -> int | None:
        self._log.collect()
        return self._log.collected if busy or self._log.collected != self._log.applied else None

    def leave(self) -> None:
        """Nobody sleeps."""


class _Transfers:
    """Fetches of a single rank, page by page."""

    def __init__(self, reports: _Reports) -> None:
        self._reports = reports
        self.under_way: list[tuple[Fetch, int]] = []
        """And how many of its pages have been copied."""

    def fetch(self, command: Fetch) -> None:
        self.under_way.append((command, 0))

    def drop(self, command: DropFetch) -> None:
        for fetch, _ in self.under_way:
            if fetch.id in command.ids:
                self._over(Fetched(0, fetch.id, error="dropped", dropped=True))
        self.under_way = [entry for entry in self.under_way if entry[0].id not in command.ids]

    def next_copy(self) -> tuple[int, int] | None:
        """The page and the block of the next copy."""
        if not self.under_way:
            return None
        fetch, done = self.under_way[0]
        return unpack_int32(fetch.pages)[done], unpack_int32(fetch.blocks)[done]

    def copied(self) -> None:
        fetch, done = self.under_way[0]
        if done + 1 < len(fetch.pages) // 4:
            self.under_way[0] = (fetch, done + 1)
            return
        del self.under_way[0]
        self._over(Fetched(0, fetch.id))

    def fail(self) -> None:
        fetch, _ = self.under_way.pop(0)
        self._over(Fetched(0, fetch.id, error="the source is gone"))

    def _over(self, report: Fetched) -> None:
        self._reports.written.append(REPORTS.encode(report))


class Worker:
    """The token loop of a single rank."""

    def __init__(self, config: InstanceConfig) -> None:
        self.executor = SimulatedExecutor.from_config(config)
        self.slots = Slots(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            composition=composition_of(config),
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_blocks=config.num_blocks or 0,
        )
        self._log = _Log()
        self._reports = _Reports()
        self.transfers = _Transfers(self._reports)
        commands = CommandLog(cast(RingReader, self._log))
        self.loop = WorkerLoop(
            rank=0,
            slots=self.slots,
            executor=self.executor,
            commands=commands,
            rounds=cast(Rounds, _Rounds(commands)),
            reports=cast(RingWriter, self._reports),
            transfers=self.transfers,
        )
        self.open: dict[int, int] = {}
        """slot → epoch of those that were admitted and not reported as closed."""

    @property
    def awake(self) -> bool:
        """The last round ran a step, so there is another one, whatever comes."""
        return self.loop._busy

    def round(self, records: Sequence[bytes]) -> list[bytes]:
        """One round that finds these records of the log.  Returns what it reports."""
        self._log.records.extend(records)
        self._log.words[PUBLISHED_WORD] += len(records)
        for record in records:
            for command in COMMANDS.decode(record).commands:
                if isinstance(command, Admit):
                    self.open[command.slot] = command.epoch
        self.loop.run_once()
        return self._take_written()

    def page(self, block: int) -> bytes:
        """What the pool holds in a block."""
        cells: bytes = self.executor._tokens.cells[block].tobytes()
        return cells

    def copy(self, content: bytes) -> list[bytes]:
        """The next page of a fetch, with this content, has come.  Returns what is reported."""
        copy = self.transfers.next_copy()
        assert copy is not None
        cells = self.executor._tokens.cells
        cells[copy[1]] = np.frombuffer(content, cells.dtype).reshape(cells.shape[1:])
        self.transfers.copied()
        return self._take_written()

    def fail(self) -> list[bytes]:
        """The fetch that is under way fails.  Returns what is reported."""
        self.transfers.fail()
        return self._take_written()

    def _take_written(self) -> list[bytes]:
        written, self._reports.written = self._reports.written, []
        for record in written:
            report = REPORTS.decode(record)
            if isinstance(report, StepReport):
                self._check_report(report)
        return written

    def _check_report(self, report: StepReport) -> None:
        slots, epochs = unpack_int32(report.slots), unpack_int32(report.epochs)
        for slot, epoch in zip(slots, epochs, strict=True):
            if self.open.get(slot) != epoch:
                raise Broken(f"closing-2: a token of slot {slot}, epoch {epoch}, which is not open")
        if len(set(slots)) != len(slots):
            raise Broken(f"closing-6: two tokens of one slot in step {report.step}")
        for closed in report.closings:
            if self.open.pop(closed.slot, None) != closed.epoch:
                raise Broken(
                    f"closing-1: slot {closed.slot}, epoch {closed.epoch} is closed, and was not open"
                )

    def check(self) -> None:
        if sorted(self.open) != self.slots.open_slots():
            raise Broken(
                f"closing-3: slots {self.slots.open_slots()} are open in the worker; by what it was told and "
                f"has reported they are {sorted(self.open)}"
            )


def _awaited(scheduler: Any, request: Request, index: int) -> bool:
    """Whether this block of one that follows is to be computed for another one, as far as was reported."""
    block, size = scheduler.ledger.table(request.slot)[index], scheduler.block_size
    for other in scheduler.slots:
        if other is None or other is request:
            continue
        table = scheduler.ledger.table(other.slot)
        if index < len(table) and table[index] == block and index >= other.computed // size:
            return True
    return False


def check_pair(engine: Engine, worker: Worker) -> None:
    """What must hold between the engine's books and the worker's slots, whatever is on the way."""
    scheduler = cast(Any, engine.core.scheduler)
    refs, size = scheduler.ledger._refs, scheduler.block_size
    follows = [one for one in scheduler.slots if one is not None and one.state is State.FOLLOWING]
    followed = [block for one in follows for block in scheduler.ledger.table(one.slot)]
    for slot, epoch in worker.open.items():
        request = scheduler.slots[slot]
        if request is None or request.epoch != epoch or request.state is State.GONE:
            raise Broken(f"closing-4: slot {slot} was freed while epoch {epoch} is open in the worker")
        held = list(scheduler.ledger.table(slot))
        capacity = int(worker.slots.table.capacity[slot]) // size
        table = worker.slots.table.blocks[slot, :capacity].tolist()
        if table != held[:capacity]:
            raise Broken(f"owner: the worker uses blocks {table} for {request.name}, whose blocks are {held}")
        writes = int(worker.slots.table.computed[slot]) // size
        for block in table[writes:]:
            if refs[block] - followed.count(block) != 1:
                raise Broken(f"owner: {request.name} is to write block {block}, which others hold")
    for slot, request in enumerate(scheduler.slots):
        if request is None or not request.indexing:
            continue
        table = scheduler.ledger.table(slot)
        for index in range(request.indexed):
            if request.state is State.FOLLOWING and _awaited(scheduler, request, index):
                continue
            found = worker.executor.tokens_in(table[index])
            wanted = request.tokens[index * size : (index + 1) * size].tolist()
            if found != wanted:
                raise Broken(
                    f"closing-5: block {table[index]} of {request.name} is in the prefix index as {wanted}, "
                    f"and holds {found}"
                )
