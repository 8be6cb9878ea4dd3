"""A weight as small integers: the one inside form that every reader of quantized files makes.

Theory.  The inputs of a row are cut into groups of 32, 64 or 128.  Each group has a scale and a zero point of
its own, and each weight is a small integer, its code: w = scale * (code - zero).  Formats of files differ in
how they lay out these three, and in little else, so readers (`checkpoint.quantized`) give all of them in this
neutral order, one code a byte, and kernels pack from it.  Several matrices that are one product, in bits or
groups that differ, are a `Stacked`.

A zero point is a float: integers for most formats (8 and 128 are the middle of 4 and 8 bits: symmetric), and
minimum / scale for GGUF's, whose weights are scale * code - minimum.  Scales are float32; they may be
negative (GGUF's Q4_0) and zero.

In *act-order* (GPTQ) inputs were sorted before they were cut into groups: column j of the codes belongs to
input `order[j]`, so activations are taken in that order, or `dequantized` puts the columns back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUPS = (32, 64, 128)
"""Inputs a group, as kernels multiply them."""
MIDDLE = {4: 8.0, 6: 32.0, 8: 128.0}
"""By bits: the zero point of a symmetric weight."""
_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""By its four bits, twice a number of MXFP4."""
_CACHED_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class Grouped:
    """A weight [out, in].  Raises `ValueError` (one line) if its parts do not fit together."""

    codes: Tensor
    """[out, in] uint8: 0…15 for 4 bits, 0…63 for 6, 0…255 for 8"""
    scales: Tensor
    """[out, in / group] float32, finite"""
    zeros: Tensor
    """[out, in / group] float32, finite"""
    group: int
    """Inputs a group: one of GROUPS"""
    bits: int
    """4, 6 or 8"""
    order: Tensor | None = None
    """[in] int32: column j of `codes` belongs to input order[j]; None: to input j"""
    e2m1: bool = False
    """Codes are of 4 bits and stand for MXFP4's numbers: w = scale * number; zeros are 0"""
    nibbles: bool = False
    """Codes are of 4 bits, and [out, in / 2]: two a byte, the first in the lower half, as files have them"""

    def __post_init__(self) -> None:
        if self.bits not in MIDDLE:
            raise ValueError(f"codes of {self.bits} bits; Baton multiplies 4, 6 and 8")
        if self.group not in GROUPS:
            raise ValueError(f"groups of {self.group} inputs; Baton multiplies groups of 32, 64 and 128")
        if self.nibbles and self.bits != 4:
            raise ValueError(f"codes of {self.bits} bits are not two a byte")
        if self.codes.dim() != 2 or self.codes.dtype != torch.uint8:
            raise ValueError(f"codes are {_told(self.codes)}, not [out, in] in uint8")
        if self.in_features % self.group:
            raise ValueError(f"{self.in_features} inputs are no multiple of the group of {self.group}")
        shape = (self.out_features, self.in_features // self.group)
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                raise ValueError(f"{name} are {_told(tensor)}, not {list(shape)} in float32")
            # (some fifty times as fast as to look at each)
            if tensor.numel() and not all(map(math.isfinite, torch.stack(torch.aminmax(tensor)).tolist())):
                raise ValueError(f"{name} hold NaN or infinity")
        largest = (1 << self.bits) - 1
        if self.bits < 8 and not self.nibbles and self.codes.numel() and int(self.codes.max()) > largest:
            raise ValueError(f"a code is {int(self.codes.max())}, {self.bits} bits hold 0 to {largest}")
        if self.order is not None:
            if tuple(self.order.shape) != (self.in_features,) or self.order.dtype != torch.int32:
                raise ValueError(f"order is {_told(self.order)}, not [{self.in_features}] in int32")
            if not torch.equal(self.order.sort().values, torch.arange(self.in_features, dtype=torch.int32)):
                raise ValueError(f"order does not name each of {self.in_features} inputs once")

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * (2 if self.nibbles else 1)

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is the middle of the codes."""
        return bool((self.zeros == MIDDLE[self.bits]).all())

    @property
    def nbytes(self) -> int:
        """Of the weight as kernels need it: codes at their bits, scales and zeros at 4 bytes."""
        order = 0 if self.order is None else 4 * self.in_features
        return self.out_features * self.in_features * self.bits // 8 + 8 * self.scales.numel() + order

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in] in the order of inputs: scale * (code - zero), computed in float32."""
        if self.e2m1:
            return self.in_bytes().dequantized(dtype)
        found = torch.empty((self.out_features, self.in_features), dtype=dtype)
        some = max(1, _CACHED_ELEMENTS // max(1, self.in_features))
        order = None if self.order is None else self.order.long()
        for first in range(0, self.out_features, some):
            part = slice(first, first + some)
            stored = spread(self.codes[part]) if self.nibbles else self.codes[part]
            codes = stored.float().reshape(-1, self.scales.shape[1], self.group)
            exact = codes.sub_(self.zeros[part].unsqueeze(2)).mul_(self.scales[part].unsqueeze(2)).flatten(1)
            if order is None:
                found[part] = exact
            else:
                found[part, order] = exact.to(dtype)
        return found

    def in_bytes(self) -> Grouped:
        """The same weight, if its codes are MXFP4's numbers, with whole numbers in 8 bits as codes."""
        if not self.e2m1:
            return self
        codes = torch.tensor([int(MIDDLE[8]) + twice for twice in _E2M1_TWICE], dtype=torch.uint8)
        zeros = torch.full_like(self.zeros, MIDDLE[8])
        scales, numbers = self.scales / 2, spread(self.codes) if self.nibbles else self.codes
        return Grouped(codes[numbers.int()], scales, zeros, self.group, 8, self.order)

    def rows(self, first: int, last: int) -> Grouped:
        """Outputs [first, last)."""
        if (first, last) == (0, self.out_features):
            return self
        part = slice(first, last)
        return replace(self, codes=self.codes[part], scales=self.scales[part], zeros=self.zeros[part])

    def changed(self, change: Callable[[Tensor], Tensor]) -> Grouped:
        """With rows put into another order by `change`, which takes [out, …] to [out, …]."""
        codes, scales, zeros = (change(part) for part in (self.codes, self.scales, self.zeros))
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def padded(self, rows: int) -> Grouped:
        """With rows of zeros up to so many."""
        missing = rows - self.out_features
        if not missing:
            return self
        return self.changed(lambda part: torch.cat((part, part.new_zeros((missing, part.shape[1])))))

    def columns(self, first: int, last: int) -> Grouped:
        """Inputs [first, last).  Raises `ValueError` where that cuts a group, or if there is an order."""
        if (first, last) == (0, self.in_features):
            return self
        if self.order is not None:
            raise ValueError("inputs in act-order cannot be cut: every group has inputs of every part")
        if first % self.group or last % self.group:
            raise ValueError(f"inputs {first} to {last - 1} cut a group of {self.group}")
        groups = slice(first // self.group, last // self.group)
        each = 2 if self.nibbles else 1
        codes = self.codes[:, first // each : last // each]
        return replace(self, codes=codes, scales=self.scales[:, groups], zeros=self.zeros[:, groups])


@dataclass(frozen=True, eq=False)
class Stacked:
    """Weights [out, in] of one product, the outputs of one after those of the other; each may be in bits and
    groups of its own.

    Raises `ValueError` (one line) if they have different inputs, or these in different orders.
    """

    parts: tuple[Grouped, ...]
    """Two or more"""

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise ValueError("one weight is no stack")
        check_inputs(self.parts)

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def order(self) -> Tensor | None:
        """Of all parts"""
        return self.parts[0].order

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in] in the order of inputs"""
        return torch.cat([part.dequantized(dtype) for part in self.parts])


InGroups = Grouped | Stacked


def joined(parts: Sequence[Grouped]) -> InGroups:
    """The outputs of all parts, one after the other; nothing is copied.

    Raises `ValueError` if they have different inputs, or these in different orders.
    """
    return parts[0] if len(parts) == 1 else Stacked(tuple(parts))


def runs_of(weight: InGroups) -> list[tuple[Grouped, ...]]:
    """The parts in their order, those side by side that are kept alike together: bits and groups change from
    one run to the next."""
    if isinstance(weight, Grouped):
        return [(weight,)]
    return [tuple(run) for _, run in itertools.groupby(weight.parts, key=_kept_alike)]


def as_one(run: Sequence[Grouped]) -> Grouped:
    """A run of `runs_of`, copied if it is more than one part."""
    if len(run) == 1:
        return run[0]
    return replace(
        run[0],
        codes=torch.cat([part.codes for part in run]),
        scales=torch.cat([part.scales for part in run]),
        zeros=torch.cat([part.zeros for part in run]),
    )


def _kept_alike(part: Grouped) -> tuple[int, int, bool, bool]:
    return part.bits, part.group, part.e2m1, part.nibbles


def spread(nibbles: Tensor) -> Tensor:
    """[rows, n] → [rows, 2 n], the lower half of each byte first"""
    return torch.stack((nibbles & 15, nibbles >> 4), dim=2).flatten(1)


def check_inputs(parts: Sequence[Grouped]) -> None:
    """Raises `ValueError` unless all have the same inputs in the same order."""
    first = parts[0]
    if any(part.in_features != first.in_features for part in parts):
        raise ValueError(f"parts have {' and '.join(str(part.in_features) for part in parts)} inputs")
    for part in parts[1:]:
        same = part.order is first.order or (
            part.order is not None and first.order is not None and torch.equal(part.order, first.order)
        )
        if not same:
            raise ValueError("parts have their inputs in different orders")


def _told(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
