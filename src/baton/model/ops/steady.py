"""Products of a library whose result for a row may depend on how many rows there are, made independent of it.

Theory.  oneDNN, MKL and their kin choose a kernel by the number of rows, and kernels may add up in other
orders.  They seldom do: on one CPU all numbers of rows but one give the same bits, or all multiples of 4 do.
So only `COUNTS` are ever asked for.  When weights are loaded, `find_sizes` tries each product with every one
of them, on the machine and with the number of threads that will compute, and finds those that agree.  From
then on rows are computed in such numbers, and what is missing is filled up with zeros (`multiply`).

Two orders often give the same bfloat16: it keeps 8 bits of a sum that was made in 24.  Of a few rows by a
small matrix all outputs may agree by chance, and those of the next prompt not.  So what is tried is not a
weight of the model but one of its shape (kernels are chosen by shapes, not by values) that `revealing` makes,
whose products with certain rows are 0: what is found is what rounding has left, all of it order.

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

COUNTS = (
    *(*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512),
)
"""Numbers of rows.  From 8 on, filling up costs a quarter at most."""
MOST_ROWS = COUNTS[-1]
_LEAST_MOST = 64
"""A single row is filled up to so many at most."""
_OFFSET = 5
"""The first row of a part that is tried a second time, in another place."""
_OUTPUTS = 1024
"""That differ in what `revealing` makes: more take long."""

Multiply = Callable[[Activations], Result]


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows that agree, ascending."""

    counts: tuple[int, ...]

    @property
    def most(self) -> int:
        return self.counts[-1]

    def parts(self, rows: int) -> list[int]:
        """Of these numbers, so many that there is room for `rows`; what is left over is in the last one."""
        found = [self.most] * (rows // self.most)
        left = rows % self.most
        while left > 0:
            enough = next(count for count in self.counts if count >= left)
            less = [count for count in self.counts if count < left]
            found.append(less[-1] if less and enough > 2 * left else enough)
            left -= found[-1]
        return found

    def common(self, others: Sizes) -> Sizes:
        """What both have, or what this one has if that is nothing."""
        both = tuple(count for count in self.counts if count in others.counts)
        return Sizes(both) if both else self


ALL = Sizes(COUNTS)


def random_rows(in_features: int, dtype: torch.dtype) -> Tensor:
    """For `find_sizes`, where different orders seldom give the same: a result in float32."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(MOST_ROWS + _OFFSET, in_features, generator=generator).to(dtype)


def revealing(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """A weight and a bias of the same shapes and dtype, and rows for `find_sizes`.

    Each input has another one, somewhere, with the same weights and the opposite activation.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = weight.shape
    order = torch.randperm(inputs, generator=generator)
    ones, others = order[: inputs // 2], order[inputs // 2 : inputs // 2 * 2]
    some = torch.randn(min(outputs, _OUTPUTS), inputs, generator=generator).to(weight.dtype)
    some[:, order[inputs // 2 * 2 :]] = 0
    some[:, others] = some[:, ones]
    found = some.repeat(-(-outputs // _OUTPUTS), 1)[:outputs]
    rows = random_rows(inputs, torch.float32)
    rows *= 2.0 ** torch.randint(-6, 7, rows.shape, generator=generator)
    rows[:, others] = -rows[:, ones]
    if bias is None:
        return found, None, rows.to(weight.dtype)
    small = 2.0**-14 * torch.randn(outputs, generator=generator)  # as large as what is left of the sums
    return found, small.to(bias.dtype), rows.to(weight.dtype)


def find_sizes(product: Multiply, rows: Tensor, int8: bool = False) -> Sizes:
    """For a product of activations of such rows (`revealing` or `random_rows`), quantized if `int8`."""

    def values(first: int, count: int) -> Tensor:
        part = rows[first : first + count].contiguous()
        found = product(quantize_activations(part) if int8 else part)
        return found.values if isinstance(found, Unscaled) else found

    for most in (MOST_ROWS, _LEAST_MOST, 16):
        whole = values(0, most)[_OFFSET:]
        counts = tuple(
            count
            for count in COUNTS
            if count <= most and torch.equal(values(_OFFSET, count)[: most - _OFFSET], whole[:count])
        )
        if counts and counts[0] <= _LEAST_MOST and counts[-1] == most:
            return Sizes(counts)
    logger.warning(
        "products of %d inputs in %s depend on the batch on this machine: a token's log-probabilities may "
        "differ a little with what is computed beside it",
        rows.shape[1],
        rows.dtype,
    )
    return ALL


def multiply(product: Multiply, x: Activations, sizes: Sizes) -> Result:
    """product(x), computed in parts of these sizes."""
    parts, first = [], 0
    for size in sizes.parts(len(x if isinstance(x, Tensor) else x.values)) or [sizes.counts[0]]:
        parts.append(_part(product, x, first, size))
        first += size
    unscaled = [part for part in parts if isinstance(part, Unscaled)]
    if unscaled:
        assert isinstance(x, Quantized)
        return Unscaled(_joined([part.values for part in unscaled]), x.scales)
    return _joined([part for part in parts if isinstance(part, Tensor)])


def _part(product: Multiply, x: Activations, first: int, size: int) -> Result:
    """Of `size` rows from `first` on, or of as many as there are."""
    last = first + size
    if isinstance(x, Quantized):
        values, scales = x.values[first:last], x.scales[first:last]
        found = product(Quantized(_filled(values, size), _filled(scales, size)))
        if isinstance(found, Unscaled):
            return Unscaled(found.values[: len(values)], scales)
        return found[: len(values)]
    assert isinstance(x, Tensor)
    rows = x[first:last]
    found = product(_filled(rows, size))
    assert isinstance(found, Tensor)
    return found[: len(rows)]


def _filled(rows: Tensor, size: int) -> Tensor:
    """With zeros up to so many."""
    missing = size - len(rows)
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows


def _joined(parts: list[Tensor]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
