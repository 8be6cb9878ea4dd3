"""The operations of `fused` by compiled kernels (`native/steps.cpp`): one pass over memory each.

A call costs some microseconds, of which most are PyTorch's for the result's memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.model.cpu.library import FLOAT, INT, POINTER, Native, native
from baton.model.description.model import Activation
from baton.model.ops.fused import ACTIVATIONS, PLAIN, Activations, Form, FusedOps, Result, addresses
from baton.model.weights.quantized import Unscaled

_MAX_ROW = 1 << 16
"""Elements of a row that is quantized: kernels keep it on their stack as float32."""


class NativeOps(FusedOps):
    """For contiguous tensors of one dtype, bfloat16 or float32, on a CPU; logits are float32 in any case."""

    def __init__(self, library: Native, dtype: torch.dtype, int8: bool = False) -> None:
        super().__init__(int8)
        self._is_bf16 = int(dtype == torch.bfloat16)
        self._add_norm = library.function(
            "add_norm",
            *(INT, POINTER, POINTER, POINTER, FLOAT, POINTER, FLOAT),
            *(INT, POINTER, POINTER, POINTER, INT, INT, FLOAT),
        )
        self._norm_rows = library.function("norm_rows", INT, POINTER, POINTER, FLOAT, INT, INT, INT, FLOAT)
        self._temper_rows = library.function("temper_rows", INT, POINTER, FLOAT, FLOAT, INT, INT)
        self._gated_mul = library.function(
            "gated_mul", INT, INT, *[POINTER] * 2, INT, *[POINTER] * 3, INT, INT
        )
        self._quantize = library.function("quantize", INT, POINTER, INT, *[POINTER] * 3, INT, INT)
        self._scale_rows = library.function("scale_rows", INT, *[POINTER] * 3, INT, INT)
        self._take_rows = library.function("take_rows", INT, *[POINTER] * 5, INT, INT)

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
        rows, n = x.shape
        form = form or self.form
        out = self._result(x, rows, n, form)
        self._add_norm(
            self._is_bf16,
            x.data_ptr(),
            *addresses(y),
            factor,
            None if weight is None else weight.data_ptr(),
            plus,
            form.number,
            form.order_address,
            *addresses(out),
            rows,
            n,
            eps,
        )
        return out

    def add(self, x: Tensor, y: Result | None, factor: float = 1.0) -> None:
        if y is None or factor == 1:
            super().add(x, y)
        else:  # as it is added before a norm, to the last bit
            self.add_norm(x, y, None, 0.0, PLAIN, factor=factor)

    def normalize(self, x: Tensor, weight: Tensor, eps: float, plus: float = 0.0) -> None:
        rows, n = x.shape
        self._norm_rows(self._is_bf16, x.data_ptr(), weight.data_ptr(), plus, rows, n, x.stride(0), eps)

    def temper(self, x: Tensor, factor: float, cap: float | None = None) -> Tensor:
        x = x.contiguous()
        self._temper_rows(int(x.dtype == torch.bfloat16), x.data_ptr(), factor, cap or 0.0, *x.shape)
        return x

    def gated_mul(
        self, gate_up: Result, form: Form | None = None, activation: Activation = "silu"
    ) -> Activations:
        values = gate_up.values if isinstance(gate_up, Unscaled) else gate_up
        rows, n = values.shape[0], values.shape[1] // 2
        form = form or self.form
        out = self._result(values, rows, n, form)
        self._gated_mul(
            self._is_bf16,
            ACTIVATIONS.index(activation),
            *addresses(gate_up),
            form.number,
            form.order_address,
            *addresses(out),
            rows,
            n,
        )
        return out

    def quantize(self, x: Tensor, form: Form | None = None) -> Activations:
        form = form or self.form
        if form.kind == "plain":
            return x
        x = x.contiguous()
        rows, n = x.shape
        out = self._result(x, rows, n, form)
        self._quantize(self._is_bf16, x.data_ptr(), form.number, form.order_address, *addresses(out), rows, n)
        return out

    def scaled(self, found: Unscaled, bias: Tensor | None = None) -> Tensor:
        values = found.values
        self._scale_rows(
            int(values.dtype == torch.bfloat16),
            values.data_ptr(),
            found.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            *values.shape,
        )
        return values

    def take_rows(self, elements: Tensor, row_places: Tensor, column_places: Tensor, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        out = torch.empty((len(rows), len(column_places)), dtype=elements.dtype)
        self._take_rows(
            self._is_bf16,
            elements.data_ptr(),
            row_places.data_ptr(),
            column_places.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
            *out.shape,
        )
        return out


def fused_ops(dtype: torch.dtype, device: torch.device, longest_row: int, int8: bool = False) -> FusedOps:
    """The fastest that this machine has.  `longest_row`: elements of the widest activations."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return FusedOps(int8)
    library = native()
    if library is not None:
        return FusedOps(int8) if longest_row > _MAX_ROW else NativeOps(library, dtype, int8)
    try:
        from baton.model.cpu.numba.ops import NumbaOps
    except ImportError:
        return FusedOps(int8)
    return NumbaOps(dtype, int8)
