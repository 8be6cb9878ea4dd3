"""What happens to activations between two products, a row at a time: `ops.fused` as kernels, and sums.

Theory.  All of it is bound by memory, so each reads its operands once and writes its result once: a program
holds a row (`add_norm`) or a stretch of it (`gated_mul`) in registers.  Arithmetic is float32.  x is
rounded to its dtype before it is normalized, because that is what the next layer will read.

A row too long for the registers of a program is walked over twice in `add_norm`: for the sum of squares,
and for the result.  Only the second walk writes, so the first reads what was there.

A row's result depends on the row alone: sums are made by one program, in an order that the row's length
decides.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.model.cuda.launch import Launch, check, next_power
from baton.model.description.model import Activation

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_LONGEST: Final = 65536
_HELD: Final = 16384
"""A row's elements in the registers of one program at most: 16 of each of 1,024 threads."""
_STRETCH: Final = 1024
_SILU: Final = tl.constexpr(0)
_GELU: Final = tl.constexpr(1)
_OAI: Final = tl.constexpr(2)
_NUMBERS: Final[dict[Activation, int]] = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2}


@triton.jit
def added(
    x_row: tl.tensor, y: tl.tensor, y_first: tl.tensor, columns: tl.tensor, used: tl.tensor, factor: tl.tensor
) -> tl.tensor:
    """Elements of a row of x, with those of y, which begins at `y_first`, times `factor`."""
    values = tl.load(x_row + columns, mask=used, other=0.0)
    if y is not None:
        more = tl.load(y + y_first + columns, mask=used, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + more * factor).to(values.dtype)
    return values


