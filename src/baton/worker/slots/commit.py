"""What a step gave is taken in: new tokens, what of prompts is computed, and which requests end.

Theory.  Most steps are *plain* (`StepBatch.plain`): a token for each slot that decodes, and nothing else.
The decode set has all that such a step needs as rows of arrays, and knows in how many steps the first of its
slots reaches `max_tokens`; if none has a stop token, no slot is looked at by itself.  In other steps

| a row | means |
| --- | --- |
| of a slot that decodes | a token, or a *run*: the drafts that were right, and the token behind them |
| with a piece of a prompt | so many more tokens are computed |
| with the last piece | the slot decodes from now on; a pooled request is closed with its result |
| late: no token can be chosen yet | its last token counts as not computed; the next step computes it again |

*Who ends.*  Only the last token of a run can end its request: no draft is computed that is a stop token, or
comes behind one or behind `max_tokens` (`batches.py`).  An executor that gives a longer run is wrong, and the
worker stops.

| closed with | when |
| --- | --- |
| `error` | no token could be chosen (`StepResult.failed`): the newest one is dropped |
| `stop` | the newest token is a stop token of the request, and so many were generated that one may be |
| `length` | no token of `max_tokens` is left |
| `handed_over` | it is the first token of a request that another instance goes on with |

A closing comes behind all tokens of its epoch, as the engine frees what the slot had when it reads it.
"""

from __future__ import annotations

import msgspec
import numpy as np

from baton.executor.base import BoolArray, Int32Array, StepBatch, StepResult
from baton.executor.drafts.runs import confirmed_counts
from baton.protocol.messages.reports import CloseReason
from baton.worker.slots.batches import speculation, without_late
from baton.worker.slots.decode_set import LEFT, SAMPLED, UNSTOPPABLE
from baton.worker.slots.outcome import StepOutcome
from baton.worker.slots.slot_table import SlotTable


