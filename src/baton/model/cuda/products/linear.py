"""What layers multiply by on a device: weights in groups, in eight bits, and in a fixed order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.cuda.products.int8 import multiply_int8
from baton.model.cuda.products.layout import Laid, lay, plain
from baton.model.cuda.products.tiles import product_launches
from baton.model.ops.device import DeviceGroups, DevicePlain, DeviceProduct
from baton.model.ops.fused import INT8, PLAIN, Activations
from baton.model.ops.wide import multiply_wide
from baton.model.weights.grouped import InGroups, as_one, runs_of
from baton.model.weights.quantized import Quantized, quantize_rows


class TritonGroups(DeviceGroups):
    """x [T, in] → x Wᵀ + b [T, out] with a weight of small integers; activations as they are."""

    form = PLAIN

    def __init__(
        self,
        weight: InGroups,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        fixed: bool,
        result: torch.dtype | None = None,
    ) -> None:
        """The weight lies on the CPU, and is copied.  `dtype`: of x and of rows of the weight."""
        self.bias = bias
        self._dtype, self._fixed, self._result = dtype, fixed, result
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.order = None if weight.order is None else weight.order.long().to(device)
        """[in]: column j of what is multiplied is input order[j]; None: they come in their order"""
        self.parts: list[Laid] = []
        """Outputs of one after those of the other; in bits and groups of their own."""
        row = 0
        for run in runs_of(weight):
            part = as_one(run)
            own = None if bias is None else bias[row : row + part.out_features]
            self.parts.append(lay(part, device, own))
            row += part.out_features

    @property
    def nbytes(self) -> int:
        order = 0 if self.order is None else 8 * self.order.numel()
        return sum(part.nbytes for part in self.parts) + order

    def multiply(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        if self.order is not None:
            x = x.index_select(1, self.order)
        out = torch.empty((len(x), self.out_features), dtype=self._result or x.dtype, device=x.device)
        row = 0
        for part in self.parts:
            columns = out[:, row : row + part.outputs]
            bias = None if part.bias is None else part.bias[0]
            for launch in product_launches(x, part, columns, bias, self._fixed):
                launch.run()
            row += part.outputs
        return out

    def rows(self, rows: Tensor) -> Tensor:
        """[T] row numbers → [T, in] of the weight, in the order in which inputs are multiplied."""
        if len(self.parts) == 1:
            return self.parts[0].rows(rows, self._dtype)
        found = torch.zeros((len(rows), self.in_features), dtype=self._dtype, device=rows.device)
        first = 0
        for part in self.parts:
            within = (rows >= first) & (rows < first + part.outputs)
            some = part.rows((rows - first).clamp(0, part.outputs - 1), self._dtype)
            found = torch.where(within.unsqueeze(1), some, found)
            first += part.outputs
        return found


class TritonInt8(DeviceProduct):
    """Quantized x [T, in] → x Wᵀ + b [T, out], of a weight with a scale an output.  Sums are of integers, and
    so exact."""

    form = INT8

    def __init__(
        self, weight: Tensor, bias: Tensor | None, device: torch.device, result: torch.dtype | None = None
    ) -> None:
        """`weight` is copied; results have its dtype, or `result`."""
        self.bias, self._dtype = bias, result or weight.dtype
        self.out_features = len(weight)
        values, scales = quantize_rows(weight)
        self._values, self._scales = values.to(device), scales.to(device)

    @property
    def nbytes(self) -> int:
        return self._values.numel() + 4 * self.out_features

    def multiply(self, x: Activations) -> Tensor:
        assert isinstance(x, Quantized)
        return multiply_int8(x, self._values, self._scales, self.bias, self._dtype)


class TritonPlain(DevicePlain):
    """x [T, in] → x Wᵀ + b [T, out], one dtype or with results in float32: by cuBLAS, or, if it is `fixed`,
    by the same instructions and additions for any number of rows."""

    form = PLAIN

    def __init__(
        self, weight: Tensor, bias: Tensor | None, fixed: bool, result: torch.dtype | None = None
    ) -> None:
        self.weight, self.bias, self._fixed, self._result = weight, bias, fixed, result or weight.dtype
        self.out_features = len(weight)

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def multiply(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        if not self._fixed:
            wide = self._result == torch.float32
            return multiply_wide(x, self.weight, self.bias) if wide else F.linear(x, self.weight, self.bias)
        out = torch.empty((len(x), self.out_features), dtype=self._result, device=x.device)
        for launch in product_launches(x, plain(self.weight), out, self.bias, fixed=True):
            launch.run()
        return out
