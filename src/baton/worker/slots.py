"""The slots of a worker: which requests run, what the next step computes, when each of them ends.

Theory. A slot is a place for one running request, and an *epoch* is one use of it. `Slots` is a pure state
machine: the engine's commands and the sampled tokens go in, batches for the executor and closings for the
engine come out. Every rank of a group has its own and gives it the same commands and tokens, so all ranks
compose the same batches without talking about them.

    FREE ──Admit──► PREFILL ──last piece of its tokens──► DECODE
      ▲                │                                     │
      └────────────────┴──── exactly one Closed an epoch ◄───┘

A request that is to be handed over (`Admit.handover`) never decodes here: its first sampled token closes
the epoch, with reason `handed_over` unless that token ends the request anyway.  One that wants a result of
its prompt (`Sampling.pooling`) has no token: the last piece of its prompt closes the epoch, with reason
`pooled`.

| in | Admit, newer epoch | Grow, Reprioritize | Preempt, Abort | stop token, max_tokens |
| --- | --- | --- | --- | --- |
| FREE | → PREFILL | ignored if the epoch is over, else violation | the same | – |
| PREFILL, DECODE | violation | noted | → FREE, Closed at once | → FREE, Closed after its token |

A command for an epoch that is over is ignored: the engine sent it before it read the closing. A command
that no correct engine sends raises `ProtocolViolation`, and the worker must stop then, as the two disagree
about the slots. Commands are applied between two steps, so the epoch's tokens are all reported before a
closing.

A row for which no token can be chosen yet (`StepResult.late`: its grammar is being compiled) has none: a
decoding one stays where it is, of a prompt all but the last token is computed, and the next step computes
that token again.  So nobody waits for another's grammar, and all ranks know, as the tokens say it.

A step may confirm several tokens of a slot, its *run* (`batches.py`).  What the executor drafts for a slot
(`StepResult.drafts`) is for the next step alone, and forgotten when the epoch ends.

A step takes first a token of each slot that decodes, in the order in which they began to (a slot without a
block for its token skips the step), then pieces of prompts: those that a `Composition` chooses, or without
one those of the earliest admissions, `max_num_batched_tokens` in all.

What a step needs of all slots stands in arrays with one entry a slot. The decode set (`decode_set.py`)
keeps the same as rows of a batch from step to step, so hundreds of slots cost a few array operations. A
batch shares these arrays and is valid until the next call.
"""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import numpy.typing as npt

from baton.executor.base import BoolArray, Int32Array, StepBatch, StepResult
from baton.executor.drafts.runs import confirmed_counts
from baton.protocol.commands import Abort, Admit, Command, Control, Grow, Pace, Preempt, Reprioritize
from baton.protocol.reports import Closed, CloseReason
from baton.worker.batches import (
    Piece,
    fitting,
    speculation,
    with_drafts,
    with_pieces,
    without_late,
)
from baton.worker.composition import Composition, Prompt, affordable
from baton.worker.decode_set import COMPUTED, LEFT, UNSTOPPABLE, DecodeSet
from baton.worker.outcome import Admitted, StepOutcome
from baton.worker.stop_tokens import MAX_TOKEN, StopTokens
from baton.worker.violations import OfSlot, ProtocolViolation, describe, unpack

log = logging.getLogger(__name__)

_REASONS = {Preempt: CloseReason.PREEMPTED, Abort: CloseReason.ABORTED}
FREE, PREFILL, DECODE = 0, 1, 2
_PHASES = ("free", "prefill", "decode", "held until a step is over")
_SAMPLED: Int32Array = np.array([0, -1, -1], np.int32)
"""What a sampled token adds, beside what was computed."""


