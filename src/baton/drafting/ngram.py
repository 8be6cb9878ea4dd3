"""Drafts from a request's own text: what followed its last tokens when they last stood there.

Theory. An answer often quotes: the prompt (edits, extraction, retrieval) or itself (code, tables, JSON).
The longest earlier place is looked for at which the last tokens stood, of 2 to 16 tokens; of equal ones the
newest. What followed it is the guess; a guess that would go beyond the end of the text goes on with itself,
so a text that repeats itself is drafted as far as one likes.

*The index* (`native/ngram.cpp`). For each n-gram of up to 3 tokens a table has its newest place, and a link
leads from each place of three tokens to the one before. A look-up follows 16 links at most, so a token
costs the same whatever the text's length: about 0.1 us. Exactly, the guess is the longest match among the
newest 16 places of the last 3 tokens and the newest place of the last 2 (and 1). Memory: 16 to 24 bytes for
each token there is room for, and there is room for twice the text at most, until the request ends.

*Behind a difference.* An answer that corrects what it quotes differs from it in a token, and there is no
match of two tokens before two more have come. So where a guess on a match of 4 tokens or more turns out
wrong, a second guess goes on behind it. It takes the new token for one in place of the guessed one; or, if
the new token is the one behind the guessed one, takes that one for left out; or, if the guessed one comes
next, takes the new token for inserted. The second guess ends at the next wrong token, unless two or more were
right since the last one, and as soon as it has been right for as long as a match can be. Of both guesses the
likelier one counts.

*The chance* that a guess is right is measured by the length of its match: for each length (in classes) the
guesses that were right, of this request, mixed with those of all requests, mixed with a prior. Old ones count
less. A guess behind a difference has classes of its own, by the tokens that were right since then. The j-th
draft of a guess has a match of j tokens more, if those before it are right. Guesses are judged by the tokens
that come, whether they were drafts of a step or not: so a request's chances are known without computing a
single draft in vain, and where nothing is ever right, nothing is tried.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array
from baton.drafting.guesses import Guesses

NgramKernel = Callable[..., None]
"""(options, learnt, texts, slots, runs, tokens: addresses; rows; drafts, chances, counts: addresses); see
`native/ngram.cpp`."""

Float32Array = npt.NDArray[np.float32]

_DEPTH = 16
_LEAST_ROOM = 512
"""Tokens."""
_MOST_SPARE = 1 << 14
_LEVELS = (1, 2, 3, 4, 5, 7, 9, 13, 16)
"""The shortest match of each class."""
_BEHIND = (0, 1, 2, 4, 8)
"""The fewest tokens behind a difference of each class."""
_PRIOR = (0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.3, 0.5, 0.6, 0.7, 0.8)
"""Of both."""
_PRIOR_WEIGHT, _ALL_WEIGHT = 8.0, 3.0
"""Guesses that the prior counts as beside those of all requests, and these beside those of one."""
_KEEP, _KEEP_ALL = 0.93, 0.998
"""What a judged guess still counts after the next one."""
_MOST_PLACES = 1 << 29
_COLUMNS = 13
"""Of `Text` in native/text.h."""


@dataclass(slots=True)
class _Arrays:
    """Of one slot; `texts` has their addresses."""

    tokens: Int32Array
    links: Int32Array
    table: Int32Array


class NgramGuesses:
    """The texts of all slots.  See `guesses.Source`."""

    eager = False

    def __init__(
        self, kernel: NgramKernel, num_slots: int, *, most: int, shortest: int = 2, longest: int = 16
    ) -> None:
        """`most`: drafts of a guess.  `shortest`, `longest`: tokens of a match that counts, and that is told
        from a longer one."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"a match of {shortest} to {longest} tokens: give 1 <= shortest <= longest")
        self._kernel = kernel
        self.most = most
        key = min(3, longest)
        levels = len(_PRIOR)
        self._options: npt.NDArray[np.int64] = np.array(
            (shortest, key, longest, _DEPTH, most, 1, levels), np.int64
        )
        of_match = np.searchsorted(_LEVELS, np.arange(longest + 1), side="right") - 1
        behind = np.searchsorted(_BEHIND, np.arange(longest), side="right") - 1 + len(_LEVELS)
        self._level_of: Int32Array = np.concatenate((of_match, behind)).astype(np.int32)
        self._prior: Float32Array = np.array(_PRIOR, np.float32)
        self._all: Float32Array = np.zeros((levels, 2), np.float32)
        self._judged: Float32Array = np.zeros((num_slots, levels, 2), np.float32)
        addresses = (array.ctypes.data for array in (self._level_of, self._prior, self._all))
        learnt = struct.pack("=3q4f", *addresses, _PRIOR_WEIGHT, _ALL_WEIGHT, _KEEP, _KEEP_ALL)
        self._learnt: npt.NDArray[np.uint8] = np.frombuffer(learnt, np.uint8)
        # Columns as in native/text.h.
        self._texts: npt.NDArray[np.int64] = np.zeros((num_slots, _COLUMNS), np.int64)
        self._texts[:, 3] = self._judged.ctypes.data + self._judged.strides[0] * np.arange(num_slots)
        self._room: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self._arrays: dict[int, _Arrays] = {}
        self._fixed = self._options.ctypes.data, self._learnt.ctypes.data, self._texts.ctypes.data
        self._make_scratch(num_slots, 4 * num_slots)

    @property
    def nbytes(self) -> int:
        """Of the texts."""
        return sum(x.tokens.nbytes + x.links.nbytes + x.table.nbytes for x in self._arrays.values())

    def admit(self, slot: int, tokens: Int32Array, num_prompt: int, salt: bytes = b"") -> None:
        self.release(slot)
        self._judged[slot] = 0
        self._make(slot, tokens)

    def release(self, slot: int) -> None:
        if self._arrays.pop(slot, None) is not None:
            self._texts[slot, :3] = 0
            self._texts[slot, 4:] = 0
            self._room[slot] = 0

    def follow(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> Guesses:
        if len(slots) == 1:
            slot = slots.item(0)
            full = self._texts.item(slot, 4) + len(tokens) > self._room.item(slot)
        else:  # (perhaps, for one of them)
            full = bool((self._texts[slots, 4] + len(tokens) > self._room[slots]).any())
        if full:
            self._grow(slots, runs)
        return self._call(slots, runs, tokens)

    def length(self, slot: int) -> int:
        """Tokens of its text."""
        return int(self._texts[slot, 4])

    def text(self, slot: int) -> Int32Array:
        """Valid until the slot is told of more, or released."""
        return self._arrays[slot].tokens[: self.length(slot)]

    @property
    def texts_address(self) -> int:
        """Of `Text` in native/text.h, by slot."""
        return int(self._fixed[2])

    @property
    def addresses(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """What the last call was given (slots, runs, tokens), and its results (drafts, chances, counts)."""
        return self._before[3:], self._behind

    def _grow(self, slots: Int32Array, runs: Int32Array) -> None:
        wanted: dict[int, int] = {}
        for slot, run in zip(slots.tolist(), runs.tolist(), strict=True):
            wanted[slot] = wanted.get(slot, 0) + run
        for slot, run in wanted.items():
            if self.length(slot) + run > self._room[slot]:
                self._make(slot, self.text(slot), run)

    def _make(self, slot: int, text: Int32Array, more: int = 0) -> None:
        """Memory for the text and as much again, and the text in it."""
        length = len(text) + more
        room = max(_LEAST_ROOM, length + min(length, _MOST_SPARE))
        if room >= _MOST_PLACES:
            raise ValueError(f"a text of {length} tokens: at most {_MOST_PLACES // 2} are drafted for")
        entries = 1 << (2 * room - 1).bit_length()
        arrays = _Arrays(np.empty(room, np.int32), np.empty(room + 1, np.int32), np.zeros(entries, np.int32))
        self._arrays[slot] = arrays
        self._texts[slot, :3] = arrays.tokens.ctypes.data, arrays.links.ctypes.data, arrays.table.ctypes.data
        self._texts[slot, 4:8] = 0, entries - 1, 0, 0
        self._room[slot] = room
        if len(text):
            self._options[5] = 0
            self._call(np.array([slot], np.int32), np.array([len(text)], np.int32), text)
            self._options[5] = 1

    def _call(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> Guesses:
        rows, size = len(slots), len(tokens)
        if size > len(self._given) or rows > self._rows.shape[1]:
            self._make_scratch(max(rows, self._rows.shape[1]), max(size, 2 * len(self._given)))
        self._rows[0, :rows] = slots
        self._rows[1, :rows] = runs
        self._given[:size] = tokens
        self._kernel(*self._before, rows, *self._behind)
        return Guesses(self._drafts[:rows], self._chances[:rows], self._rows[2, :rows])

    def _make_scratch(self, rows: int, tokens: int) -> None:
        """Arguments and results have a fixed place: to ask for an array's address takes a microsecond."""
        self._given: Int32Array = np.empty(tokens, np.int32)
        self._rows: Int32Array = np.empty((3, rows), np.int32)
        self._drafts: Int32Array = np.empty((rows, self.most), np.int32)
        self._chances: Float32Array = np.empty((rows, self.most), np.float32)
        first = self._rows.ctypes.data
        stride = self._rows.strides[0]
        self._before = *self._fixed, first, first + stride, self._given.ctypes.data
        self._behind = self._drafts.ctypes.data, self._chances.ctypes.data, first + 2 * stride
