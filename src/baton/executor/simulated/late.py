"""The simulated executor as a device that runs behind the host.

Theory.  `launch` copies a batch into a queue, and nothing else happens: no KV is written, no token is
sampled.  The device gets there at the last moment, when the step is collected.  So whoever counts on a step
before that finds what was there before, and a block that was given away while a step was in flight which
writes it is overwritten under its new owner.  The token that a slot sampled last stays in an array by slot,
as it would in a device's memory; a row that carries it finds what lies there, also another epoch's.

What no worker may do is refused with `OrderBroken`: a third step in flight, to admit or release a slot that a
step in flight has a row of, a row that carries a token which the step before does not sample.

In real time (`simulated_real_time`) the device begins a step when it was launched, or when the step before is
over, and takes what the cost model says; `collect` waits for its end.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baton.executor.base import Int32Array, OnLayers, StepBatch, StepResult, needs_token
from baton.executor.simulated.executor import SimulatedExecutor
from baton.protocol.params.sampling import Sampling, Stopping

IN_FLIGHT = 2
"""Steps that may be launched and not collected."""
_NO_TOKEN = -9


class OrderBroken(RuntimeError):
    """A call came while a step was in flight that forbids it, or too early."""


@dataclass(slots=True)
class _Launched:
    batch: StepBatch
    on_layers: OnLayers | None
    begins: float
    """On the clock of `time.perf_counter`; only in real time."""


class LateSimulatedExecutor(SimulatedExecutor):
    """A `LateExecutor`."""

    one_step_late = True

    def __init__(self, *, max_num_seqs: int, **options: Any) -> None:
        if options.get("speculation") is not None:
            raise ValueError("speculation: an executor that is one step late drafts nothing; leave it away")
        super().__init__(max_num_seqs=max_num_seqs, **options)
        self._newest: Int32Array = np.full(max_num_seqs, _NO_TOKEN, np.int32)
        self._queue: deque[_Launched] = deque()
        self._free = 0.0

    def carries(self, sampling: Sampling, stopping: Stopping) -> bool:
        return not needs_token(sampling)

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        self._refuse_in_flight(slot, "admitted")
        super().admit(slot, tokens, num_prompt, sampling, stopping, salt)

    def release(self, slot: int) -> None:
        self._refuse_in_flight(slot, "released")
        super().release(slot)

    def launch(self, batch: StepBatch, on_layers: OnLayers | None = None) -> None:
        """Raises `OrderBroken`."""
        if len(self._queue) == IN_FLIGHT:
            raise OrderBroken(f"step {batch.step} is launched while {IN_FLIGHT} others are in flight")
        self._check_carried(batch)
        copies = {
            name: getattr(batch, name).copy()
            for name in ("slots", "starts", "counts", "tokens", "samples", "block_tables")
        }
        self._queue.append(_Launched(replace(batch, **copies), on_layers, time.perf_counter()))

    def collect(self) -> StepResult:
        """Raises `OrderBroken`."""
        if not self._queue:
            raise OrderBroken("nothing is in flight")
        step = self._queue[0]
        batch, began = step.batch, max(step.begins, self._free)
        if batch.carried is not None:
            firsts = np.cumsum(batch.counts) - batch.counts
            batch.tokens[firsts[batch.carried]] = self._newest[batch.slots[batch.carried]]
        result = self._run(batch, step.on_layers, began)
        self._newest[batch.slots[batch.samples]] = result.tokens
        self._free = time.perf_counter()
        self._queue.popleft()
        return result

    def execute(self, batch: StepBatch, on_layers: OnLayers | None = None) -> StepResult:
        if self._queue:
            raise OrderBroken(f"step {batch.step} is executed while another one is in flight")
        self.launch(batch, on_layers)
        return self.collect()

    @property
    def in_flight(self) -> list[StepBatch]:
        """As they were launched, the oldest first."""
        return [step.batch for step in self._queue]

    def _check_carried(self, batch: StepBatch) -> None:
        carried: Int32Array = np.empty(0, np.int32)
        if batch.carried is not None:
            carried = batch.slots[batch.carried]
            if batch.carried[batch.num_decodes :].any():
                raise OrderBroken(f"step {batch.step}: a prompt carries a token")
        before = self._queue[-1].batch if self._queue else None
        known = [] if before is None else before.slots[before.samples].tolist()
        if wrong := set(carried.tolist()).difference(known):
            raise OrderBroken(
                f"step {batch.step} carries tokens of slots {sorted(wrong)}, "
                "which the step before does not sample"
            )
        if (batch.tokens < 0).sum() != len(carried):
            raise OrderBroken(f"step {batch.step} has tokens below 0 that are not carried")

    def _refuse_in_flight(self, slot: int, what: str) -> None:
        for step in self._queue:
            if slot in step.batch.slots:
                raise OrderBroken(
                    f"slot {slot} is {what} while step {step.batch.step} is in flight, which runs it"
                )
