"""Storing keys and values in their tiles, and the rotary embedding on the way, in numba."""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated"
from __future__ import annotations

import math

import numpy as np

from baton.model.cpu.numba import kv_int8
from baton.model.cpu.numba.task import (
    BLOCK,
    BLOCK_BYTES,
    COS,
    DIM,
    EPS,
    HEADS,
    ITEMS,
    KEY_NORM,
    KEY_STRIDE,
    KEYS,
    KV_HEADS,
    KV_INT8,
    LAYER,
    NEXT,
    NUM_ITEMS,
    QKV,
    QUERY_NORM,
    ROTARY_STRIDE,
    ROTATED,
    SCRATCH,
    SCRATCH_BYTES,
    SIN,
    THREADS,
    VALUE_STRIDE,
    VALUES,
    compiled,
)
from baton.model.cpu.numba.vectors import (
    SINGLES,
    add,
    copy_int16,
    copy_int32,
    element_bytes,
    fetch_add_int64,
    float_at,
    int32_at,
    int64_at,
    load_some,
    multiply,
    multiply_add,
    splat,
    store_some,
    subtract,
    total,
)

_BYTES = 128 << 10
"""Of a thread's scratch memory: where a head in eight bits is, behind rotated ones."""


@compiled
def tile_bytes(task, element):
    elements = int64_at(task + BLOCK) * int64_at(task + DIM)
    if int64_at(task + KV_INT8) != 0:
        return elements + 4 * int64_at(task + BLOCK)
    return elements * element_bytes(element)


