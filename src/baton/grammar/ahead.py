"""Masks behind drafts: what may come after each draft of a row, if it is right.

Theory.  A step with drafts samples behind each of them, and all these tokens are drafts before the model has
computed anything.  So their masks are filled with the others, beside the model, and the positions are
sampled together.  A copy of the row's matcher reads one draft after the other, and fills a mask behind each;
where a draft is not in the mask before it, it will not be sampled, and nothing behind it is needed.  The
matcher itself reads what was sampled, as ever.

A copy shares its lexer, and drafts that are wrong make that fuller, which may end in the failure that
`masks.py` answers with a lexer of one's own.  There a request is not asked for masks ahead any more: whether
it fails then depends on its tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from baton.grammar.filling import Asked, Bits, Filling, allows


@dataclass(slots=True)
class _Walk:
    """Of one slot: its next mask behind a draft."""

    slot: int
    matcher: LLMatcher
    place: int
    """Of the last mask that is filled."""
    drafts: list[int]
    """That it has not read."""


class Ahead:
    """The masks of one step's places: for each row that samples, one before its drafts and one behind each.

    Rows follow each other as the step has them.
    """

    def __init__(self, words: int, filling: Filling) -> None:
        self._filling = filling
        self.masks: Bits = np.zeros((0, words), np.uint32)
        """[places, words]; of slots without a grammar a row means nothing."""
        self.filled: dict[int, int] = {}
        """By slot: how many of its places have a mask."""
        self._first: dict[int, int] = {}
        self._drafts: dict[int, list[int]] = {}

    def begin(self, slots: Sequence[int], drafts: Sequence[list[int]]) -> None:
        """A step begins, with these drafts of each of its slots."""
        self.filled, self._first, self._drafts = {}, {}, dict(zip(slots, drafts, strict=True))
        place = 0
        for slot, its in self._drafts.items():
            self._first[slot] = place
            place += 1 + len(its)
        if place > len(self.masks):
            self.masks = np.zeros((2 * place, self.masks.shape[1]), np.uint32)

    def first(self, slot: int) -> int:
        """Its first place."""
        return self._first[slot]

    def stop(self, slot: int) -> None:
        """Of this slot only the first place is filled."""
        self._drafts[slot] = []

    def fill(
        self, masks: Bits, rows: list[Asked], asked: Callable[[int, LLMatcher, int, int], Asked]
    ) -> None:
        """`masks` and `rows`: the places before the drafts, which are filled.  `asked(slot, matcher, place,
        more)`: of a place behind so many tokens more."""
        going = []
        for one in rows:
            slot = one.row
            place = self._first[slot]
            self.masks[place] = masks[slot]
            self.filled[slot] = 1
            if drafts := self._drafts[slot]:
                going.append(_Walk(slot, one.matcher.deep_copy(), place, drafts))
        while going := [walk for walk in going if self._read(walk)]:
            wanted = [asked(walk.slot, walk.matcher, walk.place, self.filled[walk.slot]) for walk in going]
            self._filling.compute(self.masks, wanted)
            going = [walk for walk in going if not walk.matcher.is_error()]
            self._filling.set_ends(self.masks, [one for one in wanted if not one.matcher.is_error()])
            for walk in going:
                self.filled[walk.slot] += 1

    def _read(self, walk: _Walk) -> bool:
        """The copy reads the next draft; whether what may come behind it is of interest."""
        if not walk.drafts:
            return False
        token, *walk.drafts = walk.drafts
        if not allows(self.masks, walk.place, token):
            return False
        walk.matcher.consume_token(token)
        walk.place += 1
        return not walk.matcher.is_error()
