"""What happens to activations between two products, in numba; the arithmetic is that of native/steps.cpp.

Theory.  Rows are independent; a row is computed in float32 in a thread's scratch memory, and written from
there: rounded, or for a quantized product as bytes 128 + round(x / c) with c = max|x| / 127 of the row.  A
result of a product of quantized activations comes with one factor a row, which is applied when it is read.
"""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated"
from __future__ import annotations

import math

import numpy as np

from baton.model.cpu.numba.task import (
    NEXT,
    NORM_EPS,
    NUM_ITEMS,
    RESULT,
    RESULT_SCALES,
    SCRATCH,
    THREADS,
    WEIGHT,
    WIDTH,
    Y_SCALES,
    X,
    Y,
    compiled,
)
from baton.model.cpu.numba.vectors import (
    SINGLES,
    add,
    divide,
    element_bytes,
    exp2,
    fetch_add_int64,
    float_at,
    highest,
    int64_at,
    load,
    load_elements,
    load_some,
    maximum,
    multiply,
    multiply_add,
    put_float,
    splat,
    store,
    store_bytes,
    store_elements,
    store_some,
    subtract,
    total,
)

_LOG2E = np.float32(math.log2(math.e))


@compiled
def _load(address, count, element):
    if count >= 16:
        return load_elements(address, element)
    return load_some(address, count, element)


@compiled
def _store(address, vector, count, element):
    if count >= 16:
        store_elements(address, vector, element)
    else:
        store_some(address, vector, count, element)


@compiled
def _own_row(task):
    """The scratch memory of this thread: a row of float32, up to a multiple of 16."""
    width = (int64_at(task + WIDTH) + 15) // 16 * 16
    return int64_at(task + SCRATCH) + 4 * width * fetch_add_int64(task + THREADS)


@compiled
def _write_row(task, row, values, element):
    """`values`: float32 [n] of a row, zeros beyond up to a multiple of 16."""
    n = int64_at(task + WIDTH)
    out, scales = int64_at(task + RESULT), int64_at(task + RESULT_SCALES)
    if scales == 0:
        size = element_bytes(element)
        for i in range(0, n, 16):
            _store(out + size * (row * n + i), load(values + 4 * i), n - i, element)
        return
    most = splat(np.float32(0))
    for i in range(0, n, 16):
        x = load(values + 4 * i)
        most = maximum(most, maximum(x, subtract(splat(np.float32(0)), x)))
    scale = max(highest(most) / np.float32(127), np.float32(1e-30))
    inverse = splat(np.float32(1) / scale)
    for i in range(0, n, 16):
        store_bytes(out + row * n + i, multiply(load(values + 4 * i), inverse), n - i)
    put_float(scales + 4 * row, scale)


@compiled
def add_norm(task, element):
    """x += y; result = x / sqrt(mean(x²) + eps) * weight."""
    n, size, values = int64_at(task + WIDTH), element_bytes(element), _own_row(task)
    y, y_scales, weight = int64_at(task + Y), int64_at(task + Y_SCALES), int64_at(task + WEIGHT)
    while True:
        row = fetch_add_int64(task + NEXT)
        if row >= int64_at(task + NUM_ITEMS):
            return
        x = int64_at(task + X) + size * row * n
        squares = splat(np.float32(0))
        factor = splat(np.float32(1))
        if y_scales != 0:
            factor = splat(float_at(y_scales + 4 * row))
        for i in range(0, n, 16):
            found = _load(x + size * i, n - i, element)
            if y != 0:
                more = _load(y + size * (row * n + i), n - i, element)
                _store(x + size * i, multiply_add(more, factor, found), n - i, element)
                found = _load(x + size * i, n - i, element)
            store(values + 4 * i, found)
            squares = multiply_add(found, found, squares)
        inverse = splat(
            np.float32(1) / np.float32(math.sqrt(total(squares) / np.float32(n) + float_at(task + NORM_EPS)))
        )
        for i in range(0, n, 16):
            normed = multiply(load(values + 4 * i), inverse)
            store(values + 4 * i, multiply(normed, _load(weight + size * i, n - i, element)))
        _write_row(task, row, values, element)


@compiled
def silu_mul(task, element):
    """Rows of gate (n) and up (n) → silu(gate) * up, silu(x) = x / (1 + e^-x)."""
    n, size, values = int64_at(task + WIDTH), element_bytes(element), _own_row(task)
    scales = int64_at(task + Y_SCALES)
    one, least = splat(np.float32(1)), splat(np.float32(-126))
    while True:
        row = fetch_add_int64(task + NEXT)
        if row >= int64_at(task + NUM_ITEMS):
            return
        gates = int64_at(task + X) + size * 2 * row * n
        factor = one
        if scales != 0:
            factor = splat(float_at(scales + 4 * row))
        for i in range(0, n, 16):
            gate = multiply(_load(gates + size * i, n - i, element), factor)
            up = multiply(_load(gates + size * (n + i), n - i, element), factor)
            power = maximum(multiply(gate, splat(_LOG2E)), least)
            silu = divide(gate, add(one, exp2(subtract(splat(np.float32(0)), power))))
            store(values + 4 * i, multiply(silu, up))
        _write_row(task, row, values, element)


@compiled
def quantize(task, element):
    """Rows as bytes and factors."""
    n, size, values = int64_at(task + WIDTH), element_bytes(element), _own_row(task)
    while True:
        row = fetch_add_int64(task + NEXT)
        if row >= int64_at(task + NUM_ITEMS):
            return
        x = int64_at(task + X) + size * row * n
        for i in range(0, n, 16):
            store(values + 4 * i, _load(x + size * i, n - i, element))
        _write_row(task, row, values, SINGLES)
