"""Products with weights in groups: by Baton's own kernel, or in PyTorch where the library is not built."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import native
from baton.model.ops.fused import Activations, Form
from baton.model.weights.group_rows import BLOCK, GroupRows, sums_at
from baton.model.weights.grouped import Grouped


class TorchGroupedProduct:
    """The arithmetic of native/grouped.cpp in PyTorch, block by block: for any CPU, and slow.

    Sums of integers are exact in float32 (below 2^24), in whatever order a matrix product adds them, and
    groups are added one after the other: a row depends on its row of x only, whatever T is.
    """

    def __init__(self, weight: Grouped, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._shape, self._group, self._bits = weight.codes.shape, weight.group, weight.bits
        codes = weight.codes.contiguous()
        self._codes = codes if weight.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
        self._scales, self._zeros = weight.scales, weight.zeros
        self._dtype = dtype
        self.bias = bias
        self.form = Form("groups", weight.order)

    @property
    def nbytes(self) -> int:
        order = self.form.order
        return self._codes.numel() + 8 * self._scales.numel() + (0 if order is None else 4 * order.numel())

    def multiply(self, x: Activations) -> Tensor:
        assert isinstance(x, GroupRows)
        outputs, inputs = self._shape
        sums = sums_at(inputs, self._group)
        found = torch.zeros((len(x.values), outputs))
        for block, first in enumerate(range(0, inputs, BLOCK)):
            part = torch.zeros_like(found)
            for begin in range(first, min(first + BLOCK, inputs), self._group):
                number = begin // self._group
                values = x.values[:, begin : begin + self._group].float()
                products = values @ self._columns(begin, begin + self._group).t()
                less = x.factors[:, sums + number].float().unsqueeze(1)
                part.addcmul_(products.addcmul_(less, self._zeros[:, number]), self._scales[:, number])
            found.addcmul_(part, x.scales[:, block].unsqueeze(1))
        if self.bias is not None:
            found += self.bias
        return found.to(self._dtype)

    def rows(self, rows: Tensor) -> Tensor:
        """[T] row numbers → [T, in] of the weight."""
        rows = rows.long()
        codes = self._codes[rows]
        if self._bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        exact = codes.float().unflatten(1, [-1, self._group]) - self._zeros[rows].unsqueeze(2)  # type: ignore[no-untyped-call]
        values: Tensor = exact.mul_(self._scales[rows].unsqueeze(2)).flatten(1).to(self._dtype)
        return values

    def _columns(self, first: int, stop: int) -> Tensor:
        """Codes [out, stop - first] as float32; `first` and `stop` are even."""
        if self._bits == 8:
            return self._codes[:, first:stop].float()
        packed = self._codes[:, first // 2 : stop // 2]
        return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).float()


GroupedProduct = NativeGroupedProduct | TorchGroupedProduct


def grouped_product(weight: Grouped, bias: Tensor | None, dtype: torch.dtype) -> GroupedProduct:
    """The fastest that this machine has.  `weight` is on the CPU, and is copied or kept."""
    library = native()
    if library is None:
        return TorchGroupedProduct(weight, bias, dtype)
    return NativeGroupedProduct(library, weight, bias, dtype)
