"""What comes out of the slots: a request that was admitted, and what a step did."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from baton.executor.base import Int32Array, StepBatch, StepResult
from baton.protocol.messages.reports import Closed, PromptLogprobs, StepReport
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from baton.protocol.routes import Routes


class Admitted(NamedTuple):
    """A request took a slot: what `Executor.admit` must be told."""

    slot: int
    tokens: Int32Array
    num_prompt: int
    sampling: Sampling
    stopping: Stopping
    salt: bytes


@dataclass(slots=True)
class StepOutcome:
    """What a step did, aligned as in `StepReport`.  The arrays may be shared: read, do not keep."""

    slots: Int32Array
    epochs: Int32Array
    tokens: Int32Array
    prefill: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, epoch, leading tokens that are computed)."""
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    closings: list[Closed] = field(default_factory=list)
    context: int = 0
    """Tokens of context that the decode rows read, together."""
    expert_tokens: list[int] = field(default_factory=list)
    routes: list[tuple[int, int, Routes]] = field(default_factory=list)
    """(slot, epoch, rows), as in `StepRoutes`."""
    speculation: list[int] = field(default_factory=list)
    patient: bool = False
    """Nobody waits for single tokens of its slots."""

    def take(self, batch: StepBatch, result: StepResult, epochs: Int32Array) -> None:
        """What the executor has to say of positions, where requests asked.  `epochs`: of each slot."""
        lengths = batch.samples.astype(np.int64)
        if result.runs is not None:
            lengths[batch.samples] = result.runs
        place_of = np.cumsum(lengths) - lengths
        for row, found in sorted(result.logprobs.items()):
            self.logprobs += enumerate(found, int(place_of[row]))
        for row, positions in sorted(result.prompt_logprobs.items()):
            slot, first = int(batch.slots[row]), int(batch.starts[row]) + 1
            self.prompt_logprobs.append(PromptLogprobs(slot, int(epochs[slot]), first, positions))
        for row, runs in result.routes.items():
            slot = int(batch.slots[row])
            self.routes += [(slot, int(epochs[slot]), run) for run in runs]

    def drop(self, indices: Collection[int]) -> None:
        """What stands at these places is no token."""
        if not indices:
            return
        kept = [index for index in range(len(self.slots)) if index not in indices]
        place = {index: number for number, index in enumerate(kept)}
        self.slots, self.epochs, self.tokens = self.slots[kept], self.epochs[kept], self.tokens[kept]
        self.logprobs = [(place[index], one) for index, one in self.logprobs if index in place]

    def report(self, step: int, applied: int, seconds: float, began: float = 0.0) -> StepReport:
        """As a message."""
        columns = [array("i", column).tobytes() for column in zip(*self.prefill, strict=True)]
        prefill_slots, prefill_epochs, prefill_computed = columns or (b"", b"", b"")
        return StepReport(
            step=step,
            applied=applied,
            slots=self.slots.tobytes(),
            epochs=self.epochs.tobytes(),
            tokens=self.tokens.tobytes(),
            prefill_slots=prefill_slots,
            prefill_epochs=prefill_epochs,
            prefill_computed=prefill_computed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            closings=self.closings,
            seconds=seconds,
            context=self.context,
            expert_tokens=self.expert_tokens,
            speculation=self.speculation,
            began=began,
        )
