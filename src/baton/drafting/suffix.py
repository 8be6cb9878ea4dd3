"""Drafts from what other requests of the same cache salt were answered.

Theory. Agents and templates make a model say the same again. When a request is over, its answer becomes a
*document* of a store; what the last tokens of another request are followed by in there is guessed to follow
again. Suffix trees do that elsewhere (SuffixDecoding, arXiv 2411.04975; Arctic Inference's, which vLLM uses):
for each of the last `depth` tokens' suffixes they count what came next. A tree of depth 24 has some hundred
bytes for each token and forgets a request at the cost of walking all of it. Here are tables instead, of the
runs of 2, 4, 8 and 16 tokens (`native/suffix.cpp`): the longest one that stands anywhere in the store is
looked up, its newest 16 places are compared further back, up to `depth` tokens, and those with the longest
match vote for each draft. Exactly, that is the tree's count at the deepest node that the text leads to, of
the newest 16 requests that came by it. What the look-up costs does not depend on how much is stored.

*A document* is an answer with the `depth` tokens before it, so that a request is guessed from its first
token on if its prompt ends as another one's did. Prompts are no answers: a text that quotes its prompt has
that in `ngram.py`, and what follows inside of prompts need not be guessed. An answer is stored when its
request leaves its slot, and indexed in pieces: `_AT_ONCE` tokens with each step, more when a request comes,
so that no step waits for a long one. The first token of an answer is never a draft (its step is that of the
prompt), and what the slot was admitted with, another epoch has stored, or another instance.

*Isolation.* A request has a salt: the digest that keeps its cached prefixes apart (`rules/prefix_keys.py`,
the key in front of the first block). It is part of the hash, and of what is compared: a look-up finds places
of the same salt alone, links lead from such places to such alone, and they alone vote. Without a salt
nothing is stored nor guessed. What requests of different salts share is room, as the oldest document goes
first, whosesoever it is; and how often guesses are right, by the length of their match.

*Memory.* A ring of tokens with its links and tables, made at once and touched as it fills: 4 + 12 * (number
of lengths) bytes a token. What was there before is overwritten, and the document it belonged to is forgotten
whole. An answer longer than a quarter of the ring is cut.

*The chance* that a draft is right: its share of the votes, times how often such guesses came true, for each
class of lengths, of this request, mixed with those of all and a prior; as in `ngram.py`. A row takes this
guess or that of its own text, whichever promises more tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array
from baton.drafting.guesses import Guesses
from baton.drafting.ngram import NgramGuesses


class SuffixKernel(Protocol):
    """See `native/suffix.cpp`, `suffix` and `suffix_index`; addresses and numbers."""

    @property
    def guess(self) -> Callable[..., None]: ...

    @property
    def indexing(self) -> Callable[..., None]: ...


SALT_BYTES = 16
MOST_DEPTH = 64
_GROUP = 16
"""A document begins at a multiple of so many tokens."""
_AT_ONCE, _AT_ADMISSION = 64, 4096
"""Tokens that are indexed with a step, at least, and when a request comes."""
_LEAST_RING = 256
_CLASSES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""The shortest match of each."""
_PRIOR = (0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_PRIOR_WEIGHT, _ALL_WEIGHT = 8.0, 3.0
"""Guesses that the prior counts as beside those of all requests, and these beside those of one."""
_KEEP, _KEEP_ALL = 0.93, 0.998
"""What a judged guess still counts after the next one."""
# Columns as `Store`, `Document` and `Row` in native/suffix.cpp.
_MASK, _END, _OLDEST, _MOST_DOCUMENTS, _NUM_DOCUMENTS, _PENDING, _OFFSET = range(8, 15)
_DOCUMENT, _ROW = 5, 6
_OPENED = 3


def bytes_per_token(depth: int) -> float:
    """Of the store."""
    return 4 + 12 * _levels(depth) + 4 / _GROUP


def _levels(depth: int) -> int:
    return depth.bit_length() - 1


class SuffixGuesses:
    """The answers of requests that are over, beside the requests' own texts.  See `guesses.Source`."""

    eager = False

    def __init__(
        self,
        own: NgramGuesses,
        kernel: SuffixKernel,
        num_slots: int,
        *,
        depth: int,
        most_requests: int,
        most_bytes: int,
        factor: float | None = None,
        least: float,
    ) -> None:
        """`depth`: tokens of a match that is told from a longer one.  `factor`: drafts for each token of the
        match, at most, also of the request's own text; None: as many as there are.  `least`: drafts end
        before the share of the places that say all of them is less.  `most_requests` 0: nothing is stored."""
        if not 2 <= depth <= MOST_DEPTH:
            raise ValueError(f"suffix_decoding_max_tree_depth {depth}: give 2 to {MOST_DEPTH}")
        self.own = own
        self._kernel = kernel
        self._depth = depth
        self._most_requests = most_requests
        most, levels = own.most, _levels(depth)
        self._documents: npt.NDArray[np.int64] = np.zeros((max(most_requests, 1), _DOCUMENT), np.int64)
        room = (most_bytes - self._documents.nbytes) if most_requests else 0
        size = _LEAST_RING
        while 2 * size * bytes_per_token(depth) <= room:
            size *= 2
        self._size = size
        """Tokens of the ring."""
        self._tokens: Int32Array = np.zeros(size, np.int32)
        self._links: Int32Array = np.zeros((levels, size), np.int32)
        self._tables: Int32Array = np.zeros((levels, 2 * size), np.int32)
        self._owners: Int32Array = np.zeros(size // _GROUP, np.int32)
        self._opened: Int32Array = np.zeros((num_slots, most), np.int32)
        self._shares: npt.NDArray[np.float32] = np.zeros((num_slots, most), np.float32)
        self._judged: npt.NDArray[np.float32] = np.zeros((num_slots, len(_CLASSES), 2), np.float32)
        self._rows: npt.NDArray[np.int64] = np.zeros((num_slots, _ROW), np.int64)
        self._rows[:, 2] = self._judged.ctypes.data + self._judged.strides[0] * np.arange(num_slots)
        arrays = self._tokens, self._links, self._tables, self._owners, self._documents, self._rows
        addresses = [array.ctypes.data for array in (*arrays, self._opened, self._shares)]
        numbers = size - 1, _GROUP, _GROUP, max(most_requests, 1), 0, 0, 0, levels, depth, most
        self._store: npt.NDArray[np.int64] = np.array((*addresses, *numbers, factor is not None), np.int64)
        self._kind_of: Int32Array = (
            np.searchsorted(_CLASSES, np.arange(depth + 1), side="right") - 1
        ).astype(np.int32)
        self._prior: npt.NDArray[np.float32] = np.array(_PRIOR, np.float32)
        self._all: npt.NDArray[np.float32] = np.zeros((len(_CLASSES), 2), np.float32)
        learnt = struct.pack(
            "=3q6f",
            *(array.ctypes.data for array in (self._kind_of, self._prior, self._all)),
            _PRIOR_WEIGHT,
            _ALL_WEIGHT,
            _KEEP,
            _KEEP_ALL,
            float(most) if factor is None else factor,
            least,
        )
        self._learnt: npt.NDArray[np.uint8] = np.frombuffer(learnt, np.uint8)
        self._fixed = self._store.ctypes.data, self._learnt.ctypes.data, own.texts_address
        self._oldest = 0
        """The oldest document's number; documents are counted from the first that ever was."""
        self._begin: dict[int, int] = {}
        """By slot with a salt: where what it is to add begins."""

    @property
    def nbytes(self) -> int:
        """Of the store, all that it can become."""
        arrays = self._tokens, self._links, self._tables, self._owners, self._documents
        return sum(array.nbytes for array in arrays)

    @property
    def num_documents(self) -> int:
        return int(self._store[_NUM_DOCUMENTS]) - self._oldest

    def admit(self, slot: int, tokens: Int32Array, num_prompt: int, salt: bytes = b"") -> None:
        self.release(slot)
        self.own.admit(slot, tokens, num_prompt, salt)
        self._judged[slot] = 0
        self._rows[slot, :2] = struct.unpack("=2q", salt) if salt and self._most_requests else 0
        self._rows[slot, _OPENED] = 0
        if salt and self._most_requests:
            self._begin[slot] = max(num_prompt + 1, len(tokens))
        self._kernel.indexing(self._fixed[0], _AT_ADMISSION)

    def release(self, slot: int) -> None:
        begin = self._begin.pop(slot, None)
        if begin is not None:
            text = self.own.text(slot)
            before = max(begin - self._depth, 0)
            self._add(self._rows[slot, :2], text[before:], begin - before)
            self._rows[slot, :2] = 0
        self.own.release(slot)

    def follow(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> Guesses:
        guesses = self.own.follow(slots, runs, tokens)
        given, results = self.own.addresses
        rows = len(slots)
        self._kernel.guess(*self._fixed, *given, rows, _AT_ONCE + 2 * len(tokens), *results)
        return guesses

    def _add(self, salt: npt.NDArray[np.int64], text: Int32Array, first: int) -> None:
        """A document: what `text` has from `first` on may follow what stands before it there."""
        text = text[: self._size // 4]
        length = len(text)
        if length <= first:
            return
        store, room = self._store, -(-length // _GROUP) * _GROUP
        start, number = int(store[_END]), int(store[_NUM_DOCUMENTS])
        oldest, kept = int(store[_OLDEST]), self._oldest
        while kept < number and (number - kept >= self._most_requests or start + room - oldest > self._size):
            kept += 1
            oldest = int(self._documents[kept % self._most_requests, 0]) if kept < number else start
        self._oldest, store[_OLDEST] = kept, oldest
        if store[_PENDING] < kept:
            store[_PENDING], store[_OFFSET] = kept, 0
        at = start % self._size
        fits = min(self._size - at, length)
        self._tokens[at : at + fits] = text[:fits]
        self._tokens[: length - fits] = text[fits:]
        groups = np.arange(start // _GROUP, (start + room) // _GROUP) % len(self._owners)
        self._owners[groups] = number % self._most_requests
        self._documents[number % self._most_requests] = start, length, first, *salt.tolist()
        store[_END], store[_NUM_DOCUMENTS] = start + room, number + 1
