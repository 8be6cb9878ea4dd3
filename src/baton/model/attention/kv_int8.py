"""Keys and values in eight bits: how a position is quantized, the same in every backend.

Theory.  What one KV head keeps of one position (its key, and apart from it its value) are `head_dim` numbers
x.  With the largest magnitude a of them, the scale is s = a / 127 and what is kept are the integers
q = round(x * (127 / a)), ties to even, in -127 … 127; readers take s * q.  A position is quantized once, when
it is written, and each reader, the queries of the same chunk too, sees what is kept.  So a token's result
depends neither on its batch nor on how its prompt was cut.  Queries are quantized likewise when they are read
with, so that kernels multiply integers.

A scale is float32.  It is 0, and so are the integers, where a is at most 2^-100; it is NaN where x holds NaN
or infinity, so that such a number is in all that reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST = 127
_LEAST = 2.0**-100


def quantize(heads: Tensor) -> tuple[Tensor, Tensor]:
    """[…, head_dim] of any floating dtype → (int8 of the same shape, float32 scales […, 1])."""
    exact = heads.float()
    largest = exact.abs().amax(-1, keepdim=True)
    broken = ~largest.isfinite()
    there = largest > _LEAST
    factors = torch.where(there, LARGEST / largest, 0.0)
    scales = torch.where(there, largest / LARGEST, 0.0).masked_fill_(broken, float("nan"))
    integers = torch.where(broken, 0.0, exact * factors)
    return integers.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def rounded(heads: Tensor) -> Tensor:
    """[…, head_dim] as readers see them: quantized and back, float32."""
    integers, scales = quantize(heads)
    return integers * scales


def row_bytes(head_dim: int) -> int:
    """Of a row as `to_rows` makes it."""
    return -(-head_dim // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES


def to_rows(heads: Tensor) -> Tensor:
    """[n, head_dim] → uint8 [n, row_bytes]: the integers, up to a multiple of four, and the scale."""
    count, head_dim = heads.shape
    rows = torch.zeros(count, row_bytes(head_dim), dtype=torch.uint8, device=heads.device)
    integers, scales = quantize(heads)
    rows[:, :head_dim] = integers.view(torch.uint8)
    rows[:, -SCALE_BYTES:] = scales.view(torch.uint8)
    return rows


def from_rows(rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """uint8 […, row_bytes] → […, head_dim] of `dtype`."""
    integers = rows[..., :head_dim].view(torch.int8)
    scales = rows[..., -SCALE_BYTES:].view(torch.float32)
    return (integers * scales).to(dtype)
