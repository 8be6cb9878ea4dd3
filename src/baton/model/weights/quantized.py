"""int8 products: weights quantized per output channel when loaded, activations per token in every step.

Theory.  A row of the weight and a token's activations are each written as integers times one scale:
w[n, k] ≈ q[n, k] * s[n] and x[t, k] ≈ (u[t, k] - 128) * c[t], with scales that map the largest magnitude to
127.  A product is then a sum of integers, exact whatever the batch, times s[n] * c[t].  It reads half the
bytes of bf16 and runs at twice its rate.  "Dynamic" says that c is computed from the values at hand; no
calibration data are needed.  Activations are *unsigned* with zero point 128 because that is what the byte
dot product of x86 multiplies; 128 times the sum of a weight row, which is known, is subtracted.

Baton's own kernel (`cpu.linear`) applies both scales; oneDNN's (`int8`), where that one does not serve,
applies s[n] only, and the operation that reads the result next applies c[t] on the way (`Unscaled`).
Quantizing the activations likewise is a part of the norm or of the SwiGLU that computes them (`fused`), for
an extra pass over them would cost what the product saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ZERO_POINT = 128
_CACHED_ELEMENTS = 1 << 17
"""Rows are quantized so many elements at a time, which stay in the cache between the operations."""


@dataclass(slots=True)
class Quantized:
    """Activations [T, K] = (values - 128) * scales[:, None]."""

    values: Tensor
    """[T, K] uint8"""
    scales: Tensor
    """[T] float32"""


@dataclass(slots=True)
class Unscaled:
    """What a product of quantized activations gives: [T, N] = values * scales[:, None]."""

    values: Tensor
    scales: Tensor
    """[T] float32"""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] → int8 values [N, K] and scales [N] float32, symmetric: row = values * scale."""
    values = torch.empty(rows.shape, dtype=torch.int8)
    scales = torch.empty(len(rows), dtype=torch.float32)
    some = max(1, _CACHED_ELEMENTS // rows.shape[1])
    for first in range(0, len(rows), some):
        exact = rows[first : first + some].float()
        scale = exact.abs().amax(dim=1).div_(127).clamp_(min=1e-30)
        scales[first : first + some] = scale
        values[first : first + some] = exact.div(scale.unsqueeze(1)).round_()
    return values, scales


def quantize_activations(x: Tensor) -> Quantized:
    """[T, K] → the same with one scale a token."""
    exact = x.float()
    scales = exact.abs().amax(dim=1).div_(127).clamp_(min=1e-30)
    values = exact.mul(scales.reciprocal().unsqueeze(1)).round_().add_(ZERO_POINT).to(torch.uint8)
    return Quantized(values, scales)
