"""Products with packed weights by `native/linear.cpp`, which explains the layout and the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.model.cpu.library import INT, POINTER, Native
from baton.model.ops.fused import INT8, PLAIN, Activations
from baton.model.weights.quantized import Quantized, quantize_rows
from baton.model.weights.store import Shelf

_SERVED = ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2vnni", "avx2")
"""Instruction sets for which the kernel is worth using."""
_MULTIPLY_BF16 = ("amx", "avx512bf16")
"""Those of them with an instruction for it."""
_ROWS_AT_A_TIME = 128


def serves(library: Native | None, dtype: torch.dtype) -> bool:
    """Whether the kernel is the fastest here.

    `dtype` is that of the weights; torch.int8 for quantized ones.
    """
    if library is None or library.instruction_set not in _SERVED:
        return False
    if dtype == torch.bfloat16:
        return library.instruction_set in _MULTIPLY_BF16
    return dtype in (torch.float32, torch.int8)


class PackedWeight:
    """[N, K] in panels.  What it is made of is copied; nothing of it is kept.

    Of a weight that the shelf has, only shape and dtype are looked at.
    """

    def __init__(self, library: Native, weight: Tensor, shelf: Shelf | None = None) -> None:
        shelf = shelf or Shelf()
        self.out_features, self.in_features = weight.shape
        self._inputs = 4 // weight.itemsize
        self._steps = -(-self.in_features // self._inputs)
        self._panel = 2 * library.lanes
        self.padded = -(-self.out_features // self._panel) * self._panel
        """Outputs, in whole panels."""
        self.elements = shelf.make("packed", (self.padded * self._steps * self._inputs,), weight.dtype)
        if not shelf.complete:
            weight = weight.contiguous()
            pack = library.function("pack_linear", INT, POINTER, POINTER, INT, INT)
            pack(weight.itemsize, weight.data_ptr(), self.elements.data_ptr(), *weight.shape)
        self.address = self.elements.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.elements.numel() * self.elements.element_size()

    def places(self) -> tuple[Tensor, Tensor]:
        """Element (n, k) of the weight is `elements[rows[n] + columns[k]]`."""
        rows = torch.arange(self.out_features)
        columns = torch.arange(self.in_features)
        step = self._panel * self._inputs
        return (
            rows // self._panel * (self._steps * step) + rows % self._panel * self._inputs,
            columns // self._inputs * step + columns % self._inputs,
        )


class NativeProduct:
    """x [T, in] → x Wᵀ + b [T, out].  A row depends on its row of x only, whatever T is.

    x and W have one dtype; the result and b have `result`: this one, or float32.
    """

    form = PLAIN

    def __init__(
        self,
        library: Native,
        weight: Tensor,
        bias: Tensor | None,
        shelf: Shelf | None = None,
        result: torch.dtype | None = None,
    ) -> None:
        self.weight = PackedWeight(library, weight, shelf)
        self._dtype = result or weight.dtype
        self.bias = bias
        self._kinds = tuple(int(dtype == torch.bfloat16) for dtype in (weight.dtype, self._dtype))
        self._linear = library.function("linear", INT, INT, *[POINTER] * 4, *[INT] * 3)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        weight, tokens = self.weight, x.shape[0]
        out = torch.empty((tokens, weight.out_features), dtype=self._dtype)
        self._linear(
            *self._kinds,
            x.data_ptr(),
            weight.address,
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            tokens,
            weight.out_features,
            weight.in_features,
        )
        return out


class NativeInt8Product:
    """Quantized x [T, in] → x Wᵀ + b [T, out] in the dtype that `weight` had, or in `result`, as b is."""

    form = INT8

    def __init__(
        self,
        library: Native,
        weight: Tensor,
        bias: Tensor | None,
        shelf: Shelf | None = None,
        result: torch.dtype | None = None,
    ) -> None:
        shelf = shelf or Shelf()
        values, scales = (weight.to(torch.int8), None) if shelf.complete else quantize_rows(weight)
        self.weight = PackedWeight(library, values, shelf)
        self._dtype = result or weight.dtype
        self.bias = bias
        self.scales = shelf.make("scales", (self.weight.padded,), torch.float32)
        self.row_sums = shelf.make("row_sums", (self.weight.padded,), torch.int32)
        if scales is not None:
            self._fill(values, scales)
        self._to_bf16 = int(self._dtype == torch.bfloat16)
        self._linear = library.function("linear_int8", INT, *[POINTER] * 7, *[INT] * 3)

    def _fill(self, values: Tensor, scales: Tensor) -> None:
        self.scales.zero_()[: len(scales)] = scales
        self.row_sums.zero_()
        for first in range(0, len(scales), _ROWS_AT_A_TIME):
            part = values[first : first + _ROWS_AT_A_TIME]
            self.row_sums[first : first + len(part)] = part.float().sum(dim=1)  # below 2^24: exact

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + 8 * self.weight.padded

    def multiply(self, x: Activations) -> Tensor:
        assert isinstance(x, Quantized)
        weight, tokens = self.weight, x.values.shape[0]
        out = torch.empty((tokens, weight.out_features), dtype=self._dtype)
        self._linear(
            self._to_bf16,
            x.values.data_ptr(),
            x.scales.data_ptr(),
            weight.address,
            self.scales.data_ptr(),
            self.row_sums.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            tokens,
            weight.out_features,
            weight.in_features,
        )
        return out
