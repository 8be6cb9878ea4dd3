"""What numba's kernels are given: a *task*, an array of int64, at the offsets (in bytes) that stand here."""

from __future__ import annotations

import functools

import numba

compiled = functools.partial(numba.njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

TASK_BYTES = 23 * 8

# Of each call: counters of items and of threads that have begun, the work, the threads' memory, the layer in
# the pool.
NEXT, THREADS, NUM_ITEMS, ITEMS, SCRATCH, LAYER = range(0, 6 * 8, 8)
# Of the shape.
HEADS, KV_HEADS, DIM, BLOCK, BLOCK_BYTES, SCALE = range(6 * 8, 12 * 8, 8)
PIECE_BLOCKS, KV_INT8 = 20 * 8, 21 * 8
# Of `attend`.
QUERIES, QUERY_STRIDE, OUT, TABLES, TABLE_STRIDE, WINDOW, PARTIALS, FINISHED = range(12 * 8, 20 * 8, 8)
SINKS = 22 * 8  # or 0
# Of `write`.
KEYS, KEY_STRIDE, VALUES, VALUE_STRIDE = range(12 * 8, 16 * 8, 8)
# Of `rotate_and_write`.
QKV, ROTATED, COS, SIN, ROTARY_STRIDE, QUERY_NORM, KEY_NORM, EPS = range(12 * 8, 20 * 8, 8)
# Of the steps between products.
X, Y, Y_SCALES, WEIGHT, RESULT, RESULT_SCALES, WIDTH, NORM_EPS = range(12 * 8, 20 * 8, 8)

SCRATCH_BYTES = 288 << 10
"""Of a thread."""
