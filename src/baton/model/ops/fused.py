"""What happens to activations between two products, each as one operation: here in plain PyTorch.

* `add_norm`: the residual stream takes up what the last sublayer gave, and is normalized for the next one;
* `gated_mul`: activation(gate) * up, such as SwiGLU;
* `normalize`: a norm in place;
* `temper`: multiplied by a number, and bent below a cap;
* `quantize`, `scaled`: into and out of int8 products (see `quantized`), where no other operation does it.

`add_norm`, `gated_mul` and `quantize` give their result in the `Form` that the next product takes: as it is,
as bytes for int8 weights, or as bytes for weights in groups.  The first two accept an unscaled int8 product.
`cpu.steps` (C++) and `cpu.numba.ops` (where that was not built) do the same with one pass over memory each;
this file serves every other device and dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.description.model import Activation
from baton.model.weights.group_rows import GroupRows, factors_of, quantize_in_blocks
from baton.model.weights.quantized import Quantized, Unscaled, quantize_activations

Activations = Tensor | Quantized | GroupRows
"""What a product takes."""
Result = Tensor | Unscaled
"""What a product gives."""


@dataclass(frozen=True, eq=False)
class Form:
    """How a product takes its activations."""

    kind: Literal["plain", "int8", "groups"]
    """A tensor; `Quantized`; `GroupRows`."""
    order: Tensor | None = None
    """[in] int32: column j of what it takes is input order[j]; for groups only."""

    @property
    def number(self) -> int:
        """`Form` of native/kernels.h."""
        return ("plain", "int8", "groups").index(self.kind)

    @property
    def order_address(self) -> int:
        return 0 if self.order is None else self.order.data_ptr()


ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_tanh", "swiglu_oai")
"""In the order of `Activation` of native/kernels.h."""
PLAIN, INT8, GROUPS = Form("plain"), Form("int8"), Form("groups")


class FusedOps:
    """`int8`: results are quantized for int8 weights, where no form is said."""

    def __init__(self, int8: bool = False) -> None:
        self.int8 = int8
        self.form = INT8 if int8 else PLAIN

    def add(self, x: Tensor, y: Result | None, factor: float = 1.0) -> None:
        """x += y * factor, both [T, hidden]; nothing if y is None."""
        if y is None:
            return
        y = self.scaled(y) if isinstance(y, Unscaled) else y
        if factor == 1:
            x.add_(y)
        else:
            x.copy_(x.float() + y.float() * factor)

    def add_norm(
        self,
        x: Tensor,
        y: Result | None,
        weight: Tensor | None,
        eps: float,
        form: Form | None = None,
        plus: float = 0.0,
        factor: float = 1.0,
    ) -> Activations:
        """x += y * factor in place, then RMSNorm(x): x / sqrt(mean(x²) + eps) * (weight + plus) over the last
        dimension; x itself without a weight.

        x, y and the result are [T, hidden].
        """
        self.add(x, y, factor)
        if weight is None:
            return self.quantize(x, form)
        return self.quantize(rms_norm(x, weight, eps, plus), form)

    def normalize(self, x: Tensor, weight: Tensor, eps: float, plus: float = 0.0) -> None:
        """RMSNorm of x [T, n], in place; rows may be apart."""
        x.copy_(rms_norm(x, weight, eps, plus))

    def temper(self, x: Tensor, factor: float, cap: float | None = None) -> Tensor:
        """x * factor, then cap * tanh(x / cap), in x or anew, for [T, n]."""
        found = x.float() * factor
        return (found if cap is None else cap * tanh(found / cap)).to(x.dtype)

    def gated_mul(
        self, gate_up: Result, form: Form | None = None, activation: Activation = "silu"
    ) -> Activations:
        """activation(gate) * up: [T, 2 n], gates first → [T, n]"""
        gate, up = self.dequantize(gate_up).chunk(2, dim=-1)
        if activation == "swiglu_oai":
            return self.quantize(_swiglu_oai(gate, up), form)
        active = _silu(gate) if activation == "silu" else _gelu_tanh(gate)
        return self.quantize(active.mul_(up), form)

    def quantize(self, x: Tensor, form: Form | None = None) -> Activations:
        """[T, K] as a product takes it."""
        form = form or self.form
        if form.kind == "groups":
            return quantize_in_blocks(x, form.order)
        return quantize_activations(x) if form.kind == "int8" else x

    def dequantize(self, found: Result, bias: Tensor | None = None) -> Tensor:
        """What a product gave, as it is.  `bias` is for an unscaled one, which has none."""
        return self.scaled(found, bias) if isinstance(found, Unscaled) else found

    def scaled(self, found: Unscaled, bias: Tensor | None = None) -> Tensor:
        """values * scale of the row + bias, in the dtype of `values`, which may be overwritten."""
        out = found.values.float().mul_(found.scales.unsqueeze(1))
        if bias is not None:
            out += bias
        return out.to(found.values.dtype)

    def _result(self, like: Tensor, rows: int, n: int, form: Form) -> Activations:
        """Room for what a kernel gives: [rows, n] of the dtype of `like`, or quantized."""
        if form.kind == "plain":
            return torch.empty((rows, n), dtype=like.dtype)
        if form.kind == "groups":
            factors = torch.empty((rows, factors_of(n)), dtype=torch.int32)
            return GroupRows(torch.empty((rows, n), dtype=torch.int8), factors)
        return Quantized(torch.empty((rows, n), dtype=torch.uint8), torch.empty(rows, dtype=torch.float32))

    def take_rows(self, elements: Tensor, row_places: Tensor, column_places: Tensor, rows: Tensor) -> Tensor:
        """[t, k] = elements[row_places[rows[t]] + column_places[k]]"""
        return elements.take(row_places[rows].unsqueeze(1) + column_places)


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (weight + plus) over the last dimension, in float32; in the dtype of x."""
    if not plus:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float() + plus, eps).to(x.dtype)


def tanh(x: Tensor) -> Tensor:
    """Of float32.  By the exponential, for the reason that `_silu` gives."""
    if x.device.type != "cpu":
        return torch.tanh(x)
    return 1.0 - 2.0 / ((2.0 * x).exp_().add_(1.0))


def _gelu_tanh(x: Tensor) -> Tensor:
    exact = x.float()
    bent = tanh((exact + 0.044715 * exact * exact * exact) * math.sqrt(2 / math.pi))
    return (0.5 * exact * (1.0 + bent)).to(x.dtype)


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    exact, other = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
    return exact.div((-1.702 * exact).exp_().add_(1.0)).mul_(other.add_(1.0)).to(gate.dtype)


def _silu(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return F.silu(x)
    # PyTorch's silu and sigmoid have two forms that differ in the last bit; where an element lies says which.
    exact = x.float()
    return exact.div(exact.neg().exp_().add_(1.0)).to(x.dtype)


def addresses(item: Tensor | Unscaled | Quantized | GroupRows | None) -> tuple[int, int]:
    """Of the values and of the scales or factors, for a kernel; 0 for what there is not."""
    if item is None:
        return 0, 0
    if isinstance(item, Tensor):
        return item.data_ptr(), 0
    if isinstance(item, GroupRows):
        return item.values.data_ptr(), item.factors.data_ptr()
    return item.values.data_ptr(), item.scales.data_ptr()
