"""The token loop of one rank: a thin shell around `Slots` and an `Executor`.

Theory.  Each round: look for commands (one 64-bit word), apply them, report what they closed, compose a
step, run it, report it.  The loop never waits for the engine: with no commands it goes on with what it has,
and with nothing to run it sleeps in `poll()` on its doorbell and on the pidfds of the processes without which
it has no purpose.  Every rank runs the same loop; only `rounds.py` differs, and only rank 0 reports tokens.

What concerns pages of other instances (`Fetch`, `DropFetch`) is handed on to `Transfers`, which works
beside the loop and reports by itself.  While a step computes the last chunk of a slot that is to be handed
over, rank 0 reports the layers that are final, a few times a step, so that they travel while the later ones
are computed.

The engine, and the gateway behind it, run on the cores that compute.  So a step that gives only tokens for
which nobody waits (`Admit.patient`) is reported without waking the engine, for some steps in a row; what is
over, and a piece of a prompt that is computed, wakes it at once, and a loop that has nothing to run never
leaves a report behind that did not.

An exception leaves the loop: `main.py` reports `WorkerFailed` and exits.  There is no going on with slots
that may differ from the engine's, or from another rank's.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Protocol

from baton.executor.base import ControlRefused, Executor, OnLayers, StepBatch, StepResult
from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import wait_any
from baton.ipc.ring import RETRY_S, RingWriter
from baton.observe.logs import unless_shown
from baton.protocol.messages.commands import Admit, Command, Control, DropFetch, Fetch
from baton.protocol.messages.reports import (
    REPORTS,
    Closed,
    ControlDone,
    Fetched,
    LayersDone,
    Report,
    StepReport,
    StepRoutes,
)
from baton.worker.command_log import CommandLog
from baton.worker.ran import StepTimes
from baton.worker.rounds import Rounds
from baton.worker.slots.outcome import Admitted
from baton.worker.slots.slots import Slots

log = logging.getLogger(__name__)

Observer = Callable[[int, StepBatch], None]
"""Called with the applied sequence and the batch before each step; for tests and traces."""


_LAYER_REPORTS = 8
"""So many `LayersDone` a step at most."""
_QUIET_STEPS = 8
"""After so many steps the engine is woken in any case, or after half of a block: it must grow slots in time
(`Scheduler.lookahead`)."""
_QUIET_S = 0.02
"""A step that takes longer wakes it: what that costs is nothing beside the step."""


class Transfers(Protocol):
    """Fetches pages beside the loop, and reports exactly one `Fetched` for each `Fetch`."""

    def fetch(self, command: Fetch) -> None: ...

    def drop(self, command: DropFetch) -> None: ...


class WorkerLoop:
    """Runs rounds until told to leave.  `run_once` is one of them."""

    def __init__(
        self,
        *,
        rank: int,
        slots: Slots,
        executor: Executor,
        commands: CommandLog,
        rounds: Rounds,
        reports: RingWriter,
        transfers: Transfers | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        host_clock: Callable[[], float] = time.monotonic,
        note_steps: bool = False,
        beside: Callable[[Callable[[], ControlDone]], None] | None = None,
    ) -> None:
        """`transfers` None: this worker fetches nothing.  `clock` shows seconds; what steps take is measured
        with it.  `host_clock` shows the same as to the other processes of this host: when steps began.
        `note_steps`: ranks other than 0 tell it as well.  `beside` runs a function elsewhere and reports what
        it gives; None: it is run between steps."""
        self._rank = rank
        self._leader = rank == 0
        self.slots = slots
        self._executor = executor
        self._commands = commands
        self._rounds = rounds
        self._reports = reports
        self._transfers = transfers
        self._observer = observer
        self._clock = clock
        self._host_clock = host_clock
        self._times = StepTimes() if note_steps and rank > 0 else None
        self._beside = beside
        self._busy = False
        self._quiet = 0  # reports in a row that have not woken the engine
        self._quiet_steps = min(_QUIET_STEPS, max(slots.block_size, 8) // 2)
        self._leaving = False
        self.steps = 0
        """Steps run so far."""

    def run(self) -> None:
        """Until a `shutdown` command or `leave`.  Exceptions are the caller's."""
        while not self._leaving and not self.slots.shutdown:
            self.run_once()
        log.log(
            unless_shown(logging.INFO),
            "leaving after %d steps, %d slots open",
            self.steps,
            len(self.slots.open_slots()),
        )

    def leave(self) -> None:
        """Ends `run` after the round under way; may be called from a signal handler."""
        self._leaving = True
        self._rounds.leave()

    def run_once(self) -> bool:
        """One round, or one sleep if there is nothing to do.  Returns whether a step was run."""
        sequence = self._rounds.enter(self._busy)
        if sequence is None:
            return False
        if sequence != self._commands.applied:
            self._apply(sequence)
        batch = None if self.slots.shutdown else self.slots.compose(self.steps + 1)
        self._busy = batch is not None
        if batch is not None:
            self._step(batch)
            if self._reports.pending:  # a follower writes nothing by itself, step after step
                self._reports.flush()
            return True
        self._rest()
        return False

    def _rest(self) -> None:
        """There is nothing to run: says what was not said yet."""
        if self._times is not None:
            self._tell_times()
        if self._quiet:
            self._quiet = 0
            self._reports.ring()
        if self._reports.pending:
            self._reports.flush()

    def emit(self, report: Report, ring: bool = True) -> None:
        """Sends a report, or queues it while the engine is behind.  `ring` False: it wakes nobody."""
        self._reports.write(REPORTS.encode(report), ring)

    def _apply(self, sequence: int) -> None:
        closings = []
        for command in self._commands.take(sequence):
            closed = self._apply_one(command)
            if closed is not None:
                closings.append(closed)
        if closings and self._leader:
            self.emit(StepReport(step=0, applied=sequence, closings=closings))

    def _apply_one(self, command: Command) -> Closed | None:
        if isinstance(command, Fetch | DropFetch):
            self._transfer(command)
            return None
        effect = self.slots.apply(command)
        if isinstance(command, Control):
            if command.action == "check_weights" and self._beside is not None:
                self._beside(partial(self._check_weights, command))
            elif command.action == "release_weights":
                self._executor.release_weights()
            elif command.id:
                self._control(command)
        elif isinstance(effect, Admitted):
            try:
                self._executor.admit(*effect)
            except ValueError as error:  # about this request alone, and the same on every rank
                effect = self.slots.fail(effect.slot, f"the executor refused the request: {error}")
                self._executor.release(effect.slot)
        elif effect is not None and not isinstance(command, Admit):
            self._executor.release(effect.slot)
        return effect if isinstance(effect, Closed) else None

    def _transfer(self, command: Fetch | DropFetch) -> None:
        if isinstance(command, DropFetch):
            if self._transfers is not None:
                self._transfers.drop(command)
        elif self._transfers is not None:
            self._transfers.fetch(command)
        else:
            error = "this worker runs without transfers: its configuration has no peer_endpoint"
            self.emit(Fetched(self._rank, command.id, error=error))

    def _check_weights(self, command: Control) -> ControlDone:
        """May run beside the steps: it changes nothing."""
        try:
            return ControlDone(self._rank, command.id, value=self._executor.check_weights(command.argument))
        except ControlRefused as refusal:
            return ControlDone(self._rank, command.id, str(refusal))
        except Exception as error:
            log.exception("checking %s failed", command.argument)
            return ControlDone(self._rank, command.id, f"{type(error).__name__}: {error}")

    def _control(self, command: Control) -> None:
        """Does what is answered.  An exception other than a refusal ends the worker."""
        if command.action == "check_weights":
            self.emit(self._check_weights(command))
            return
        error = ""
        began = self._clock()
        try:
            match command.action:
                case "update_weights":
                    self._executor.update_weights(command.argument)
                case "start_profile":
                    self._executor.start_profile(command.argument)
                case "stop_profile":
                    self._executor.stop_profile()
        except ControlRefused as refusal:
            error = str(refusal)
        log.info("%s took %.2f s%s", command.action, self._clock() - began, error and f": refused, {error}")
        self.emit(ControlDone(self._rank, command.id, error))

    def _step(self, batch: StepBatch) -> None:
        began, began_at = self._clock(), self._host_clock()
        if self._observer is not None:
            self._observer(self._commands.applied, batch)
        on_layers = self._on_layers(batch) if self._leader and self.slots.hands_over else None
        # (Without a hand-over the executor is called with the batch alone.)
        execute = self._executor.execute
        result = execute(batch) if on_layers is None else execute(batch, on_layers)
        self._take(batch, result, began, began_at)

    def _take(self, batch: StepBatch, result: StepResult, began: float, began_at: float) -> None:
        """Commits and reports a step that is over; `began` and `began_at`: when, on both clocks."""
        outcome = self.slots.commit(batch, result)
        self.steps = batch.step
        for closed in outcome.closings:
            self._executor.release(closed.slot)
        if self._times is not None:
            if self._times.add(batch.step, began_at, self._clock() - began):
                self._tell_times()
        elif self._leader:
            seconds = self._clock() - began
            told = outcome.closings or outcome.prefill  # (the next prompt may wait for the end of this one)
            quiet = outcome.patient and not told and seconds < _QUIET_S
            self._quiet = self._quiet + 1 if quiet and self._quiet < self._quiet_steps else 0
            if outcome.routes:
                self.emit(StepRoutes(outcome.routes), ring=False)
            report = outcome.report(batch.step, self._commands.applied, seconds, began_at)
            self.emit(report, ring=self._quiet == 0)

    def _tell_times(self) -> None:
        assert self._times is not None
        told = self._times.take(self._host_clock())
        if told is not None:
            self.emit(told)

    def _on_layers(self, batch: StepBatch) -> OnLayers | None:
        """Reports layers of the slots whose last chunk this is; None if there is no such slot."""
        slots, epochs = self.slots.last_chunks(batch)
        count = self._executor.pool.num_layers
        if not slots or count == 1:
            return None
        every = -(-count // _LAYER_REPORTS)
        packed = array("i", slots).tobytes(), array("i", epochs).tobytes()

        def report(layers: int) -> None:
            if layers % every == 0 and layers < count:  # (the report of the step says the rest)
                self.emit(LayersDone(*packed, layers))

        return report


def flush_reports(reports: RingWriter, doorbell: Doorbell, deadline_s: float) -> bool:
    """Sends what is queued, for `deadline_s` at most.  Returns whether all of it went.

    `doorbell` is this rank's, which the engine rings when it frees space.
    """
    give_up = time.monotonic() + deadline_s
    while not reports.flush():
        if time.monotonic() > give_up:
            return False
        wait_any([doorbell.fileno()], RETRY_S)
        doorbell.drain()
    return True
