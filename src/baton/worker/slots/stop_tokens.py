"""The stop tokens of all slots, compared with the tokens of a step in one operation on arrays."""

from __future__ import annotations

import numpy as np

from baton.executor.base import BoolArray, Int32Array

MAX_TOKEN = (1 << 31) - 1
NO_STOP, IN_SET = -1, -2
"""Fill what stop tokens leave of the columns; the first one of a slot whose stop tokens are in a set."""
_COLUMNS = 8
"""Stop tokens a slot that are compared in one array operation; more of them go through a set."""


class StopTokens:
    def __init__(self, num_slots: int) -> None:
        self.columns: Int32Array = np.full((num_slots, _COLUMNS), NO_STOP, np.int32)
        """[num_slots, columns]"""
        self.of: list[frozenset[int]] = [frozenset()] * num_slots
        """[num_slots] the stop tokens of each slot, as a set."""
        self._many: set[int] = set()
        """Slots that have more than there are columns."""

    def set(self, slot: int, token_ids: tuple[int, ...]) -> None:
        self.columns[slot] = NO_STOP
        possible = [token for token in token_ids if 0 <= token <= MAX_TOKEN]
        self.of[slot] = frozenset(possible)
        if len(possible) <= _COLUMNS:
            self.columns[slot, : len(possible)] = possible
        else:
            self.columns[slot, 0] = IN_SET
            self._many.add(slot)

    def release(self, slot: int) -> None:
        self._many.discard(slot)

    def among(self, slots: Int32Array, tokens: Int32Array, columns: Int32Array | None = None) -> BoolArray:
        """[n] which of the tokens are stop tokens of their slots.  `columns`: of these slots, if known."""
        if columns is None:
            columns = self.columns[slots]
        found: BoolArray = (columns == tokens[:, None]).any(axis=1)
        if self._many:
            for index, slot in enumerate(slots.tolist()):
                if slot in self._many:
                    found[index] = int(tokens[index]) in self.of[slot]
        return found
