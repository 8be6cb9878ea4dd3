"""Paged attention in numba.

Theory.  The arithmetic is that of native/attention.cpp.  A *tile of queries* is up to 32 rows: the query
heads that share a KV head, at one or several consecutive positions of a request.  It walks over blocks of
the request and keeps for each row an online softmax: the largest score so far m, the sum l of 2^(score -
m), the sum O of 2^(score - m) * value.  With a block's keys K and values V:

    S = Q K            scores, then times scale * log2(e), so that 2^x serves for e^x
    m' = max(m, S)     P = 2^(S - m')      l = l * 2^(m - m') + sum P
    O = O * 2^(m - m') + P V

and the result is O / l.  A context is cut into pieces at fixed positions, each with a softmax of its own;
their (m, l, O) are merged from the first to the last (`pieces`), by the thread that walks over all of
them or, where pieces are shared out, by the one that finishes last.  The lanes of a vector are tokens in S
and dims in O; see `vectors`.
"""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated"
from __future__ import annotations

import math

import numpy as np

from baton.model.cpu.kernels import QUERY_ROWS
from baton.model.cpu.numba import kv_int8
from baton.model.cpu.numba.pieces import NOTHING, copy_partial, merge
from baton.model.cpu.numba.task import (
    BLOCK,
    BLOCK_BYTES,
    DIM,
    FINISHED,
    HEADS,
    ITEMS,
    KV_HEADS,
    KV_INT8,
    LAYER,
    NEXT,
    NUM_ITEMS,
    OUT,
    PARTIALS,
    PIECE_BLOCKS,
    QUERIES,
    QUERY_STRIDE,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SINKS,
    TABLE_STRIDE,
    TABLES,
    THREADS,
    WINDOW,
    compiled,
)
from baton.model.cpu.numba.tile import (
    EXPANDED,
    FACTORS,
    FRESH,
    LARGEST,
    LAST_PAIR,
    MERGED,
    O_STRIDE,
    P_STRIDE,
    Q_SCALES,
    Q_STRIDE,
    RESULTS,
    S_STRIDE,
    SUMS,
    P,
    Q,
    S,
    multiply_keys,
    multiply_values,
)
from baton.model.cpu.numba.vectors import (
    SINGLES,
    add,
    copy_int32,
    element_bytes,
    exp2,
    fetch_add_int32,
    fetch_add_int64,
    float_at,
    highest,
    int32_at,
    int64_at,
    keep,
    load,
    load_some,
    maximum,
    multiply,
    multiply_add,
    put_float,
    put_int32,
    splat,
    store,
    store_elements,
    store_some,
    subtract,
    total,
)
from baton.model.cpu.numba.writes import tile_bytes

_MASKED = np.float32(-1e30)
_LOG2_E = np.float32(math.log2(math.e))


@compiled
def _find_largest(scratch, row, low, high, width, scale):
    """m' of a row that sees the block's tokens [low, high); the scores of others are overwritten."""
    s = scratch + S + row * S_STRIDE
    best = splat(_MASKED)
    if low <= 0 and high >= width:
        for i in range(0, width, 16):
            best = maximum(best, load(s + 4 * i))
    else:
        for i in range(0, width, 16):
            seen = keep(load(s + 4 * i), low - i, high - i, _MASKED)
            store(s + 4 * i, seen)
            best = maximum(best, seen)
    found = highest(best) * scale
    put_float(scratch + FRESH + 4 * row, max(found, float_at(scratch + LARGEST + 4 * row)))


@compiled
def _scale_scores(scratch, rows, end, scales):
    """Times the scales of queries and of keys [end] in eight bits; the scores of others become 0."""
    for row in range(rows):
        of_row = splat(float_at(scratch + Q_SCALES + 4 * row))
        for i in range(0, end, 16):
            at = scratch + S + row * S_STRIDE + 4 * i
            factors = multiply(of_row, load_some(scales + 4 * i, end - i, SINGLES))
            store(at, multiply(load(at), factors))


@compiled
def _find_weights(scratch, row, width, scale, end, of_values, element):
    """P and l of a row.  `of_values`: where the scales [end] of values in eight bits are, or 0."""
    s, p = scratch + S + row * S_STRIDE, scratch + P + row * P_STRIDE
    sums = scratch + SUMS + 64 * row
    shift, scales = splat(-float_at(scratch + FRESH + 4 * row)), splat(scale)
    found = multiply(load(sums), splat(float_at(scratch + FACTORS + 4 * row)))
    for i in range(0, width, 16):
        weights = exp2(multiply_add(load(s + 4 * i), scales, shift))
        found = add(found, weights)
        if of_values != 0:
            weights = multiply(weights, load_some(of_values + 4 * i, end - i, SINGLES))
        store_elements(p + element_bytes(element) * i, weights, element)
    store(sums, found)


