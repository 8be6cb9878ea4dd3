"""Keys and values in eight bits, in numba: how they are quantized, and expanded for products.

Theory.  What is kept, and where, is as in `model.attention.kv_int8` and native/tiles.h.  C++ multiplies
bytes; here a tile is expanded to the elements that `accumulate_product` takes: an integer of eight bits is
exact in bfloat16.  The scales of keys are multiplied into scores, those of values into weights.
"""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN201, ANN202, E501
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, operator, var-annotated, has-type, misc"
from __future__ import annotations

import numpy as np

from baton.model.cpu.numba.bytes import copy_flipped_byte, load_byte, nearest, store_pairs
from baton.model.cpu.numba.task import compiled
from baton.model.cpu.numba.vectors import (
    SINGLES,
    copy_int32,
    element_bytes,
    highest,
    load_some,
    maximum,
    multiply,
    put_float,
    splat,
    store_bytes,
    store_some,
    subtract,
    total,
)

LARGEST = np.float32(127)
_LEAST = np.float32(2.0**-100)
_LARGEST_NUMBER = np.float32(3.4028235e38)


@compiled
def _largest(source, dim, element):
    """The largest magnitude of a head; NaN if it holds NaN or infinity."""
    most, zeros = splat(np.float32(0)), splat(np.float32(0))
    broken = np.float32(0)
    for i in range(0, dim, 16):
        x = load_some(source + element_bytes(element) * i, dim - i, element)
        most = maximum(maximum(x, subtract(zeros, x)), most)
        broken += total(multiply(x, zeros))
    return highest(most) + broken


@compiled
def _scaling(largest):
    """What makes integers of a head, and the scale that undoes it."""
    if not largest <= _LARGEST_NUMBER:
        return np.float32(0), np.float32(np.nan)
    if largest > _LEAST:
        return LARGEST / largest, largest / LARGEST
    return np.float32(0), np.float32(0)


@compiled
def quantize_head(source, to, dim, element):
    """A head → bytes 128 + q; returns their scale."""
    factor, scale = _scaling(_largest(source, dim, element))
    for i in range(0, dim, 16):
        x = splat(np.float32(0))
        if factor != 0:
            x = multiply(load_some(source + element_bytes(element) * i, dim - i, element), splat(factor))
        store_bytes(to + i, x, dim - i)
    return scale


@compiled
def quantize_query(source, to, dim, element):
    """A row of queries → integers, as elements; returns their scale."""
    factor, scale = _scaling(_largest(source, dim, element))
    size = element_bytes(element)
    for i in range(0, dim, 16):
        x = splat(np.float32(0))
        if factor != 0:
            x = nearest(multiply(load_some(source + size * i, dim - i, element), splat(factor)))
        store_some(to + size * i, x, dim - i, element)
    return scale


@compiled
def put_keys(tile, block, dim, offset, keys, stride, count, scratch, element):
    for token in range(count):
        scale = quantize_head(keys + token * stride, scratch, dim, element)
        put_float(tile + block * dim + 4 * (offset + token), scale)
        for step in range(dim // 4):
            copy_int32(tile + 4 * (step * block + offset + token), scratch + 4 * step)


@compiled
def put_values(tile, block, dim, offset, values, stride, count, scratch, element):
    for token in range(count):
        at = offset + token
        put_float(tile + block * dim + 4 * at, quantize_head(values + token * stride, scratch, dim, element))
        to = tile + at // 4 * dim * 4 + at % 4
        for i in range(dim):
            copy_flipped_byte(to + 4 * i, scratch + i)


@compiled
def expand(source, to, first, steps, columns, row, flip, element):
    """Steps [first, steps) of four bytes of `columns` columns, `row` of them a step, as a product reads them.

    `flip`: 128, bytes are signed; 0: they are 128 + q.
    """
    for step in range(first, steps):
        for i in range(0, columns, 16):
            at, count = source + 4 * (step * row + i), columns - i
            zero, one = load_byte(at, count, 0, flip), load_byte(at, count, 8, flip)
            two, three = load_byte(at, count, 16, flip), load_byte(at, count, 24, flip)
            if element_bytes(element) == 2:
                store_pairs(to + 4 * (2 * step * row + i), zero, one, count)
                store_pairs(to + 4 * ((2 * step + 1) * row + i), two, three, count)
            else:
                store_some(to + 4 * (4 * step * row + i), zero, count, SINGLES)
                store_some(to + 4 * ((4 * step + 1) * row + i), one, count, SINGLES)
                store_some(to + 4 * ((4 * step + 2) * row + i), two, count, SINGLES)
                store_some(to + 4 * ((4 * step + 3) * row + i), three, count, SINGLES)
