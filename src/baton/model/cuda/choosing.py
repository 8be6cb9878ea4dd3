"""A program a row: the row's token, from its chunks' maxima and masses.  `chunks` tells the theory."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from baton.model.cuda.chunks import ordered, read_row, uniform, weigh

_NONE: Final = tl.constexpr(0x7FFFFFFF)
"""No token."""
_PIVOTS: Final = tl.constexpr(8)
_WEIGHTLESS: Final = tl.constexpr(88.0)
"""So many temperatures below the largest logit a weight is 0."""
_BELOW_ALL: Final = tl.constexpr(-(1 << 40))
"""Below what `ordered` makes of any logit."""
_NO_CHUNK: Final = tl.constexpr(-(1 << 41))
"""Stands for the largest logit of a chunk that there is not."""
_NEAR: Final = tl.constexpr(1 << 16)
"""Of keys: how far apart bounds may stay that are only there to spare reading.  (bfloat16 has no more.)"""
_ULPS: Final = tl.constexpr(4)
"""What a sum of two logits may be wrong by, and more, in keys."""
_NEARLY_ALL: Final = tl.constexpr(0.999999)
"""A top-p from which on rounding would decide what is left out."""


@triton.jit
def kept(keys: tl.tensor, ids: tl.tensor, border: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Which tokens the prefix of the ranking has that ends with the token `last`, whose logit is `border`."""
    return (keys > border) | ((keys == border) & (ids <= last))


