"""Products with weights in groups: by Baton's own kernel, or in PyTorch where the library is not built."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.model.cpu.grouped import NativeGroupedProduct, kept_order, rows_of_parts, shelved
from baton.model.cpu.library import native
from baton.model.ops.fused import Activations, Form
from baton.model.weights.group_rows import BLOCK, GroupRows, sums_at
from baton.model.weights.grouped import Grouped, InGroups, as_one
from baton.model.weights.store import Facts, Shelf


class TorchGroupedProduct:
    """The arithmetic of native/grouped.cpp in PyTorch, block by block: for any CPU, and slow.

    Sums of integers are exact in float32 (below 2^24), in whatever order a matrix product adds them, and
    groups are added one after the other: a row depends on its row of x only, whatever T is.
    Without a weight the shelf has it.  `result`: as of `NativeGroupedProduct`.
    """

    def __init__(
        self,
        weight: InGroups | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        shelf: Shelf | None = None,
        result: torch.dtype | None = None,
    ) -> None:
        shelf = shelf or Shelf()
        self.parts = [_Part(None if run is None else as_one(run), own) for run, own in shelved(weight, shelf)]
        self._dtype, self._result = dtype, result or dtype
        self.out_features = sum(part.out_features for part in self.parts)
        self.bias = bias
        self.form = Form("groups", kept_order(weight, self.parts[0].in_features, shelf))

    @property
    def nbytes(self) -> int:
        order = self.form.order
        return sum(part.nbytes for part in self.parts) + (0 if order is None else 4 * order.numel())

    def multiply(self, x: Activations) -> Tensor:
        assert isinstance(x, GroupRows)
        found = torch.cat([part.multiply(x) for part in self.parts], dim=1)
        if self.bias is not None:
            found += self.bias
        return found.to(self._result)

    def rows(self, rows: Tensor) -> Tensor:
        """[T] row numbers → [T, in] of the weight."""
        return rows_of_parts(rows, [(part.out_features, part.rows) for part in self.parts]).to(self._dtype)


class _Part:
    """A weight of one number of bits, and of groups of one size."""

    def __init__(self, weight: Grouped | None, shelf: Shelf) -> None:
        if weight is not None:
            weight = weight.in_bytes()

        def described() -> Facts:
            assert weight is not None
            return {
                "n": weight.out_features,
                "k": weight.in_features,
                "group": weight.group,
                "bits": weight.bits,
            }

        facts = {name: int(value) for name, value in shelf.note("groups", described).items()}
        self.out_features, self.in_features = facts["n"], facts["k"]
        self._group, self.bits = facts["group"], facts["bits"]
        groups = (facts["n"], facts["k"] // facts["group"])
        self._codes = shelf.make(
            "codes", (facts["n"], facts["k"] // (2 if self.bits == 4 else 1)), torch.uint8
        )
        self._scales = shelf.make("scales", groups, torch.float32)
        self._zeros = shelf.make("zeros", groups, torch.float32)
        if weight is not None:
            codes = weight.codes
            is_kept = weight.bits != 4 or weight.nibbles
            self._codes.copy_(codes if is_kept else codes[:, ::2] | codes[:, 1::2] << 4)
            self._scales.copy_(weight.scales)
            self._zeros.copy_(weight.zeros)

    @property
    def nbytes(self) -> int:
        return self._codes.numel() + 8 * self._scales.numel()

    def multiply(self, x: GroupRows) -> Tensor:
        """[T, out] float32"""
        inputs = self.in_features
        sums = sums_at(inputs, self._group)
        found = torch.zeros((len(x.values), self.out_features))
        for block, first in enumerate(range(0, inputs, BLOCK)):
            part = torch.zeros_like(found)
            for begin in range(first, min(first + BLOCK, inputs), self._group):
                number = begin // self._group
                values = x.values[:, begin : begin + self._group].float()
                products = values @ self._columns(begin, begin + self._group).t()
                less = x.factors[:, sums + number].float().unsqueeze(1)
                part.addcmul_(products.addcmul_(less, self._zeros[:, number]), self._scales[:, number])
            found.addcmul_(part, x.scales[:, block].unsqueeze(1))
        return found

    def rows(self, rows: Tensor) -> Tensor:
        """[T] row numbers → [T, in] float32"""
        codes = self._codes[rows]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        exact = codes.float().unflatten(1, [-1, self._group]) - self._zeros[rows].unsqueeze(2)  # type: ignore[no-untyped-call]
        values: Tensor = exact.mul_(self._scales[rows].unsqueeze(2)).flatten(1)
        return values

    def _columns(self, first: int, stop: int) -> Tensor:
        """Codes [out, stop - first] as float32; `first` and `stop` are even."""
        if self.bits != 4:
            return self._codes[:, first:stop].float()
        packed = self._codes[:, first // 2 : stop // 2]
        return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).float()


GroupedProduct = NativeGroupedProduct | TorchGroupedProduct


def grouped_product(
    weight: InGroups | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    shelf: Shelf | None = None,
    result: torch.dtype | None = None,
) -> GroupedProduct:
    """The fastest that this machine has.  `weight` is on the CPU, and is copied; None: the shelf has it."""
    library = native()
    if library is None:
        return TorchGroupedProduct(weight, bias, dtype, shelf, result)
    return NativeGroupedProduct(library, weight, bias, dtype, shelf, result)
