"""The slots that decode, as rows of a batch: what a step of one token for each of them needs.

Theory.  Most steps give every decoding slot one token and end none of them.  All that such a step needs is
kept here row by row, and what has to be asked of all rows (has each a block for its token? is one of them at
its end?) is a number that goes down by one.  `Slots` makes a new set when a slot enters or leaves, and after
a step that was anything else than one token for each row.
"""

from __future__ import annotations

import numpy as np

from baton.executor.base import BoolArray, Int32Array

COMPUTED, LEFT, UNSTOPPABLE = 0, 1, 2
"""Columns of the counters of slots."""
_DECODED: Int32Array = np.array([1, -1, -1], np.int32)
"""What a decode step adds to them."""
NO_STOP, IN_SET = -1, -2
"""Fill what stop tokens leave of the columns; the first one of a slot whose stop tokens are in a set."""
MAX_TOKEN = (1 << 31) - 1


class DecodeSet:
    """Of the slots given, in order of admission; the other arrays have an entry for every slot there is."""

    def __init__(
        self,
        slots: Int32Array,
        counters: Int32Array,
        tables: Int32Array,
        epochs: Int32Array,
        stops: Int32Array,
        patient: BoolArray,
    ) -> None:
        self.slots = slots
        self.counters: Int32Array = counters[slots]
        self.starts: Int32Array = self.counters[:, COMPUTED].copy()
        self.longest = int(self.starts.max(initial=0))
        self.left = int(self.counters[:, LEFT].min(initial=MAX_TOKEN))
        """Steps until the first of them reaches its `max_tokens`."""
        self.room = 0
        """Steps for which every slot has a block for its token; 0: not known."""
        self.tables: Int32Array = tables[slots]
        self.epochs: Int32Array = epochs[slots]
        self.stops: Int32Array = stops[slots]
        columns = int((self.stops != NO_STOP).any(axis=0).sum())  # (they are filled from the first on)
        self.stops = self.stops[:, :columns]
        self.patient = bool(patient[slots].all())
        self.ones: Int32Array = np.ones(len(slots), np.int32)
        self.trues: BoolArray = np.ones(len(slots), np.bool_)
        self.row_of = {slot: row for row, slot in enumerate(slots.tolist())}

    def advance(self) -> None:
        """Each slot has one token more."""
        self.counters += _DECODED
        self.starts = self.starts + 1  # (batches have the one before)
        self.longest += 1
        self.left -= 1
        self.room -= 1
