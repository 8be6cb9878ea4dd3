"""From logits to tokens on the device, equal to native/sampling.cpp token for token where logits are equal.

Theory.  A row is looked at in chunks of CHUNK logits.  Three launches: the largest logit of each chunk
(`maxima_kernel`) and the mass of each chunk (`masses_kernel`) by a program a chunk, then
`choosing.choose_kernel`, a program a row.

*Weights* are exp((logit - max) / temperature) by the CPU's own polynomial, so they are the same float32;
sums are in float64.  24 bits of a weight in 53 leave room for 2^29 equals, so where equals decide (which is
when borders are met exactly) sums are exact in any order; elsewhere they may differ by 1e-16 of the total,
and a token by that chance.

*Min-p, top-k and top-p* each keep a prefix of the ranking (logit descending, id ascending).  Where it ends
is searched among the logits' bits, which are ordered like logits once those of negative ones are turned
(`ordered`). With eight pivots a pass, the number or mass of what lies above each tells which eighth of the
range to look at next, so eleven passes find it among 2^32.  Chunks whose largest logit is below all pivots
are not read.  One program reads a row's chunks one after the other, a microsecond each, so these are nearly
all from the start: k tokens are above what the maxima of k chunks are above, and what weighs less than the
mass that top-p leaves out, over the vocabulary's size, is left out whatever there is of it.  Of logits that
equal the last one, the smallest ids are kept.

*The draw.*  u is a function of the request's stream and the position (`sampling.counter_random`); the token
is the first in vocabulary order with which the sum of kept weights exceeds u * total.

A mask has a bit for each token: what it leaves out is as -inf.  A row depends on nothing but itself.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from baton.model.cuda.arithmetic import exponential

_GOLDEN: Final = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1: Final = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2: Final = tl.constexpr(0x94D049BB133111EB)
_TO_UNIT: Final = tl.constexpr(2.0**-53)


@triton.jit
def read_row(
    logits: tl.tensor,
    masks: tl.tensor,
    masked: tl.tensor,
    chunk: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Chunk `chunk` of a row as float32, -inf where the mask leaves it out or the row is over; which it has.

    masks: the row's bits; `masked`: whether they count."""
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    there = ids < vocab
    words = tl.load(masks + ids // 32, mask=there & (masked != 0), other=-1)
    there = there & (((words >> (ids % 32)) & 1) != 0)
    return tl.load(logits + ids, mask=there, other=float("-inf")), there


@triton.jit
def ordered(logits: tl.tensor) -> tl.tensor:
    """float32 → int64 that are ordered alike; -0 equals 0."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def weigh(logits: tl.tensor, most: tl.tensor, temperature: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Weights of [n] logits, 0 for those that min-p leaves out."""
    below = logits - most
    each = exponential(tl.div_rn(below, tl.zeros_like(below) + temperature))
    return tl.where(each >= min_p, each, 0.0)


@triton.jit
def uniform(stream: tl.tensor, position: tl.tensor) -> tl.tensor:
    """In [0, 1), float64: `sampling.counter_random.uniforms`."""
    x = stream.to(tl.uint64) + (position.to(tl.uint64) + 1) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * _TO_UNIT


@triton.jit(do_not_specialize_on_alignment=("slots",))
def maxima_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    masked: tl.tensor,
    masks: tl.tensor,
    maxima: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Programs: (rows, chunks).  maxima: float32 [rows, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    values, _ = read_row(
        logits + row * stride, masks + slot * words, tl.load(masked + slot), chunk, vocab, CHUNK
    )
    tl.store(maxima + row * chunks + chunk, tl.max(values, 0))


@triton.jit(do_not_specialize_on_alignment=("slots",))
def masses_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    masked: tl.tensor,
    masks: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Programs: (rows, chunks).  masses: float64 [rows, chunks], written for rows that are not greedy."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    index = tl.arange(0, CHUNKS)
    most = tl.max(tl.load(maxima + row * chunks + index, mask=index < chunks, other=float("-inf")), 0)
    temperature = tl.load(temperatures + slot)
    if (temperature > 0) & (tl.abs(most) < float("inf")):
        values, _ = read_row(
            logits + row * stride, masks + slot * words, tl.load(masked + slot), chunk, vocab, CHUNK
        )
        weights = weigh(values, most, temperature, tl.load(min_ps + slot))
        tl.store(masses + row * chunks + chunk, tl.sum(weights.to(tl.float64), 0))