class Commit:
    """Takes in steps for the slots of one table."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table

    def take(self, batch: StepBatch, result: StepResult) -> StepOutcome:
        """As `Slots.commit`."""
        table = self._table
        decode = table.decode
        if result.late:
            batch, result = without_late(batch, result)
            table.repeated.update(table.handovers.intersection(batch.slots[result.late].tolist()))
        table.drafts = result.drafts
        plain = batch.plain
        whole = plain or (batch.first_prompt == len(batch.slots) and not result.late)  # every row samples
        sampled: Int32Array = batch.slots if whole else batch.slots[batch.samples]
        newest = _newest(batch, result, len(sampled))
        table.last[sampled] = newest
        if plain:
            context = decode.context
            decode.advance()
            counters = decode.counters
            outcome = StepOutcome(
                sampled, decode.epochs, result.tokens, context=context, patient=decode.patient
            )
            stops = decode.stops
        else:
            outcome, counters = self._take_rows(batch, result, sampled, whole)
            stops = table.stops.columns[sampled]
        table.counters[sampled], outcome.expert_tokens = counters, result.expert_tokens
        if result.logprobs or result.prompt_logprobs or result.routes:
            outcome.take(batch, result, table.epoch)
        if not (plain and decode.left and not stops.shape[1] and not result.failed):
            self._end(batch, result, sampled, newest, counters, stops, outcome)
        return outcome

    def _take_rows(
        self, batch: StepBatch, result: StepResult, sampled: Int32Array, whole: bool
    ) -> tuple[StepOutcome, Int32Array]:
        """What a step that is not plain did to its slots, and the counters of those that sampled."""
        table, decode, runs, decodes = self._table, self._table.decode, result.runs, batch.first_prompt
        outcome = StepOutcome(
            sampled,
            table.epoch[sampled],
            result.tokens,
            context=int(batch.starts[:decodes].sum()),
            patient=bool(table.patient[batch.slots].all()),
        )
        if runs is None:
            runs = np.ones(len(sampled), np.int32)
        else:
            self._take_runs(batch, runs, outcome)
        table.computed[batch.slots] += runs if whole else confirmed_counts(batch, result)
        counters: Int32Array = table.counters[sampled]
        counters += runs[:, None] * SAMPLED
        if decodes < len(decode.slots) or result.late or batch.drafts is not None:
            going = sampled if whole else batch.slots[:decodes][batch.samples[:decodes]]
            decode.advance_some(going, runs[: len(going)])
        elif decodes:
            decode.advance()
        self._take_prompts(batch, outcome, result.late)
        for row, ends in batch.pooled.items():
            if ends:
                closed = table.close(int(batch.slots[row]), CloseReason.POOLED)
                outcome.closings.append(msgspec.structs.replace(closed, pooled=result.pooled.get(row, b"")))
        return outcome, counters

    def _take_runs(self, batch: StepBatch, runs: Int32Array, outcome: StepOutcome) -> None:
        """Whose tokens these are.  Raises `RuntimeError` if a run goes on behind the end of its request."""
        assert batch.drafts is not None
        drafts: list[int] = batch.drafts[batch.samples].tolist()
        lengths, tokens = runs.tolist(), outcome.tokens.tolist()
        slots: list[int] = outcome.slots.tolist()
        left, first = self._table.left[outcome.slots].tolist(), 0
        stops_of = self._table.stops.of
        for slot, run, count, most in zip(slots, lengths, drafts, left, strict=True):
            last = first + run - 1
            if not 1 <= run <= min(count + 1, most) or not stops_of[slot].isdisjoint(tokens[first:last]):
                raise RuntimeError(f"step {batch.step}: runs {lengths} of {drafts} drafts go too far")
            first = last + 1
        outcome.speculation = speculation(drafts, lengths)
        outcome.slots, outcome.epochs = np.repeat(outcome.slots, runs), np.repeat(outcome.epochs, runs)

    def _take_prompts(self, batch: StepBatch, outcome: StepOutcome, late: list[int]) -> None:
        """Notes the progress of prefill rows; those that sampled decode from now on.  `late`: rows."""
        table, first = self._table, batch.first_prompt
        composition = table.composition
        if composition is not None and first < len(batch.slots):
            counts = batch.counts.copy()
            counts[late] += 1
            pieces = list(zip(batch.slots[first:].tolist(), counts[first:].tolist(), strict=True))
            composition.computed(pieces, first, outcome.context)
            for slot in batch.slots[late].tolist():
                composition.again(slot)
        for row in range(first, len(batch.slots)):
            slot = int(batch.slots[row])
            outcome.prefill.append((slot, int(table.epoch[slot]), int(table.computed[slot])))
            if batch.samples[row]:
                table.decodes(slot)

    def _end(
        self,
        batch: StepBatch,
        result: StepResult,
        sampled: Int32Array,
        newest: Int32Array,
        counters: Int32Array,
        stops: Int32Array,
        outcome: StepOutcome,
    ) -> None:
        """Closes the slots whose newest token is their last one.  `counters`, `stops`: of those that
        sampled."""
        table = self._table
        place_of = np.cumsum(batch.samples) - 1 if result.failed else np.empty(0, np.int64)
        failed = {int(place_of[row]): message for row, message in result.failed.items()}
        left = counters[:, LEFT]
        over: BoolArray = left == 0
        stopped: BoolArray | None = None
        if stops.shape[1]:
            stopped = table.stops.among(sampled, newest, stops)
            stopped &= counters[:, UNSTOPPABLE] < 0
            over |= stopped
        if table.handovers:
            for index in range(int(batch.samples[: batch.first_prompt].sum()), len(sampled)):
                over[index] |= int(sampled[index]) in table.handovers
        over[list(failed)] = True
        if over.any():
            for index in over.nonzero()[0].tolist():
                reason = CloseReason.HANDED_OVER
                if index in failed:
                    reason = CloseReason.ERROR
                elif stopped is not None and stopped[index]:
                    reason = CloseReason.STOP
                elif left[index] == 0:
                    reason = CloseReason.LENGTH
                outcome.closings.append(table.close(int(sampled[index]), reason, failed.get(index, "")))
        if failed:
            ends_of = range(len(sampled)) if result.runs is None else (np.cumsum(result.runs) - 1).tolist()
            outcome.drop({ends_of[index] for index in failed})


def _newest(batch: StepBatch, result: StepResult, num_sampled: int) -> Int32Array:
    """The last token of each row that samples.  Raises `RuntimeError` if the executor gave more or less than
    the batch asks for."""
    runs = result.runs
    if (runs is None) != (batch.drafts is None):
        raise RuntimeError(f"step {batch.step}: runs of tokens are those of a batch with drafts")
    if len(result.tokens) != (num_sampled if runs is None else runs.sum()):
        raise RuntimeError(
            f"step {batch.step} samples {num_sampled} rows, the executor gave {len(result.tokens)}"
        )
    newest: Int32Array = result.tokens if runs is None else result.tokens[np.cumsum(runs) - 1]
    return newest
