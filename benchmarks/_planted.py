"""Guesses that know the answer, and err on purpose, each draft by itself with the same chance.

A draft model and an MTP layer compute all the same, so they cost what they cost: what they say is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array
from baton.drafting.guesses import Guesses, Judged
from baton.drafting.models.model_drafter import DraftModel
from baton.drafting.models.mtp_drafter import MtpModel, States


class Planted:
    """A `drafting.guesses.Source` that knows the answers."""

    eager = False

    def __init__(self, answers: Sequence[Sequence[int]], right: float, vocab: int, most: int) -> None:
        self._answers = [np.array(answer, np.int32) for answer in answers]
        self._right, self._vocab, self._most = right, vocab, most
        self._judged = Judged(len(answers), most)
        self._done = [0] * len(answers)
        self._random = np.random.default_rng(1)

    def admit(self, slot: int, tokens: Int32Array, num_prompt: int, salt: bytes = b"") -> None:
        self._judged.admit(slot)
        self._done[slot] = 0

    def release(self, slot: int) -> None:
        pass

    def follow(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> Guesses:
        n = len(slots)
        found = Guesses(
            np.zeros((n, self._most), np.int32), np.zeros((n, self._most), np.float32), np.zeros(n, np.int32)
        )
        first = 0
        for row, (slot, run) in enumerate(zip(slots.tolist(), runs.tolist(), strict=True)):
            self._judged.judge(slot, tokens[first : first + run].tolist())
            first += run
            self._done[slot] += run
            guess = self._answers[slot][self._done[slot] :][: self._most].copy()
            wrong = self._random.random(len(guess)) >= self._right
            guess[wrong] = (guess[wrong] + 1) % self._vocab
            count = len(guess)
            found.drafts[row, :count] = guess
            found.chances[row, :count] = self._judged.chances(slot, guess.tolist())
            found.counts[row] = count
        return found


class Answers:
    """What the slots of a bench say, and what is said in place of it."""

    def __init__(self, blocks: int, vocab: int) -> None:
        """`blocks` of each slot, in the slots' order."""
        self._blocks, self._vocab = blocks, vocab
        self.texts: list[list[int]] = []
        """Of each slot, to the end of its answer."""
        self.right = 1.0
        self._random = np.random.default_rng(1)

    def plant(self, found: Int32Array, tables: Int32Array, places: Int32Array) -> None:
        """Replaces the tokens `found` [n], which rows with these block tables are to have at these places."""
        for row, place in enumerate(places.tolist()):
            text = self.texts[int(tables[row, 0]) // self._blocks]
            right = place < len(text) and self._random.random() < self.right
            found[row] = text[place] if right else (found[row] + 1) % self._vocab


class PlantedModel:
    """A `drafting.models.model_drafter.DraftModel`."""

    def __init__(self, model: DraftModel, answers: Answers) -> None:
        self._model, self._answers = model, answers
        self.max_len = model.max_len

    def compute(
        self, tokens: Int32Array, starts: Int32Array, counts: Int32Array, tables: Int32Array, wanted: bool
    ) -> Int32Array:
        found = self._model.compute(tokens, starts, counts, tables, wanted)
        if len(found):
            self._answers.plant(found, tables, starts + counts)
        return found


class PlantedMtp:
    """A `drafting.models.mtp_drafter.MtpModel`, whose texts are computed here from their first token on."""

    def __init__(self, model: MtpModel, answers: Answers) -> None:
        self._model, self._answers = model, answers
        self.max_len = model.max_len

    def keep(self, states: States) -> States:
        return self._model.keep(states)

    def compute(
        self,
        tokens: Int32Array,
        states: Sequence[States],
        starts: Int32Array,
        counts: Int32Array,
        tables: Int32Array,
        wanted: npt.NDArray[np.int64],
    ) -> tuple[Int32Array, States]:
        found, own = self._model.compute(tokens, states, starts, counts, tables, wanted)
        self._answers.plant(found, tables[wanted], (starts + counts + 1)[wanted])
        return found, own
