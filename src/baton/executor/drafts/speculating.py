"""The drafter of an executor: what it is told of each step, and how its drafts reach all ranks.

Rank 0 alone has one.  Its drafts for the next step travel with the tokens of this one, in a place of a size
that all ranks know: `most` for each row that sampled.
"""

from __future__ import annotations

import numpy as np

from baton.drafting.base import Drafter
from baton.drafting.models.mtp_drafter import MtpDrafter, States
from baton.executor.base import Int32Array, Int64Array, StepBatch, StepResult
from baton.protocol.sampling import Sampling, Stopping

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

    def draft(self, batch: StepBatch, result: StepResult, seconds: float | None) -> Int32Array:
        """Rank 0: the drafts for the next step [n, most], a row for each that sampled.

        `result`: with tokens and runs.  `seconds`: what the step took, None if it computed pieces of prompts.
        """
        rows = batch.samples.nonzero()[0]
        found = np.full((len(rows), self.most), _NONE, np.int32)
        if self.drafter is None:
            return found
        if seconds is not None:
            self.drafter.took(len(batch.tokens), seconds)
        self.drafter.see(batch.slots, batch.starts + batch.counts, batch.block_tables, batch.first_prompt)
        slots = batch.slots[rows]
        runs = np.ones(len(rows), np.int32) if result.runs is None else result.runs.copy()
        drafted = np.zeros(len(rows), np.int32) if batch.drafts is None else batch.drafts[rows]
        tokens = result.tokens
        if result.late or result.failed:  # the last entries of their runs are no tokens
            without = np.isin(rows, [*result.late, *result.failed])
            tokens = np.delete(tokens, (np.cumsum(runs) - 1)[without])
            going = ~without
            runs[without] -= 1
            tokens = tokens[np.repeat(going, runs)]
            slots, runs, drafted = slots[going], runs[going], drafted[going]
            places = going.nonzero()[0]
        else:
            places = np.arange(len(rows))
        if not len(slots):
            return found
        self.drafter.after(slots, runs, tokens, drafted)
        proposed = self.drafter.propose(slots)
        if proposed:
            for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
                drafts = proposed.get(slot)
                if drafts is not None:
                    found[place, : len(drafts)] = drafts[: self.most]
            if found.max() >= self._vocab_size:
                raise ValueError(f"a draft is {found.max()}, the vocabulary has {self._vocab_size} tokens")
        return found

    def take(self, batch: StepBatch, result: StepResult, drafts: Int32Array) -> None:
        """Every rank: the drafts [n, most] of the next step."""
        rows: Int64Array = (drafts[:, 0] != _NONE).nonzero()[0]
        slots = batch.slots[batch.samples][rows].tolist()
        counts = (drafts[rows] != _NONE).sum(axis=1).tolist()
        of_row = zip(slots, rows.tolist(), counts, strict=True)
        result.drafts = {slot: drafts[row, :count] for slot, row, count in of_row}
