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

What is known of each slot stands in `slot_table.py`; what follows from what a step gave is `commit.py`. Here
are commands, and what a step computes. A batch shares arrays with the table and is valid until the next call.
"""

from __future__ import annotations

import logging

import numpy as np

from baton.executor.base import Int32Array, StepBatch, StepResult
from baton.protocol.messages.commands import Abort, Admit, Command, Control, Grow, Pace, Preempt, Reprioritize
from baton.protocol.messages.reports import Closed, CloseReason
from baton.worker.slots.batches import Piece, fitting, with_drafts, with_pieces
from baton.worker.slots.commit import Commit
from baton.worker.slots.composition import Composition, affordable
from baton.worker.slots.outcome import Admitted, StepOutcome
from baton.worker.slots.slot_table import FREE, SlotTable
from baton.worker.slots.stop_tokens import MAX_TOKEN
from baton.worker.slots.violations import OfSlot, ProtocolViolation, describe, unpack

log = logging.getLogger(__name__)

_REASONS = {Preempt: CloseReason.PREEMPTED, Abort: CloseReason.ABORTED}
_PHASES = ("free", "prefill", "decode", "held until a step is over")


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
        self.table = SlotTable(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            composition=composition,
        )
        self._commit = Commit(self.table)

    # ---- commands

    def apply(self, command: Command) -> Admitted | Closed | None:
        """Applies one command between two steps.

        Returns what follows from it: `Admitted` (tell the executor), `Closed` (report it; unless the
        command was an Admit, the executor releases the slot), or nothing.  Raises `ProtocolViolation`.
        """
        table = self.table
        match command:
            case Admit():
                return self._admit(command)
            case Grow():
                if self._is_open(command):
                    self._grow(command)
            case Reprioritize():
                if self._is_open(command):
                    table.patient[command.slot] = command.patient
                    table.decode.reread()
                    if table.composition:
                        table.composition.reprioritize(command)
            case Preempt() | Abort():
                if self._is_open(command):
                    return self._close(command.slot, _REASONS[type(command)])
            case Pace():
                if table.composition is not None:
                    table.composition.pace = command
            case Control():
                self._control(command)
        return None

    def _admit(self, command: Admit) -> Admitted | Closed | None:
        table = self.table
        slot = command.slot
        self._check_slot(command)
        if command.epoch <= table.epoch[slot]:
            log.debug("ignored, epoch %d is known: %s", command.epoch, describe(command))
            return None
        if table.phase[slot] != FREE:
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
        table.epoch[slot] = command.epoch
        pools = command.sampling.pooling is not None
        if command.num_prompt + (0 if pools else command.stopping.max_tokens) > self.max_model_len:
            asked = f"{command.num_prompt} prompt tokens + max_tokens {command.stopping.max_tokens}"
            message = f"{asked} are more than max_model_len {self.max_model_len}; lower max_tokens"
            return Closed(slot, command.epoch, CloseReason.ERROR, message)
        table.capacity[slot] = 0
        self._append_blocks(command)
        if table.capacity[slot] < length:
            raise self._violation(command, f"its blocks hold {table.capacity[slot]} of {length} tokens")
        table.open(command, tokens, left)
        return Admitted(slot, tokens, command.num_prompt, command.sampling, command.stopping, command.salt)

    def _grow(self, command: Grow) -> None:
        have, blocks = self._append_blocks(command)
        self.table.decode.grow(command.slot, have, blocks)

    def _append_blocks(self, command: Admit | Grow) -> tuple[int, Int32Array]:
        """Returns how many blocks the slot had, and the new ones."""
        table = self.table
        blocks = unpack(command, command.blocks, "blocks")
        have = int(table.capacity[command.slot]) // self.block_size
        if have + len(blocks) > table.width:
            raise self._violation(command, f"more than the {table.width} blocks that max_model_len needs")
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_blocks):
            raise self._violation(command, f"a block is outside the pool of {self.num_blocks}")
        return table.append(command.slot, blocks), blocks

    def _control(self, command: Control) -> None:
        match command.action:
            case "pause":
                self.paused = True
            case "resume":
                self.paused = False
            case "shutdown":
                self.shutdown = True
            case "update_weights":
                if self.table.phase.any():
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
        table = self.table
        budget = self.max_num_batched_tokens
        decode = table.decode
        if decode.changed:
            decode.settle(int(table.capacity.max()) // self.block_size)
        rows = decode.slots
        starts = decode.starts
        if decode.room <= 0:
            decode.room = int((table.capacity[rows] - starts).min(initial=MAX_TOKEN))
        whole = len(rows) <= budget and decode.room > 0
        if whole:
            tables = decode.tables
            counts, samples = decode.ones, decode.trues
        else:
            kept = (starts < table.capacity[rows]).nonzero()[0][:budget]
            filled = int(table.capacity.max()) // self.block_size
            rows, starts, tables = rows[kept], starts[kept], decode.tables[kept, :filled]
            counts, samples = decode.ones[: len(kept)], decode.trues[: len(kept)]
        tokens: Int32Array = table.last.take(rows)
        num_decodes = len(rows)
        pieces: list[tuple[int, int]] = []
        if table.prefilling and budget > num_decodes:
            pieces = affordable(self._pieces(budget - num_decodes, num_decodes), table.scored)
        if not num_decodes and not pieces:
            return None
        longest = decode.longest if whole else int(starts.max(initial=0))
        width = longest // self.block_size + 1
        table_rows = tables[:num_decodes, :width]
        batch = StepBatch(step, rows, starts, counts, tokens, samples, table_rows, num_decodes, plain=whole)
        if table.drafts and num_decodes:
            spare = budget - num_decodes - sum(count for _, count in pieces)
            room = np.minimum(table.left[rows], table.capacity[rows] - starts)
            found = fitting(rows, table.drafts, room, spare, table.stops)
            if found is not None:
                batch = with_drafts(batch, found, tables[:num_decodes], self.block_size)
        return self._with_prompts(batch, pieces) if pieces else batch

    def _pieces(self, room: int, rows: int) -> list[tuple[int, int]]:
        """(slot, tokens) of the prompts that the next step computes, `room` tokens at most, beside so many
        rows of the decode set."""
        table = self.table
        if table.composition is not None:
            decode = table.decode
            return table.composition.choose(rows, decode.context, bool(rows) and not decode.patient, room)
        pieces: list[tuple[int, int]] = []
        for slot in table.prefilling:
            if room == 0:
                break
            count = min(len(table.tokens[slot]) - int(table.computed[slot]), room)
            pieces.append((slot, count))
            room -= count
        return pieces

    def _with_prompts(self, batch: StepBatch, chosen: list[tuple[int, int]]) -> StepBatch:
        """The rows of a batch, followed by these (slot, tokens) of prompts."""
        table = self.table
        pieces: list[Piece] = []
        longest = 0
        for slot, count in chosen:
            start, text = int(table.computed[slot]), table.tokens[slot]
            end = start + count
            targets = None
            if slot in table.scored and start + 1 < len(text):
                targets = text[start + 1 : end + 1]
            ends, pooled = end == len(text), slot in table.pooled
            samples, of_pooled = ends and not pooled, ends if pooled else None
            pieces.append(Piece(slot, start, text[start:end], samples, targets, of_pooled))
            longest = max(longest, end)
        slots = [piece.slot for piece in pieces]
        size, width = len(batch.slots), (longest - 1) // self.block_size + 1
        if size:
            width = max(width, batch.block_tables.shape[1])
        if batch.plain:  # (its tables are the first ones of the decode set)
            table.decode.lay(slots, size, width)
            tables = table.decode.tables[: size + len(slots)]
        else:
            tables = table.blocks[[*batch.slots.tolist(), *slots]]
        return with_pieces(batch, pieces, tables, width)

    def commit(self, batch: StepBatch, result: StepResult) -> StepOutcome:
        """Takes in the tokens of a batch that was composed after the last command.

        The executor releases the slots of the outcome's closings.
        """
        return self._commit.take(batch, result)

    @property
    def hands_over(self) -> bool:
        """Whether any slot is to be handed over."""
        return bool(self.table.handovers)

    def last_chunks(self, batch: StepBatch) -> tuple[list[int], list[int]]:
        """Slots and epochs of the batch whose last chunk before their hand-over it computes, for the first
        time."""
        table = self.table
        rows = range(batch.first_prompt, len(batch.slots))
        found = [int(batch.slots[row]) for row in rows if batch.samples[row]]
        slots = [slot for slot in found if slot in table.handovers and slot not in table.repeated]
        return slots, [int(table.epoch[slot]) for slot in slots]

    def fail(self, slot: int, message: str) -> Closed:
        """The executor cannot run this slot's request: closes its epoch with reason `error`."""
        return self._close(slot, CloseReason.ERROR, message)

    # ---- what is inside

    def open_slots(self) -> list[int]:
        """Slots whose epoch is not closed."""
        return self.table.open_slots()

    def _close(self, slot: int, reason: CloseReason, message: str = "") -> Closed:
        return self.table.close(slot, reason, message)

    def _is_open(self, command: Grow | Reprioritize | Preempt | Abort) -> bool:
        """Whether the command's epoch runs.  Raises for one that was never admitted."""
        self._check_slot(command)
        last = int(self.table.epoch[command.slot])
        if command.epoch > last:
            raise self._violation(command, "this epoch was never admitted")
        if command.epoch == last and self.table.phase[command.slot] != FREE:
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
        state = f"slot {slot} is in {_PHASES[self.table.phase[slot]]}, epoch {self.table.epoch[slot]}"
        return ProtocolViolation(f"{describe(command)}: {problem} ({state})")
