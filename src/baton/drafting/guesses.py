"""What may follow in each of some rows, and how probably; and who says so."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array

_KEEP = 0.98
"""What a judged guess still counts after the next one."""
_PRIOR_WEIGHT = 1.0
"""Guesses that the prior counts as."""


class Guesses(NamedTuple):
    """Of n rows, `most` drafts at most each."""

    drafts: Int32Array
    """[n, most]; what is beyond a row's count means nothing."""
    chances: npt.NDArray[np.float32]
    """[n, most]: that a draft and all before it are right. Falls in each row; 0 or nothing beyond its
    count."""
    counts: Int32Array
    """[n]"""


class Source(Protocol):
    """Guesses what follows in each slot, and judges its guesses by what comes."""

    @property
    def eager(self) -> bool:
        """Whether it is to be asked after each step, also where its guesses were worth nothing lately."""

    def admit(self, slot: int, tokens: Int32Array, num_prompt: int) -> None:
        """The slot's text so far; not valid after the call."""

    def release(self, slot: int) -> None:
        """Forget the slot; nothing happens if it is not known."""

    def follow(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> Guesses:
        """So many tokens more of each of these slots [n]: what follows them?  A slot may occur several times,
        its guess is then the last one.  The result is valid until the next call."""


class Judged:
    """The chances of guesses that say nothing of themselves, by position: of each slot the share that came
    true lately, mixed with a prior."""

    def __init__(self, num_slots: int, most: int, prior: float = 0.7) -> None:
        self._prior = prior
        self._right: npt.NDArray[np.float64] = np.zeros((num_slots, most))
        self._all: npt.NDArray[np.float64] = np.zeros((num_slots, most))
        self._open: dict[int, list[int]] = {}
        """By slot: what was guessed to come, of which nothing came yet."""

    def admit(self, slot: int) -> None:
        self._open.pop(slot, None)
        self._right[slot] = self._all[slot] = 0

    def judge(self, slot: int, came: list[int]) -> None:
        """What came after the last guess of this slot."""
        for place, (guess, token) in enumerate(zip(self._open.pop(slot, ()), came, strict=False)):
            self._right[slot, place] = _KEEP * self._right[slot, place] + (guess == token)
            self._all[slot, place] = _KEEP * self._all[slot, place] + 1
            if guess != token:
                break

    def chances(self, slot: int, guess: list[int]) -> npt.NDArray[np.float64]:
        """Of this guess, which is judged by what comes next."""
        self._open[slot] = guess
        count = len(guess)
        single = (self._right[slot, :count] + _PRIOR_WEIGHT * self._prior) / (
            self._all[slot, :count] + _PRIOR_WEIGHT
        )
        found: npt.NDArray[np.float64] = single.cumprod(dtype=np.float64)
        return found
