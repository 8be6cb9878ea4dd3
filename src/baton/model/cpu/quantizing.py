"""Quantizing weights while they are loaded by `native/quantize.cpp`, as `weights.quantize` does in PyTorch.

Both search in the same way, so codes are the same, but where two clips err equally, or a weight is half-way
between two codes, to float32's precision.  The C++ reads 16-bit weights where they lie, a mapped file's too.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton.model.cpu.library import INT, POINTER, Native
from baton.model.weights.grouped import Grouped
from baton.model.weights.own_memory import own_memory
from baton.model.weights.quantize import check_group, search_for

_SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ITEM_GROUPS = 1024


class _Quantizing(ctypes.Structure):
    """`Quantizing` of native/quantize.cpp."""

    _fields_ = (
        ("weight", POINTER),
        ("source", INT),
        ("stride", INT),
        ("rows", INT),
        ("k", INT),
        ("group", INT),
        ("bits", INT),
        ("symmetric", INT),
        ("clips", POINTER),
        ("num_clips", INT),
        ("fits", INT),
        ("codes", POINTER),
        ("scales", POINTER),
        ("zeros", POINTER),
        ("errors", POINTER),
    )


def quantize_natively(
    library: Native, weight: Tensor, bits: int = 4, group: int = 64, symmetric: bool = False
) -> tuple[Grouped, float]:
    """As `weights.quantize.quantize` and `relative_error`."""
    check_group(weight, group)
    rows, columns = weight.shape
    if weight.dtype not in _SOURCES:
        weight = weight.float()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    groups = rows * columns // group
    codes = own_memory(rows * columns, torch.uint8).view(rows, columns)
    scales = torch.empty((rows, columns // group), dtype=torch.float32)
    zeros = torch.empty_like(scales)
    errors = torch.zeros((-(-groups // _ITEM_GROUPS), 2), dtype=torch.float64)
    tried, fits = search_for(bits, symmetric)
    clips = torch.tensor(tried, dtype=torch.float64)
    task = _Quantizing(
        weight.data_ptr(),
        _SOURCES[weight.dtype],
        weight.stride(0),
        rows,
        columns,
        group,
        bits,
        symmetric,
        clips.data_ptr(),
        len(clips),
        fits,
        codes.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        errors.data_ptr(),
    )
    library.function("quantize_weight", POINTER)(ctypes.addressof(task))
    wrong, total = errors.sum(dim=0).tolist()
    return Grouped(codes, scales, zeros, group, bits), (wrong / total) ** 0.5 if total else 0.0
