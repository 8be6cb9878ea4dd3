"""int8 products by oneDNN, a part of PyTorch; see `quantized` for the theory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.model.cpu.library import native
from baton.model.cpu.linear import serves
from baton.model.ops.fused import INT8, Activations, FusedOps, Result
from baton.model.ops.steady import Sizes, multiply
from baton.model.weights.quantized import ZERO_POINT, Quantized, Unscaled, quantize_rows


class Int8Product:
    """Quantized [T, K] → [T, N], unscaled if there is no bias.  `weight` is copied; nothing of it is kept.

    The result is in the dtype that `weight` had, or in `result`.
    """

    form = INT8
    sizes: Sizes | None = None
    """As in `packed.PlainProduct`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, ops: FusedOps, result: torch.dtype | None = None
    ) -> None:
        self._bias = bias
        self._ops = ops
        self._dtype = result or weight.dtype
        self._out_features = weight.shape[0]
        values, self._scales = quantize_rows(weight)
        self._weight: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
        self._zero_points = torch.zeros(self._out_features, dtype=torch.int32)
        self._bytes = values.numel() + 8 * self._out_features
        self._multiply: Any = torch.ops.onednn.qlinear_pointwise.default

    @property
    def nbytes(self) -> int:
        return self._bytes

    def multiply(self, x: Activations) -> Result:
        return self.at_once(x) if self.sizes is None else multiply(self.at_once, x, self.sizes)

    def at_once(self, x: Activations) -> Result:
        assert isinstance(x, Quantized)
        values = self._multiply(
            x.values, 1.0, ZERO_POINT, self._weight, self._scales, self._zero_points, None, 1.0, 0,
            self._dtype, "none", (), "",
        )  # fmt: skip
        found = Unscaled(values, x.scales)
        return found if self._bias is None else self._ops.scaled(found, self._bias)


def why_not_int8() -> str:
    """Why int8 cannot be multiplied fast here, by our kernel or by oneDNN, or ""."""
    return "" if serves(native(), torch.int8) else why_not_onednn_int8()


def why_not_onednn_int8() -> str:
    """Why this PyTorch, on this CPU, cannot multiply int8 fast and exactly, or ""."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return "this PyTorch has no oneDNN int8 products"
    if not torch.cpu._is_vnni_supported():
        return "this CPU has no int8 dot products (AVX-512 VNNI) and there is no library of ours for it"
    return ""