class Slots:
    """All slots of one worker.  Sizes as in `InstanceConfig`; `composition` None: each step takes as many
    tokens of prompts as fit, in order of admission."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        composition: Composition | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.paused = False
        self.shutdown = False
        n = max_num_seqs
        self._width = -(-max_model_len // block_size)
        self._phase: npt.NDArray[np.int8] = np.zeros(n, np.int8)
        self._epoch: Int32Array = np.full(n, -1, np.int32)  # the last one admitted
        # Leading tokens whose KV is in the blocks, tokens that may still be generated, and how many of those
        # cannot be a stop: together, as each step changes them together.
        self._counters: Int32Array = np.zeros((n, 3), np.int32)
        self._capacity: Int32Array = np.zeros(n, np.int32)  # tokens that the blocks hold
        self._last: Int32Array = np.zeros(n, np.int32)  # the newest token
        self._tables: Int32Array = np.zeros((n, self._width), np.int32)
        self._stops = StopTokens(n)
        self._patient: BoolArray = np.zeros(n, np.bool_)
        self._handovers: set[int] = set()  # slots that close after their first sampled token
        self._repeated: set[int] = (
            set()
        )  # of these: their last chunk was computed, and they have no token yet
        self._tokens: dict[int, Int32Array] = {}  # of slots in PREFILL
        self._pooled: set[int] = set()  # slots that close when their prompt is computed, without a token
        self._scored: dict[int, int] = {}  # in PREFILL: how many log-probabilities of each token they want
        self._prefilling: list[int] = []  # in order of admission
        self._decode = DecodeSet(
            self._counters, self._tables, self._epoch, self._stops.columns, self._patient
        )
        self._composition = composition
        self._drafts: dict[int, Int32Array] = {}  # for the next step

    @property  # (views, made when they are needed: a copy of the slots has its own)
    def _computed(self) -> Int32Array:
        return self._counters[:, COMPUTED]

    @property
    def _left(self) -> Int32Array:
        return self._counters[:, LEFT]

    @property
    def _unstoppable(self) -> Int32Array:
        return self._counters[:, UNSTOPPABLE]

    # ---- commands

    def apply(self, command: Command) -> Admitted | Closed | None:
        """Applies one command between two steps.

        Returns what follows from it: `Admitted` (tell the executor), `Closed` (report it; unless the
        command was an Admit, the executor releases the slot), or nothing.  Raises `ProtocolViolation`.
        """
        match command:
            case Admit():
                return self._admit(command)
            case Grow():
                if self._is_open(command):
                    self._grow(command)
            case Reprioritize():
                if self._is_open(command):
                    self._patient[command.slot], self._decode.changed = command.patient, True
                    if self._composition:
                        self._composition.reprioritize(command)
            case Preempt() | Abort():
                if self._is_open(command):
                    return self._close(command.slot, _REASONS[type(command)])
            case Pace():
                if self._composition is not None:
                    self._composition.pace = command
            case Control():
                self._control(command)
        return None

    def _admit(self, command: Admit) -> Admitted | Closed | None:
        slot = command.slot
        self._check_slot(command)
        if command.epoch <= self._epoch[slot]:
            log.debug("ignored, epoch %d is known: %s", command.epoch, describe(command))
            return None
        if self._phase[slot] != FREE:
            raise self._violation(command, "the slot is occupied")
        tokens = unpack(command, command.tokens, "tokens")
        length = len(tokens)
        if not 1 <= command.num_prompt <= length:
            raise self._violation(command, f"num_prompt must be from 1 to the {length} tokens")
        if not 0 <= command.num_computed < length:
            raise self._violation(command, f"num_computed must be from 0 to {length - 1}")
        left = command.stopping.max_tokens - (length - command.num_prompt)
        if left < 1:
            raise self._violation(command, f"its tokens leave {left} of max_tokens to generate")
        self._epoch[slot] = command.epoch
        pools = command.sampling.pooling is not None
        if command.num_prompt + (0 if pools else command.stopping.max_tokens) > self.max_model_len:
            asked = f"{command.num_prompt} prompt tokens + max_tokens {command.stopping.max_tokens}"
            message = f"{asked} are more than max_model_len {self.max_model_len}; lower max_tokens"
            return Closed(slot, command.epoch, CloseReason.ERROR, message)
        self._capacity[slot] = 0
        self._append_blocks(command)
        if self._capacity[slot] < length:
            raise self._violation(command, f"its blocks hold {self._capacity[slot]} of {length} tokens")
        self._phase[slot] = PREFILL
        self._computed[slot] = command.num_computed
        self._left[slot] = left
        self._unstoppable[slot] = min(command.stopping.min_tokens - (length - command.num_prompt), left)
        self._stops.set(slot, command.stopping.stop_token_ids)
        self._tokens[slot] = tokens
        if command.sampling.prompt_logprobs is not None and length == command.num_prompt:
            # (With generated tokens an earlier epoch has reported the whole prompt.)
            self._scored[slot] = command.sampling.prompt_logprobs
        self._patient[slot] = command.patient
        if command.handover:
            self._handovers.add(slot)
        if pools:
            self._pooled.add(slot)
        self._prefilling.append(slot)
        if self._composition is not None:
            self._composition.admit(
                Prompt(
                    slot,
                    command.num_computed,
                    length - command.num_computed,
                    command.priority,
                    length > command.num_prompt,
                    command.patient,
                    command.waited,
                )
            )
        return Admitted(slot, tokens, command.num_prompt, command.sampling, command.stopping, command.salt)

    def _grow(self, command: Grow) -> None:
        have, blocks = self._append_blocks(command)
        self._decode.grow(command.slot, have, blocks)

    def _append_blocks(self, command: Admit | Grow) -> tuple[int, Int32Array]:
        """Returns how many blocks the slot had, and the new ones."""
        blocks = unpack(command, command.blocks, "blocks")
        have = int(self._capacity[command.slot]) // self.block_size
        if have + len(blocks) > self._width:
            raise self._violation(command, f"more than the {self._width} blocks that max_model_len needs")
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_blocks):
            raise self._violation(command, f"a block is outside the pool of {self.num_blocks}")
        self._tables[command.slot, have : have + len(blocks)] = blocks
        self._capacity[command.slot] += len(blocks) * self.block_size
        return have, blocks

    def _control(self, command: Control) -> None:
        match command.action:
            case "pause":
                self.paused = True
            case "resume":
                self.paused = False
            case "shutdown":
                self.shutdown = True
            case "update_weights":
                if self._phase.any():
                    raise ProtocolViolation(
                        f"Control(update_weights) while slots {self.open_slots()} are open: "
                        "KV of the old weights would be read by the new ones"
                    )

    # ---- steps

    def compose(self, step: int) -> StepBatch | None:
        """The next step's work, or None: paused, nothing admitted, or every slot waits for blocks.

        Composing changes nothing; `commit` does.
        """
        if self.paused:
            return None
        budget = self.max_num_batched_tokens
        decode = self._decode
        if decode.changed:
            decode.settle(int(self._capacity.max()) // self.block_size)
        rows = decode.slots
        starts = decode.starts
        if decode.room <= 0:
            decode.room = int((self._capacity[rows] - starts).min(initial=MAX_TOKEN))
        if len(rows) <= budget and decode.room > 0:
            tables = decode.tables
            counts, samples = decode.ones, decode.trues
        else:
            kept = (starts < self._capacity[rows]).nonzero()[0][:budget]
            filled = int(self._capacity.max()) // self.block_size
            rows, starts, tables = rows[kept], starts[kept], decode.tables[kept, :filled]
            counts, samples = decode.ones[: len(kept)], decode.trues[: len(kept)]
        tokens: Int32Array = self._last.take(rows)
        num_decodes = len(rows)
        pieces: list[tuple[int, int]] = []
        if self._prefilling and budget > num_decodes:
            pieces = affordable(self._pieces(budget - num_decodes, num_decodes), self._scored)
        if not num_decodes and not pieces:
            return None
        longest = decode.longest if rows is decode.slots else int(starts.max(initial=0))
        width = longest // self.block_size + 1
        batch = StepBatch(
            step, rows, starts, counts, tokens, samples, tables[:num_decodes, :width], num_decodes
        )
        if self._drafts and num_decodes:
            spare = budget - num_decodes - sum(count for _, count in pieces)
            room = np.minimum(self._left[rows], self._capacity[rows] - starts)
            found = fitting(rows, self._drafts, room, spare, self._stops)
            if found is not None:
                batch = with_drafts(batch, found, tables[:num_decodes], self.block_size)
        return self._with_prompts(batch, pieces) if pieces else batch

    def _pieces(self, room: int, rows: int) -> list[tuple[int, int]]:
        """(slot, tokens) of the prompts that the next step computes, `room` tokens at most, beside so many
        rows of the decode set."""
        if self._composition is not None:
            decode = self._decode
            return self._composition.choose(rows, decode.context, bool(rows) and not decode.patient, room)
        pieces: list[tuple[int, int]] = []
        for slot in self._prefilling:
            if room == 0:
                break
            count = min(len(self._tokens[slot]) - int(self._computed[slot]), room)
            pieces.append((slot, count))
            room -= count
        return pieces

    def _with_prompts(self, batch: StepBatch, chosen: list[tuple[int, int]]) -> StepBatch:
        """The rows of a batch, followed by these (slot, tokens) of prompts."""
        pieces: list[Piece] = []
        longest = 0
        for slot, count in chosen:
            start, text = int(self._computed[slot]), self._tokens[slot]
            end = start + count
            targets = None
            if slot in self._scored and start + 1 < len(text):
                targets = text[start + 1 : end + 1]
            ends, pooled = end == len(text), slot in self._pooled
            samples, of_pooled = ends and not pooled, ends if pooled else None
            pieces.append(Piece(slot, start, text[start:end], samples, targets, of_pooled))
            longest = max(longest, end)
        slots = [piece.slot for piece in pieces]
        size, width = len(batch.slots), (longest - 1) // self.block_size + 1
        if size:
            width = max(width, batch.block_tables.shape[1])
        if batch.slots is self._decode.slots:
            self._decode.lay(slots, size, width)
            tables = self._decode.tables[: size + len(slots)]
        else:
            tables = self._tables[[*batch.slots.tolist(), *slots]]
        return with_pieces(batch, pieces, tables, width)

    def commit(self, batch: StepBatch, result: StepResult) -> StepOutcome:
        """Takes in the tokens of a batch that was composed after the last command.

        The executor releases the slots of the outcome's closings.
        """
        decode = self._decode
        if result.late:
            batch, result = without_late(batch, result)
            self._repeated.update(self._handovers.intersection(batch.slots[~batch.samples].tolist()))
        self._drafts = result.drafts
        plain = batch.slots is decode.slots  # one token for each row of the decode set, and nothing else
        decodes = batch.first_prompt
        whole = plain or (decodes == len(batch.slots) and not result.late)  # every row samples
        sampled: Int32Array = batch.slots if whole else batch.slots[batch.samples]
        runs = result.runs
        if (runs is None) != (batch.drafts is None):
            raise RuntimeError(f"step {batch.step}: runs of tokens are those of a batch with drafts")
        if len(result.tokens) != (len(sampled) if runs is None else runs.sum()):
            raise RuntimeError(
                f"step {batch.step} samples {len(sampled)} rows, the executor gave {len(result.tokens)}"
            )
        newest = result.tokens if runs is None else result.tokens[np.cumsum(runs) - 1]
        self._last[sampled] = newest
        if plain:
            context = decode.context
            decode.advance()
            counters = decode.counters
            outcome = StepOutcome(
                sampled, decode.epochs, result.tokens, context=context, patient=decode.patient
            )
            stops = decode.stops
        else:
            outcome = StepOutcome(
                sampled,
                self._epoch[sampled],
                result.tokens,
                context=int(batch.starts[:decodes].sum()),
                patient=bool(self._patient[batch.slots].all()),
            )
            if runs is None:
                runs = np.ones(len(sampled), np.int32)
            else:
                self._take_runs(batch, runs, outcome)
            self._computed[batch.slots] += runs if whole else confirmed_counts(batch, result)
            counters = self._counters[sampled]
            counters += runs[:, None] * _SAMPLED
            stops = self._stops.columns[sampled]
            if decodes < len(decode.slots) or result.late or batch.drafts is not None:
                going = sampled if whole else batch.slots[:decodes][batch.samples[:decodes]]
                decode.advance_some(going, runs[: len(going)])
            elif decodes:
                decode.advance()
            self._commit_prefill(batch, outcome, result.late)
            for row, ends in batch.pooled.items():
                if ends:
                    closed = self._close(int(batch.slots[row]), CloseReason.POOLED)
                    outcome.closings.append(
                        msgspec.structs.replace(closed, pooled=result.pooled.get(row, b""))
                    )
        self._counters[sampled], outcome.expert_tokens = counters, result.expert_tokens
        if result.logprobs or result.prompt_logprobs or result.routes:
            outcome.take(batch, result, self._epoch)
        if plain and decode.left and not stops.shape[1] and not result.failed:
            return outcome
        place_of = np.cumsum(batch.samples) - 1 if result.failed else np.empty(0, np.int64)
        failed = {int(place_of[row]): message for row, message in result.failed.items()}
        left = counters[:, LEFT]
        over: BoolArray = left == 0
        stopped: BoolArray | None = None
        if stops.shape[1]:
            stopped = self._stops.among(sampled, newest, stops)
            stopped &= counters[:, UNSTOPPABLE] < 0
            over |= stopped
        if self._handovers:
            for index in range(int(batch.samples[: batch.first_prompt].sum()), len(sampled)):
                over[index] |= int(sampled[index]) in self._handovers
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
                outcome.closings.append(self._close(int(sampled[index]), reason, failed.get(index, "")))
        if failed:
            ends_of = range(len(sampled)) if result.runs is None else (np.cumsum(result.runs) - 1).tolist()
            outcome.drop({ends_of[index] for index in failed})
        return outcome

    def _take_runs(self, batch: StepBatch, runs: Int32Array, outcome: StepOutcome) -> None:
        """Whose tokens these are.  Raises `RuntimeError` if a run goes on behind the end of its request."""
        assert batch.drafts is not None
        drafts: list[int] = batch.drafts[batch.samples].tolist()
        lengths, tokens = runs.tolist(), outcome.tokens.tolist()
        slots: list[int] = outcome.slots.tolist()
        left, first = self._left[outcome.slots].tolist(), 0
        for slot, run, count, most in zip(slots, lengths, drafts, left, strict=True):
            last = first + run - 1
            if not 1 <= run <= min(count + 1, most) or not self._stops.of[slot].isdisjoint(
                tokens[first:last]
            ):
                raise RuntimeError(f"step {batch.step}: runs {lengths} of {drafts} drafts go too far")
            first = last + 1
        outcome.speculation = speculation(drafts, lengths)
        outcome.slots, outcome.epochs = np.repeat(outcome.slots, runs), np.repeat(outcome.epochs, runs)

    @property
    def hands_over(self) -> bool:
        """Whether any slot is to be handed over."""
        return bool(self._handovers)

    def last_chunks(self, batch: StepBatch) -> tuple[list[int], list[int]]:
        """Slots and epochs of the batch whose last chunk before their hand-over it computes, for the first
        time."""
        rows = range(batch.first_prompt, len(batch.slots))
        found = [int(batch.slots[row]) for row in rows if batch.samples[row]]
        slots = [slot for slot in found if slot in self._handovers and slot not in self._repeated]
        return slots, [int(self._epoch[slot]) for slot in slots]

    def _commit_prefill(self, batch: StepBatch, outcome: StepOutcome, late: list[int]) -> None:
        """Notes the progress of prefill rows; those that sampled decode from now on.  `late`: rows."""
        first = batch.first_prompt
        if self._composition is not None and first < len(batch.slots):
            counts = batch.counts.copy()
            counts[late] += 1
            pieces = list(zip(batch.slots[first:].tolist(), counts[first:].tolist(), strict=True))
            self._composition.computed(pieces, first, outcome.context)
            for slot in batch.slots[late].tolist():
                self._composition.again(slot)
        for row in range(first, len(batch.slots)):
            slot = int(batch.slots[row])
            outcome.prefill.append((slot, int(self._epoch[slot]), int(self._computed[slot])))
            if batch.samples[row]:
                self._leave_prefill(slot)
                self._phase[slot] = DECODE
                self._decode.enter(slot)

    def fail(self, slot: int, message: str) -> Closed:
        """The executor cannot run this slot's request: closes its epoch with reason `error`."""
        return self._close(slot, CloseReason.ERROR, message)

    # ---- what is inside

    def open_slots(self) -> list[int]:
        """Slots whose epoch is not closed."""
        return [int(slot) for slot in np.flatnonzero(self._phase)]

    def _close(self, slot: int, reason: CloseReason, message: str = "") -> Closed:
        if self._phase[slot] == DECODE:
            self._decode.leave(slot)
        else:
            self._leave_prefill(slot)
        self._phase[slot] = FREE
        self._stops.release(slot)
        self._handovers.discard(slot)
        self._repeated.discard(slot)
        self._pooled.discard(slot)
        self._drafts.pop(slot, None)
        return Closed(slot, int(self._epoch[slot]), reason, message)

    def _leave_prefill(self, slot: int) -> None:
        self._prefilling.remove(slot)
        if self._composition is not None:
            self._composition.leave(slot)
        del self._tokens[slot]
        self._scored.pop(slot, None)

    def _is_open(self, command: Grow | Reprioritize | Preempt | Abort) -> bool:
        """Whether the command's epoch runs.  Raises for one that was never admitted."""
        self._check_slot(command)
        last = int(self._epoch[command.slot])
        if command.epoch > last:
            raise self._violation(command, "this epoch was never admitted")
        if command.epoch == last and self._phase[command.slot] != FREE:
            return True
        log.debug("ignored, epoch %d is over: %s", command.epoch, describe(command))
        return False

    def _check_slot(self, command: OfSlot) -> None:
        if not 0 <= command.slot < self.max_num_seqs:
            raise ProtocolViolation(
                f"{describe(command)}: there are slots 0 to {self.max_num_seqs - 1} (max_num_seqs)"
            )

    def _violation(self, command: OfSlot, problem: str) -> ProtocolViolation:
        slot = command.slot
        state = f"slot {slot} is in {_PHASES[self._phase[slot]]}, epoch {self._epoch[slot]}"
        return ProtocolViolation(f"{describe(command)}: {problem} ({state})")
