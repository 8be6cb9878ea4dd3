"""Products of bytes: activations with a scale a token, weights with one an output (`weights.quantized`).

Theory.  Activations come as unsigned bytes with the zero point 128, which a CPU's byte products take; with
their uppermost bit turned they are the signed ones that a device multiplies.  Sums are of integers in 32
bits: exact, so no tile and no number of rows changes a result.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.model.cuda.launch import Launch, check, next_power
from baton.model.weights.quantized import Quantized

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_FEW: Final = 32
_LONGEST: Final = 65536
_HELD: Final = 32768
"""A row's elements in the registers of one program at most: 32 of each of 1,024 threads."""
_ROUNDING: Final = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 of at most 2^22 is rounded to an integer, ties to even, by adding it."""


@triton.jit(do_not_specialize=("rows",))
def int8_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Programs: (tiles of rows, tiles of outputs).  x: uint8 [rows, inputs]; weight: int8 [outputs, inputs];
    x_scales, scales: float32 a row of each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < rows
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = n < outputs
    x_row = x + (row.to(tl.int64) * inputs)[:, None]
    weight_row = weight + (n.to(tl.int64) * inputs)[:, None]
    top = tl.full((), 128, tl.uint8)
    total = tl.zeros((ROWS, OUTPUTS), tl.int32)
    for first in range(0, inputs, STEP):
        k = first + tl.arange(0, STEP)
        there = k < inputs
        some = tl.load(x_row + k[None, :], mask=used[:, None] & there[None, :], other=128)
        other = tl.load(weight_row + k[None, :], mask=inside[:, None] & there[None, :], other=0)
        total = tl.dot((some ^ top).to(tl.int8, bitcast=True), tl.trans(other), total, out_dtype=tl.int32)
    row_scale = tl.load(x_scales + row, mask=used, other=0.0)
    scale = tl.load(scales + n, mask=inside, other=0.0)
    found = total.to(tl.float32) * scale[None, :] * row_scale[:, None]
    if bias is not None:
        found += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + (row.to(tl.int64) * outputs)[:, None] + n[None, :],
        found.to(out.dtype.element_ty),
        mask=used[:, None] & inside[None, :],
    )


@triton.jit
def quantize_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program a row: `weights.quantized.quantize_activations`.  A row of more than WIDTH elements is read
    twice, WIDTH at a time; a maximum is the same in any order."""
    row = tl.program_id(0).to(tl.int64)
    if SIZE > WIDTH:
        tops = tl.zeros((WIDTH,), tl.float32)
        for first in range(0, SIZE, WIDTH):
            columns = first + tl.arange(0, WIDTH)
            some = tl.load(x + row * x_stride + columns, mask=columns < SIZE, other=0.0)
            tops = tl.maximum(tops, tl.abs(some.to(tl.float32)))
        scale, factor = byte_scale(tl.max(tops, 0))
        for first in range(0, SIZE, WIDTH):
            columns = first + tl.arange(0, WIDTH)
            used = columns < SIZE
            exact = tl.load(x + row * x_stride + columns, mask=used, other=0.0).to(tl.float32)
            tl.store(values + row * SIZE + columns, to_bytes(exact, factor), mask=used)
    else:
        columns = tl.arange(0, WIDTH)
        used = columns < SIZE
        exact = tl.load(x + row * x_stride + columns, mask=used, other=0.0).to(tl.float32)
        scale, factor = byte_scale(tl.max(tl.abs(exact), 0))
        tl.store(values + row * SIZE + columns, to_bytes(exact, factor), mask=used)
    tl.store(scales + row, scale)


@triton.jit
def byte_scale(largest: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest magnitude of a row → its scale, and what its elements are multiplied by."""
    hundred = tl.zeros_like(largest) + 127.0
    scale = tl.maximum(tl.div_rn(largest, hundred), 1e-30)
    return scale, tl.div_rn(tl.zeros_like(largest) + 1.0, scale)


@triton.jit
def to_bytes(exact: tl.tensor, factor: tl.tensor) -> tl.tensor:
    whole = ((exact * factor) + _ROUNDING) - _ROUNDING
    return (whole + 128.0).to(tl.uint8)


def quantize(x: Tensor) -> Quantized:
    """[T, K]; rows may be apart."""
    values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    quantize_launch(x, values, scales).run()
    return Quantized(values, scales)


def quantize_launch(x: Tensor, values: Tensor, scales: Tensor) -> Launch:
    check("x", x, (None, None), *_DTYPES)
    rows, size = x.shape
    if size > _LONGEST:
        raise ValueError(f"x [{rows}, {size}]: the kernel takes rows of at most {_LONGEST} elements")
    width = min(next_power(size), _HELD)
    arguments = dict(x=x, values=values, scales=scales, x_stride=x.stride(0), SIZE=size, WIDTH=width)
    return Launch(quantize_kernel, (rows,), arguments, warps=min(32, max(1, width // 512)), fused=False)


def multiply_int8(
    x: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[T, in] by int8 [out, in] with scales float32 [out] → [T, out]"""
    out = torch.empty((len(x.values), len(weight)), dtype=dtype, device=weight.device)
    int8_launch(x, weight, scales, bias, out).run()
    return out


def int8_launch(x: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> Launch:
    outputs, inputs = weight.shape
    rows = len(x.values)
    check("x", x.values, (None, inputs), torch.uint8)
    check("weight", weight, (outputs, inputs), torch.int8)
    check("scales", scales, (outputs,), torch.float32)
    if bias is not None:
        check("bias", bias, (outputs,), out.dtype)
    few = rows <= _FEW
    row_tile, output_tile, step = (16, 32, 256) if few else (128, 128, 128)
    arguments = dict(
        x=x.values,
        x_scales=x.scales,
        weight=weight,
        scales=scales,
        bias=bias,
        out=out,
        rows=rows,
        outputs=outputs,
        inputs=inputs,
        ROWS=row_tile,
        OUTPUTS=output_tile,
        STEP=step,
    )
    grid = (-(-rows // row_tile), -(-outputs // output_tile))
    return Launch(int8_kernel, grid, arguments, warps=4 if few else 8, stages=4 if few else 3)
