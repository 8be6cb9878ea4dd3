"""A step's batch put together: rows that decode, some of them with drafts, and pieces of prompts.

Theory.  Most steps give each decoding slot one token; `Slots.compose` takes their batch from the decode set
as it is.  What other steps add is here, as functions of arrays.

*Drafts* (`drafting/base.py`) are taken from the front, as many as do no harm.  Only the last token of a run,
which is none of them, can end a request: so they are fewer than `max_tokens` leaves, and end before a stop
token.  Each of them needs a place in the slot's blocks.  And they take only what rows and pieces of prompts
leave of the step's tokens.

A step computes a token and its drafts, and confirms a run of them.  What was computed behind it counts for
nothing: the next step of the slot begins behind the run, and overwrites it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from baton.executor.base import Int32Array, StepBatch, StepResult
from baton.worker.stop_tokens import StopTokens


class Piece(NamedTuple):
    """Tokens of a prompt that a step computes."""

    slot: int
    start: int
    tokens: Int32Array
    samples: bool
    """It is the last piece, and a token follows."""
    targets: Int32Array | None
    """As in `StepBatch.prompt_logprob_targets`."""
    pooled: bool | None
    """As in `StepBatch.pooled`."""


class Fitting(NamedTuple):
    """Drafts that a step computes: [n] of each row how many, and all of them in the rows' order."""

    counts: Int32Array
    tokens: Int32Array


def fitting(
    slots: Int32Array, drafts: Mapping[int, Int32Array], room: Int32Array, spare: int, stops: StopTokens
) -> Fitting | None:
    """What a step takes of the slots' drafts, `spare` in all at most; None: nothing.

    `room` [n]: tokens that each slot may get of the step: until `max_tokens`, and for which it has blocks."""
    empty: Int32Array = np.empty(0, np.int32)
    each = [drafts.get(slot, empty) for slot in slots.tolist()]
    counts: Int32Array = np.array([len(one) for one in each], np.int32)
    tokens: Int32Array = np.concatenate((empty, *each))
    row = np.repeat(np.arange(len(slots)), counts)
    place = np.arange(len(tokens)) - (np.cumsum(counts) - counts)[row]
    taken = np.minimum(counts, np.maximum(room - 1, 0))
    ends = stops.among(slots[row], tokens)
    np.minimum.at(taken, row[ends], place[ends].astype(np.int32))
    taken = np.minimum(taken, np.maximum(spare - (np.cumsum(taken) - taken), 0)).astype(np.int32)
    return Fitting(taken, tokens[place < taken[row]]) if taken.any() else None


def with_drafts(batch: StepBatch, drafts: Fitting, tables: Int32Array, block_size: int) -> StepBatch:
    """A batch of decoding rows alone with these drafts.  Rows without any come first.  `tables`: of the rows,
    as wide as there are blocks."""
    order = np.argsort(drafts.counts > 0, kind="stable")
    starts, of_row = batch.starts[order], drafts.counts[order]
    counts = of_row + np.int32(1)
    tokens = np.empty(len(order) + len(drafts.tokens), np.int32)
    newest = np.zeros(len(tokens), np.bool_)
    newest[np.cumsum(counts) - counts] = True
    tokens[newest] = batch.tokens[order]
    tokens[~newest] = drafts.tokens  # (those that have none are first, the others in their order)
    width = (int((starts + counts).max()) - 1) // block_size + 1
    return StepBatch(
        batch.step,
        batch.slots[order],
        starts,
        counts,
        tokens,
        batch.samples,
        tables[order, :width],
        int((of_row == 0).sum()),
        drafts=of_row,
    )


def with_pieces(batch: StepBatch, pieces: Sequence[Piece], tables: Int32Array, width: int) -> StepBatch:
    """The batch's rows, followed by these pieces.  `tables`: of all rows; `width`: of its columns."""
    before = len(batch.slots)
    targets: dict[int, Int32Array] = {}
    pooled: dict[int, bool] = {}
    for row, piece in enumerate(pieces, before):
        if piece.targets is not None:
            targets[row] = piece.targets
        if piece.pooled is not None:
            pooled[row] = piece.pooled
    slots, starts, of_tokens, samples, _, _ = zip(*pieces, strict=True)
    counts = [len(tokens) for tokens in of_tokens]
    drafts = batch.drafts
    if drafts is not None:
        drafts = np.concatenate((drafts, np.zeros(len(pieces), np.int32)))
    return StepBatch(
        step=batch.step,
        slots=np.concatenate((batch.slots, np.array(slots, np.int32))),
        starts=np.concatenate((batch.starts, np.array(starts, np.int32))),
        counts=np.concatenate((batch.counts, np.array(counts, np.int32))),
        tokens=np.concatenate((batch.tokens, *of_tokens)),
        samples=np.concatenate((batch.samples, np.array(samples, np.bool_))),
        block_tables=tables[:, :width],
        num_decodes=batch.num_decodes,
        drafts=drafts,
        prompt_logprob_targets=targets,
        pooled=pooled,
    )


def without_late(batch: StepBatch, result: StepResult) -> tuple[StepBatch, StepResult]:
    """As if the last tokens of the rows that are late had not been computed.  (Rows that sample nothing
    confirm no drafts.)"""
    counts, samples, runs = batch.counts.copy(), batch.samples.copy(), result.runs
    counts[result.late] -= 1
    samples[result.late] = False
    places = (np.cumsum(batch.samples) - 1)[result.late]
    tokens = np.delete(result.tokens, places if runs is None else (np.cumsum(runs) - 1)[places])
    return (
        replace(batch, slots=batch.slots.copy(), counts=counts, samples=samples),
        replace(result, tokens=tokens, runs=None if runs is None else np.delete(runs, places)),
    )


def speculation(drafts: Int32Array, runs: Int32Array) -> list[int]:
    """As in `StepReport`, of the sampling rows: drafts that the step computed, lengths of the runs."""
    drafted = drafts > 0
    right = runs[drafted] - 1
    longest = int(right.max(initial=0))
    by_place = [int((right > place).sum()) for place in range(longest)]
    return [int(drafted.sum()), int(drafts.sum()), *by_place]
