"""Which of a row's drafts are right: the positions that a step samples, and the runs that come of them.

Theory.  A row with k drafts is sampled at 1 + k positions: before its first draft, and behind each of them.
What is sampled behind a draft counts if that draft, and all before it, were what was sampled in their places;
so the first wrong draft ends the run, with the token that is right there.

What the sampler knows of a slot besides logits and positions (penalties, a grammar) must have read the tokens
before.  So the positions are sampled in *waves*: first the one before the drafts, of all rows, as in a step
without drafts; then the one behind their first draft, of the rows in which it was right; and so on.  Each
wave finds what it would find in a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.executor.base import Int32Array, Int64Array, StepBatch, StepResult

NOTHING = -3
"""In place of a token: a position behind the run."""


class Places:
    """The positions that a step with drafts samples, P in all, row after row.  `rows`: those that sample."""

    def __init__(self, batch: StepBatch, rows: Int64Array) -> None:
        assert batch.drafts is not None
        drafts = batch.drafts[rows]
        self.rows = rows
        self.slots: Int32Array = batch.slots[rows]
        self.lengths: Int32Array = drafts + np.int32(1)
        """[n]"""
        self.first = np.cumsum(self.lengths) - self.lengths
        """[n] of each row the first place."""
        self.row_of = np.repeat(np.arange(len(rows)), self.lengths)
        """[P]"""
        self.within: Int32Array = (np.arange(len(self.row_of)) - self.first[self.row_of]).astype(np.int32)
        """[P] place in the row, from 0."""
        ends = np.cumsum(batch.counts, dtype=np.int64)[rows]
        self.tokens = (ends - drafts - 1)[self.row_of] + self.within
        """[P] the query tokens at these positions, which ascend."""
        known: Int32Array = (batch.starts + batch.counts)[rows] - drafts
        self.positions: Int32Array = known[self.row_of] + self.within
        """[P] of the tokens that are sampled."""
        last = self.within == drafts[self.row_of]
        self.expected: Int32Array = np.where(
            last, NOTHING, batch.tokens[(self.tokens + 1) % len(batch.tokens)]
        )
        """[P] the draft for what is sampled, `NOTHING` where there is none."""

    def waves(self) -> Iterator[Wave]:
        """The waves, as long as there is one; each must be given its tokens (`Wave.tokens`)."""
        going = np.arange(len(self.rows))
        number = 0
        while len(going):
            wave = Wave(self, going, self.first[going] + number)
            yield wave
            going = going[wave.tokens == self.expected[wave.places]]
            number += 1

    def runs_alone(self, tokens: Int32Array) -> Int32Array:
        """Of tokens [P] that were sampled at all positions, whatever came of those before: the same with
        `NOTHING` behind the runs."""
        wrong = np.where(tokens == self.expected, len(tokens), self.within)
        length = np.minimum.reduceat(wrong, self.first)
        return np.where(self.within <= length[self.row_of], tokens, np.int32(NOTHING))

    def runs(self, tokens: Int32Array) -> Int32Array:
        """[n] the lengths of the runs in tokens [P]."""
        found: Int32Array = np.add.reduceat(tokens != NOTHING, self.first).astype(np.int32)
        return found


def sampled_tokens(batch: StepBatch) -> tuple[Int64Array, Places | None]:
    """Which of a batch's query tokens are sampled behind, ascending; and the places of a step with drafts."""
    rows = np.flatnonzero(batch.samples)
    if batch.drafts is not None:
        places = Places(batch, rows)
        return places.tokens, places
    return np.cumsum(batch.counts, dtype=np.int64)[rows] - 1, None


class Wave:
    """One position of each of some rows."""

    def __init__(self, of: Places, going: Int64Array, places: Int64Array) -> None:
        self.going = going
        """[m] which of the sampling rows."""
        self.places = places
        """[m] which of the places."""
        self.rows, self.slots, self.positions = of.rows[going], of.slots[going], of.positions[places]
        self.tokens: Int32Array = np.empty(0, np.int32)
        """[m] what was sampled; below 0 where nothing could be."""


def confirmed_counts(batch: StepBatch, result: StepResult) -> Int32Array:
    """[R] query tokens of each row, without the drafts that were wrong."""
    if batch.drafts is None or result.runs is None:
        return batch.counts
    counts: Int32Array = batch.counts - batch.drafts
    counts[batch.samples] += result.runs - 1
    return counts
