"""Answers that repeat themselves, which models of few parameters do until they have no tokens left."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MAX_PATTERN = 1024


class RepetitionDetection(msgspec.Struct, kw_only=True, frozen=True):
    """When an answer ends because it repeats itself: its last tokens are a pattern, `min_count` times."""

    max_pattern_size: int = 0
    """Tokens of a pattern at most; 0: nothing is looked for."""
    min_pattern_size: int = 0
    """Tokens of a pattern at least; 0 means 1."""
    min_count: int = 0
    """From 2."""

    def problem(self) -> str | None:
        """What is wrong with it."""
        sizes = (self.min_pattern_size, self.max_pattern_size)
        if any(type(one) is not int for one in (*sizes, self.min_count)):
            return "give integers"
        if not 0 <= sizes[0] <= sizes[1] <= MAX_PATTERN:
            return f"min_pattern_size must be from 0 to max_pattern_size, and that at most {MAX_PATTERN}"
        if sizes[1] and not 2 <= self.min_count <= MAX_PATTERN:
            return f"min_count: {self.min_count} must be from 2 to {MAX_PATTERN}"
        return None

    @property
    def reach(self) -> int:
        """So many of the last tokens are looked at."""
        return max(1, self.max_pattern_size * self.min_count)

    def found(self, tokens: Sequence[int]) -> bool:
        """Whether these end so."""
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            length = size * self.min_count
            if length > len(tokens):
                return False
            if tokens[-1] == tokens[-1 - size] and tokens[-length:-size] == tokens[size - length :]:
                return True
        return False
