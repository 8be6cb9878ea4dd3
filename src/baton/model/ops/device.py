"""What multiplies where a device has kernels for it.

(The kernels import Triton, and layers must not: this is what layers know of them.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from baton.model.ops.fused import Activations, Form
from baton.model.weights.grouped import InGroups


class DeviceProduct(ABC):
    """x [T, in] → x Wᵀ + b [T, out]"""

    form: Form
    """In which activations are taken."""
    bias: Tensor | None
    out_features: int

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def multiply(self, x: Activations) -> Tensor: ...


class DeviceGroups(DeviceProduct):
    """Of a weight in groups."""

    @abstractmethod
    def rows(self, rows: Tensor) -> Tensor:
        """[T] row numbers → [T, in] of the weight."""


class DevicePlain(DeviceProduct):
    """Of a weight as it is, which may be overwritten in place at any time."""

    weight: Tensor


class DeviceKernels(ABC):
    """Makes products for one device."""

    @abstractmethod
    def plain(self, weight: Tensor, bias: Tensor | None) -> DevicePlain | None:
        """Of a weight on the device; None: PyTorch multiplies by it."""

    @abstractmethod
    def grouped(self, weight: InGroups, bias: Tensor | None, dtype: torch.dtype) -> DeviceGroups:
        """Of a weight on the CPU, which is copied."""

    @abstractmethod
    def int8(self, weight: Tensor, bias: Tensor | None) -> DeviceProduct:
        """Quantizes a weight on the CPU; results are of its dtype."""
