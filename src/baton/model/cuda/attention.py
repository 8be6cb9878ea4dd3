"""Attention over paged keys and values: decode rows in fixed splits, chunks of prompts with their prefix.

Theory.  A *tile* is up to ROWS pairs (position, query head) of one request that share a KV head: all heads
of a decode row's position, or those of neighbouring positions of a chunk.  A program takes a tile, or a
*split* of its context, and walks over keys KEYS at a time with the softmax of FlashAttention: the largest
score m so far, the sum l of 2^(s - m), and O, the same sum over values, both scaled down when m grows.
Scores are in powers of two (s = score * log2 e), since that is what the device has an instruction for.

Keys are looked up position by position in the block table, so any block size serves, and walks begin at
multiples of KEYS whatever the window: what is added up depends on a position and its context, not on the
batch.

*Decode.*  One program a tile would leave most of a device idle, so contexts are cut at multiples of SPLIT
positions. Each split writes (m, l, O); `merge_kernel` adds them up from the first to the last.  How many
splits are launched depends on the batch, how many a row has does not, so neither does its result.  A row of
one split is written at once, with the same bits as if it had been merged: its factors are 1.

*What is not seen.*  Scores of keys that a position does not see are -inf.  What lies past a request's end
or before its window may hold anything, NaN included: it is not read.  Padding rows of a fixed batch have no
positions.

Keys and values in eight bits (`attention.kv_int8`): queries are quantized as they are read, and what is
multiplied are integers, which both bfloat16 and float16 hold exactly; scales of values are multiplied into
the weights.

A sink takes part in the softmax as a score that sees nothing.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from baton.model.cuda.arithmetic import LOG2E, byte_scales, is_broken, product, tanh, to_integers

MERGED: Final = 16
"""Splits that are merged at a time."""


@triton.jit(do_not_specialize=("table_stride", "splits"))
def attend_kernel(
    queries: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    tables: tl.tensor,
    items: tl.tensor,
    sinks: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    INT8: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Programs: (items, KV heads * parts of their query heads, splits).

    items: [N, 4] int32: first token of the step, number of positions, position of the first, row of
    `tables`. queries: [T, HEADS, DIM]; out: [T, HEADS * DIM]; with SPLIT (else 0; items have one position):
    sums float32 [N, HEADS, splits, DIM], tops [N, HEADS, splits, 2] of (m, l).  keys, values: of the layer,
    strides in elements; with INT8 they are bytes, and scales lie behind each position's (strides are
    multiples of four).
    """
    item = tl.program_id(0)
    split = tl.program_id(2)
    parts: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(1) // parts
    part = tl.program_id(1) % parts
    token = tl.load(items + item * 4)
    count = tl.load(items + item * 4 + 1)
    position = tl.load(items + item * 4 + 2)
    row = tl.load(items + item * 4 + 3)
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - (window - 1), 0)
    last = tl.where(count > 0, position + count, 0)
    whole = True
    if SPLIT:
        whole = (last - 1) // SPLIT == first // SPLIT
        first = tl.maximum(first, split * SPLIT)
        last = tl.minimum(last, (split + 1) * SPLIT)
    if first >= last:
        return

    index = tl.arange(0, ROWS)
    shift = index // TILE_HEADS
    of_group = part * TILE_HEADS + index % TILE_HEADS
    used = (shift < count) & (of_group < GROUP)
    head = kv_head * GROUP + of_group
    dims = tl.arange(0, WIDTH)
    inside = dims < DIM
    token_of = (token + shift).to(tl.int64)
    q = tl.load(
        queries + token_of[:, None] * query_stride + (head * DIM)[:, None] + dims[None, :],
        mask=used[:, None] & inside[None, :],
        other=0.0,
    )
    q_scale = tl.full((ROWS,), 1.0, tl.float32) * scale
    if INT8:
        exact = q.to(tl.float32)
        broken = tl.max(is_broken(exact), 1) > 0
        factors, scales = byte_scales(tl.max(tl.abs(exact), 1), broken)
        q = to_integers(exact, factors, broken).to(q.dtype)
        q_scale = scales * scale

    of_head = kv_head * HEAD_STRIDE
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(first // KEYS * KEYS, last, KEYS):
        n = start + tl.arange(0, KEYS)
        there = (n >= first) & (n < last)
        block = tl.load(tables + row.to(tl.int64) * table_stride + n // BLOCK, mask=there, other=0)
        at = block.to(tl.int64) * BLOCK_STRIDE + of_head + (n % BLOCK) * POSITION_STRIDE
        loaded = there[:, None] & inside[None, :]
        if DIM == WIDTH:
            loaded = there[:, None]
        k = tl.load(keys + at[:, None] + dims[None, :], mask=loaded, other=0)
        v = tl.load(values + at[:, None] + dims[None, :], mask=loaded, other=0)
        if INT8:  # (the interpreter does not make bfloat16 of integers)
            k, v = k.to(tl.float32).to(q.dtype), v.to(tl.float32).to(q.dtype)
        s = product(q, tl.trans(k), tl.zeros((ROWS, KEYS), tl.float32)) * q_scale[:, None]
        if INT8:
            s = s * tl.load(key_scales + at // 4, mask=there, other=0.0)[None, :]
        if SOFT_CAP:
            s = soft_cap * tanh(s / soft_cap)
        seen = there[None, :] & (n[None, :] <= (position + shift)[:, None])
        if WINDOW:
            seen = seen & (n[None, :] > (position + shift - window)[:, None])
        s = tl.where(seen, s * LOG2E, float("-inf"))
        largest = tl.maximum(m, tl.max(s, 1))
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(s - finite[:, None])
        shrunk = tl.exp2(m - finite)
        total = total * shrunk + tl.sum(weights, 1)
        if INT8:
            # (A weight of 0 times the scale of what is not seen, which may be NaN: see `there`.)
            weights = weights * tl.load(value_scales + at // 4, mask=there, other=0.0)[None, :]
        o = product(weights.to(q.dtype), v, o * shrunk[:, None])
        m = largest

    place = token_of * HEADS + head
    if whole:
        if sinks is not None:
            m, total, o = with_sinks(sinks, head, used, m, total, o)
        # (Rows that are not used have seen nothing: 0 / 1, which nobody stores.)
        result = o / tl.where(used, total, 1.0)[:, None]
        tl.store(
            out + place[:, None] * DIM + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=used[:, None] & inside[None, :],
        )
    else:
        if SPLIT:
            at_split = (item.to(tl.int64) * HEADS + head) * splits + split
            tl.store(sums + at_split[:, None] * DIM + dims[None, :], o, mask=used[:, None] & inside[None, :])
            tl.store(tops + at_split * 2, m, mask=used)
            tl.store(tops + at_split * 2 + 1, total, mask=used)


@triton.jit
def with_sinks(
    sinks: tl.tensor, head: tl.tensor, used: tl.tensor, m: tl.tensor, total: tl.tensor, o: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(m, l, O) of [n] and [n, d] with the sinks of `head` [n] among the scores."""
    sink = tl.load(sinks + head, mask=used, other=0.0) * LOG2E
    largest = tl.maximum(m, sink)
    shrunk = tl.exp2(m - largest)
    return largest, total * shrunk + tl.exp2(sink - largest), o * shrunk[:, None]


@triton.jit(do_not_specialize=("splits",))
def merge_kernel(
    out: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    items: tl.tensor,
    sinks: tl.tensor,
    splits: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Programs: (items of one position, HEADS).  As `attend_kernel`, whose splits it adds up."""
    token = tl.load(items + tl.program_id(0) * 4)
    count = tl.load(items + tl.program_id(0) * 4 + 1)
    position = tl.load(items + tl.program_id(0) * 4 + 2)
    head = tl.program_id(1)
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - (window - 1), 0) // SPLIT
    last = position // SPLIT + 1
    if (count == 0) | (last - first < 2):
        return
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    dims = tl.arange(0, WIDTH)
    inside = dims < DIM
    m = tl.full((1,), float("-inf"), tl.float32)
    for start in range(first // TOGETHER * TOGETHER, last, TOGETHER):
        n = start + tl.arange(0, TOGETHER)
        there = (n >= first) & (n < last)
        some = tl.load(tops + (place * splits + n) * 2, mask=there, other=float("-inf"))
        m = tl.maximum(m, tl.max(some, 0))
    total = tl.zeros((1,), tl.float32)
    o = tl.zeros((1, WIDTH), tl.float32)
    for start in range(first // TOGETHER * TOGETHER, last, TOGETHER):
        n = start + tl.arange(0, TOGETHER)
        there = (n >= first) & (n < last)
        at = place * splits + n
        factor = tl.exp2(tl.load(tops + at * 2, mask=there, other=float("-inf")) - m)
        total += tl.sum(factor * tl.load(tops + at * 2 + 1, mask=there, other=0.0), 0)
        some = tl.load(
            sums + at[:, None] * DIM + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        o += tl.sum(factor[:, None] * some, 0)[None, :]
    if sinks is not None:
        one = tl.zeros((1,), tl.int32)
        m, total, o = with_sinks(sinks, one + head, one == 0, m, total, o)
    result = o / total[:, None]
    out_place = token.to(tl.int64) * HEADS + head
    tl.store(out + out_place * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=inside[None, :])
