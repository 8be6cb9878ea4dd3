"""The token loop of one rank with an executor that is one step late.

Theory.  A round of `WorkerLoop` runs a step.  A round of this one *launches* a step, then *collects* the one
that the round before has launched; the device goes on with the new one meanwhile:

    round   apply, compose and launch     collect, commit, report
      k     step n + 1                    step n
      k+1   step n + 2                    step n + 1

Commands are applied with one step in flight, which is then before them: its tokens count.  A round that has
nothing to launch collects what is in flight, and what that frees or makes known is composed in the next one.
So after a round that launched or collected there is always another one, and a loop that sleeps has nothing in
flight.  Every rank does the same in round k, as its slots (`slots/late_slots.py`) and the tokens are the
same.

The seconds of a step are those that the device had for it: from its launch, or from the end of the step
before if that was later, to the end of its `collect`.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from baton.executor.base import Executor, LateExecutor, StepBatch
from baton.worker.loop import WorkerLoop
from baton.worker.slots.composition import Composition
from baton.worker.slots.late_slots import LateSlots
from baton.worker.slots.slots import Slots


class _Flight(NamedTuple):
    batch: StepBatch
    launched: float
    launched_at: float
    """The same moment on the clock of the host."""


class LateLoop(WorkerLoop):
    """As there; `executor` is a `LateExecutor`, `slots` are `LateSlots`."""

    _in_flight: _Flight | None = None
    _due: _Flight | None = None
    """What this round collects: it was in flight when the round began."""
    _free, _free_at = 0.0, 0.0
    """When the device was through with what was collected last, on both clocks."""

    def run_once(self) -> bool:
        """One round, or one sleep if there is nothing to do.  Returns whether anything was in flight."""
        if not self.begin():
            return False
        self.finish()
        return True

    def begin(self) -> bool:
        """The first half of a round: applies commands and launches a step.  Returns whether `finish` must
        follow; if not, the loop has slept or has nothing to do."""
        sequence = self._rounds.enter(self._busy)
        if sequence is None:
            return False
        if sequence != self._commands.applied:
            self._apply(sequence)
        self._due, self._in_flight = self._in_flight, None
        number = self.steps + 1 if self._due is None else self._due.batch.step + 1
        batch = None if self.slots.shutdown else self.slots.compose(number)
        if batch is not None:
            self._launch(batch)
        self._busy = batch is not None or self._due is not None
        if not self._busy:
            self._rest()
        return self._busy

    def finish(self) -> None:
        """The second half: collects the step that the round before has launched, if there is one."""
        due, self._due = self._due, None
        if due is not None:
            result = self._late.collect()
            began, began_at = max(due.launched, self._free), max(due.launched_at, self._free_at)
            self._free, self._free_at = self._clock(), self._host_clock()
            self._take(due.batch, result, began, began_at)
        if self._reports.pending:
            self._reports.flush()

    @property
    def due(self) -> StepBatch | None:
        """Between `begin` and `finish`: the step that is collected."""
        return None if self._due is None else self._due.batch

    @property
    def _late(self) -> LateExecutor:
        return cast(LateExecutor, self._executor)

    def _launch(self, batch: StepBatch) -> None:
        launched, launched_at = self._clock(), self._host_clock()
        if self._observer is not None:
            self._observer(self._commands.applied, batch)
        on_layers = self._on_layers(batch) if self._leader and self.slots.hands_over else None
        self._late.launch(batch, on_layers)
        cast(LateSlots, self.slots).launched(batch)
        self._in_flight = _Flight(batch, launched, launched_at)


def slots_of(
    executor: Executor,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    composition: Composition | None,
) -> Slots:
    """The slots of a worker with this executor."""
    sizes = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "block_size": executor.info.block_size,
        "num_blocks": executor.info.num_blocks,
        "composition": composition,
    }
    if executor.one_step_late:
        return LateSlots(carries=cast(LateExecutor, executor).carries, **sizes)
    return Slots(**sizes)  # type: ignore[arg-type]


def loop_of(executor: Executor) -> type[WorkerLoop]:
    """The loop of a worker with this executor."""
    return LateLoop if executor.one_step_late else WorkerLoop
