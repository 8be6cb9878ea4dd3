"""What may follow in each of some rows, and how probably; and who says so."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array

_KEEP, _KEEP_ALL = 0.95, 0.998
"""What a judged guess still counts after the next one."""
_PRIOR_WEIGHT, _ALL_WEIGHT = 8.0, 2.0
"""Guesses that the prior counts as beside those of all requests, and these beside those of one."""


class Guesses(NamedTuple):
    """Of n rows, `most` drafts at most each."""

    drafts: Int32Array
    """[n, most]; what is beyond a row's count means nothing."""
    chances: npt.NDArray[np.float32]
    """[n, most]: that a draft and all before it are right. Falls in each row; 0 beyond its count."""
    counts: Int32Array
    """[n]"""


class Source(Protocol):
    """Guesses what follows in each slot, and judges its guesses by what comes."""

    @property
    def eager(self) -> bool:
        """Whether it is to be asked after each step, also where its guesses were worth nothing lately."""

    def admit(self, slot: int, tokens: Int32Array, num_prompt: int, salt: bytes = b"") -> None:
        """The slot's text so far; not valid after the call.  `salt`: as in `Drafter.admit`."""

    def release(self, slot: int) -> None:
        """Forget the slot; nothing happens if it is not known."""

    def follow(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> Guesses:
        """So many tokens more of each of these slots [n]: what follows them?  A slot may occur several times,
        its guess is then the last one.  The result is valid until the next call."""


class Judged:
    """The chances of guesses that say nothing of themselves, by position: of each slot the share that came
    true, mixed with that of all requests, mixed with a prior. Old ones count less."""

    def __init__(self, num_slots: int, most: int, prior: float = 0.7) -> None:
        self._prior = prior
        # By slot, and behind the last slot of all requests: guesses that were right, and guesses.
        self._right: npt.NDArray[np.float64] = np.zeros((num_slots + 1, most))
        self._count: npt.NDArray[np.float64] = np.zeros((num_slots + 1, most))
        self._open: dict[int, list[int]] = {}
        """By slot: what was guessed to come, of which nothing came yet."""

    def admit(self, slot: int) -> None:
        self._open.pop(slot, None)
        self._right[slot] = self._count[slot] = 0

    def judge(self, slot: int, came: list[int]) -> None:
        """What came after the last guess of this slot."""
        for place, (guess, token) in enumerate(zip(self._open.pop(slot, ()), came, strict=False)):
            for row, keep in ((slot, _KEEP), (-1, _KEEP_ALL)):
                self._right[row, place] = keep * self._right[row, place] + (guess == token)
                self._count[row, place] = keep * self._count[row, place] + 1
            if guess != token:
                break

    def note(self, slot: int, guess: list[int]) -> None:
        """This guess is judged by what comes next."""
        self._open[slot] = guess

    def chances(self, slot: int, guess: list[int]) -> npt.NDArray[np.float64]:
        """Of this guess, which is judged by what comes next."""
        self.note(slot, guess)
        found: npt.NDArray[np.float64] = self.expected(np.array([slot]), len(guess))[0]
        return found

    def expected(self, slots: npt.NDArray[np.integer], count: int) -> npt.NDArray[np.float64]:
        """[n, count]: of the next guess of each slot."""
        right, seen = self._right[:, :count], self._count[:, :count]
        of_all = (right[-1] + _PRIOR_WEIGHT * self._prior) / (seen[-1] + _PRIOR_WEIGHT)
        single = (right[slots] + _ALL_WEIGHT * of_all) / (seen[slots] + _ALL_WEIGHT)
        found: npt.NDArray[np.float64] = single.cumprod(axis=1, dtype=np.float64)
        return found
