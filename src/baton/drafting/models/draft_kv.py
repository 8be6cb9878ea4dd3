"""Where the KV of a draft model lies, and of which tokens it is.

Theory. A draft model has a pool of its own with as many blocks as the model that serves, used under the same
numbers: the engine's block tables say where its KV of a text belongs, and whatever happens to blocks
(sharing of prefixes, preemption, hand-over) needs no second accounting. But nobody promises that it is
there: a block of a prefix that was found, or that came from another instance, has the serving model's KV
and perhaps none of the draft model's. So it is known of each full block which tokens its draft KV is of: a
digest of the cache salt and all tokens up to the block's end, which is taken away before the block is
written again. A slot adopts a block whose digest is that of its own salt and tokens; what else is missing is
computed (`model_drafter.py`). So nothing, not even time, tells requests of one salt what others asked.

Drafts go ahead of the text, and perhaps beyond the blocks that a slot is known to have. Behind the others the
pool has some blocks that are lent for that, from one round of drafts to the next: what lies there is of
tokens that may be wrong, and is never taken for a text's KV.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array

_DIGEST_BYTES = 16
_MOST_AT_EDGES = 16
"""Slots whose drafts go beyond their blocks at a time; others have fewer drafts."""


def blocks_ahead(num_slots: int, most: int, block_size: int) -> int:
    """To be lent, where a slot has up to `most` drafts."""
    return min(num_slots, _MOST_AT_EDGES) * -(-most // block_size)


class DraftKv:
    """Of all slots the blocks, and of all blocks what is in them."""

    def __init__(
        self, *, num_slots: int, num_blocks: int, block_size: int, max_model_len: int, most: int
    ) -> None:
        """The pool has `num_blocks`, and `blocks_ahead` behind them."""
        self.block_size = block_size
        width = -(-max_model_len // block_size) + -(-most // block_size)
        self.tables: Int32Array = np.zeros((num_slots, width), np.int32)
        """[slots, W] the known blocks of each slot, and behind them those that are lent to it."""
        self._known: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        """Blocks of each slot that its batches have shown."""
        self._content: dict[int, bytes] = {}
        """Block → digest of the tokens up to its end."""
        self._ahead = range(num_blocks, num_blocks + blocks_ahead(num_slots, most, block_size))
        self._lent = 0

    def admit(self, slot: int) -> None:
        """Another request, whose blocks are not known yet."""
        self._known[slot] = 0

    def see(self, slots: Int32Array, ends: Int32Array, tables: Int32Array) -> None:
        """A step's rows: the slots [R], the tokens that they have after it, and their tables [R, W]."""
        blocks = (ends + (self.block_size - 1)) // self.block_size
        for row in (blocks > self._known[slots]).nonzero()[0].tolist():
            slot, count = int(slots[row]), int(blocks[row])
            self._known[slot] = count
            self.tables[slot, :count] = tables[row, :count]

    def room(self, slot: int) -> int:
        """Tokens that the known blocks of the slot hold."""
        return int(self._known[slot]) * self.block_size

    def has(self, slot: int, column: int, digest: bytes) -> bool:
        """Whether this block of the slot is full of the tokens with this digest."""
        return self._content.get(int(self.tables[slot, column])) == digest

    def fill(self, slot: int, column: int, digest: bytes) -> None:
        """This block of the slot has been computed to its end."""
        self._content[int(self.tables[slot, column])] = digest

    def forget(self) -> None:
        """What was computed is of weights that are gone."""
        self._content.clear()

    def write(self, slot: int, start: int, stop: int) -> None:
        """The slot's positions from `start` to `stop` are written now."""
        last = min((stop - 1) // self.block_size + 1, int(self._known[slot]))
        for column in range(start // self.block_size, last):
            self._content.pop(int(self.tables[slot, column]), None)

    def take_back(self) -> None:
        """What was lent is free again."""
        self._lent = 0

    def lend(self, slot: int, stop: int) -> int:
        """Blocks for positions below `stop`, where the known ones do not suffice.  Returns for which there
        are."""
        known = int(self._known[slot])
        count = (stop - 1) // self.block_size + 1 - known
        if count <= 0:
            return stop
        lent = self._ahead[self._lent : self._lent + count]
        self._lent += len(lent)
        self.tables[slot, known : known + len(lent)] = lent
        return min(stop, (known + len(lent)) * self.block_size)


def digest_of_salt(salt: bytes) -> bytes:
    """Of a text with no tokens yet."""
    return blake2b(salt, digest_size=_DIGEST_BYTES, person=b"salt").digest()


def digest_of(before: bytes, tokens: Int32Array) -> bytes:
    """Of a text that goes on with these tokens.  `before`: of the text up to there."""
    return blake2b(before + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
