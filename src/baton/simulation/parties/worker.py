"""One rank: the production token loop, slots, log, rounds and fetcher, with virtual memory between processes.

Theory.  `WorkerLoop`, `LeaderRounds`, `FollowerRounds`, `CommandLog`, `Slots` and `Fetcher` are those of
production.  What is virtual is what they would share with other processes (`rings.py`), what a step takes
(`gate.py`) and where pages come from (`transfers.py`).

A rank that would sleep in `poll()` returns from `run_once` instead, and is run again when something becomes
visible to it: that is all that the virtual ends change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, cast

import numpy as np

from baton.executor.base import ControlRefused, Int32Array, OnLayers, StepBatch, StepResult
from baton.executor.simulated.executor import SimulatedExecutor
from baton.executor.simulated.late import LateSimulatedExecutor
from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingReader, RingWriter
from baton.ipc.ticket import TicketReader, TicketWriter
from baton.protocol.messages.reports import REPORTS, Fetched, Report, WorkerFailed, WorkerReady
from baton.protocol.params.sampling import Sampling, Stopping
from baton.simulation.checks.oracle import weights_salt
from baton.simulation.events import Party
from baton.simulation.plans.plan import POISON
from baton.simulation.wires.gate import PartialPages
from baton.simulation.wires.network import Delays
from baton.simulation.wires.rings import Bell, Blocked, Leader, LogEnd, ReportEnd, TicketEnd, WatchedReports
from baton.simulation.wires.transfers import VirtualTransfers
from baton.worker.command_log import CommandLog
from baton.worker.late_loop import LateLoop, loop_of, slots_of
from baton.worker.rounds import FollowerRounds, LeaderRounds
from baton.worker.slots.composition import composition_of

if TYPE_CHECKING:
    from baton.simulation.parties.hosts import NodeRings
    from baton.simulation.parties.instance import Instance
    from baton.simulation.parties.relay import Relay


class DeviceLost(RuntimeError):
    """The accelerator of a rank is gone: what a plan's `fail_rank` raises in the middle of a step."""


class _Failing(SimulatedExecutor):
    """A simulated executor that can refuse a request and lose its device."""

    lost = False
    member = ""
    weights = ""
    """The path of those that it has."""
    broke: Callable[[], None] = staticmethod(lambda: None)
    """Called when it cannot load what it is to have."""
    proposed: dict[int, list[int]] = {}  # noqa: RUF012 (it is replaced, never changed)
    """By slot: the drafts for the next step."""

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        if tokens[0] == POISON:
            raise ValueError(f"token {POISON} is poison")
        super().admit(slot, tokens, num_prompt, sampling, stopping, salt)
        self._salts[slot] ^= np.uint64(weights_salt(self.weights))

    def check_weights(self, directory: str) -> str:
        if directory == "bad" or directory.endswith(f"?{self.member}"):
            raise ControlRefused("these weights do not fit")
        return ""

    def update_weights(self, directory: str) -> None:
        if directory == "bad":
            raise ControlRefused("these weights do not fit")
        if directory.endswith(f"!{self.member}"):
            self.broke()
            raise ControlRefused("the disk is gone")
        self.weights = directory

    def _run(self, batch: StepBatch, on_layers: OnLayers | None, began: float) -> StepResult:
        if self.lost:
            raise DeviceLost("the device fell off the bus")
        result = super()._run(batch, on_layers, began)
        self.proposed = {slot: drafts.tolist() for slot, drafts in result.drafts.items()}
        return result

    def seconds(self, batch: StepBatch) -> float:
        """What a step takes."""
        return self._cost_of(batch, int((batch.starts + batch.counts).sum()))


class Executor(_Failing):
    """One that runs a step when it is told to."""


class LateExecutor(_Failing, LateSimulatedExecutor):
    """One that is one step late."""


