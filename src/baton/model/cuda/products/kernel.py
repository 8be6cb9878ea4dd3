"""x Wᵀ for weights of every kind (`layout`), of a layer or of all experts of a mixture: one kernel.

Theory.  A program computes a tile, ROWS rows of x by OUTPUTS outputs, and walks over the inputs a group at a
time.  Codes are whole numbers of at most 8 bits, which bfloat16 and float16 hold exactly, so they are what is
multiplied:

    sum of x * w over a group = s * (sum of x * code - z * sum of x)

in float32, with the group's scale s and zero point z.  No weight is rounded, and none lies in memory in
another form than its codes.

*The order.*  Inputs are cut into PARTS, which the weight's shape decides and nothing else.  A part's groups
are added up from the first to the last, and so are the parts.  With few rows each part is a program of its
own (SPLIT), for else most of a device would be idle, and `merge_kernel` adds up what they wrote; with many
rows one program computes all parts one after the other.  Both make the same additions.

*Experts.*  Rows are (token, expert) pairs sorted by expert (`pairs`), and a tile has rows of one expert.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from baton.model.cuda.arithmetic import INTERPRETED, product
from baton.model.cuda.products import layout

_PLAIN: Final = tl.constexpr(layout.PLAIN)
_INT4: Final = tl.constexpr(layout.INT4)
_INT8: Final = tl.constexpr(layout.INT8)
_TWICE: Final = tl.constexpr(0xC8643210)
"""Twice MXFP4's numbers without their signs: 0, 1, 2, 3, 4, 6, 8, 12; the first in the lowest four bits."""


@triton.jit
def as_numbers(codes: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Whole numbers in the dtype of `like`.  (The interpreter does not make bfloat16 of integers.)"""
    if INTERPRETED:
        return codes.to(tl.float32).to(like.dtype)
    else:
        return codes.to(like.dtype)


@triton.jit
def of_nibbles(nibbles: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """uint8, 0 to 15 → the numbers that they stand for."""
    if KIND == _INT4:
        return (nibbles ^ 8).to(tl.int8) - 8
    else:
        table = tl.full((), _TWICE, tl.uint32)
        twice = ((table >> ((nibbles & 7).to(tl.uint32) * 4)) & 15).to(tl.int8)
        return tl.where(nibbles > 7, -twice, twice)


@triton.jit(do_not_specialize=("rows",))
def product_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    order: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    span: tl.tensor,
    zero_step: tl.tensor,
    KIND: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Programs: (tiles of rows, tiles of outputs, PARTS with SPLIT, else 1).

    x: [.., inputs]; out: [rows, outputs], with SPLIT float32 [PARTS, rows, outputs].  STEP: inputs a group
    (PLAIN: a step); span: steps of a part; TOGETHER: steps whose loads are made at once.
    tiles: int32 [.., 3] expert, first row, number of rows; None: rows are of one weight.  order: int32
    [rows]: row r is that of token order[r] // CHOSEN in x; None: row r.
    """
    expert = tl.program_id(0) * 0
    first = tl.program_id(0) * ROWS
    count = tl.minimum(rows - first, ROWS)
    if tiles is not None:
        expert = tl.load(tiles + tl.program_id(0) * 3)
        first = tl.load(tiles + tl.program_id(0) * 3 + 1)
        count = tl.load(tiles + tl.program_id(0) * 3 + 2)
    if count <= 0:
        return
    index = tl.arange(0, ROWS)
    used = index < count
    row = first + index
    source = row
    if order is not None:
        source = tl.load(order + row, mask=used, other=0) // CHOSEN
    x_row = x + (source.to(tl.int64) * x_stride)[:, None]
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = n < outputs
    steps = (inputs + STEP - 1) // STEP
    begin = tl.program_id(2) * span
    end = tl.minimum(begin + span, steps)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if SPLIT or PARTS == 1:
        for step in range(begin, end, TOGETHER):
            for other in tl.static_range(TOGETHER):
                total = with_step(
                    total, step + other, end, x_row, used, codes, scales, zeros, expert, n, inside, outputs,
                    inputs, steps, zero_step, KIND, STEP, TOGETHER,
                )  # fmt: skip
    else:
        for part in range(PARTS):
            end = tl.minimum((part + 1) * span, steps)
            found = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for step in range(part * span, end, TOGETHER):
                for other in tl.static_range(TOGETHER):
                    found = with_step(
                        found, step + other, end, x_row, used, codes, scales, zeros, expert, n, inside,
                        outputs, inputs, steps, zero_step, KIND, STEP, TOGETHER,
                    )  # fmt: skip
            total += found
    stored = used[:, None] & inside[None, :]
    place = row.to(tl.int64)
    if SPLIT:
        place += tl.program_id(2).to(tl.int64) * rows
    else:
        if bias is not None:
            total += tl.load(bias + expert * outputs + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + (place * out_stride)[:, None] + n[None, :], total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def with_step(
    total: tl.tensor,
    step: tl.tensor,
    end: tl.tensor,
    x_row: tl.tensor,
    used: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    inside: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    steps: tl.tensor,
    zero_step: tl.tensor,
    KIND: tl.constexpr,
    STEP: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> tl.tensor:
    """`total` and the sum over the inputs of a step; as it is for a step from `end` on."""
    if TOGETHER > 1:
        used = used & (step < end)
        inside = inside & (step < end)
    if KIND == _PLAIN:
        k = step * STEP + tl.arange(0, STEP)
        there = k < inputs
        some = tl.load(x_row + k[None, :], mask=used[:, None] & there[None, :], other=0.0)
        at = (expert.to(tl.int64) * outputs + n) * inputs
        weight = tl.load(codes + at[:, None] + k[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        total = product(some, tl.trans(weight), total)
    else:
        group = expert.to(tl.int64) * steps + step
        WIDTH: tl.constexpr = STEP if KIND == _INT8 else STEP // 2
        j = tl.arange(0, WIDTH)
        some = tl.load(x_row + (step * STEP + j)[None, :], mask=used[:, None], other=0.0)
        stored = tl.load(
            codes + group * outputs * WIDTH + (n * WIDTH)[:, None] + j[None, :], mask=inside[:, None], other=0
        )
        found = tl.zeros_like(total)
        if KIND == _INT8:
            found = product(some, tl.trans(as_numbers(stored, some)), found)
        else:
            more = tl.load(x_row + (step * STEP + WIDTH + j)[None, :], mask=used[:, None], other=0.0)
            lower, upper = of_nibbles(stored & 15, KIND), of_nibbles(stored >> 4, KIND)
            found = product(some, tl.trans(as_numbers(lower, some)), found)
            found = product(more, tl.trans(as_numbers(upper, some)), found)
        if zeros is not None:
            sums = tl.sum(some.to(tl.float32), 1)
            if KIND != _INT8:
                sums += tl.sum(more.to(tl.float32), 1)
            zero = tl.load(zeros + group * outputs + n, mask=inside, other=0).to(tl.float32) * zero_step
            found -= sums[:, None] * zero[None, :]
        scale = tl.load(scales + group * outputs + n, mask=inside, other=0.0).to(tl.float32)
        total += found * scale[None, :]
    return total


@triton.jit(do_not_specialize=("rows",))
def merge_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Programs: (rows, stretches of WIDTH outputs).  out = sum of parts [PARTS, rows, outputs], from the
    first to the last, + bias."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = n < outputs
    total = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * outputs + n, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + n, total.to(out.dtype.element_ty), mask=inside)
