"""Which of a row's drafts are right: the positions that a step samples, and the runs that come of them.

Theory.  A row with k drafts is sampled at 1 + k positions: before its first draft, and behind each of them.
What is sampled behind a draft counts if that draft, and all before it, were what was sampled in their places;
so the first wrong draft ends the run, with the token that is right there.

What the sampler knows of a slot besides logits and positions (penalties, a grammar) must have read the tokens
before.  So the positions are sampled in *waves*: first the one before the drafts, of all rows, as in a step
without drafts; then the one behind their first draft, of the rows in which it was right; and so on.  Each
wave finds what it would find in a step of its own.

Where nothing is known but what follows from the drafts (masks of a grammar, `grammar/ahead.py`), all
positions are sampled together, and those behind a wrong draft are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.executor.base import Int32Array, Int64Array, StepBatch, StepResult

NOTHING = -3
"""In place of a token: a position behind the run."""


class Places:
    """The positions that a step with drafts samples, P in all, row after row.  `rows`: those that sample.

    Lists, not arrays: there are a few of them in most steps, and one operation on arrays takes as long as
    twenty on numbers.
    """

    def __init__(self, batch: StepBatch, rows: Int64Array) -> None:
        assert batch.drafts is not None
        self.rows = rows
        self.slots: Int32Array = batch.slots[rows]
        self.first: list[int] = []
        """[n] of each row the first place."""
        self.row_of: list[int] = []
        """[P] which of `rows`."""
        self.expected: list[int] = []
        """[P] the draft for what is sampled, `NOTHING` where there is none."""
        drafts, ends = batch.drafts.tolist(), batch.counts.cumsum().tolist()
        lengths, given = (batch.starts + batch.counts).tolist(), batch.tokens.tolist()
        tokens: list[int] = []
        positions: list[int] = []
        for number, row in enumerate(rows.tolist()):
            count, end, length = drafts[row], ends[row], lengths[row]
            self.first.append(len(tokens))
            self.row_of += [number] * (count + 1)
            tokens += range(end - count - 1, end)
            positions += range(length - count, length + 1)
            self.expected += given[end - count : end]
            self.expected.append(NOTHING)
        self.tokens: Int64Array = np.array(tokens, np.int64)
        """[P] the query tokens at these positions, which ascend."""
        self.positions: Int32Array = np.array(positions, np.int32)
        """[P] of the tokens that are sampled."""

    @property
    def slot_of(self) -> Int32Array:
        """[P]"""
        return self.slots[self.row_of]

    def waves(self) -> Iterator[Wave]:
        """The waves, as long as there is one; each must be given its tokens (`Wave.tokens`)."""
        going = list(range(len(self.rows)))
        number = 0
        while going:
            wave = Wave(self, going, [self.first[index] + number for index in going])
            yield wave
            sampled = zip(going, wave.places, wave.tokens.tolist(), strict=True)
            going = [index for index, place, token in sampled if token == self.expected[place]]
            number += 1

    def runs_alone(self, tokens: Int32Array) -> list[int]:
        """Of tokens [P] that were sampled at all positions, whatever came of those before: the same with
        `NOTHING` behind the runs."""
        sampled: list[int] = tokens.tolist()
        for first, end in self.spans():
            place = first
            while sampled[place] == self.expected[place]:
                place += 1
            sampled[place + 1 : end] = [NOTHING] * (end - place - 1)
        return sampled

    def runs(self, tokens: Int32Array) -> Int32Array:
        """[n] the lengths of the runs in tokens [P]."""
        sampled: list[int] = tokens.tolist()
        return np.array(
            [end - first - sampled[first:end].count(NOTHING) for first, end in self.spans()], np.int32
        )

    def spans(self) -> Iterator[tuple[int, int]]:
        """[n] the places of each row, from and to."""
        return zip(self.first, [*self.first[1:], len(self.row_of)], strict=True)


def sampled_tokens(batch: StepBatch) -> tuple[Int64Array, Places | None]:
    """Which of a batch's query tokens are sampled behind, ascending; and the places of a step with drafts."""
    rows = np.flatnonzero(batch.samples)
    if batch.drafts is not None:
        places = Places(batch, rows)
        return places.tokens, places
    return np.cumsum(batch.counts, dtype=np.int64)[rows] - 1, None


class Wave:
    """One position of each of some rows."""

    def __init__(self, of: Places, going: list[int], places: list[int]) -> None:
        self.places = places
        """[m] which of the places."""
        whole = len(going) == len(of.rows)
        self.rows: Int64Array = of.rows if whole else of.rows[going]
        self.slots: Int32Array = of.slots if whole else of.slots[going]
        self.positions: Int32Array = of.positions[places]
        self.tokens: Int32Array = np.empty(0, np.int32)
        """[m] what was sampled; below 0 where nothing could be."""


def confirmed_counts(batch: StepBatch, result: StepResult) -> Int32Array:
    """[R] query tokens of each row, without the drafts that were wrong."""
    if batch.drafts is None or result.runs is None:
        return batch.counts
    counts: Int32Array = batch.counts - batch.drafts
    counts[batch.samples] += result.runs - 1
    return counts


def drafts_of(batch: StepBatch) -> list[list[int]]:
    """[n] of each row that samples, in order; of a batch with drafts."""
    assert batch.drafts is not None
    given, ends = batch.tokens.tolist(), batch.counts.cumsum().tolist()
    counts, samples = batch.drafts.tolist(), batch.samples.tolist()
    return [
        given[end - count : end] for end, count, wanted in zip(ends, counts, samples, strict=True) if wanted
    ]