@compiled
def _start_tile(scratch, used, dim):
    zeros = splat(np.float32(0))
    for row in range(used):
        for i in range(0, dim, 16):
            store(scratch + RESULTS + row * O_STRIDE + 4 * i, zeros)
        store(scratch + SUMS + 64 * row, zeros)
        put_float(scratch + LARGEST + 4 * row, NOTHING)


@compiled
def _partial_of(scratch, row, dim):
    """A row's result of a piece as it is kept: O, l, m."""
    found = scratch + RESULTS + row * O_STRIDE
    put_float(found + 4 * dim, total(load(scratch + SUMS + 64 * row)))
    copy_int32(found + 4 * dim + 4, scratch + LARGEST + 4 * row)
    return found


@compiled
def _close_piece(scratch, used, dim, merged):
    """`merged`: there are pieces before."""
    for row in range(used):
        to, source = scratch + MERGED + row * O_STRIDE, _partial_of(scratch, row, dim)
        if merged:
            merge(to, source, dim)
        else:
            copy_partial(to, source, dim)
    _start_tile(scratch, used, dim)


@compiled
def _write_out(to, source, dim, sink, element):
    """`sink`: where the score is that the head's softmax counts besides, or 0."""
    found = float_at(source + 4 * dim)
    if sink != 0:
        above = float_at(sink) * _LOG2_E - float_at(source + 4 * dim + 4)
        found += highest(exp2(splat(min(above, np.float32(126)))))
    factors = splat(np.float32(1) / found)
    size = element_bytes(element)
    i = 0
    while i + 16 <= dim:
        store_elements(to + size * i, multiply(load(source + 4 * i), factors), element)
        i += 16
    if i < dim:
        rest = load_some(source + 4 * i, dim - i, SINGLES)
        store_some(to + size * i, multiply(rest, factors), dim - i, element)