@triton.jit
def next_chunk(tops: tl.tensor, above: tl.tensor, chunk: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """The first chunk behind `chunk` whose largest key (`tops`) is above `above`; CHUNKS if there is none."""
    index = tl.arange(0, CHUNKS)
    return tl.min(tl.where((tops > above) & (index > chunk), index, CHUNKS), 0)


@triton.jit
def border_of_best(tops: tl.tensor, low: tl.tensor, high: tl.tensor, number: tl.tensor) -> tl.tensor:
    """A key from `low` on, below `high`, that the largest logits of `number` chunks are above, so that as
    many tokens are; `low` if there is none."""
    while high - low > _NEAR:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(tops > middle, 1, 0), 0) >= number
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def measure(
    logits: tl.tensor,
    masks: tl.tensor,
    masked: tl.tensor,
    tops: tl.tensor,
    vocab: tl.tensor,
    most: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    counts: tl.tensor,
    border: tl.tensor,
    last: tl.tensor,
    pivots: tl.tensor,
    low: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """[pivots] float64: number (`counts`) or mass of what is kept and lies above each pivot, of which `low`
    is the smallest."""
    found = tl.zeros((_PIVOTS,), tl.float64)
    chunk = next_chunk(tops, low, -1, CHUNKS)
    while chunk < CHUNKS:
        values, _ = read_row(logits, masks, masked, chunk, vocab, CHUNK)
        keys = ordered(values)
        each = weigh(values, most, temperature, min_p)
        each = tl.where(counts, 1.0, each)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        each = tl.where(kept(keys, ids, border, last), each, 0.0).to(tl.float64)
        found += tl.sum(tl.where(keys[:, None] > pivots[None, :], each[:, None], 0.0), 0)
        chunk = next_chunk(tops, low, chunk, CHUNKS)
    return found


@triton.jit
def find_cut(
    logits: tl.tensor,
    masks: tl.tensor,
    masked: tl.tensor,
    tops: tl.tensor,
    vocab: tl.tensor,
    most: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    counts: tl.tensor,
    border: tl.tensor,
    last: tl.tensor,
    limit: tl.tensor,
    low: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(border, last) of the shortest prefix, of what is kept so far, that reaches `limit` in tokens
    (`counts`) or in mass; what is kept so far if what lies above `low` does not."""
    high = ordered(most)  # what lies above `high` does not reach the limit, what lies above `low` does
    low = tl.minimum(low, high - 1)
    above = limit * 0.0
    state = last * 0  # 0: nothing is known of `low`; 1: it reaches the limit; 2: it does not
    while (state != 2) & ((high - low > 1) | (state == 0)):
        pivots = low + (high - low) * tl.arange(0, _PIVOTS) // _PIVOTS
        found = measure(
            logits,
            masks,
            masked,
            tops,
            vocab,
            most,
            temperature,
            min_p,
            counts,
            border,
            last,
            pivots,
            low,
            CHUNK,
            CHUNKS,
        )
        reaches = found >= limit
        state = tl.where((state == 1) | (tl.max(tl.where(reaches, 1, 0), 0) == 1), 1, 2)
        low = tl.maximum(low, tl.max(tl.where(reaches, pivots, low), 0))
        fails = (found < limit) & (pivots > low)
        lowest = tl.min(tl.where(fails, pivots, high), 0)
        above = tl.where(lowest < high, tl.max(tl.where(fails & (pivots == lowest), found, 0.0), 0), above)
        high = lowest
    if state == 1:
        # What equals `high` makes up the rest: so many of it, those of the smallest ids.
        bits = high.to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        weight = tl.max(weigh(tl.zeros((_PIVOTS,), tl.float32) + value, most, temperature, min_p), 0)
        each = tl.where(counts | (weight == 0.0), 1.0, weight).to(tl.float64)
        number = tl.minimum(tl.maximum(tl.ceil((limit - above) / each), 1.0), vocab).to(tl.int32)
        seen = number * 0
        ends = number * 0 + _NONE
        chunk = next_chunk(tops, high - 1, -1, CHUNKS)
        while (chunk < CHUNKS) & (seen < number):
            values, there = read_row(logits, masks, masked, chunk, vocab, CHUNK)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            equal = there & (ordered(values) == high) & kept(ordered(values), ids, border, last)
            rank = seen + tl.cumsum(tl.where(equal, 1, 0), 0)
            ends = tl.minimum(ends, tl.min(tl.where(equal & (rank == number), ids, _NONE), 0))
            seen = tl.max(rank, 0)
            chunk = next_chunk(tops, high - 1, chunk, CHUNKS)
        last = tl.where(high > border, ends, tl.minimum(ends, last))
        border = high
    return border, last


@triton.jit
def chunk_masses(
    logits: tl.tensor,
    masks: tl.tensor,
    masked: tl.tensor,
    tops: tl.tensor,
    vocab: tl.tensor,
    most: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    border: tl.tensor,
    last: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """[CHUNKS] float64: the mass of what is kept of each."""
    index = tl.arange(0, CHUNKS)
    masses = tl.zeros((CHUNKS,), tl.float64)
    chunk = next_chunk(tops, border - 1, -1, CHUNKS)
    while chunk < CHUNKS:
        values, _ = read_row(logits, masks, masked, chunk, vocab, CHUNK)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        each = weigh(values, most, temperature, min_p)
        each = tl.where(kept(ordered(values), ids, border, last), each, 0.0)
        masses = tl.where(index == chunk, tl.sum(each.to(tl.float64), 0), masses)
        chunk = next_chunk(tops, border - 1, chunk, CHUNKS)
    return masses


@triton.jit(do_not_specialize_on_alignment=("slots", "positions"))
def choose_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    streams: tl.tensor,
    all_masked: tl.tensor,
    all_masks: tl.tensor,
    all_maxima: tl.tensor,
    all_masses: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Programs: (rows,).  tokens: int32 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    masked = tl.load(all_masked + slot)
    masks, logits_row = all_masks + slot * words, logits + row * stride
    index = tl.arange(0, CHUNKS)
    of_chunks = tl.load(all_maxima + row * chunks + index, mask=index < chunks, other=float("-inf"))
    most = tl.max(of_chunks, 0)
    token = chunks * 0 + _NONE
    if (temperature > 0) & (tl.abs(most) < float("inf")):
        top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
        border = top_k * 0 + _BELOW_ALL
        tops = tl.where(index < chunks, ordered(of_chunks), _NO_CHUNK)
        lowest = ordered(most - _WEIGHTLESS * temperature)
        last = token
        masses = tl.load(all_masses + row * chunks + index, mask=index < chunks, other=0.0)
        if top_k < vocab:
            border, last = find_cut(
                logits_row,
                masks,
                masked,
                tops,
                vocab,
                most,
                temperature,
                min_p,
                masked == masked,
                border,
                last,
                top_k.to(tl.float64),
                border_of_best(tops, lowest, ordered(most), top_k),
                CHUNK,
                CHUNKS,
            )
            masses = chunk_masses(
                logits_row,
                masks,
                masked,
                tops,
                vocab,
                most,
                temperature,
                min_p,
                border,
                last,
                CHUNK,
                CHUNKS,
            )
        if top_p < 1:
            # All tokens lighter than this together are lighter than what is left out.
            total = tl.sum(masses, 0)
            unneeded = tl.log(((1.0 - top_p) * total / vocab).to(tl.float32)) - 0.01
            least = tl.where(top_p < _NEARLY_ALL, ordered(most + temperature * unneeded) - _ULPS, lowest)
            border, last = find_cut(
                logits_row,
                masks,
                masked,
                tops,
                vocab,
                most,
                temperature,
                min_p,
                masked != masked,
                border,
                last,
                top_p * total,
                tl.maximum(tl.maximum(least, lowest), border - 1),
                CHUNK,
                CHUNKS,
            )
            masses = chunk_masses(
                logits_row,
                masks,
                masked,
                tops,
                vocab,
                most,
                temperature,
                min_p,
                border,
                last,
                CHUNK,
                CHUNKS,
            )
        reached = tl.cumsum(masses, 0)
        target = uniform(tl.load(streams + slot), tl.load(positions + row)) * tl.max(reached, 0)
        chunk = tl.min(tl.where((reached > target) & (masses > 0), index, CHUNKS), 0)
        # Rounding may put the target at the total itself: then it is the last one of positive weight.
        chunk = tl.where(chunk < CHUNKS, chunk, tl.max(tl.where(masses > 0, index, 0), 0))
        before = tl.sum(tl.where(index < chunk, masses, 0.0), 0)
        values, _ = read_row(logits_row, masks, masked, chunk, vocab, CHUNK)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        each = weigh(values, most, temperature, min_p)
        each = tl.where(kept(ordered(values), ids, border, last), each, 0.0).to(tl.float64)
        token = tl.min(tl.where((each > 0) & (before + tl.cumsum(each, 0) > target), ids, _NONE), 0)
        token = tl.where(token == _NONE, tl.max(tl.where(each > 0, ids, 0), 0), token)
    else:
        chunk = tl.min(tl.where((of_chunks == most) & (index < chunks), index, CHUNKS), 0)
        while (token == _NONE) & (chunk < chunks):
            values, there = read_row(logits_row, masks, masked, chunk, vocab, CHUNK)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            token = tl.min(tl.where(there & (values == most), ids, _NONE), 0)
            chunk += 1
        token = tl.where(token == _NONE, 0, token)
    tl.store(tokens + row, token)


@triton.jit(do_not_specialize=("total",))
def edit_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    biases: tl.tensor,
    banned: tl.tensor,
    seen: tl.tensor,
    counts: tl.tensor,
    repetitions: tl.tensor,
    frequencies: tl.tensor,
    presences: tl.tensor,
    stride: tl.tensor,
    total: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Programs: (stretches of entries,).  Each entry is another token of a row:
    `sampling.edits.edit_logits`."""
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = index < total
    row = tl.load(rows + index, mask=there, other=0).to(tl.int64)
    at = logits + row * stride + tl.load(ids + index, mask=there, other=0)
    value = tl.load(at, mask=there, other=0.0) + tl.load(biases + index, mask=there, other=0.0)
    value = tl.where(tl.load(banned + index, mask=there, other=0) != 0, float("-inf"), value)
    repetition = tl.load(repetitions + row, mask=there, other=1.0)
    number = tl.load(counts + index, mask=there, other=0.0)
    penalized = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    often = tl.load(frequencies + row, mask=there, other=0.0) * number
    once = tl.where(number > 0, tl.load(presences + row, mask=there, other=0.0), 0.0)
    penalized = penalized - (often + once)
    tl.store(at, tl.where(tl.load(seen + index, mask=there, other=0) != 0, penalized, value), mask=there)
