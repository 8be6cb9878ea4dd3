"""Activations for products with weights in groups (`grouped`): signed bytes, one scale for 128 inputs.

Theory.  x[t, k] ≈ q[t, k] * c[t, b], with a scale c for each token and block b of 128 inputs, which maps the
largest magnitude to 127.  A product with codes is then, group by group,

    sum of x * w = c * s * (sum of q * code - zero * sum of q)

where both sums are of integers: exact, whatever the batch.  So beside q and c a kernel needs the sums of q
over the weight's groups.  They do not depend on the weight: those over 32, 64 and 128 inputs are all kept,
and one result of a norm serves weights in any groups.

Why a scale for 128 inputs, and not one for a token as int8 has: an outlier spoils the bytes of its block
only.  With 3 of 2,048 inputs 10 to 50 times as large as the others, as trained models have them, the error of
a product is a third; with none, four fifths.  It costs one multiplication for 32 byte dot products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Inputs that share a scale."""
SUMMED = (32, 64, 128)
"""Inputs over which there are sums: the groups that weights may have."""


@dataclass(slots=True)
class GroupRows:
    """Activations [T, K] = values * (the scale of the input's block); K is a multiple of 32."""

    values: Tensor
    """[T, K] int8"""
    factors: Tensor
    """[T, factors_of(K)] int32: scales of blocks, which are float32 by their bits; then minus the sums of
    `values` over 32, 64 and 128 inputs"""

    @property
    def scales(self) -> Tensor:
        """[T, blocks] float32"""
        return self.factors[:, : -(-self.values.shape[1] // BLOCK)].view(torch.float32)


def factors_of(inputs: int) -> int:
    """Numbers in a row of `GroupRows.factors`."""
    return -(-inputs // BLOCK) + sum(-(-inputs // size) for size in SUMMED)


def sums_at(inputs: int, group: int) -> int:
    """Where the sums over groups begin in a row of factors."""
    before = [size for size in SUMMED if size < group]
    return -(-inputs // BLOCK) + sum(-(-inputs // size) for size in before)


def quantize_in_blocks(x: Tensor, order: Tensor | None = None) -> GroupRows:
    """[T, K] → the same in bytes, its columns in `order` (column j is x's column order[j])."""
    exact = x.float() if order is None else x.float()[:, order.long()]
    tokens, inputs = exact.shape
    missing = -inputs % BLOCK
    blocks = torch.nn.functional.pad(exact, (0, missing)).view(tokens, -1, BLOCK)
    scales = blocks.abs().amax(dim=2).div_(127).clamp_(min=1e-30)
    whole = blocks.mul(scales.reciprocal().unsqueeze(2)).round_()
    sums = [whole.view(tokens, -1, size).sum(dim=2)[:, : -(-inputs // size)].neg() for size in SUMMED]
    values = whole.flatten(1)[:, :inputs].to(torch.int8).contiguous()
    less = torch.cat(sums, dim=1).int()
    return GroupRows(values, torch.cat([scales.view(torch.int32), less], dim=1))


def dequantize_blocks(rows: GroupRows) -> Tensor:
    """[T, K] float32, in the order of `values`."""
    inputs = rows.values.shape[1]
    return rows.values.float() * rows.scales.repeat_interleave(BLOCK, dim=1)[:, :inputs]
