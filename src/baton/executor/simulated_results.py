"""What the simulated executor gives besides tokens, made of the hash of what it has read."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from baton.protocol.pooling import Pooling
from baton.protocol.sampling import TokenLogprobs

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
    top = tuple((candidate, -j * math.log(2)) for j, candidate in enumerate(ranked, start=1))
    return TokenLogprobs(token=chosen, logprob=-rank * math.log(2), rank=rank, top=top)


def powers(count: int) -> npt.NDArray[np.uint64]:
    """[count] P^i mod 2^64."""
    factors = np.full(count, _MULTIPLIER, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
