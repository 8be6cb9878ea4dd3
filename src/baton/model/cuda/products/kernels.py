"""Makes products for a CUDA device: imported only where Triton serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.model.cuda.products.experts import TritonExperts, experts_of
from baton.model.cuda.products.linear import TritonGroups, TritonInt8, TritonPlain
from baton.model.cuda.rows import row_sums
from baton.model.description.model import Activation
from baton.model.ops.device import DeviceKernels
from baton.model.weights.grouped import InGroups


class TritonKernels(DeviceKernels):
    """`fixed`: all products are made by one tile for any number of rows."""

    def __init__(self, device: torch.device, fixed: bool = False) -> None:
        self._device, self._fixed = device, fixed

    def plain(self, weight: Tensor, bias: Tensor | None, result: torch.dtype | None = None) -> TritonPlain:
        return TritonPlain(weight, bias, self._fixed, result)

    def grouped(
        self, weight: InGroups, bias: Tensor | None, dtype: torch.dtype, result: torch.dtype | None = None
    ) -> TritonGroups:
        return TritonGroups(weight, bias, dtype, self._device, self._fixed, result)

    def int8(self, weight: Tensor, bias: Tensor | None, result: torch.dtype | None = None) -> TritonInt8:
        return TritonInt8(weight, bias, self._device, result)

    def row_sums(self, rows: Tensor) -> Tensor:
        return row_sums(rows)

    def experts(
        self, gate_up: Sequence[object], down: Sequence[object], activation: Activation
    ) -> TritonExperts | None:
        return experts_of(gate_up, down, activation, self._fixed)
