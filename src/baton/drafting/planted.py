"""Drafts of a known quality: some right, some wrong, by a seed; for the simulator, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from baton.drafting.base import Int32Array
from baton.protocol.params.sampling import Sampling, Stopping

Answer = Callable[[int, Sequence[int], int], Sequence[int]]
"""(slot, its tokens so far, a number) → up to so many tokens that follow them, as the model will say."""


class PlantedDrafter:
    """A `base.Drafter` that knows the answers: each of its drafts is right with the same chance."""

    def __init__(
        self, answer: Answer, *, most: int, right: float, vocab_size: int, seed: int = 0, varied: bool = False
    ) -> None:
        """`most`: drafts of a slot in a step.  `right`: the chance of each to be right.  `varied`: a slot has
        any number of drafts from none to `most`.  What is drawn depends on the seed, and on the slot and the
        number of its tokens."""
        self._answer = answer
        self._most, self._right, self._varied = most, right, varied
        self._vocab_size, self._seed = vocab_size, seed
        self._tokens: dict[int, list[int]] = {}

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        self._tokens[slot] = tokens.tolist()

    def release(self, slot: int) -> None:
        self._tokens.pop(slot, None)

    def see(self, slots: Int32Array, ends: Int32Array, tables: Int32Array, first_prompt: int) -> None:
        pass

    def after(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> None:
        given: list[int] = tokens.tolist()
        first = 0
        for slot, run in zip(slots.tolist(), runs.tolist(), strict=True):
            self._tokens[slot] += given[first : first + run]
            first += run

    def took(self, tokens: int, seconds: float) -> None:
        pass

    def propose(self, slots: Int32Array) -> dict[int, Int32Array]:
        found: dict[int, Int32Array] = {}
        for slot in slots.tolist():
            tokens = self._tokens[slot]
            random = Random((self._seed << 40) + (slot << 32) + len(tokens))
            count = random.randint(0, self._most) if self._varied else self._most
            drafts = list(self._answer(slot, tokens, count))
            for place, token in enumerate(drafts):
                if random.random() >= self._right:
                    drafts[place] = (token + random.randrange(1, max(self._vocab_size, 2))) % self._vocab_size
            if drafts:
                found[slot] = np.array(drafts, np.int32)
        return found
