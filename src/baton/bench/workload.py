"""Random work of exact sizes: prompts as token ids, and the moments at which they are sent.

Prompts are token ids, not text: a text of n tokens for one tokenizer has another number for the next.  Ids
are uniform over the vocabulary but for the first few, which most models keep for special tokens, so two
prompts practically never share a beginning and a prefix cache finds nothing.  Everything follows from a seed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.model.checkpoint.gguf import is_gguf
from baton.model.checkpoint.gguf_config import read_config

_FIRST_ID = 10
"""Below it: what many vocabularies reserve."""
UNKNOWN_VOCABULARY = 1000
"""Ids that practically every model has, for a server that does not say how many there are."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how many tokens are asked for."""

    prompt: list[int]
    output_len: int


def random_requests(
    count: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    seed: int = 0,
    range_ratio: float = 0.0,
) -> list[Request]:
    """`count` requests of exactly `input_len` and `output_len` tokens.

    With a `range_ratio` r (0 to 1), lengths are uniform between (1 - r) and (1 + r) of these, at least 1.
    """
    rng = np.random.default_rng(seed)
    first = _FIRST_ID if vocab_size > 2 * _FIRST_ID else 0
    inputs = _lengths(rng, count, input_len, range_ratio)
    outputs = _lengths(rng, count, output_len, range_ratio)
    return [
        Request(rng.integers(first, vocab_size, size).tolist(), output)
        for size, output in zip(inputs, outputs, strict=True)
    ]


def _lengths(rng: np.random.Generator, count: int, mean: int, ratio: float) -> list[int]:
    low = max(1, math.floor(mean * (1 - ratio)))
    high = max(low, math.ceil(mean * (1 + ratio)))
    lengths: list[int] = rng.integers(low, high, count, endpoint=True).tolist()
    return lengths


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the start at which each request is sent: `rate` a second, all at once if infinite.

    Intervals are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is
    burstier, more is steadier, infinity is a clock.  As in vLLM they are scaled so that the last request is
    sent exactly after `count / rate` seconds: another seed gives other moments, not another load.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(index + 1) / rate for index in range(count)]
    rng = np.random.default_rng((seed, 1))
    times = np.cumsum(rng.gamma(burstiness, 1.0 / (rate * burstiness), count))
    scaled: list[float] = (times * (count / rate / times[-1])).tolist()
    return scaled


def vocabulary_of(model: Path) -> int:
    """`vocab_size` of a checkpoint.  Raises `ValueError`, `OSError`."""
    if is_gguf(model):
        return int(read_config(model)[0]["vocab_size"])
    size = json.loads((model / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"{model / 'config.json'} does not say the vocab_size")
    return size
