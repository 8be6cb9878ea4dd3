"""The drafter of an executor: guesses of a source, and how many of them each step computes.

Theory. After each step the source guesses what follows in every row, and how probably (`guesses.py`).
With a fixed number (`num_speculative_tokens` of a method that was asked for) all of them are drafts.
Otherwise (`auto`) `choice.py` takes those that make most tokens per second, by what steps have cost
(`cost.py`): none where nothing is likely enough, or the step is bound by arithmetic.

*What nothing costs.* While no guess was worth a draft for some steps, the tokens of up to 8 steps are
kept and given to the source together: guesses are judged by what came all the same, and a step costs a
microsecond. The first draft, and each new request, ends that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array
from baton.drafting.choice import LEAST, choose
from baton.drafting.cost import StepCost
from baton.drafting.guesses import Guesses, Source
from baton.protocol.sampling import Sampling, Stopping

_PATIENCE = 16
"""Steps without a draft, after which guesses are made less often."""
_SELDOM = 8
"""Steps of which one guesses then, at most."""


class ChoosingDrafter:
    """A `base.Drafter`."""

    def __init__(self, source: Source, num_slots: int, *, cost: StepCost | None) -> None:
        """`cost` None: every guess is a draft."""
        self._source = source
        self._cost = cost
        self._guesses: Guesses | None = None
        self._rows: npt.NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        """By slot: the row of its guess."""
        self._kept: list[tuple[Int32Array, Int32Array, Int32Array]] = []
        """Slots, runs and tokens of steps that the source was not told of."""
        self._barren = 0
        """Steps since the last draft."""

    @property
    def cost(self) -> StepCost | None:
        return self._cost

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        self._flush()
        self._forget()
        self._barren = 0
        self._source.admit(slot, tokens, num_prompt, salt)

    def release(self, slot: int) -> None:
        self._flush()
        self._forget()
        self._source.release(slot)

    def see(self, slots: Int32Array, ends: Int32Array, tables: Int32Array, first_prompt: int) -> None:
        pass

    def after(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array, drafted: Int32Array) -> None:
        self._barren += 1
        self._forget()
        every = 1 if self._source.eager else min(max(1, self._barren // _PATIENCE), _SELDOM)
        if every > 1 or self._kept:
            self._kept.append((slots.copy(), runs.copy(), tokens.copy()))
            if len(self._kept) >= every:
                self._flush()
            return
        self._guess(slots, runs, tokens)

    def took(self, tokens: int, seconds: float) -> None:
        if self._cost is not None:
            self._cost.add(tokens, seconds)

    def propose(self, slots: Int32Array) -> dict[int, Int32Array]:
        guesses = self._guesses
        if guesses is None or not len(slots):
            return {}
        rows = self._rows[slots]
        drafts, counts = guesses.drafts, guesses.counts
        if rows.min() < 0 or len(rows) != len(counts) or (np.diff(rows) != 1).any():
            there = rows >= 0
            slots_there, rows = slots[there], rows[there]
            drafts, counts, chances = drafts[rows], counts[rows], guesses.chances[rows]
        else:
            slots_there, chances = slots, guesses.chances
        if self._cost is not None:
            chosen = self._choose(chances, counts, len(slots))
            if chosen is None:
                return {}
            counts = chosen
        found = {
            slot: drafts[row, :count].copy()
            for row, (slot, count) in enumerate(zip(slots_there.tolist(), counts.tolist(), strict=True))
            if count
        }
        if found:
            self._barren = 0
        return found

    def _choose(self, chances: npt.NDArray[np.float32], counts: Int32Array, rows: int) -> Int32Array | None:
        assert self._cost is not None
        if not counts.any() or chances[:, 0].max() <= LEAST or not self._cost.knows(rows):
            return None
        return choose(chances, rows, self._cost.table())

    def _guess(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> None:
        self._guesses = self._source.follow(slots, runs, tokens)
        self._rows[slots] = np.arange(len(slots))
        self._guessed = slots.copy()

    def _flush(self) -> None:
        """The source is told of all steps."""
        if self._kept:
            slots, runs, tokens = (np.concatenate(parts) for parts in zip(*self._kept, strict=True))
            self._kept.clear()
            self._guess(slots, runs, tokens)

    def _forget(self) -> None:
        """What was guessed is for a step that is over."""
        if self._guesses is not None:
            self._rows[self._guessed] = -1
            self._guesses = None
