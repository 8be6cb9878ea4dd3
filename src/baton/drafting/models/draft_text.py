"""A slot's text as a draft model sees it: its tokens, and how many of them the model has computed."""

from __future__ import annotations

import numpy as np

from baton.drafting.base import Int32Array
from baton.drafting.models.draft_kv import DraftKv, digest_of, digest_of_salt
from baton.protocol.params.sampling import Stopping

_SPARE = 256


class DraftText:
    """Of one request, from `admit` on."""

    def __init__(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        stopping: Stopping,
        kv: DraftKv,
        salt: bytes = b"",
    ) -> None:
        self.slot = slot
        self.length = len(tokens)
        self.left = stopping.max_tokens - (len(tokens) - num_prompt)
        """Tokens that may still come."""
        self.computed = 0
        """Leading tokens whose draft KV is in the slot's known blocks."""
        self.base = 0
        """Leading tokens that are left out: the KV of the others is that of a text that begins there."""
        self.drafts: list[int] = []
        """What was drafted behind the text, and nothing came yet."""
        self.stops = frozenset(stopping.stop_token_ids)
        self._kv = kv
        self._before = digest_of_salt(salt)
        self._tokens: Int32Array = np.empty(len(tokens) + _SPARE, np.int32)
        self._tokens[: len(tokens)] = tokens
        self._digests: list[bytes] = []
        """Of the text up to the end of each full block."""
        self._noted = 0
        """Full blocks that the pool knows to be computed."""
        self._room = 0
        """Tokens that the known blocks held when drafts were made."""

    @property
    def missing(self) -> int:
        """Tokens that are not computed, at least the newest one."""
        return self.length - self.computed

    @property
    def over(self) -> bool:
        """Whether nothing follows."""
        return self.left < 1 or int(self._tokens[self.length - 1]) in self.stops

    def between(self, start: int, stop: int) -> Int32Array:
        return self._tokens[start:stop]

    def append(self, tokens: Int32Array) -> None:
        """What came.  Drafts that it confirms are computed."""
        if self.drafts:
            if self.computed == self.length:
                right = 0
                # The last draft was never computed, and what follows the newest token is wanted of each text.
                for draft, token in zip(self.drafts[:-1], tokens[:-1].tolist(), strict=False):
                    if draft != token:
                        break
                    right += 1
                self.computed = min(self.length + right, self._room)
            self.drafts = []
        stop = self.length + len(tokens)
        if stop > len(self._tokens):
            grown = np.empty(2 * stop, np.int32)
            grown[: self.length] = self._tokens[: self.length]
            self._tokens = grown
        self._tokens[self.length : stop] = tokens
        self.length = stop
        self.left -= len(tokens)
        self._note()

    def adopt(self) -> None:
        """Takes blocks that follow and have the draft KV of just these tokens; never the newest token."""
        size = self._kv.block_size
        while self.computed % size == 0 and self.computed + size < self.length:
            column = self.computed // size
            if self.computed + size > self._kv.room(self.slot):
                return
            if not self._kv.has(self.slot, column, self._digest(column)):
                return
            self.computed += size
            self._noted = max(self._noted, column + 1)

    def write(self, stop: int) -> None:
        """What is not computed is about to be, up to `stop`."""
        self._kv.write(self.slot, self.computed, stop)
        self._noted = min(self._noted, self.computed // self._kv.block_size)
        self._room = self._kv.room(self.slot)

    def wrote(self, stop: int) -> None:
        """The text is computed up to `stop`."""
        self.computed = min(stop, self._room)
        self._note()

    def _note(self) -> None:
        if self.base:  # (which no other text can use)
            return
        size = self._kv.block_size
        while (self._noted + 1) * size <= self.computed:
            self._kv.fill(self.slot, self._noted, self._digest(self._noted))
            self._noted += 1

    def _digest(self, column: int) -> bytes:
        size = self._kv.block_size
        while len(self._digests) <= column:
            start = len(self._digests) * size
            before = self._digests[-1] if self._digests else self._before
            self._digests.append(digest_of(before, self._tokens[start : start + size]))
        return self._digests[column]