@compiled
def _put_keys(tile, block, dim, offset, keys, stride, count, element):
    """Keys, `stride` bytes from one token to the next, to their columns of a K tile: 4 bytes at a time."""
    for step in range(dim * element_bytes(element) // 4):
        for token in range(count):
            copy_int32(tile + 4 * (step * block + offset + token), keys + token * stride + 4 * step)


@compiled
def _put_values(tile, dim, offset, values, stride, count, element):
    for token in range(count):
        at, source = offset + token, values + token * stride
        if element_bytes(element) == 4:
            for i in range(dim):
                copy_int32(tile + 4 * (at * dim + i), source + 4 * i)
        else:
            to = tile + 4 * (at // 2) * dim + 2 * (at % 2)
            for i in range(dim):
                copy_int16(to + 4 * i, source + 2 * i)


@compiled
def _tile_of(task, block, kv_head, element):
    """(K tile, V tile) of a block."""
    tile = tile_bytes(task, element)
    keys = int64_at(task + LAYER) + block * int64_at(task + BLOCK_BYTES) + kv_head * tile
    return keys, keys + int64_at(task + KV_HEADS) * tile


@compiled
def _put(task, tiles, offset, keys, key_stride, values, value_stride, count, scratch, element):
    """Keys, values or (0) not, in their tiles."""
    dim, block = int64_at(task + DIM), int64_at(task + BLOCK)
    if int64_at(task + KV_INT8) != 0:
        if keys != 0:
            kv_int8.put_keys(tiles[0], block, dim, offset, keys, key_stride, count, scratch, element)
        if values != 0:
            kv_int8.put_values(tiles[1], block, dim, offset, values, value_stride, count, scratch, element)
        return
    if keys != 0:
        _put_keys(tiles[0], block, dim, offset, keys, key_stride, count, element)
    if values != 0:
        _put_values(tiles[1], dim, offset, values, value_stride, count, element)


@compiled
def write(task, element):
    kv_heads = int64_at(task + KV_HEADS)
    head_bytes = int64_at(task + DIM) * element_bytes(element)
    scratch = int64_at(task + SCRATCH) + fetch_add_int64(task + THREADS) * SCRATCH_BYTES
    keys, key_stride = int64_at(task + KEYS), int64_at(task + KEY_STRIDE)
    values, value_stride = int64_at(task + VALUES), int64_at(task + VALUE_STRIDE)
    while True:
        index = fetch_add_int64(task + NEXT)
        if index >= int64_at(task + NUM_ITEMS) * kv_heads:
            return
        run, head = int64_at(task + ITEMS) + 20 * (index // kv_heads), index % kv_heads
        token, count, offset = int32_at(run), int32_at(run + 4), int32_at(run + 12)
        tiles = _tile_of(task, int32_at(run + 8), head, element)
        from_keys = keys + token * key_stride + head * head_bytes
        from_values = values + token * value_stride + head * head_bytes
        _put(task, tiles, offset, from_keys, key_stride, from_values, value_stride, count, scratch, element)


@compiled
def _rotate_head(source, to, half, cos, sin, norm, eps, element):
    """One head: halves (a, b) → (a cos - b sin, b cos + a sin), after the head norm if there is one."""
    size = element_bytes(element)
    scale = splat(np.float32(1))
    if norm != 0:
        squares = splat(np.float32(0))
        for i in range(0, 2 * half, 16):
            x = load_some(source + size * i, 2 * half - i, element)
            squares = multiply_add(x, x, squares)
        mean = total(squares) / np.float32(2 * half)
        scale = splat(np.float32(1) / np.float32(math.sqrt(mean + eps)))
    for i in range(0, half, 16):
        count = half - i
        a, b = (
            load_some(source + size * i, count, element),
            load_some(source + size * (half + i), count, element),
        )
        if norm != 0:
            a = multiply(multiply(a, scale), load_some(norm + size * i, count, element))
            b = multiply(multiply(b, scale), load_some(norm + size * (half + i), count, element))
        c, s = load_some(cos + 4 * i, count, SINGLES), load_some(sin + 4 * i, count, SINGLES)
        store_some(to + size * i, subtract(multiply(a, c), multiply(b, s)), count, element)
        store_some(to + size * (half + i), add(multiply(b, c), multiply(a, s)), count, element)


@compiled
def rotate_and_write(task, element):
    heads, kv_heads = int64_at(task + HEADS), int64_at(task + KV_HEADS)
    dim = int64_at(task + DIM)
    per_kv = heads // kv_heads
    head_bytes = dim * element_bytes(element)
    stride = (heads + 2 * kv_heads) * head_bytes
    rotated = int64_at(task + SCRATCH) + fetch_add_int64(task + THREADS) * SCRATCH_BYTES
    scratch = rotated + _BYTES
    eps = float_at(task + EPS)
    while True:
        index = fetch_add_int64(task + NEXT)
        if index >= int64_at(task + NUM_ITEMS) * kv_heads:
            return
        run, head = int64_at(task + ITEMS) + 20 * (index // kv_heads), index % kv_heads
        count, offset = int32_at(run + 4), int32_at(run + 12)
        tiles = _tile_of(task, int32_at(run + 8), head, element)
        # A few tokens at a time: a line of a K tile holds 16.
        for first in range(0, count, 16):
            some = min(count - first, 16)
            for i in range(some):
                token = int32_at(run) + first + i
                row = int64_at(task + QKV) + token * stride
                angle = (int32_at(run + 16) + first + i) * int64_at(task + ROTARY_STRIDE)
                cos, sin = int64_at(task + COS) + angle, int64_at(task + SIN) + angle
                for query in range(head * per_kv, (head + 1) * per_kv):
                    to = int64_at(task + ROTATED) + (token * heads + query) * head_bytes
                    norm = int64_at(task + QUERY_NORM)
                    _rotate_head(row + query * head_bytes, to, dim // 2, cos, sin, norm, eps, element)
                key = row + (heads + head) * head_bytes
                norm = int64_at(task + KEY_NORM)
                _rotate_head(key, rotated + i * head_bytes, dim // 2, cos, sin, norm, eps, element)
            _put(task, tiles, offset + first, rotated, head_bytes, 0, 0, some, scratch, element)
        token = int32_at(run)
        values = int64_at(task + QKV) + token * stride + (heads + kv_heads + head) * head_bytes
        _put(task, tiles, offset, 0, 0, values, stride, count, scratch, element)
