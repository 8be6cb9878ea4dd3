"""What the simulated executor gives besides tokens, made of the hash of what it has read."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.executor.base import Int32Array, StepBatch, StepResult
from baton.executor.drafts.runs import confirmed_counts
from baton.protocol.codec import pack_int32
from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import LISTED_LOGPROBS, Sampling, TokenLogprobs
from baton.protocol.routes import Routes

_MULTIPLIER = 0x9E3779B97F4A7C15
DIMENSIONS = 8
"""Of a vector, unless fewer or more are asked for."""


def simulated_vector(seen: int, pooling: Pooling) -> list[float]:
    """What stands for the hidden state, or the logits, after tokens of this hash."""
    size = max(1, len(pooling.labels)) if pooling.kind == "labels" else pooling.dimensions or DIMENSIONS
    vector = [((seen >> 8 * (place % 8)) & 255) / 256 - 0.5 + place for place in range(size)]
    if pooling.kind == "labels" or not pooling.normalize:
        return vector
    length = math.sqrt(sum(value * value for value in vector))
    return [value / max(length, 1e-12) for value in vector]


def invented_logprobs(seen: int, token: int | None, k: int, vocab_size: int) -> TokenLogprobs:
    """A ranking derived from a hash: the j-th most likely token has probability 2^-j.

    Rank 1 is the token that greedy sampling takes.  `token` None means that one; a token that is not
    among the k most likely gets rank k + 1.
    """
    first = seen % vocab_size
    stride = 1 + seen // vocab_size % max(vocab_size - 1, 1)
    while math.gcd(stride, vocab_size) != 1:  # a stride prime to the vocabulary repeats no token
        stride += 1
    ranked = [(first + j * stride) % vocab_size for j in range(min(k, vocab_size))]
    chosen = first if token is None else token
    rank = 1 if chosen == first else ranked.index(chosen) + 1 if chosen in ranked else max(k, 1) + 1
    own, values = -rank * math.log(2), [-j * math.log(2) for j in range(1, len(ranked) + 1)]
    if len(ranked) > LISTED_LOGPROBS:
        return TokenLogprobs.packed(chosen, own, rank, pack_int32(ranked), array("f", values).tobytes())
    return TokenLogprobs(chosen, own, rank, tuple(zip(ranked, values, strict=True)))


class InventedRoutes:
    """Which experts tokens went to, of requests that asked: a function of token and position."""

    def __init__(self) -> None:
        self._from: dict[int, int] = {}
        """Slot → the first position of which that is wanted."""

    def admit(self, slot: int, sampling: Sampling) -> None:
        self._from.pop(slot, None)
        if sampling.routes_from is not None:
            self._from[slot] = sampling.routes_from

    def add(self, batch: StepBatch, result: StepResult) -> None:
        begins, counts = np.cumsum(batch.counts) - batch.counts, confirmed_counts(batch, result)
        for row, slot in enumerate(batch.slots.tolist()):
            start, count = int(batch.starts[row]), int(counts[row])
            first = max(start, self._from.get(slot, start + count))
            if first < start + count:
                tokens = batch.tokens[begins[row] + first - start : begins[row] + count]
                result.routes[row] = [simulated_routes(first, tokens)]


def simulated_routes(first: int, tokens: Sequence[int] | Int32Array) -> Routes:
    """Two of some 64 experts in each of two layers, of the tokens at positions from `first` on."""
    row = np.asarray(tokens, np.int64)
    seen = row * 7 + np.arange(first, first + len(row)) * 3
    ids = np.stack((seen % 31, 31 + seen % 29, seen % 23, 23 + seen % 37), axis=1)
    return Routes(first, 2, 2, 1, ids.astype(np.uint8).tobytes())


def powers(count: int) -> npt.NDArray[np.uint64]:
    """[count] P^i mod 2^64."""
    factors = np.full(count, _MULTIPLIER, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
