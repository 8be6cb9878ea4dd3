"""What a worker knows of each slot, and the three ways from one phase to the next.

Theory.  A slot is FREE, or computes its tokens (PREFILL), or generates (DECODE):

    FREE ──open──► PREFILL ──decodes──► DECODE
      ▲               │                    │
      └─────close─────┴────────────────────┘

What a step needs of all slots stands in arrays with one entry a slot.  The decode set (`decode_set.py`) keeps
the same as rows of a batch from step to step, so hundreds of slots cost a few array operations.  What few
slots have stands in dictionaries and sets by slot, and `close` clears it all: what is left in the arrays
means nothing once a slot is free.

Nothing is checked here.  `slots.py` checks commands and composes steps; `commit.py` takes in what steps gave.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.executor.base import BoolArray, Int32Array
from baton.protocol.messages.commands import Admit
from baton.protocol.messages.reports import Closed, CloseReason
from baton.worker.slots.composition import Composition, Prompt
from baton.worker.slots.decode_set import COMPUTED, LEFT, UNSTOPPABLE, DecodeSet
from baton.worker.slots.stop_tokens import StopTokens

FREE, PREFILL, DECODE = 0, 1, 2


class SlotTable:
    """Of one worker.  Sizes as in `InstanceConfig`."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, composition: Composition | None
    ) -> None:
        n = max_num_seqs
        self.block_size = block_size
        self.width = -(-max_model_len // block_size)
        """Blocks of a slot, at most."""
        self.phase: npt.NDArray[np.int8] = np.zeros(n, np.int8)
        self.epoch: Int32Array = np.full(n, -1, np.int32)
        """The last one admitted."""
        self.counters: Int32Array = np.zeros((n, 3), np.int32)
        """Leading tokens whose KV is in the blocks, tokens that may still be generated, and how many of those
        cannot be a stop: together, as each step changes them together."""
        self.capacity: Int32Array = np.zeros(n, np.int32)
        """Tokens that the blocks hold."""
        self.last: Int32Array = np.zeros(n, np.int32)
        """The newest token."""
        self.blocks: Int32Array = np.zeros((n, self.width), np.int32)
        """Each slot's, by position."""
        self.stops = StopTokens(n)
        self.patient: BoolArray = np.zeros(n, np.bool_)
        self.decode = DecodeSet(self.counters, self.blocks, self.epoch, self.stops.columns, self.patient)
        self.drafts: dict[int, Int32Array] = {}
        """For the next step."""
        self.prefilling: list[int] = []
        """In order of admission."""
        self.tokens: dict[int, Int32Array] = {}
        """Of slots in PREFILL."""
        self.scored: dict[int, int] = {}
        """In PREFILL: how many log-probabilities of each token they want."""
        self.pooled: set[int] = set()
        """They close when their prompt is computed, without a token."""
        self.handovers: set[int] = set()
        """They close after their first sampled token."""
        self.repeated: set[int] = set()
        """Of these: their last chunk was computed, and they have no token yet."""
        self.composition = composition

    @property  # (views, made when they are needed: a copy of the table has its own)
    def computed(self) -> Int32Array:
        return self.counters[:, COMPUTED]

    @property
    def left(self) -> Int32Array:
        return self.counters[:, LEFT]

    @property
    def unstoppable(self) -> Int32Array:
        return self.counters[:, UNSTOPPABLE]

    def open_slots(self) -> list[int]:
        """Slots whose epoch is not closed."""
        return [int(slot) for slot in np.flatnonzero(self.phase)]

    def open(self, command: Admit, tokens: Int32Array, left: int) -> None:
        """A request takes a free slot, which has its epoch and blocks already.  `left`: tokens that it may
        generate."""
        slot, length = command.slot, len(tokens)
        self.phase[slot] = PREFILL
        self.computed[slot] = command.num_computed
        self.left[slot] = left
        self.unstoppable[slot] = min(command.stopping.min_tokens - (length - command.num_prompt), left)
        self.stops.set(slot, command.stopping.stop_token_ids)
        self.tokens[slot] = tokens
        if command.sampling.prompt_logprobs is not None and length == command.num_prompt:
            # (With generated tokens an earlier epoch has reported the whole prompt.)
            self.scored[slot] = command.sampling.prompt_logprobs
        self.patient[slot] = command.patient
        if command.handover:
            self.handovers.add(slot)
        if command.sampling.pooling is not None:
            self.pooled.add(slot)
        self.prefilling.append(slot)
        if self.composition is not None:
            self.composition.admit(
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

    def append(self, slot: int, blocks: Int32Array) -> int:
        """Gives a slot these blocks behind those that it has.  Returns how many those are."""
        have = int(self.capacity[slot]) // self.block_size
        self.blocks[slot, have : have + len(blocks)] = blocks
        self.capacity[slot] += len(blocks) * self.block_size
        return have

    def decodes(self, slot: int) -> None:
        """Its tokens are computed, and the first one behind them is sampled."""
        self.leave_prefill(slot)
        self.phase[slot] = DECODE
        self.decode.enter(slot)

    def leave_prefill(self, slot: int) -> None:
        self.prefilling.remove(slot)
        if self.composition is not None:
            self.composition.leave(slot)
        del self.tokens[slot]
        self.scored.pop(slot, None)

    def close(self, slot: int, reason: CloseReason, message: str = "") -> Closed:
        """The slot's epoch is over."""
        if self.phase[slot] == DECODE:
            self.decode.leave(slot)
        else:
            self.leave_prefill(slot)
        self.phase[slot] = FREE
        self.stops.release(slot)
        self.handovers.discard(slot)
        self.repeated.discard(slot)
        self.pooled.discard(slot)
        self.drafts.pop(slot, None)
        return Closed(slot, int(self.epoch[slot]), reason, message)
