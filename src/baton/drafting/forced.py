"""Drafts that a grammar forces: where an answer may go on in one way only, that is what follows.

Theory. In JSON of a known schema most bytes are no choice: after `{"na` comes `me"`. What a grammar forces is
bytes; which tokens the model chooses for them is a guess (`grammar/spelling.py`), so it is judged by what
comes, like any other. Of a row that has two guesses, the one that promises more tokens is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from baton.drafting.base import Int32Array
from baton.drafting.guesses import Guesses, Judged, Source

Forced = Callable[[Iterable[int]], dict[int, list[int]]]
"""`grammar.masks.Masks.forced`: slots → those that have a forced text, and its tokens."""

_PRIOR = 0.8


class WithForced:
    """A `guesses.Source`: another one, and what is forced."""

    def __init__(
        self, source: Source, forced: Forced, any_constrained: Callable[[], bool], num_slots: int, most: int
    ) -> None:
        """`any_constrained`: whether any slot has a grammar."""
        self._source = source
        self._forced = forced
        self._any = any_constrained
        self._most = most
        self._judged = Judged(num_slots, most, prior=_PRIOR)
        self._guessed: set[int] = set()
        """Slots with a guess that nobody has judged."""

    @property
    def eager(self) -> bool:
        return self._source.eager or self._any()

    def admit(self, slot: int, tokens: Int32Array, num_prompt: int, salt: bytes = b"") -> None:
        self._source.admit(slot, tokens, num_prompt, salt)
        self._judged.admit(slot)
        self._guessed.discard(slot)

    def release(self, slot: int) -> None:
        self._source.release(slot)
        self._guessed.discard(slot)

    def follow(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> Guesses:
        guesses = self._source.follow(slots, runs, tokens)
        if self._guessed:
            self._judge(slots, runs, tokens)
        if not self._any():
            return guesses
        found = self._forced(slots.tolist())
        for row, slot in enumerate(slots.tolist()):
            forced = found.get(slot, [])[: self._most]
            if not forced:
                continue
            chances = self._judged.chances(slot, forced)
            self._guessed.add(slot)
            if chances.sum() > guesses.chances[row, : guesses.counts[row]].sum():
                count = len(forced)
                guesses.drafts[row, :count] = forced
                guesses.chances[row, :count] = chances
                guesses.chances[row, count:] = 0
                guesses.counts[row] = count
        return guesses

    def _judge(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> None:
        ends = np.cumsum(runs)
        for slot, end, run in zip(slots.tolist(), ends.tolist(), runs.tolist(), strict=True):
            if slot in self._guessed:
                self._guessed.discard(slot)
                self._judged.judge(slot, tokens[end - run : end].tolist())
