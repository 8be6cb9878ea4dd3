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

import numpy as np

from baton.model.cpu.kernels import QUERY_ROWS
from baton.model.cpu.numba.pieces import NOTHING, copy_partial, merge
from baton.model.cpu.numba.product import accumulate_product
from baton.model.cpu.numba.task import (
    BLOCK,
    BLOCK_BYTES,
    DIM,
    FINISHED,
    HEADS,
    ITEMS,
    KV_HEADS,
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
    TABLE_STRIDE,
    TABLES,
    THREADS,
    WINDOW,
    compiled,
)
from baton.model.cpu.numba.vectors import (
    MANY_REGISTERS,
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

# A thread's scratch memory, in bytes.  Rows are an odd number of cache lines apart, so that they do not
# compete for the same ones; the distances are constants, which addresses then contain.
_Q_STRIDE = 1088  # queries: up to 256 elements
_S_STRIDE = 576  # scores: up to 128 float32
_P_STRIDE = 576  # weights: up to 128 elements
_O_STRIDE = 1088  # sums of values: up to 256 float32
_Q = 0
_S = _Q + QUERY_ROWS * _Q_STRIDE
_P = _S + QUERY_ROWS * _S_STRIDE
_O = _P + QUERY_ROWS * _P_STRIDE
_SUMS = _O + QUERY_ROWS * _O_STRIDE  # l, a vector of partial sums for each row
_LARGEST = _SUMS + QUERY_ROWS * 64  # m
_FRESH = _LARGEST + QUERY_ROWS * 4  # m'
_FACTORS = _FRESH + QUERY_ROWS * 4  # 2^(m - m')
_LAST_PAIR = _FACTORS + QUERY_ROWS * 4  # values of a last token that has no second: 256 pairs
_MERGED = _LAST_PAIR + 1024  # of the pieces before: O, l and m of each row
assert _MERGED + QUERY_ROWS * _O_STRIDE <= SCRATCH_BYTES

_MASKED = np.float32(-1e30)


# Products of a tile.  Registers hold 4 rows x 64 columns of the result, which reads B line after line;
# columns that are left are done with more rows at once.  `rows` is 2 or a multiple of 4, but some rows beyond
# may be computed as well: nobody reads them.

_ROWS = 8 if MANY_REGISTERS else 4
_TWO = 2 if MANY_REGISTERS else 1


@compiled
def _multiply_keys(scratch, b, stride, ahead, steps, columns, rows, element):
    """S = Q K: `b` is a K tile, whose rows are `stride` bytes apart."""
    c, a = scratch + _S, scratch + _Q
    while MANY_REGISTERS and columns >= 64:
        if rows == 2:
            accumulate_product(c, _S_STRIDE, None, a, _Q_STRIDE, b, stride, ahead, steps, 2, 4, 16, element)
        for row in range(0, rows // 4 * 4, 4):
            to, left = c + row * _S_STRIDE, a + row * _Q_STRIDE
            accumulate_product(
                to, _S_STRIDE, None, left, _Q_STRIDE, b, stride, ahead, steps, 4, 4, 16, element
            )
        c, b, columns = c + 256, b + 256, columns - 64
    while columns >= _TWO * 16:
        if rows == 2:
            accumulate_product(
                c, _S_STRIDE, None, a, _Q_STRIDE, b, stride, ahead, steps, 2, _TWO, 16, element
            )
        for row in range(0, rows // 4 * 4, _ROWS):
            to, left = c + row * _S_STRIDE, a + row * _Q_STRIDE
            accumulate_product(
                to, _S_STRIDE, None, left, _Q_STRIDE, b, stride, ahead, steps, _ROWS, _TWO, 16, element
            )
        c, b, columns = c + _TWO * 64, b + _TWO * 64, columns - _TWO * 16
    if columns >= 16:
        if rows == 2:
            accumulate_product(c, _S_STRIDE, None, a, _Q_STRIDE, b, stride, ahead, steps, 2, 1, 16, element)
        for row in range(0, rows // 4 * 4, _ROWS):
            to, left = c + row * _S_STRIDE, a + row * _Q_STRIDE
            accumulate_product(
                to, _S_STRIDE, None, left, _Q_STRIDE, b, stride, ahead, steps, _ROWS, 1, 16, element
            )
        c, b, columns = c + 64, b + 64, columns - 16
    while columns > 0:
        for row in range(0, rows, 4):
            to, left = c + row * _S_STRIDE, a + row * _Q_STRIDE
            accumulate_product(to, _S_STRIDE, None, left, _Q_STRIDE, b, stride, 0, steps, 4, 1, 1, element)
        c, b, columns = c + 4, b + 4, columns - 1


@compiled
def _multiply_values(scratch, a, b, ahead, steps, dim, rows, element):
    """O = O * factors + P V: `a` is where weights begin in P, `b` in the V tile."""
    c, factors, stride, columns = scratch + _O, scratch + _FACTORS, 4 * dim, dim
    while MANY_REGISTERS and columns >= 64:
        if rows == 2:
            accumulate_product(
                c, _O_STRIDE, factors, a, _P_STRIDE, b, stride, ahead, steps, 2, 4, 16, element
            )
        for row in range(0, rows // 4 * 4, 4):
            to, left, scales = c + row * _O_STRIDE, a + row * _P_STRIDE, factors + 4 * row
            accumulate_product(
                to, _O_STRIDE, scales, left, _P_STRIDE, b, stride, ahead, steps, 4, 4, 16, element
            )
        c, b, columns = c + 256, b + 256, columns - 64
    while columns >= _TWO * 16:
        if rows == 2:
            accumulate_product(
                c, _O_STRIDE, factors, a, _P_STRIDE, b, stride, ahead, steps, 2, _TWO, 16, element
            )
        for row in range(0, rows // 4 * 4, _ROWS):
            to, left, scales = c + row * _O_STRIDE, a + row * _P_STRIDE, factors + 4 * row
            accumulate_product(
                to, _O_STRIDE, scales, left, _P_STRIDE, b, stride, ahead, steps, _ROWS, _TWO, 16, element
            )
        c, b, columns = c + _TWO * 64, b + _TWO * 64, columns - _TWO * 16
    if columns >= 16:
        if rows == 2:
            accumulate_product(
                c, _O_STRIDE, factors, a, _P_STRIDE, b, stride, ahead, steps, 2, 1, 16, element
            )
        for row in range(0, rows // 4 * 4, _ROWS):
            to, left, scales = c + row * _O_STRIDE, a + row * _P_STRIDE, factors + 4 * row
            accumulate_product(
                to, _O_STRIDE, scales, left, _P_STRIDE, b, stride, ahead, steps, _ROWS, 1, 16, element
            )
        c, b, columns = c + 64, b + 64, columns - 16
    while columns > 0:
        for row in range(0, rows, 4):
            to, left, scales = c + row * _O_STRIDE, a + row * _P_STRIDE, factors + 4 * row
            accumulate_product(to, _O_STRIDE, scales, left, _P_STRIDE, b, stride, 0, steps, 4, 1, 1, element)
        c, b, columns = c + 4, b + 4, columns - 1


# Attention


@compiled
def _find_largest(scratch, row, low, high, width, scale):
    """m' of a row that sees the block's tokens [low, high); the scores of others are overwritten."""
    s = scratch + _S + row * _S_STRIDE
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
    put_float(scratch + _FRESH + 4 * row, max(found, float_at(scratch + _LARGEST + 4 * row)))


@compiled
def _find_weights(scratch, row, width, scale, element):
    """P and l of a row."""
    s, p = scratch + _S + row * _S_STRIDE, scratch + _P + row * _P_STRIDE
    sums = scratch + _SUMS + 64 * row
    shift, scales = splat(-float_at(scratch + _FRESH + 4 * row)), splat(scale)
    found = multiply(load(sums), splat(float_at(scratch + _FACTORS + 4 * row)))
    for i in range(0, width, 16):
        weights = exp2(multiply_add(load(s + 4 * i), scales, shift))
        store_elements(p + element_bytes(element) * i, weights, element)
        found = add(found, weights)
    store(sums, found)


@compiled
def _start_tile(scratch, used, dim):
    zeros = splat(np.float32(0))
    for row in range(used):
        for i in range(0, dim, 16):
            store(scratch + _O + row * _O_STRIDE + 4 * i, zeros)
        store(scratch + _SUMS + 64 * row, zeros)
        put_float(scratch + _LARGEST + 4 * row, NOTHING)


@compiled
def _partial_of(scratch, row, dim):
    """A row's result of a piece as it is kept: O, l, m."""
    found = scratch + _O + row * _O_STRIDE
    put_float(found + 4 * dim, total(load(scratch + _SUMS + 64 * row)))
    copy_int32(found + 4 * dim + 4, scratch + _LARGEST + 4 * row)
    return found


@compiled
def _close_piece(scratch, used, dim, merged):
    """`merged`: there are pieces before."""
    for row in range(used):
        to, source = scratch + _MERGED + row * _O_STRIDE, _partial_of(scratch, row, dim)
        if merged:
            merge(to, source, dim)
        else:
            copy_partial(to, source, dim)
    _start_tile(scratch, used, dim)


@compiled
def _write_out(to, source, dim, element):
    factors = splat(np.float32(1) / float_at(source + 4 * dim))
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
    tile = block * dim * size
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
        _multiply_keys(
            scratch, keys, 4 * block, ahead_of_keys, dim // elements_of_step, min(width, block), rows, element
        )
        for row in range(used):
            seen = position + row // heads - base + 1
            _find_largest(scratch, row, seen - window, min(seen, block), width, scale)
        for row in range(0, used, 16):
            old, fresh = scratch + _LARGEST + 4 * row, scratch + _FRESH + 4 * row
            store(scratch + _FACTORS + 4 * row, exp2(subtract(load(old), load(fresh))))
            store(old, load(fresh))
        for row in range(used):
            _find_weights(scratch, row, width, scale, element)
        first, whole = begin // elements_of_step, end // elements_of_step
        weights = scratch + _P + 4 * first
        _multiply_values(
            scratch, weights, values + 4 * dim * first, ahead_of_values, whole - first, dim, rows, element
        )
        if whole * elements_of_step < end:
            # The last pair has one token: what is in the other's place counts as zero.
            pair = scratch + _LAST_PAIR
            for i in range(dim):
                put_int32(pair + 4 * i, int32_at(values + 4 * (dim * whole + i)) & 0xFFFF)
            for row in range(rows):
                put_float(scratch + _FACTORS + 4 * row, np.float32(1))
            _multiply_values(scratch, scratch + _P + 4 * whole, pair, 0, 1, dim, rows, element)
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
        to = scratch + _Q + row * _Q_STRIDE
        for i in range(0, dim * size, 4):
            copy_int32(to + i, source + i)
    merged = _walk(scratch, task, item, kv_head, heads, rows, used, element)

    out = int64_at(task + OUT)
    pieces = int32_at(item + 32)
    if pieces == 1:
        for row in range(used):
            to = out + ((token + row // heads) * num_heads + head + row % heads) * dim * size
            source = scratch + _MERGED + row * _O_STRIDE
            if not merged:
                source = _partial_of(scratch, row, dim)
            _write_out(to, source, dim, element)
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
        _write_out(to, whole, dim, element)


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
