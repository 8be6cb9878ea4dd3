"""The operations of `ops.fused` by Triton's kernels (`rows`): one pass over memory each.

What products of bytes take is quantized by a pass of its own.
"""

from __future__ import annotations

from torch import Tensor

from baton.model.cuda import rows
from baton.model.cuda.products import int8
from baton.model.description.model import Activation
from baton.model.ops.fused import Activations, Form, FusedOps, Result


class TritonOps(FusedOps):
    """For tensors [T, n] of one dtype on a device, whose rows may be apart."""

    def add(self, x: Tensor, y: Result | None, factor: float = 1.0) -> None:
        if y is not None:
            rows.add_norm(x, self.dequantize(y), None, 0.0, factor=factor)

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
        more = None if y is None else self.dequantize(y)
        return self.quantize(rows.add_norm(x, more, weight, eps, plus, factor), form)

    def normalize(self, x: Tensor, weight: Tensor, eps: float, plus: float = 0.0) -> None:
        rows.add_norm(x, None, weight, eps, plus, out=x)

    def gated_mul(
        self, gate_up: Result, form: Form | None = None, activation: Activation = "silu"
    ) -> Activations:
        return self.quantize(rows.gated_mul(self.dequantize(gate_up), activation), form)

    def quantize(self, x: Tensor, form: Form | None = None) -> Activations:
        form = form or self.form
        return int8.quantize(x) if form.kind == "int8" else super().quantize(x, form)
