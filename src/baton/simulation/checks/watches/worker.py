"""What is checked where a rank composes a step and reports."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from baton.engine.states import State
from baton.executor.base import StepBatch
from baton.protocol.codec import unpack_int32
from baton.protocol.messages.commands import Admit
from baton.protocol.messages.reports import Report, StepReport
from baton.simulation import describe
from baton.simulation.checks.books import Books, Violation
from baton.simulation.checks.watches.scheduling.pace import PaceWatch
from baton.simulation.plans.drafts import most_drafts

if TYPE_CHECKING:
    from baton.simulation.parties.instance import Instance
    from baton.simulation.parties.worker import RankProcess
    from baton.simulation.world import World


class WorkerWatch:
    """The rules `owner`, `agreement`, `drafts` and `closing-1` to `-3`; those of `scheduling/pace.py` are
    asked here."""

    def __init__(self, world: World, books: Callable[[Instance], Books]) -> None:
        self._world = world
        self._books = books
        self._pace: dict[str, PaceWatch] = {}
        """By incarnation."""

    def before_step(self, rank: RankProcess, applied: int, batch: StepBatch) -> None:
        """A rank is about to run a step."""
        books = self._books(rank.instance)
        digest = (
            applied.to_bytes(8, "little"),
            batch.slots.tobytes(),
            batch.starts.tobytes(),
            batch.counts.tobytes(),
            batch.tokens.tobytes(),
            batch.samples.tobytes(),
            batch.block_tables.tobytes(),
        )
        if rank.rank > 0:
            self._compare(rank, batch, books.digests.get(batch.step), digest)
            return
        if len(rank.instance.ranks) > 1:
            books.digests[batch.step] = digest
        self._check_owners(rank, batch, books)
        self._check_drafts(rank, batch)
        self._pace.setdefault(rank.instance.name, PaceWatch()).before_step(rank, batch)
        self._world.steps += 1
        if self._world.recording:
            self._world.note(rank, f"step {batch.step}: {describe.batch(batch)} (log {applied})")

    def before_end(self, rank: RankProcess, batch: StepBatch) -> None:
        """A step that a device has computed since it was launched is over: what it writes, it writes now."""
        if rank.rank == 0:
            self._check_owners(rank, batch, self._books(rank.instance))

    def _compare(
        self, rank: RankProcess, batch: StepBatch, leader: tuple[bytes, ...] | None, mine: tuple[bytes, ...]
    ) -> None:
        if leader is None:
            if not rank.instance.ranks[0].alive:
                return  # it died between its ticket and its step; in a collective this rank would hang
            raise Violation("agreement", f"{rank.name} runs step {batch.step}, which the leader has not run")
        if leader != mine:
            names = ("applied", "slots", "starts", "counts", "tokens", "samples", "block_tables")
            wrong = [name for name, a, b in zip(names, leader, mine, strict=True) if a != b]
            here, there = (int.from_bytes(digest[0], "little") for digest in (mine, leader))
            raise Violation(
                "agreement",
                f"step {batch.step} of {rank.name} differs from the leader's in {', '.join(wrong)}; "
                f"log applied up to {here} and {there}",
            )

    def _check_owners(self, rank: RankProcess, batch: StepBatch, books: Books) -> None:
        scheduler: Any = rank.instance.engine.core.scheduler
        size = scheduler.block_size
        refs, epochs = scheduler.ledger._refs, rank.slots.table.epoch
        # Who follows has not been told to the worker, and reads nothing of what is computed for it.
        follows = [
            set(scheduler.ledger.table(slot))
            for slot, request in enumerate(scheduler.slots)
            if request is not None and request.state is State.FOLLOWING
        ]
        tables = batch.block_tables.tolist()
        starts, counts = batch.starts.tolist(), batch.counts.tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            request = scheduler.slots[slot]
            epoch = int(epochs[slot])
            if request is None or request.epoch != epoch:
                raise Violation(
                    "owner", f"step {batch.step} runs slot {slot} epoch {epoch}, which the engine has freed"
                )
            used = (starts[row] + counts[row] - 1) // size + 1
            held = scheduler.ledger.table(slot)
            if tables[row][:used] != held[:used]:
                raise Violation(
                    "owner",
                    f"step {batch.step} uses blocks {tables[row][:used]} for {request.name}, whose blocks "
                    f"are {list(held)}",
                )
            for index in range(starts[row] // size, used):
                if refs[held[index]] - sum(held[index] in blocks for blocks in follows) != 1:
                    raise Violation(
                        "owner",
                        f"step {batch.step} writes block {held[index]} of {request.name}, which is shared",
                    )

    def _check_drafts(self, rank: RankProcess, batch: StepBatch) -> None:
        """They are those that the step before proposed, for this epoch, from the first on."""
        epochs: Any = rank.slots.table.epoch
        ends = batch.counts.cumsum().tolist()
        proposed, of_epochs = rank.executor.proposed, rank.drafted_for
        for row, count in enumerate(() if batch.drafts is None else batch.drafts.tolist()):
            slot = int(batch.slots[row])
            drafts = batch.tokens[ends[row] - count : ends[row]].tolist()
            if drafts != proposed.get(slot, [])[:count] or (count and of_epochs.get(slot) != epochs[slot]):
                raise Violation(
                    "drafts",
                    f"step {batch.step} computes drafts {drafts} of slot {slot}, epoch {epochs[slot]}; the "
                    f"step before proposed {proposed.get(slot)} for epoch {of_epochs.get(slot)}",
                )
        rank.drafted_for = {slot: int(epochs[slot]) for slot in batch.slots.tolist()}

    def reported(self, rank: RankProcess, report: Report) -> None:
        """A rank writes a report."""
        if self._world.recording:
            self._world.note(rank, f"reports {describe.report(report)}")
        if rank.rank > 0 or not isinstance(report, StepReport):
            return
        books = self._books(rank.instance)
        self._sync(books, report.applied)
        open_epochs = books.at_worker
        slots, epochs = unpack_int32(report.slots), unpack_int32(report.epochs)
        for slot, epoch in zip(slots, epochs, strict=True):
            if open_epochs.get(slot) != epoch:
                raise Violation("closing-2", f"a token of slot {slot}, epoch {epoch}, which is not open")
        longest = most_drafts(rank.instance.config) + 1
        for slot, run in groupby(slots):
            count = len(list(run))
            if count > longest or slots.count(slot) != count:
                raise Violation(
                    "closing-6", f"step {report.step} reports {slots.count(slot)} tokens of slot {slot}"
                )
        for closed in report.closings:
            if open_epochs.get(closed.slot) != closed.epoch:
                raise Violation(
                    "closing-1",
                    f"Closed({closed.reason.value}) of slot {closed.slot}, epoch {closed.epoch}, which "
                    "is not open: closed twice, or never admitted",
                )
            del open_epochs[closed.slot]

    def _sync(self, books: Books, applied: int) -> None:
        for batch in books.batches[books.synced : applied]:
            for command in batch.commands:
                if isinstance(command, Admit):
                    books.at_worker[command.slot] = command.epoch
        books.synced = max(books.synced, applied)

    def after_round(self, rank: RankProcess) -> None:
        """After each round of a rank."""
        if rank.rank > 0:
            return
        books = self._books(rank.instance)
        self._sync(books, rank.log.applied)
        is_open = rank.slots.open_slots()
        if len(is_open) != len(books.at_worker) or any(slot not in books.at_worker for slot in is_open):
            silent = sorted(set(books.at_worker) - set(is_open)) or sorted(
                set(is_open) - set(books.at_worker)
            )
            raise Violation(
                "closing-3", f"slots {silent} were closed in the worker, and no Closed was reported for them"
            )