@compiled
def _walk(scratch, task, item, kv_head, heads, rows, used, element):
    """The item's blocks, one after the other: fills O, l and m of the scratch.

    Returns whether they were several pieces, which then are merged.
    """
    size = element_bytes(element)
    dim, block = int64_at(task + DIM), int64_at(task + BLOCK)
    position, scale = int32_at(item + 8), float_at(task + SCALE)
    tile, in_bytes = tile_bytes(task, element), int64_at(task + KV_INT8) != 0
    expanded, of_values = scratch + EXPANDED, 0
    to_values = int64_at(task + KV_HEADS) * tile
    block_bytes = int64_at(task + BLOCK_BYTES)
    head_tile = int64_at(task + LAYER) + kv_head * tile
    table = int64_at(task + TABLES) + 4 * int32_at(item + 12) * int64_at(task + TABLE_STRIDE)
    window = int64_at(task + WINDOW)
    lowest, highest_seen = position - window + 1, position + int32_at(item + 4)
    column, last = int32_at(item + 16), int32_at(item + 20)
    keys = head_tile + int32_at(table + 4 * column) * block_bytes
    elements_of_step = 4 // size
    piece, merged = int64_at(task + PIECE_BLOCKS), False
    while column < last:
        base = column * block
        # The tokens of the block that any row sees, and the vectors that hold them.
        begin, end = max(lowest - base, 0), min(highest_seen - base, block)
        width = (end + 15) // 16 * 16
        column += 1
        values = keys + to_values
        following = keys
        if column < last:
            following = head_tile + int32_at(table + 4 * column) * block_bytes
        # While a tile is read, the next one is fetched: the values, then the next keys.  Tiles of few tokens
        # are read faster than memory answers: there it is the tile of the next block.
        ahead_of_keys, ahead_of_values = to_values, following - values
        if block < 32:
            ahead_of_keys = ahead_of_values = following - keys
        columns = min(width, block)
        if in_bytes:
            kv_int8.expand(keys, expanded, 0, dim // 4, columns, block, 0, element)
            multiply_keys(scratch, expanded, 4 * block, 0, dim // elements_of_step, columns, rows, element)
            _scale_scores(scratch, used, end, keys + block * dim)
            kv_int8.expand(values, expanded, begin // 4, (end + 3) // 4, dim, dim, 128, element)
            of_values = values + block * dim
        else:
            multiply_keys(
                scratch, keys, 4 * block, ahead_of_keys, dim // elements_of_step, columns, rows, element
            )
        for row in range(used):
            seen = position + row // heads - base + 1
            _find_largest(scratch, row, seen - window, min(seen, block), width, scale)
        for row in range(0, used, 16):
            old, fresh = scratch + LARGEST + 4 * row, scratch + FRESH + 4 * row
            store(scratch + FACTORS + 4 * row, exp2(subtract(load(old), load(fresh))))
            store(old, load(fresh))
        for row in range(used):
            _find_weights(scratch, row, width, scale, end, of_values, element)
        if in_bytes:  # the weight of what is in a last pair's other place is 0, and that is a number
            values, ahead_of_values, end = expanded, 0, (end + 3) // 4 * 4
        first, whole = begin // elements_of_step, end // elements_of_step
        weights = scratch + P + 4 * first
        multiply_values(
            scratch, weights, values + 4 * dim * first, ahead_of_values, whole - first, dim, rows, element
        )
        if whole * elements_of_step < end:
            # The last pair has one token: what is in the other's place counts as zero.
            pair = scratch + LAST_PAIR
            for i in range(dim):
                put_int32(pair + 4 * i, int32_at(values + 4 * (dim * whole + i)) & 0xFFFF)
            for row in range(rows):
                put_float(scratch + FACTORS + 4 * row, np.float32(1))
            multiply_values(scratch, scratch + P + 4 * whole, pair, 0, 1, dim, rows, element)
        keys = following
        if (column < last and column % piece == 0) or (column == last and merged):
            _close_piece(scratch, used, dim, merged)
            merged = True
    return merged


@compiled
def _attend_tile(task, item, unit, scratch, element):
    """An item for one KV head, or for 32 of its heads."""
    size = element_bytes(element)
    num_heads, num_kv_heads = int64_at(task + HEADS), int64_at(task + KV_HEADS)
    dim = int64_at(task + DIM)
    heads_per_kv = num_heads // num_kv_heads
    chunks = (heads_per_kv + QUERY_ROWS - 1) // QUERY_ROWS
    kv_head, chunk = unit // chunks, unit % chunks
    head = kv_head * heads_per_kv + chunk * QUERY_ROWS
    heads = min(heads_per_kv - chunk * QUERY_ROWS, QUERY_ROWS)
    token, used = int32_at(item), int32_at(item + 4) * heads
    rows = 2 if used <= 2 else (used + 3) // 4 * 4
    _start_tile(scratch, used, dim)
    queries, stride = int64_at(task + QUERIES), int64_at(task + QUERY_STRIDE)
    for row in range(used):
        source = queries + (token + row // heads) * stride + (head + row % heads) * dim * size
        to = scratch + Q + row * Q_STRIDE
        if int64_at(task + KV_INT8) != 0:
            put_float(scratch + Q_SCALES + 4 * row, kv_int8.quantize_query(source, to, dim, element))
            continue
        for i in range(0, dim * size, 4):
            copy_int32(to + i, source + i)
    merged = _walk(scratch, task, item, kv_head, heads, rows, used, element)

    out, sinks = int64_at(task + OUT), int64_at(task + SINKS)
    pieces = int32_at(item + 32)
    if pieces == 1:
        for row in range(used):
            to = out + ((token + row // heads) * num_heads + head + row % heads) * dim * size
            source = scratch + MERGED + row * O_STRIDE
            if not merged:
                source = _partial_of(scratch, row, dim)
            sink = 0 if sinks == 0 else sinks + 4 * (head + row % heads)
            _write_out(to, source, dim, sink, element)
        return
    # A piece's result, [32, dim + 2] float32: O and l and m of each row.  The last one adds all up.
    units = num_kv_heads * chunks
    row_bytes = 4 * (dim + 2)
    piece_bytes = QUERY_ROWS * row_bytes
    slot = int32_at(item + 24)
    first = int64_at(task + PARTIALS) + (slot * units + unit) * piece_bytes
    mine = first + int32_at(item + 28) * units * piece_bytes
    for row in range(used):
        copy_partial(mine + row * row_bytes, _partial_of(scratch, row, dim), dim)
    finished = int64_at(task + FINISHED) + 4 * (slot * units + unit)
    if fetch_add_int32(finished) + 1 < pieces:
        return
    put_int32(finished, 0)
    for row in range(used):
        whole = first + row * row_bytes
        for piece in range(1, pieces):
            merge(whole, whole + piece * units * piece_bytes, dim)
        to = out + ((token + row // heads) * num_heads + head + row % heads) * dim * size
        sink = 0 if sinks == 0 else sinks + 4 * (head + row % heads)
        _write_out(to, whole, dim, sink, element)


@compiled
def attend(task, element):
    thread = fetch_add_int64(task + THREADS)
    scratch = int64_at(task + SCRATCH) + thread * SCRATCH_BYTES
    heads_per_kv = int64_at(task + HEADS) // int64_at(task + KV_HEADS)
    units = (heads_per_kv + QUERY_ROWS - 1) // QUERY_ROWS * int64_at(task + KV_HEADS)
    while True:
        index = fetch_add_int64(task + NEXT)
        if index >= int64_at(task + NUM_ITEMS) * units:
            return
        item = int64_at(task + ITEMS) + 36 * (index // units)
        _attend_tile(task, item, index % units, scratch, element)
