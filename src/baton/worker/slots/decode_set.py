"""The slots that decode, as rows of a batch: what a step of one token for each of them needs.

Theory.  Most steps give every decoding slot one token and end none of them.  All that such a step needs is
kept here row by row, in the order in which they began, and what has to be asked of all rows (has each a block
for its token? is one of them at its end?) is a number that goes down by one.

A slot that enters or leaves does not cost a new set.  `enter` and `leave` note it; `settle`, before the next
step is composed, writes the tables of those that entered behind the others and moves up what is behind those
that left.
Only the few numbers of each row are gathered anew.  The tables have a row for every slot there is, so a step
that also computes prompts lays theirs behind those of the set, and copies none of these.
"""

from __future__ import annotations

import numpy as np

from baton.executor.base import BoolArray, Int32Array
from baton.worker.slots.stop_tokens import MAX_TOKEN, NO_STOP

COMPUTED, LEFT, UNSTOPPABLE = 0, 1, 2
"""Columns of the counters of slots."""
SAMPLED: Int32Array = np.array([0, -1, -1], np.int32)
"""What a sampled token adds to them, beside what was computed."""
_DECODED: Int32Array = np.array([1, -1, -1], np.int32)
"""What a decode step adds to them."""


class DecodeSet:
    """Rows of decoding slots.  The arrays given belong to `SlotTable`, with an entry for every slot."""

    def __init__(
        self,
        counters: Int32Array,
        tables: Int32Array,
        epochs: Int32Array,
        stops: Int32Array,
        patient: BoolArray,
    ) -> None:
        self._of_slots = counters, epochs, stops, patient
        self._tables_of_slots = tables
        self._entering: list[int] = []
        self._leaving: list[int] = []
        self._reread = False
        """Whether numbers of its slots are others than it has."""
        self.changed = False
        """Whether `settle` has anything to do."""
        self.row_of: Int32Array = np.full(len(tables), -1, np.int32)
        """By slot; -1: it has none."""
        self.tables: Int32Array = np.zeros_like(tables)
        """Those of the set, then room for others."""
        self._gather(np.empty(0, np.int32))

    def enter(self, slot: int) -> None:
        """It has finished its prompt."""
        self._entering.append(slot)
        self.changed = True

    def leave(self, slot: int) -> None:
        if slot in self._entering:
            self._entering.remove(slot)
        else:
            self._leaving.append(slot)
        self.changed = self._reread or bool(self._entering or self._leaving)

    def reread(self) -> None:
        """What the arrays say of a slot has changed."""
        self._reread = self.changed = True

    def grow(self, slot: int, first: int, blocks: Int32Array) -> None:
        """Its table has these blocks, from column `first` on.  (`room` is still true: at least so much.)"""
        row = int(self.row_of[slot])
        if row >= 0:
            self.tables[row, first : first + len(blocks)] = blocks

    def settle(self, columns: int) -> None:
        """Gives rows to the slots that entered and takes back those of the slots that left.  No earlier batch
        is used any more.  `columns`: of the tables, so many at most mean anything."""
        slots = self.slots
        if self._leaving:
            rows = self.row_of[self._leaving]
            self.row_of[self._leaving] = -1
            kept = np.ones(len(slots), np.bool_)
            kept[rows] = False
            slots = slots[kept]
            self._move_up(int(rows.min()), kept, columns)
            self._leaving.clear()
        if self._entering:
            slots = np.concatenate((slots, np.array(self._entering, np.int32)))
            self.lay(self._entering, len(slots) - len(self._entering), self.tables.shape[1])
            self._entering.clear()
        self.row_of[slots] = np.arange(len(slots))
        self._gather(slots)
        self.changed = self._reread = False

    def _move_up(self, first: int, kept: BoolArray, columns: int) -> None:
        """From the row `first` on only these are kept."""
        behind = kept[first:].nonzero()[0] + first
        self.tables[first : first + len(behind), :columns] = self.tables[behind, :columns]

    def lay(self, slots: list[int], row: int, columns: int) -> None:
        """Writes the tables of these slots from that row on."""
        self.tables[row : row + len(slots), :columns] = self._tables_of_slots[slots, :columns]

    def _gather(self, slots: Int32Array) -> None:
        counters, epochs, stops, patient = self._of_slots
        self.slots = slots
        self.counters: Int32Array = counters[slots]
        self.starts: Int32Array = self.counters[:, COMPUTED].copy()
        self.longest = int(self.starts.max(initial=0))
        self.context = int(self.starts.sum())
        """Tokens that they read in the next step, together."""
        self.left = int(self.counters[:, LEFT].min(initial=MAX_TOKEN))
        """Steps until the first of them reaches its `max_tokens`."""
        self.room = 0
        """Steps for which every slot has a block for its token, at least; 0: not known."""
        self.epochs: Int32Array = epochs[slots]
        self.stops: Int32Array = stops[slots]
        used = int((self.stops != NO_STOP).any(axis=0).sum())  # (they are filled from the first on)
        self.stops = self.stops[:, :used]
        self.patient = bool(patient[slots].all())
        self.ones: Int32Array = np.ones(len(slots), np.int32)
        self.trues: BoolArray = np.ones(len(slots), np.bool_)

    def advance(self) -> None:
        """Each slot has one token more."""
        self.counters += _DECODED
        self.starts = self.starts + 1  # (batches have the one before)
        self.longest += 1
        self.context += len(self.slots)
        self.left -= 1
        self.room -= 1

    def advance_some(self, slots: Int32Array, runs: Int32Array) -> None:
        """These have so many more tokens; the others lacked a block or were too many for the step."""
        rows = self.row_of[slots]
        self.counters[rows] += runs[:, None] * _DECODED
        self.starts = self.counters[:, COMPUTED].copy()
        self.longest = int(self.starts.max(initial=0))
        self.context += int(runs.sum())
        self.left = int(self.counters[:, LEFT].min(initial=MAX_TOKEN))
        self.room = 0
