"""A tile of queries in numba's attention: a thread's scratch memory, and the products."""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated"
from __future__ import annotations

from baton.model.cpu.kernels import QUERY_ROWS
from baton.model.cpu.numba.product import accumulate_product
from baton.model.cpu.numba.task import SCRATCH_BYTES, compiled
from baton.model.cpu.numba.vectors import MANY_REGISTERS

# A thread's scratch memory, in bytes.  Rows are an odd number of cache lines apart, so that they do not
# compete for the same ones; the distances are constants, which addresses then contain.
Q_STRIDE = 1088  # queries: up to 256 elements
S_STRIDE = 576  # scores: up to 128 float32
P_STRIDE = 576  # weights: up to 128 elements
O_STRIDE = 1088  # sums of values: up to 256 float32
Q = 0
S = Q + QUERY_ROWS * Q_STRIDE
P = S + QUERY_ROWS * S_STRIDE
RESULTS = P + QUERY_ROWS * P_STRIDE
SUMS = RESULTS + QUERY_ROWS * O_STRIDE  # l, a vector of partial sums for each row
LARGEST = SUMS + QUERY_ROWS * 64  # m
FRESH = LARGEST + QUERY_ROWS * 4  # m'
FACTORS = FRESH + QUERY_ROWS * 4  # 2^(m - m')
LAST_PAIR = FACTORS + QUERY_ROWS * 4  # values of a last token that has no second: 256 pairs
MERGED = LAST_PAIR + 1024  # of the pieces before: O, l and m of each row
Q_SCALES = MERGED + QUERY_ROWS * O_STRIDE  # of queries in eight bits
EXPANDED = Q_SCALES + QUERY_ROWS * 4  # a tile of eight bits: up to 128 x 256 elements
assert EXPANDED + 4 * 128 * 256 <= SCRATCH_BYTES


# Products of a tile.  Registers hold 4 rows x 64 columns of the result, which reads B line after line;
# columns that are left are done with more rows at once.  `rows` is 2 or a multiple of 4, but some rows beyond
# may be computed as well: nobody reads them.

_ROWS = 8 if MANY_REGISTERS else 4
_TWO = 2 if MANY_REGISTERS else 1


@compiled
def multiply_keys(scratch, b, stride, ahead, steps, columns, rows, element):
    """S = Q K: `b` is a K tile, whose rows are `stride` bytes apart."""
    c, a = scratch + S, scratch + Q
    while MANY_REGISTERS and columns >= 64:
        if rows == 2:
            accumulate_product(c, S_STRIDE, None, a, Q_STRIDE, b, stride, ahead, steps, 2, 4, 16, element)
        for row in range(0, rows // 4 * 4, 4):
            to, left = c + row * S_STRIDE, a + row * Q_STRIDE
            accumulate_product(to, S_STRIDE, None, left, Q_STRIDE, b, stride, ahead, steps, 4, 4, 16, element)
        c, b, columns = c + 256, b + 256, columns - 64
    while columns >= _TWO * 16:
        if rows == 2:
            accumulate_product(c, S_STRIDE, None, a, Q_STRIDE, b, stride, ahead, steps, 2, _TWO, 16, element)
        for row in range(0, rows // 4 * 4, _ROWS):
            to, left = c + row * S_STRIDE, a + row * Q_STRIDE
            accumulate_product(
                to, S_STRIDE, None, left, Q_STRIDE, b, stride, ahead, steps, _ROWS, _TWO, 16, element
            )
        c, b, columns = c + _TWO * 64, b + _TWO * 64, columns - _TWO * 16
    if columns >= 16:
        if rows == 2:
            accumulate_product(c, S_STRIDE, None, a, Q_STRIDE, b, stride, ahead, steps, 2, 1, 16, element)
        for row in range(0, rows // 4 * 4, _ROWS):
            to, left = c + row * S_STRIDE, a + row * Q_STRIDE
            accumulate_product(
                to, S_STRIDE, None, left, Q_STRIDE, b, stride, ahead, steps, _ROWS, 1, 16, element
            )
        c, b, columns = c + 64, b + 64, columns - 16
    while columns > 0:
        for row in range(0, rows, 4):
            to, left = c + row * S_STRIDE, a + row * Q_STRIDE
            accumulate_product(to, S_STRIDE, None, left, Q_STRIDE, b, stride, 0, steps, 4, 1, 1, element)
        c, b, columns = c + 4, b + 4, columns - 1


@compiled
def multiply_values(scratch, a, b, ahead, steps, dim, rows, element):
    """O = O * factors + P V: `a` is where weights begin in P, `b` in the V tile."""
    c, factors, stride, columns = scratch + RESULTS, scratch + FACTORS, 4 * dim, dim
    while MANY_REGISTERS and columns >= 64:
        if rows == 2:
            accumulate_product(c, O_STRIDE, factors, a, P_STRIDE, b, stride, ahead, steps, 2, 4, 16, element)
        for row in range(0, rows // 4 * 4, 4):
            to, left, scales = c + row * O_STRIDE, a + row * P_STRIDE, factors + 4 * row
            accumulate_product(
                to, O_STRIDE, scales, left, P_STRIDE, b, stride, ahead, steps, 4, 4, 16, element
            )
        c, b, columns = c + 256, b + 256, columns - 64
    while columns >= _TWO * 16:
        if rows == 2:
            accumulate_product(
                c, O_STRIDE, factors, a, P_STRIDE, b, stride, ahead, steps, 2, _TWO, 16, element
            )
        for row in range(0, rows // 4 * 4, _ROWS):
            to, left, scales = c + row * O_STRIDE, a + row * P_STRIDE, factors + 4 * row
            accumulate_product(
                to, O_STRIDE, scales, left, P_STRIDE, b, stride, ahead, steps, _ROWS, _TWO, 16, element
            )
        c, b, columns = c + _TWO * 64, b + _TWO * 64, columns - _TWO * 16
    if columns >= 16:
        if rows == 2:
            accumulate_product(c, O_STRIDE, factors, a, P_STRIDE, b, stride, ahead, steps, 2, 1, 16, element)
        for row in range(0, rows // 4 * 4, _ROWS):
            to, left, scales = c + row * O_STRIDE, a + row * P_STRIDE, factors + 4 * row
            accumulate_product(
                to, O_STRIDE, scales, left, P_STRIDE, b, stride, ahead, steps, _ROWS, 1, 16, element
            )
        c, b, columns = c + 64, b + 64, columns - 16
    while columns > 0:
        for row in range(0, rows, 4):
            to, left, scales = c + row * O_STRIDE, a + row * P_STRIDE, factors + 4 * row
            accumulate_product(to, O_STRIDE, scales, left, P_STRIDE, b, stride, 0, steps, 4, 1, 1, element)
        c, b, columns = c + 4, b + 4, columns - 1