@triton.jit
def add_norm_kernel(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    out_stride: tl.tensor,
    factor: tl.tensor,
    eps: tl.tensor,
    plus: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program a row, WIDTH elements at a time.  y: None for nothing to add; weight: None for no norm,
    then nothing goes to `out`."""
    row = tl.program_id(0).to(tl.int64)
    if SIZE > WIDTH:
        squares = tl.zeros((WIDTH,), tl.float32)
        if weight is not None:
            for first in range(0, SIZE, WIDTH):
                columns = first + tl.arange(0, WIDTH)
                exact = added(x + row * x_stride, y, row * y_stride, columns, columns < SIZE, factor).to(
                    tl.float32
                )
                squares += exact * exact
        inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE + eps)
        for first in range(0, SIZE, WIDTH):
            columns = first + tl.arange(0, WIDTH)
            used = columns < SIZE
            values = added(x + row * x_stride, y, row * y_stride, columns, used, factor)
            if y is not None:
                tl.store(x + row * x_stride + columns, values, mask=used)
            if weight is not None:
                grown = tl.load(weight + columns, mask=used, other=0.0).to(tl.float32) + plus
                result = (values.to(tl.float32) * inverse * grown).to(values.dtype)
                tl.store(out + row * out_stride + columns, result, mask=used)
        return
    columns = tl.arange(0, WIDTH)
    used = columns < SIZE
    if weight is not None:  # (asked for with the row: behind the sum it would be another wait for memory)
        grown = tl.load(weight + columns, mask=used, other=0.0).to(tl.float32) + plus
    values = added(x + row * x_stride, y, row * y_stride, columns, used, factor)
    if y is not None:
        tl.store(x + row * x_stride + columns, values, mask=used)
    if weight is not None:
        exact = values.to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(exact * exact, 0) / SIZE + eps)
        tl.store(out + row * out_stride + columns, (exact * inverse * grown).to(values.dtype), mask=used)


@triton.jit
def gated_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program a row and stretch."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    used = columns < size
    values = tl.load(gate_up + row * stride + columns, mask=used, other=0.0)
    gate = values.to(tl.float32)
    up = tl.load(gate_up + row * stride + size + columns, mask=used, other=0.0).to(tl.float32)
    if ACTIVATION == _SILU:
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == _GELU:
        # (1 + tanh(x)) / 2 = 1 / (1 + exp(-2 x)), in which nothing cancels.
        twice = (gate + 0.044715 * gate * gate * gate) * 1.5957691216057308
        active = gate / (1.0 + tl.exp(-twice))
    else:
        tl.static_assert(ACTIVATION == _OAI)
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        active = gate / (1.0 + tl.exp(-1.702 * gate))
    tl.store(out + row * size + columns, (active * up).to(values.dtype), mask=used)


@triton.jit
def row_sums_kernel(
    x: tl.tensor, out: tl.tensor, stride: tl.tensor, SIZE: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    values = tl.load(x + row * stride + columns, mask=columns < SIZE, other=0.0)
    tl.store(out + row, tl.sum(values, 0))


def add_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    eps: float,
    plus: float = 0.0,
    factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """x += y * factor in place, then x / sqrt(mean(x²) + eps) * (weight + plus): see `FusedOps.add_norm`.

    x, y and the result are [T, n]; rows may be apart.  The result goes to `out`, which may be x itself (a
    norm in place), or is new; x without a weight.
    """
    if weight is None:
        if y is not None:
            add_norm_launch(x, y, None, x, eps, plus, factor).run()
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    add_norm_launch(x, y, weight, out, eps, plus, factor).run()
    return out


def add_norm_launch(
    x: Tensor, y: Tensor | None, weight: Tensor | None, out: Tensor, eps: float, plus: float, factor: float
) -> Launch:
    check("x", x, (None, None), *_DTYPES)
    tokens, size = x.shape
    if size > _LONGEST:
        raise ValueError(f"x [{tokens}, {size}]: the kernel takes rows of at most {_LONGEST} elements")
    check("out", out, (tokens, size), x.dtype)
    if y is not None:
        check("y", y, (tokens, size), x.dtype)
    if weight is not None:
        check("weight", weight, (size,), x.dtype)
    width = min(next_power(size), _HELD)
    arguments = dict(
        x=x,
        y=y,
        weight=weight,
        out=out,
        x_stride=x.stride(0),
        y_stride=0 if y is None else y.stride(0),
        out_stride=out.stride(0),
        factor=float(factor),
        eps=float(eps),
        plus=float(plus),
        SIZE=size,
        WIDTH=width,
    )
    return Launch(add_norm_kernel, (tokens,), arguments, warps=min(32, max(1, width // 512)))


def gated_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up: [T, 2 n], gates first → [T, n].  See `FusedOps.gated_mul`."""
    check("gate_up", gate_up, (None, None), *_DTYPES)
    tokens, both = gate_up.shape
    out = torch.empty((tokens, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    gated_mul_launch(gate_up, out, activation).run()
    return out


def gated_mul_launch(gate_up: Tensor, out: Tensor, activation: Activation) -> Launch:
    check("gate_up", gate_up, (None, None), *_DTYPES)
    tokens, both = gate_up.shape
    if both % 2:
        raise ValueError(
            f"gate_up [{tokens}, {both}]: gates and values are equally many, so give an even number"
        )
    arguments = dict(
        gate_up=gate_up,
        out=out,
        stride=gate_up.stride(0),
        size=both // 2,
        ACTIVATION=_NUMBERS[activation],
        WIDTH=_STRETCH,
    )
    return Launch(gated_mul_kernel, (tokens, -(-both // 2 // _STRETCH)), arguments)


def row_sums(x: Tensor) -> Tensor:
    """Float32 [T, n] → [T, 1]; rows may be apart."""
    out = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    row_sums_launch(x, out).run()
    return out


def row_sums_launch(x: Tensor, out: Tensor) -> Launch:
    check("x", x, (None, None), torch.float32)
    tokens, size = x.shape
    check("out", out, (tokens, 1), torch.float32)
    width = next_power(size)
    arguments = dict(x=x, out=out, stride=x.stride(0), SIZE=size, WIDTH=width)
    return Launch(row_sums_kernel, (tokens,), arguments, warps=min(32, max(1, width // 512)))
