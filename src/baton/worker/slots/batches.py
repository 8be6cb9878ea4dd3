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
from baton.worker.slots.stop_tokens import StopTokens


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
    """Drafts that a step computes."""

    counts: list[int]
    """[n] how many of each row."""
    tokens: list[int]
    """All of them, in the rows' order."""


def fitting(
    slots: Int32Array, drafts: Mapping[int, Int32Array], room: Int32Array, spare: int, stops: StopTokens
) -> Fitting | None:
    """What a step takes of the slots' drafts, `spare` in all at most; None: nothing.

    `room` [n]: tokens that each slot may get of the step: until `max_tokens`, and for which it has blocks."""
    counts: list[int] = []
    tokens: list[int] = []
    for slot, most in zip(slots.tolist(), room.tolist(), strict=True):
        found = drafts.get(slot)
        count = max(min(most - 1, spare - len(tokens)), 0)
        taken: list[int] = [] if found is None else found[:count].tolist()
        ends = stops.of[slot]
        if not ends.isdisjoint(taken):
            taken = taken[: next(place for place, token in enumerate(taken) if token in ends)]
        counts.append(len(taken))
        tokens += taken
    return Fitting(counts, tokens) if tokens else None


def with_drafts(batch: StepBatch, drafts: Fitting, tables: Int32Array, block_size: int) -> StepBatch:
    """A batch of decoding rows alone with these drafts.  Rows without any come first.  `tables`: of the rows,
    as wide as there are blocks."""
    rows = range(len(drafts.counts))
    without = [row for row in rows if not drafts.counts[row]]
    order = [*without, *(row for row in rows if drafts.counts[row])]
    of_row = [drafts.counts[row] for row in order]
    newest: list[int] = batch.tokens.tolist()
    tokens: list[int] = []
    first = 0
    for row in order:  # (the drafts of those that have some are in their order)
        tokens.append(newest[row])
        tokens += drafts.tokens[first : first + drafts.counts[row]]
        first += drafts.counts[row]
    slots, starts = batch.slots[order], batch.starts[order]
    if without:
        tables = tables[order]
    taken = np.array(of_row, np.int32)
    counts = taken + np.int32(1)
    width = (int((starts + counts).max()) - 1) // block_size + 1
    return StepBatch(
        batch.step,
        slots,
        starts,
        counts,
        np.array(tokens, np.int32),
        batch.samples,
        tables[:, :width],
        len(without),
        drafts=taken,
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
        replace(batch, counts=counts, samples=samples, plain=False),
        replace(result, tokens=tokens, runs=None if runs is None else np.delete(runs, places)),
    )


def speculation(drafts: list[int], runs: list[int]) -> list[int]:
    """As in `StepReport`, of the sampling rows: drafts that the step computed, lengths of the runs."""
    right = [run - 1 for run, count in zip(runs, drafts, strict=True) if count]
    by_place = [sum(number > place for number in right) for place in range(max(right, default=0))]
    return [len(right), sum(drafts), *by_place]
