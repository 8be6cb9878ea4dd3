"""The slots of a worker whose executor is one step late: it composes a step before the last one's tokens are
read.

Theory.  What a step does to a slot is known when it is launched, but for one thing, the token: so many more
tokens are computed, one more is there, one less is left to generate.  So `launched` counts all that at once,
and the next step is composed of the slots as ever, with rows that carry the token (`StepBatch.carried`).
`commit` has the tokens later, and what they decide: stop tokens, and rows for which none could be chosen.

A slot of which no row may be composed before the step in flight is committed is HELD, in no set of rows:

| why a slot is held | what happens when the step is committed |
| --- | --- |
| the step gives its last token: `max_tokens` | closed, `length`, or `stop` if the token says so |
| the step gives the first token of a hand-over, or the result of a pooled prompt | closed |
| `Preempt` or `Abort` came after the step was launched | closed; its token counts, and may end it otherwise |
| the token before was a stop token, or none could be chosen | closed; the row in flight gives nothing |
| its next token depends on this one (`LateExecutor.carries`) | it goes on |

So a slot is closed only when no step in flight has a row of it: the engine frees blocks on `Closed`, and
whoever gets them next finds nobody writing there.  What a slot's `Closed` says, and which tokens come before
it, is what it would be without all this, except that a `Preempt` or `Abort` finds one token more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from baton.executor.base import BoolArray, Int32Array, StepBatch, StepResult
from baton.protocol.messages.commands import Abort, Admit, Command, Preempt
from baton.protocol.messages.reports import Closed, CloseReason
from baton.protocol.params.sampling import Sampling, Stopping
from baton.worker.slots.composition import Prompt
from baton.worker.slots.decode_set import COMPUTED, LEFT, SAMPLED, UNSTOPPABLE
from baton.worker.slots.outcome import Admitted, StepOutcome
from baton.worker.slots.slot_table import DECODE, PREFILL
from baton.worker.slots.slots import Slots

HELD = 3
"""A phase beside those of `slot_table.py`."""
_UNKNOWN = -1
"""In place of a token that the host has not read."""
_NOT_SAMPLED: Int32Array = np.array([-1, 1, 1], np.int32)


class _Aside(NamedTuple):
    """The prompt of a slot whose next token may come late."""

    tokens: Int32Array
    scored: int | None
    prompt: Prompt | None


@dataclass(slots=True)
class _Flight:
    """A step that was launched and is not committed."""

    batch: StepBatch
    outcome: StepOutcome
    sampled: Int32Array
    """[n] slots, in the order of their tokens."""
    ends: BoolArray
    """[n] it is the last token that was asked for."""
    stoppable: BoolArray
    """[n]"""
    stops: Int32Array
    """[n, columns] as in `StopTokens`."""
    plain: bool
    """None of its slots is held because of what it is, and none has stop tokens."""


class LateSlots(Slots):
    """As `Slots`; after `compose` comes `launched`, and `commit` is called one step later.  `carries`: as in
    `LateExecutor`."""

    def __init__(self, *, carries: Callable[[Sampling, Stopping], bool], **sizes: Any) -> None:
        super().__init__(**sizes)
        self._carries = carries
        self._waits: BoolArray = np.zeros(self.max_num_seqs, np.bool_)
        self._some_wait = False
        self._flights: deque[_Flight] = deque()
        self._asked: dict[int, CloseReason] = {}  # of slots of the step in flight, for which a command came
        self._over: dict[int, tuple[CloseReason, str]] = {}  # whose row in flight gives nothing
        self._aside: dict[int, _Aside] = {}

    def apply(self, command: Command) -> Admitted | Closed | None:
        """As there.  A slot that the step in flight has a row of is closed when that is committed."""
        if isinstance(command, Preempt | Abort) and self._flights and self._is_open(command):
            slot = command.slot
            if slot in self._flights[-1].batch.slots:
                if slot not in self._over:
                    reason = CloseReason.PREEMPTED if isinstance(command, Preempt) else CloseReason.ABORTED
                    self._asked.setdefault(slot, reason)
                self._hold(slot)
                return None
        return super().apply(command)

    def _admit(self, command: Admit) -> Admitted | Closed | None:
        admitted = super()._admit(command)
        if isinstance(admitted, Admitted):
            waits = command.sampling.pooling is None and not self._carries(command.sampling, command.stopping)
            self._waits[command.slot] = waits
            self._some_wait = self._some_wait or waits
        return admitted

    def compose(self, step: int) -> StepBatch | None:
        batch = super().compose(step)
        if batch is not None and self._flights:
            unknown = batch.tokens[: batch.num_decodes] == _UNKNOWN
            if unknown.any():
                batch.carried = np.zeros(len(batch.slots), np.bool_)
                batch.carried[: batch.num_decodes] = unknown
        return batch

    def launched(self, batch: StepBatch) -> None:
        """The executor has begun this batch, which was composed last: counts what it will have done."""
        table = self.table
        decode = table.decode
        plain = batch.plain
        sampled: Int32Array = batch.slots if plain else batch.slots[batch.samples]
        table.last[sampled] = _UNKNOWN
        nothing: Int32Array = np.empty(0, np.int32)
        if plain:
            outcome = StepOutcome(
                sampled, decode.epochs, nothing, context=decode.context, patient=decode.patient
            )
            decode.advance()
            counters = decode.counters
            table.counters[sampled] = counters
            stops = decode.stops
            plain = bool(decode.left)
        else:
            decodes = batch.num_decodes
            outcome = StepOutcome(
                sampled,
                table.epoch[sampled],
                nothing,
                context=int(batch.starts[:decodes].sum()),
                patient=bool(table.patient[batch.slots].all()),
            )
            table.counters[batch.slots, COMPUTED] += batch.counts
            table.counters[sampled] += SAMPLED
            counters = table.counters[sampled]
            stops = table.stops.columns[sampled]
            if decodes < len(decode.slots):
                decode.advance_some(batch.slots[:decodes], np.ones(decodes, np.int32))
            elif decodes:
                decode.advance()
            self._launch_prompts(batch, outcome)
        ends: BoolArray = counters[:, LEFT] == 0
        stoppable: BoolArray = counters[:, UNSTOPPABLE] < 0
        if not plain or self._some_wait:
            held = ends | self._waits[sampled]
            plain = plain and not held.any()
            for slot in sampled[held].tolist():
                self._hold(slot)
            if table.handovers:
                for slot in table.handovers.intersection(sampled.tolist()):
                    self._hold(slot)
        self._flights.append(
            _Flight(batch, outcome, sampled, ends, stoppable, stops, plain and not stops.shape[1])
        )

    def _launch_prompts(self, batch: StepBatch, outcome: StepOutcome) -> None:
        """Those that this step computes to their end decode from now on."""
        table = self.table
        first = batch.num_decodes
        if table.composition is not None and first < len(batch.slots):
            pieces = list(zip(batch.slots[first:].tolist(), batch.counts[first:].tolist(), strict=True))
            table.composition.computed(pieces, first, outcome.context)
        for row in range(first, len(batch.slots)):
            slot = int(batch.slots[row])
            outcome.prefill.append((slot, int(table.epoch[slot]), int(table.computed[slot])))
            if batch.samples[row]:
                if self._waits[slot]:
                    prompt = None if table.composition is None else table.composition.prompts[slot]
                    self._aside[slot] = _Aside(table.tokens[slot], table.scored.get(slot), prompt)
                table.decodes(slot)
            elif batch.pooled.get(row):
                self._hold(slot)

    def commit(self, batch: StepBatch, result: StepResult) -> StepOutcome:
        """Takes in what the oldest step that was launched, and not committed, gave."""
        table = self.table
        if not self._flights or self._flights[0].batch is not batch:
            raise RuntimeError(f"step {batch.step} is not the oldest one in flight")
        flight = self._flights[0]
        if result.drafts or result.runs is not None:
            raise RuntimeError(f"step {batch.step}: an executor that is one step late drafts nothing")
        if len(result.tokens) != len(flight.sampled):
            raise RuntimeError(
                f"step {batch.step} samples {len(flight.sampled)} rows, "
                f"the executor gave {len(result.tokens)}"
            )
        self._flights.popleft()
        later = self._flights[-1].sampled if self._flights else None
        outcome, sampled = flight.outcome, flight.sampled
        outcome.tokens, outcome.expert_tokens = result.tokens, result.expert_tokens
        table.last[sampled] = result.tokens
        if later is not None:
            table.last[later] = _UNKNOWN
        over, self._over = self._over, {}
        if over:
            for row in np.flatnonzero(np.isin(batch.slots, list(over))).tolist():
                result.routes.pop(row, None)
                result.failed.pop(row, None)
        if result.logprobs or result.prompt_logprobs or result.routes:
            outcome.take(batch, result, table.epoch)
        if flight.plain and not (over or self._asked or result.failed):
            return outcome
        self._end(flight, result, over, set() if later is None else set(later.tolist()))
        return outcome

    def _end(
        self,
        flight: _Flight,
        result: StepResult,
        over: dict[int, tuple[CloseReason, str]],
        later: set[int],
    ) -> None:
        """Closes what ends with this step, and lets go on what was held.  `over`: whose row means nothing.
        `later`: slots that the next step in flight has rows of."""
        table = self.table
        batch, outcome, sampled = flight.batch, flight.outcome, flight.sampled
        asked, self._asked = self._asked, {}
        place_of = np.cumsum(batch.samples) - 1
        failed = {int(place_of[row]): message for row, message in result.failed.items()}
        late = {int(batch.slots[row]) for row in result.late}
        stopped: BoolArray = np.zeros(len(sampled), np.bool_)
        if flight.stops.shape[1]:
            stopped = table.stops.among(sampled, result.tokens, flight.stops) & flight.stoppable
        without = set(failed)
        odd = stopped | flight.ends | (table.phase[sampled] == HELD)
        odd[list(failed)] = True
        if over:
            odd |= np.isin(sampled, list(over))
        for index in odd.nonzero()[0].tolist():
            slot = int(sampled[index])
            if slot in over:
                without.add(index)
                continue
            if slot in late:
                without.add(index)
                self._again(slot, batch, outcome)
                if slot in asked:
                    outcome.closings.append(self._close(slot, asked.pop(slot)))
                continue
            self._aside.pop(slot, None)
            found = None
            if index in failed:
                found = CloseReason.ERROR
            elif stopped[index]:
                found = CloseReason.STOP
            elif flight.ends[index]:
                found = CloseReason.LENGTH
            elif slot in table.handovers:
                found = CloseReason.HANDED_OVER
            elif slot in asked:
                found = asked[slot]
            if found is None:
                if slot not in later:  # (else it is that step's launch that holds it, if it is held)
                    self._go_on(slot)
                continue
            asked.pop(slot, None)
            if slot in later:
                self._hold(slot)
                self._over[slot] = found, failed.get(index, "")
            else:
                outcome.closings.append(self._close(slot, found, failed.get(index, "")))
        for slot, (reason, message) in over.items():
            outcome.closings.append(self._close(slot, reason, message))
        for row, ends in batch.pooled.items():
            if ends:
                slot = int(batch.slots[row])
                asked.pop(slot, None)
                closed = self._close(slot, CloseReason.POOLED)
                outcome.closings.append(msgspec.structs.replace(closed, pooled=result.pooled.get(row, b"")))
        for slot, reason in asked.items():  # of prompts that the step computed a piece of
            outcome.closings.append(self._close(slot, reason))
        outcome.drop(without)

    def _hold(self, slot: int) -> None:
        """No row of it is composed until `_go_on`, or ever."""
        table = self.table
        if table.phase[slot] == DECODE:
            table.decode.leave(slot)
        elif table.phase[slot] == PREFILL:
            table.leave_prefill(slot)
        table.phase[slot] = HELD

    def _go_on(self, slot: int) -> None:
        if self.table.phase[slot] == HELD:
            self.table.phase[slot] = DECODE
            self.table.decode.enter(slot)

    def _again(self, slot: int, batch: StepBatch, outcome: StepOutcome) -> None:
        """No token could be chosen for it yet: the last one before is computed again."""
        table = self.table
        row = batch.slots.tolist().index(slot)
        table.counters[slot] += _NOT_SAMPLED
        aside = self._aside.pop(slot, None)
        if aside is None:
            table.last[slot] = batch.tokens[int(batch.counts[: row + 1].sum()) - 1]
            self._go_on(slot)
            return
        table.phase[slot] = PREFILL
        table.prefilling.insert(0, slot)
        table.tokens[slot] = aside.tokens
        if aside.scored is not None:
            table.scored[slot] = aside.scored
        if table.composition is not None and aside.prompt is not None:
            table.composition.back(aside.prompt)
            table.composition.again(slot)
        if slot in table.handovers:
            table.repeated.add(slot)
        epoch, computed = int(table.epoch[slot]), int(table.computed[slot])
        outcome.prefill = [(slot, epoch, computed) if one[0] == slot else one for one in outcome.prefill]

    def _close(self, slot: int, reason: CloseReason, message: str = "") -> Closed:
        self._go_on(slot)
        self._aside.pop(slot, None)
        return super()._close(slot, reason, message)
