"""Products of a library whose result for a row may depend on how many rows there are, made independent of it.

Theory.  oneDNN, MKL and their kin choose a kernel by the number of rows, and kernels may add up in other
orders.  They seldom do: on one CPU all numbers of rows but one give the same bits, or all multiples of 4 do.
So when weights are loaded, `find_sizes` tries each product with many numbers of rows, on the machine and with
the number of threads that will compute, and finds the smallest *unit* whose multiples agree.  From then on
rows are computed at most `most` at a time, and a number that is no multiple of the unit is filled up with
zeros (`multiply`).

Baton's own kernels (`cpu.linear`) need none of this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.ops.fused import Activations, Result
from baton.model.weights.quantized import Quantized, Unscaled, quantize_activations

logger = logging.getLogger(__name__)

MOST_ROWS = 512
_TRIED = (
    *(
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        11,
        12,
        15,
        16,
        17,
        20,
        24,
        28,
        31,
        32,
        33,
        36,
        40,
        48,
        52,
        63,
        64,
        65,
        72,
        80,
    ),
    *(96, 100, 127, 128, 192, 240, 256, 384),
)
_UNITS = (1, 2, 4, 8, 16, 32, 64)
_OFFSET = 5
"""The first row of a part that is tried a second time, in another place."""

Multiply = Callable[[Activations], Result]


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows that agree: multiples of `unit` up to `most`."""

    unit: int
    most: int


def find_sizes(product: Multiply, in_features: int, dtype: torch.dtype, int8: bool = False) -> Sizes:
    """For a product of activations [rows, in_features] of `dtype`, quantized if `int8`."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(MOST_ROWS, in_features, generator=generator).to(dtype)

    def values(part: Tensor) -> Tensor:
        found = product(quantize_activations(part) if int8 else part)
        return found.values if isinstance(found, Unscaled) else found

    def agrees(count: int, whole: Tensor) -> bool:
        found = values(rows[_OFFSET : _OFFSET + count].contiguous())
        return torch.equal(found, whole[_OFFSET : _OFFSET + count])

    whole = values(rows)
    bad = [count for count in _TRIED if not agrees(count, whole)]
    for unit in _UNITS:
        if not any(count % unit == 0 for count in bad):
            return Sizes(unit, MOST_ROWS)
    for count in (64, 16):  # always the same number then, if at least its rows are treated alike
        some = values(rows[:count].contiguous())
        again = values(rows[_OFFSET : _OFFSET + count].contiguous())
        if torch.equal(some[_OFFSET:], again[: count - _OFFSET]):
            return Sizes(count, count)
    logger.warning(
        "products of %d inputs in %s depend on the batch on this machine: a token's log-probabilities may "
        "differ a little with what is computed beside it",
        in_features,
        dtype,
    )
    return Sizes(1, MOST_ROWS)


def multiply(product: Multiply, x: Activations, sizes: Sizes) -> Result:
    """product(x), computed in parts of these sizes."""
    count = len(x if isinstance(x, Tensor) else x.values)
    if count <= sizes.most and count % sizes.unit == 0:
        return product(x)
    parts = [_part(product, x, first, sizes) for first in range(0, count, sizes.most)]
    unscaled = [part for part in parts if isinstance(part, Unscaled)]
    if unscaled:
        assert isinstance(x, Quantized)
        return Unscaled(_joined([part.values for part in unscaled]), x.scales)
    return _joined([part for part in parts if isinstance(part, Tensor)])


def _part(product: Multiply, x: Activations, first: int, sizes: Sizes) -> Result:
    """Of rows from `first` on."""
    last = first + sizes.most
    if isinstance(x, Quantized):
        values, scales = x.values[first:last], x.scales[first:last]
        found = product(Quantized(_filled(values, sizes.unit), _filled(scales, sizes.unit)))
        if isinstance(found, Unscaled):
            return Unscaled(found.values[: len(values)], scales)
        return found[: len(values)]
    assert isinstance(x, Tensor)
    rows = x[first:last]
    found = product(_filled(rows, sizes.unit))
    assert isinstance(found, Tensor)
    return found[: len(rows)]


def _filled(rows: Tensor, unit: int) -> Tensor:
    """With zeros up to a multiple of the unit."""
    missing = -len(rows) % unit
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows


def _joined(parts: list[Tensor]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
