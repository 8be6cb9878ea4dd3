"""Rows of masks: what fills them, and what is changed in them afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

Bits = npt.NDArray[np.uint32]


class Asked(NamedTuple):
    """A row that is to be filled."""

    matcher: LLMatcher
    row: int
    lexer: int
    """Of the matcher; several share one."""
    ends: tuple[int, ...]
    """Tokens that end the answer."""
    stays: bool
    """Whether the answer goes on wherever it can."""


class Filling:
    """`threads`: that fill rows of different lexers side by side."""

    def __init__(self, vocab_size: int, threads: int) -> None:
        self._vocab_size = vocab_size
        self._threads = threads
        self._executor: LLExecutor | None = None

    def compute(self, masks: Bits, rows: list[Asked]) -> None:
        """Which tokens the matchers let come next; a matcher may fail (`is_error`)."""
        width = 4 * masks.shape[1]
        if len(rows) < 2 or self._threads == 1:
            for asked in rows:
                asked.matcher.unsafe_compute_mask_ptr(masks.ctypes.data + asked.row * width, width)
        else:
            if self._executor is None:
                self._executor = LLExecutor(self._threads)
            # (Each thread takes rows that follow each other: then they meet at few lexers' locks.)
            ordered = [(one.matcher, one.row) for one in sorted(rows, key=lambda asked: asked.lexer)]
            self._executor.unsafe_compute_mask_ptr(ordered, masks.ctypes.data, width, len(masks))

    def set_ends(self, masks: Bits, rows: Iterable[Asked]) -> None:
        """Lets these answers end, or not: changes what `compute` has filled."""
        word, bit = self._vocab_size >> 5, 1 << (self._vocab_size & 31)
        staying: dict[tuple[int, ...], list[int]] = {}
        for asked in rows:
            if asked.stays:
                staying.setdefault(asked.ends, []).append(asked.row)
            last: int = masks.item(asked.row, word)
            if last & bit:
                masks[asked.row, word] = last & ~bit
                for token in asked.ends:
                    masks[asked.row, token >> 5] |= np.uint32(1 << (token & 31))
        for ends, group in staying.items():
            _keep_on(masks, ends, group)


def allows(masks: Bits, row: int, token: int) -> bool:
    """Whether the token is in a row."""
    word: int = masks.item(row, token >> 5)
    return bool(word >> (token & 31) & 1)


def _keep_on(masks: Bits, ends: tuple[int, ...], rows: list[int]) -> None:
    """Takes the ends out of these rows, where something else is left."""
    tokens = np.array(ends, np.int64)
    bits = np.left_shift(np.uint32(1), (tokens & 31).astype(np.uint32))
    numbers = np.array(rows, np.int64)
    found = (masks[np.ix_(numbers, tokens >> 5)] & bits).any(axis=1)
    for row in numbers[found].tolist():
        kept = masks[row].copy()
        for token in ends:
            kept[token >> 5] &= ~np.uint32(1 << (token & 31))
        if kept.any():
            masks[row] = kept
