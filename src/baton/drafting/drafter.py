"""The drafter of an executor: guesses of a source, and how many of them each step computes.

Theory. After each step the source guesses what follows in every row, and how probably (`guesses.py`).
With a fixed number (`num_speculative_tokens` of a method that was asked for) all of them are drafts.
Otherwise (`auto`) `choice.py` takes those that make most tokens per second, by what steps have cost
(`cost.py`): none where nothing is likely enough, or the step is bound by arithmetic.

*What nothing costs.* While no guess was worth a draft for some steps, the tokens of up to 8 steps are
kept and given to the source together, and one of them is measured: guesses are judged by what came all the
same, and a step costs some microseconds. The first draft, and each new request, ends that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array
from baton.drafting.choice import choose
from baton.drafting.cost import StepCost
from baton.drafting.guesses import Guesses, Source
from baton.protocol.params.sampling import Sampling, Stopping

_PATIENCE = 16
"""Steps without a draft, after which guesses are made less often."""
_SELDOM = 8
"""Steps of which one guesses then, at most."""


class ChoosingDrafter:
    """A `base.Drafter`."""

    def __init__(
        self,
        source: Source,
        *,
        cost: StepCost | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`cost` None: every guess is a draft."""
        self._clock = clock
        self._own_s = self._since = 0.0
        """What guessing and choosing took after the last step, and when it began."""
        self._source = source
        self._cost = cost
        self._guesses: Guesses | None = None
        self._guessed: list[int] = []
        """The slots of its rows; one that occurs twice has its guess in the last of them."""
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

    def after(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> None:
        self._since = self._clock()
        self._barren += 1
        self._forget()
        every = 1 if self._source.eager else min(max(1, self._barren // _PATIENCE), _SELDOM)
        if every > 1 or self._kept:
            self._kept.append((slots, runs, tokens))
            if len(self._kept) >= every:
                self._flush()
            return
        self._guess(slots, runs, tokens)

    def took(self, tokens: int, seconds: float) -> None:
        cost = self._cost
        if cost is None or (self._barren > _PATIENCE and self._barren % _SELDOM and cost.knows(tokens)):
            return
        cost.add(tokens, seconds + self._own_s)

    def propose(self, slots: Int32Array) -> dict[int, Int32Array]:
        found = self._propose(slots)
        self._own_s = self._clock() - self._since
        return found

    def _propose(self, slots: Int32Array) -> dict[int, Int32Array]:
        guesses = self._guesses
        if guesses is None or not len(slots):
            return {}
        wanted: list[int] = slots.tolist()
        drafts, chances, counts = guesses.drafts, guesses.chances, guesses.counts
        if wanted != self._guessed:
            row_of = {slot: row for row, slot in enumerate(self._guessed)}
            wanted = [slot for slot in wanted if slot in row_of]
            rows = [row_of[slot] for slot in wanted]
            drafts, chances, counts = drafts[rows], chances[rows], counts[rows]
        numbers: list[int] = counts.tolist()
        if self._cost is not None:
            chosen = self._choose(chances, numbers, len(slots))
            if chosen is None:
                return {}
            numbers = chosen
        found = {
            slot: drafts[row, :number].copy()
            for row, (slot, number) in enumerate(zip(wanted, numbers, strict=True))
            if number
        }
        if found:
            self._barren = 0
        return found

    def _choose(self, chances: npt.NDArray[np.float32], counts: list[int], rows: int) -> list[int] | None:
        assert self._cost is not None
        if not any(counts) or not self._cost.knows(rows):
            return None
        return choose(chances, rows, self._cost.table())

    def _guess(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> None:
        self._guesses = self._source.follow(slots, runs, tokens)
        self._guessed = slots.tolist()

    def _flush(self) -> None:
        """The source is told of all steps."""
        if self._kept:
            slots, runs, tokens = (np.concatenate(parts) for parts in zip(*self._kept, strict=True))
            self._kept.clear()
            self._guess(slots, runs, tokens)

    def _forget(self) -> None:
        """What was guessed is for a step that is over."""
        self._guesses = None
