"""What multiplies where a device has kernels for it.

(The kernels import Triton, and layers must not: this is what layers know of them.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.model.description.model import Activation
from baton.model.ops.fused import Activations, Form
from baton.model.ops.routing import Routed
from baton.model.weights.grouped import InGroups


class DeviceProduct(ABC):
    """x [T, in] → x Wᵀ + b [T, out], of the dtype of x or in another one, if it was made so."""

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


class DeviceExperts(ABC):
    """The experts of a mixture."""

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        routed: Routed,
        shared: Tensor | None,
        counts: Tensor,
        present: Tensor | None = None,
    ) -> Tensor:
        """[T, hidden] → the weighted sum of what each token's experts give, and of what the MLP gives that
        all tokens pass (`shared` [T, hidden]).  The host waits for nothing.

        `counts` [experts] int64: tokens that each expert had are added to it.  `present` [T] int64: rows
        below 0 are padding; they have no experts.
        """


class DeviceKernels(ABC):
    """Makes products for one device.  `result`: the dtype of what they give, and of the bias; None: the
    model's."""

    @abstractmethod
    def plain(self, weight: Tensor, bias: Tensor | None, result: torch.dtype | None = None) -> DevicePlain:
        """Of a weight on the device."""

    @abstractmethod
    def grouped(
        self, weight: InGroups, bias: Tensor | None, dtype: torch.dtype, result: torch.dtype | None = None
    ) -> DeviceGroups:
        """Of a weight on the CPU, which is copied."""

    @abstractmethod
    def int8(self, weight: Tensor, bias: Tensor | None, result: torch.dtype | None = None) -> DeviceProduct:
        """Quantizes a weight on the CPU, of the model's dtype."""

    @abstractmethod
    def row_sums(self, rows: Tensor) -> Tensor:
        """A `routing.RowSums`."""

    @abstractmethod
    def experts(
        self, gate_up: Sequence[object], down: Sequence[object], activation: Activation
    ) -> DeviceExperts | None:
        """Of a mixture, from the products of its experts, which from then on have views of its weights; None
        where these products are not all alike, or of no kind that there is a kernel for."""