class RankProcess(Party):
    """The process of one rank of one incarnation."""

    instance: Instance
    rank: int
    executor: Executor | LateExecutor
    drafted_for: dict[int, int]
    """Slots of the last step and their epochs."""

    def __init__(self, instance: Instance, rank: int, random: Random, rings: NodeRings | None = None) -> None:
        """`rings`: of its host, if that is not the leader's."""
        world = instance.world
        super().__init__(f"{instance.name}.rank{rank}", world.draw_rate(random), random.uniform(0, 1e4))
        self.instance = instance
        self.rank = rank
        self._kind = f"rank of {instance.index}"
        self._world = world
        self._events = world.events
        self._jitter = random.random
        self._log_delays = Delays(random, 1e-6, 2e-4)
        self._log_free = 0.0
        self._visible_at: list[float] = []
        self._ticket_free = 0.0
        self._scheduled = False
        self._loading = True
        self._cost = 0.0
        self.drafted_for = {}
        config = instance.config
        made = (LateExecutor if config.overlap_steps else Executor).from_config(config, rank)
        self.executor = cast("Executor | LateExecutor", made)
        self.executor.member, self.executor.weights = instance.member, config.weights.path
        self.executor.broke = partial(instance.excuses.append, "it could not load new weights")
        self.pages = PartialPages(world.events, self.executor.pool.array())
        self.transfers = VirtualTransfers(self, random)
        self.slots = slots_of(
            self.executor,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            composition=composition_of(config),
            max_model_len=config.max_model_len,
        )
        self._rings = rings
        self.log_end = LogEnd(instance.records if rings is None else rings.records)
        self.log = CommandLog(cast(RingReader, self.log_end))
        self.ticket_end = TicketEnd(self._ticket_taken)
        self.report_end = ReportEnd(world.plan.report_room, self._send_report, self.wake)
        watched = WatchedReports(self.report_end, self._write_report, self._ring)
        report_end = cast(RingWriter, watched)
        self.loop = loop_of(self.executor)(
            rank=rank,
            slots=self.slots,
            executor=self.executor,
            commands=self.log,
            rounds=self._rounds(report_end),
            reports=report_end,
            transfers=self.transfers if config.peer_endpoint else None,
            observer=self._observe,
            clock=self._worked,
            host_clock=self._host_clock,
            note_steps=config.note_steps,
        )

    def _rounds(self, reports: RingWriter) -> LeaderRounds | FollowerRounds:
        instance = self.instance
        if self.rank > 0:
            return FollowerRounds(self.log, reports, cast(TicketReader, self.ticket_end))
        alone = instance.config.tensor_parallel_size == 1
        return Leader(
            self.log,
            reports,
            cast(Doorbell, Bell()),
            0,
            tickets=None if alone else cast(TicketWriter, instance.tickets),
        )

    @property
    def relay(self) -> Relay | None:
        """Its parent, if it is not the engine's process."""
        return None if self._rings is None else self._rings.relay

    # -- what becomes visible

    def log_grew(self) -> None:
        """The engine has written a record: it becomes visible after a while."""
        at = max(self._events.now + self._log_delays.next(), self._log_free)
        self._log_free = at
        self._visible_at.append(at)
        self._events.at(at, self, self._log_visible)

    def ticket_written(self, round_: int, sequence: int) -> None:
        at = max(self._events.now + self._log_delays.next(), self._ticket_free)
        if sequence:
            at = max(at, self._visible_at[sequence - 1])
        self._ticket_free = at
        self._events.at(at, self, self._ticket_visible, round_, sequence)

    def _log_visible(self) -> None:
        self.log_end.publish()
        self.wake()

    def _ticket_visible(self, round_: int, sequence: int) -> None:
        self.ticket_end.visible[round_] = sequence
        self.wake()

    def _ticket_taken(self) -> None:
        if self._rings is not None:
            self._rings.wake()
            return
        leader = self.instance.ranks[0]
        if leader.alive:
            leader.wake()

    # -- life

    def load(self) -> None:
        """The model is loaded: says so and begins."""
        info = self.executor.info
        self._loading = False
        self.loop.emit(
            WorkerReady(
                self.rank,
                info.num_blocks,
                info.block_size,
                info.tile,
                info.block_bytes,
                info.vocab_size,
                source=self.transfers.source() if self.instance.config.peer_endpoint else None,
            )
        )
        self.wake()

    def wake(self) -> None:
        if not self._scheduled and not self._loading:
            self._scheduled = True
            self._events.after(1e-6, self, self._run)

    def _run(self) -> None:
        self._scheduled = False
        if self.rank == 0 and self.instance.tickets.ends and self.instance.tickets.full:
            return  # a follower that takes a ticket wakes it
        if isinstance(self.loop, LateLoop):
            self._begin(self.loop)
            return
        try:
            stepped = self.loop.run_once()
        except Blocked:
            return
        except DeviceLost as error:
            self._fails(error)
            return
        self._world.monitor.worker.after_round(self)
        if self.slots.shutdown:
            self._leave()
        elif stepped:
            cost = (self.executor.virtual_seconds - self._cost) * (0.8 + 0.4 * self._jitter())
            self._cost = self.executor.virtual_seconds
            self._scheduled = True
            self.pages.begins(cost)
            self.instance.gate.begins(self.rank, self.loop.steps, cost)
            self._events.after(cost, self, self._run)
        elif self._has_work():
            self.wake()

    def _begin(self, loop: LateLoop) -> None:
        """The first half of a round: a step is launched, and the device computes the one before."""
        try:
            goes_on = loop.begin()
        except Blocked:
            return
        self._world.monitor.worker.after_round(self)
        if goes_on:
            cost = 0.0
            if loop.due is not None:
                cost = self.executor.seconds(loop.due) * (0.8 + 0.4 * self._jitter())
            self._scheduled = True
            self._events.after(cost, self, self._finish, loop)
        elif self.slots.shutdown:
            self._leave()
        elif self._has_work():
            self.wake()

    def _finish(self, loop: LateLoop) -> None:
        """The second half: that step is over, and only now has anything of it been written."""
        due = loop.due
        if due is not None:
            self._world.monitor.worker.before_end(self, cast(LateExecutor, self.executor).in_flight[0])
        try:
            loop.finish()
        except DeviceLost as error:
            self._fails(error)
            return
        if due is not None:  # (a rank that was held up has written nothing before)
            self.instance.gate.begins(self.rank, due.step, 0.0)
        self._world.monitor.worker.after_round(self)
        if self.slots.shutdown:
            self._leave()
        else:
            self._events.after(1e-6, self, self._run)

    def _fails(self, error: DeviceLost) -> None:
        self.report_end.append(REPORTS.encode(WorkerFailed(self.rank, f"DeviceLost: {error}")))
        self.report_end.force()
        self._world.supervisor.rank_died(self, "said that it failed and exited")

    def _leave(self) -> None:
        self._world.note(self, "leaves")
        self.report_end.force()
        self.die()

    def _has_work(self) -> bool:
        if self.rank == 0:
            return self.log_end.has_news
        return self.ticket_end.taken + 1 in self.ticket_end.visible

    def _worked(self) -> float:
        return self.executor.virtual_seconds

    def _host_clock(self) -> float:
        """What every process of its host reads; the engine runs on the leader's."""
        host = self.instance.engine if self.relay is None else self.relay
        return host.local(self._events.now)

    def die(self) -> None:
        """All its threads end."""
        self.alive = self.transfers.party.alive = False

    def fetched(self, report: Fetched) -> None:
        """Its transfer thread says that a fetch is over."""
        record = REPORTS.encode(report)
        self._reporting(record)
        self.report_end.write(record)

    def _write_report(self, record: bytes, ring: bool) -> bool:
        report = self._reporting(record)
        if self.rank == 0:
            return self.instance.gate.write(report, record, ring)
        return self.report_end.write(record, ring)

    def _ring(self) -> None:
        if self.rank == 0:
            self.instance.gate.ring()

    def _last_chunks(self, batch: StepBatch) -> list[int]:
        """Blocks that this step writes and that are to be handed over layer by layer."""
        slots = set(self.slots.last_chunks(batch)[0])
        size = self.executor.info.block_size
        blocks: list[int] = []
        for row, slot in enumerate(batch.slots.tolist()):
            if slot in slots:
                start, count = int(batch.starts[row]), int(batch.counts[row])
                blocks += batch.block_tables[row, start // size : (start + count - 1) // size + 1].tolist()
        return blocks

    def _observe(self, applied: int, batch: StepBatch) -> None:
        if self.slots.hands_over and self.executor.pool.num_layers > 1 and not self.executor.one_step_late:
            self.pages.remember(self._last_chunks(batch))
        self._world.monitor.worker.before_step(self, applied, batch)

    def _reporting(self, record: bytes) -> Report:
        self._world.message_passed(self._kind, self.rank, self)
        report = REPORTS.decode(record)
        self._world.monitor.worker.reported(self, report)
        return report

    def _send_report(self, record: bytes) -> None:
        if self._rings is not None:
            self._world.monitor.relay.reported(self.instance, self.rank, record)
            self._rings.report(self.rank, record)
        else:
            self.instance.report_channels[self.rank].send(record)

    def describe(self) -> str:
        """For people: what it does now."""
        epochs = self.slots.table.epoch
        open_slots = ", ".join(f"{slot} (epoch {epochs[slot]})" for slot in self.slots.open_slots())
        waits = "paused" if self.slots.paused else "running" if self._scheduled else "asleep"
        return (
            f"{self.name}: {waits}, log applied up to {self.log.applied}, open slots: {open_slots or 'none'}"
        )
