"""How a weight lies on a device, for `kernel`.

Theory.  Products of a few rows are bound by the bytes of the weight.  A program computes some neighbouring
outputs and walks over the inputs a group at a time, so a group's codes of neighbouring outputs lie side by
side: codes [groups, out, bytes of a group], scales and zero points [groups, out].  Whatever the tile, it
reads one piece of memory.

Codes of 4 bits: byte j of a group has input j in its lower half and input j + group / 2 in its upper one.  So
a tile of bytes is two tiles of inputs in their order, and nothing has to be shuffled between threads.

A code is stored as a signed number, less the middle of its bits: then a symmetric weight has no zero points,
and the sums that zero points need are of the size of the result.  Numbers of MXFP4 stay the four bits that
they are.  6 bits take a byte.

Scales and zero points take as few bytes as hold them exactly: float16, bfloat16 or float32; bytes for zero
points that are whole numbers or eighths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from baton.model.weights.grouped import MIDDLE, Grouped, spread

PLAIN, INT4, INT8, E2M1 = range(4)
"""Kinds: numbers of the dtype of x; signed 4 bits; signed 8 bits; MXFP4's."""
_EIGHTH: Final = 0.125


@dataclass(frozen=True, eq=False)
class Laid:
    """Weights [out, in] of `experts` alike (1: of a layer), on a device."""

    kind: int
    outputs: int
    inputs: int
    codes: Tensor
    """PLAIN: [experts, out, in]; else [experts, groups, out, bytes of a group] uint8 (two codes a byte) or
    int8"""
    group: int = 0
    """Inputs a group; PLAIN: 0"""
    scales: Tensor | None = None
    """[experts, groups, out] float16, bfloat16 or float32"""
    zeros: Tensor | None = None
    """[experts, groups, out] int8, float16 or float32, in units of `zero_step`, less the middle; None: all
    are 0"""
    zero_step: float = 1.0
    bias: Tensor | None = None
    """[experts, out], of the model's dtype"""

    @property
    def experts(self) -> int:
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def alike(self) -> tuple[object, ...]:
        """Weights with the same can be stacked."""
        kinds = tuple(None if part is None else part.dtype for part in (self.codes, self.scales, self.zeros))
        there = self.bias is None
        return self.kind, self.outputs, self.inputs, self.group, self.zero_step, kinds, there

    def of(self, expert: int) -> Laid:
        """One of them; nothing is copied."""
        part = slice(expert, expert + 1)

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[part]

        return replace(
            self,
            codes=self.codes[part],
            scales=cut(self.scales),
            zeros=cut(self.zeros),
            bias=cut(self.bias),
        )

    def rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[T] outputs of the only weight → [T, in]"""
        if self.kind == PLAIN:
            return self.codes[0].index_select(0, rows)
        assert self.scales is not None
        codes = self.codes[0].index_select(1, rows)
        numbers = _numbers(codes, self.kind).float()
        if self.zeros is not None:
            zeros = self.zeros[0].index_select(1, rows).float()
            numbers -= (zeros * self.zero_step).unsqueeze(2)
        numbers *= self.scales[0].index_select(1, rows).float().unsqueeze(2)
        return numbers.transpose(0, 1).reshape(len(rows), self.inputs).to(dtype)


def plain(weight: Tensor, bias: Tensor | None = None) -> Laid:
    """[out, in], as it is."""
    outputs, inputs = weight.shape
    return Laid(PLAIN, outputs, inputs, weight.unsqueeze(0), bias=None if bias is None else bias.unsqueeze(0))


def lay(weight: Grouped, device: torch.device, bias: Tensor | None = None) -> Laid:
    """Copies a weight, whose inputs are taken in their order in `codes`."""
    groups = weight.in_features // weight.group
    middle, scales, zeros = MIDDLE[weight.bits], weight.scales, weight.zeros
    if weight.e2m1:
        kind, middle, scales = E2M1, 0.0, weight.scales / 2  # (the kernel has twice the numbers)
    else:
        kind = INT4 if weight.bits == 4 else INT8
    stored, step = _stored_zeros(zeros - middle)
    codes = spread(weight.codes) if weight.nibbles else weight.codes
    codes = codes.view(weight.out_features, groups, weight.group)
    if kind == INT8:
        codes = (codes.to(torch.int16) - int(middle)).to(torch.int8)
    else:
        half = weight.group // 2
        if kind == INT4:
            codes = codes ^ 8  # (as a signed number of 4 bits)
        codes = codes[..., :half] | codes[..., half:] << 4

    def placed(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).contiguous().unsqueeze(0).to(device)

    return Laid(
        kind,
        weight.out_features,
        weight.in_features,
        placed(codes),
        weight.group,
        placed(_stored_scales(scales)),
        None if stored is None else placed(stored),
        step,
        None if bias is None else bias.unsqueeze(0),
    )


def unified(weights: list[Laid]) -> list[Laid]:
    """With scales and zero points of one dtype and unit each."""
    scales = {weight.scales.dtype for weight in weights if weight.scales is not None}
    if len(scales) > 1:
        weights = [replace(weight, scales=_float(weight.scales)) for weight in weights]
    zeros = {(weight.zeros is None or weight.zeros.dtype, weight.zero_step) for weight in weights}
    if len(zeros) > 1:
        weights = [replace(weight, zeros=_whole_zeros(weight), zero_step=1.0) for weight in weights]
    return weights


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _whole_zeros(weight: Laid) -> Tensor | None:
    """In float32, in units of 1"""
    if weight.zeros is not None:
        return weight.zeros.float() * weight.zero_step
    return None if weight.scales is None else torch.zeros_like(weight.scales, dtype=torch.float32)


def stacked(weights: list[Laid]) -> Laid:
    """Of weights that are `alike`, one each."""

    def joined(parts: list[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        return torch.cat(there) if there else None

    codes = torch.cat([weight.codes for weight in weights])
    return replace(
        weights[0],
        codes=codes,
        scales=joined([weight.scales for weight in weights]),
        zeros=joined([weight.zeros for weight in weights]),
        bias=joined([weight.bias for weight in weights]),
    )


def _numbers(codes: Tensor, kind: int) -> Tensor:
    """[…, bytes] → [..., group], as whole numbers"""
    if kind == INT8:
        return codes
    halves = torch.cat((codes & 15, codes >> 4), dim=-1).to(torch.int8)
    if kind == INT4:
        return (halves ^ 8) - 8
    small = halves & 7
    exponent = (small >> 1).clamp_(min=1) - 1
    twice = torch.where(small > 1, (2 + (small & 1)) << exponent, small)
    return torch.where(halves > 7, -twice, twice)


def _stored_scales(scales: Tensor) -> Tensor:
    for dtype in (torch.float16, torch.bfloat16):
        found = scales.to(dtype)
        if torch.equal(found.float(), scales):
            return found
    return scales


def _stored_zeros(zeros: Tensor) -> tuple[Tensor | None, float]:
    """And the unit that they are in."""
    if not bool(zeros.any()):
        return None, 1.0
    for step in (1.0, _EIGHTH):
        units = zeros / step
        if bool(((units == units.round()) & (units >= -128) & (units <= 127)).all()):
            return units.to(torch.int8), step
    half = zeros.to(torch.float16)
    return (half if torch.equal(half.float(), zeros) else zeros), 1.0
