"""How the pieces of a context are added up, in numba; of a piece there is O, l and m of a row."""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated"
from __future__ import annotations

import numpy as np

from baton.model.cpu.numba.task import compiled
from baton.model.cpu.numba.vectors import (
    SINGLES,
    copy_int32,
    exp2,
    float_at,
    highest,
    load_some,
    multiply,
    multiply_add,
    put_float,
    splat,
    store_some,
)

NOTHING = np.float32(-1e25)
"""m before the first score: a masked one must lie far below it."""


@compiled
def copy_partial(to, source, dim) -> None:
    for i in range(0, 4 * dim + 8, 4):
        copy_int32(to + i, source + i)


@compiled
def merge(to, source, dim) -> None:
    """Adds a piece's (O, l, m) to those of the pieces before it.  One that saw nothing changes nothing."""
    before, now = float_at(to + 4 * dim + 4), float_at(source + 4 * dim + 4)
    if now == NOTHING:
        return
    if before == NOTHING:
        copy_partial(to, source, dim)
        return
    most = max(before, now)
    old, new = exp2(splat(before - most)), exp2(splat(now - most))
    for i in range(0, dim, 16):
        part = multiply(load_some(to + 4 * i, dim - i, SINGLES), old)
        whole = multiply_add(load_some(source + 4 * i, dim - i, SINGLES), new, part)
        store_some(to + 4 * i, whole, dim - i, SINGLES)
    weights = float_at(to + 4 * dim) * highest(old) + float_at(source + 4 * dim) * highest(new)
    put_float(to + 4 * dim, weights)
    put_float(to + 4 * dim + 4, most)
