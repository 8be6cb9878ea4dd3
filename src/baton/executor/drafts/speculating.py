"""The drafter of an executor: what it is told of each step, and how its drafts reach all ranks.

Rank 0 alone has one.  Its drafts for the next step travel with the tokens of this one, in a place of a size
that all ranks know: `most` for each row that sampled.
"""

from __future__ import annotations

import numpy as np

from baton.drafting.base import Drafter
from baton.drafting.models.mtp_drafter import MtpDrafter, States
from baton.executor.base import Int32Array, Int64Array, StepBatch, StepResult
from baton.protocol.params.sampling import Sampling, Stopping

_NONE = -1
"""In place of a draft."""


class Speculator:
    """`most`: drafts of a slot in a step.  `drafter` None: on ranks other than 0."""

    def __init__(self, drafter: Drafter | None, most: int, vocab_size: int) -> None:
        self.drafter = drafter
        self.most = most
        self._vocab_size = vocab_size

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        if self.drafter is not None:
            self.drafter.admit(slot, tokens, num_prompt, sampling, stopping, salt)

    def release(self, slot: int) -> None:
        if self.drafter is not None:
            self.drafter.release(slot)

    def read(self, batch: StepBatch, hidden: States) -> None:
        """The step has been computed, and is not sampled: its hidden states before the last norm."""
        if isinstance(self.drafter, MtpDrafter):
            self.drafter.read(batch.slots, batch.starts, batch.counts, batch.block_tables, hidden)

    def done(self) -> None:
        """The step is over."""
        if isinstance(self.drafter, MtpDrafter):
            self.drafter.done()

    def took(self, tokens: int, seconds: float) -> None:
        """As `Drafter.took`."""
        if self.drafter is not None:
            self.drafter.took(tokens, seconds)

    def draft(self, batch: StepBatch, result: StepResult) -> None:
        """Rank 0: puts the drafts for the next step into the result, which has tokens and runs."""
        drafter = self.drafter
        if drafter is None:
            return
        drafter.see(batch.slots, batch.starts + batch.counts, batch.block_tables, batch.first_prompt)
        slots, runs, tokens = _given(batch, result)
        if not len(slots):
            return
        drafter.after(slots, runs, tokens)
        proposed = drafter.propose(slots)
        for slot, drafts in proposed.items():
            if len(drafts) > self.most:
                proposed[slot] = drafts[: self.most]
            if max(drafts.tolist()) >= self._vocab_size:
                raise ValueError(f"a draft of {drafts}: the vocabulary has {self._vocab_size} tokens")
        result.drafts = proposed

    def packed(self, batch: StepBatch, result: StepResult) -> Int32Array:
        """The result's drafts [n, most], a row for each that sampled, `_NONE` behind them."""
        slots = batch.slots[batch.samples].tolist()
        found = np.full((len(slots), self.most), _NONE, np.int32)
        for row, slot in enumerate(slots):
            if (drafts := result.drafts.get(slot)) is not None:
                found[row, : len(drafts)] = drafts
        return found

    def unpack(self, batch: StepBatch, result: StepResult, packed: Int32Array) -> None:
        """Other ranks: what `packed` gave on rank 0, into the result."""
        rows: Int64Array = (packed[:, 0] != _NONE).nonzero()[0]
        slots = batch.slots[batch.samples][rows].tolist()
        counts = (packed[rows] != _NONE).sum(axis=1).tolist()
        of_row = zip(slots, rows.tolist(), counts, strict=True)
        result.drafts = {slot: packed[row, :count] for slot, row, count in of_row}


def _given(batch: StepBatch, result: StepResult) -> tuple[Int32Array, Int32Array, Int32Array]:
    """What a step gave, as `Drafter.after` is told of it: slots, runs, tokens."""
    none_is_without = not (result.late or result.failed)
    if none_is_without and batch.num_decodes == len(batch.slots):
        return batch.slots, batch.counts, result.tokens  # (one each)
    rows = batch.samples.nonzero()[0]
    slots, tokens = batch.slots[rows], result.tokens
    runs = np.ones(len(rows), np.int32) if result.runs is None else result.runs
    if none_is_without:
        return slots, runs, tokens
    without = np.isin(rows, [*result.late, *result.failed])  # the last entries of their runs are no tokens
    tokens = np.delete(tokens, (np.cumsum(runs) - 1)[without])
    going, runs = ~without, runs - without
    return slots[going], runs[going], tokens[np.repeat(going, runs)]
