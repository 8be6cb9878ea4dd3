"""How a product is launched: tiles, parts, warps; and the launches themselves.

Theory.  Few rows: the tile has as few rows as the instruction for matrices takes, 16, and parts are programs
of their own, so that most of the device reads weights.  Many rows: larger tiles, each of which reads its
share of x and of the weight once.  Both make the same additions in the same order (`kernel`), but by
instructions of different shapes, of which no manual says that they add alike.  A *fixed* product has one
tile for any number of rows, and so one instruction.

A row's place in a tile does not matter: an instruction computes each row by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.model.cuda.launch import Launch, check
from baton.model.cuda.products.kernel import merge_kernel, product_kernel
from baton.model.cuda.products.layout import PLAIN, Laid

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEW = 32
"""Rows, from one expert or altogether, up to which tiles are small."""
_STRETCH = 1024
_PROGRAMS = 256
"""That a product of a few rows should be at least, if its parts are not too short."""
_LEAST_OF_PART = 512
_MOST_PARTS = 8
_ROUND = 128
"""Inputs of a part are a multiple of it, but in the last one."""


class Tile(NamedTuple):
    """Of a program."""

    rows: int
    outputs: int
    step: int
    """Inputs a step of plain weights."""
    warps: int
    stages: int
    loaded: int = 64
    """Inputs whose loads are made at once, at least, of weights in groups."""


_SMALL = Tile(16, 64, 128, 4, 4)
_LARGE = Tile(64, 64, 64, 8, 3)
_LARGE_PLAIN = Tile(64, 128, 64, 8, 3)
_FIXED = Tile(64, 64, 64, 4, 4)
_FIXED_PLAIN = Tile(64, 64, 64, 8, 4)
_FLOAT32 = Tile(16, 32, 32, 4, 2)
"""Of float32 for any number of rows: no instruction for matrices multiplies it."""
_FLOAT32_LONG = Tile(16, 32, 32, 8, 1)
"""The same for groups of more than 64: the factors of a whole group are in registers at once."""


def tile_for(weight: Laid, dtype: torch.dtype, rows: int, fixed: bool) -> Tile:
    """`rows`: that one weight multiplies, about."""
    if dtype == torch.float32:
        return _FLOAT32_LONG if weight.group > 64 else _FLOAT32
    if fixed:
        return _FIXED_PLAIN if weight.kind == PLAIN else _FIXED
    if rows <= FEW:
        return _SMALL
    return _LARGE_PLAIN if weight.kind == PLAIN else _LARGE


def expert_tile(weight: Laid, dtype: torch.dtype, pairs: int, fixed: bool) -> Tile:
    """Of so many rows, whatever the kind: for `pairs` rows of all experts."""
    return tile_for(weight, dtype, FEW if pairs <= 16 * weight.experts else FEW + 1, fixed)


def parts_of(weight: Laid, step: int) -> int:
    """Of the inputs: a matter of the weight's shape alone."""
    tiles = -(-weight.outputs // _SMALL.outputs)
    most = min(_MOST_PARTS, weight.inputs // _LEAST_OF_PART, -(-_PROGRAMS // tiles))
    return max(1, min(most, -(-weight.inputs // step)))


def product_launches(
    x: Tensor, weight: Laid, out: Tensor, bias: Tensor | None = None, fixed: bool = False
) -> list[Launch]:
    """out = x Wᵀ + bias: x [T, in], out [T, out] of one dtype, or out in float32; the bias is as out.  Rows
    of both may be apart."""
    check("x", x, (None, weight.inputs), *DTYPES)
    rows = len(x)
    check("out", out, (rows, weight.outputs), x.dtype, torch.float32)
    if bias is not None:
        check("bias", bias, (weight.outputs,), out.dtype)
    tile = tile_for(weight, x.dtype, rows, fixed)
    step = weight.group or tile.step
    parts = parts_of(weight, step)
    splits = parts > 1 and rows <= (tile.rows if fixed else FEW)
    target, given = out, bias
    if splits:
        target = torch.empty((parts * rows, weight.outputs), dtype=torch.float32, device=x.device)
        given = None
    grid = (-(-rows // tile.rows), -(-weight.outputs // tile.outputs), parts if splits else 1)
    launches = [_launch(x, weight, target, given, grid, tile, parts, splits, rows)]
    if splits:
        launches.append(_merge(target, bias, out, parts))
    return launches


def expert_launch(
    x: Tensor, weight: Laid, out: Tensor, tiles: Tensor, tile: Tile, order: Tensor | None, chosen: int
) -> Launch:
    """Rows of `out` [pairs, out] by the weights of their experts, with their biases: see `product_kernel`."""
    check("x", x, (None, weight.inputs), *DTYPES)
    check("out", out, (None, weight.outputs), x.dtype)
    check("tiles", tiles, (None, 3), torch.int32)
    grid = (len(tiles), -(-weight.outputs // tile.outputs), 1)
    return _launch(x, weight, out, weight.bias, grid, tile, 1, False, len(out), tiles, order, chosen)


def _launch(
    x: Tensor,
    weight: Laid,
    out: Tensor,
    bias: Tensor | None,
    grid: tuple[int, int, int],
    tile: Tile,
    parts: int,
    splits: bool,
    rows: int,
    tiles: Tensor | None = None,
    order: Tensor | None = None,
    chosen: int = 1,
) -> Launch:
    if weight.kind == PLAIN and weight.codes.dtype != x.dtype:
        raise ValueError(f"x in {x.dtype}, the weight in {weight.codes.dtype}: the kernel takes one dtype")
    step = weight.group or tile.step
    together = 1 if weight.kind == PLAIN else max(1, tile.loaded // step)
    some = max(1, _ROUND // step)
    span = -(-weight.inputs // (step * some * parts)) * some
    arguments = dict(
        x=x,
        codes=weight.codes,
        scales=weight.scales,
        zeros=weight.zeros,
        bias=bias,
        out=out,
        tiles=tiles,
        order=order,
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        rows=rows,
        outputs=weight.outputs,
        inputs=weight.inputs,
        span=span,
        zero_step=float(weight.zero_step),
        KIND=weight.kind,
        STEP=step,
        PARTS=parts,
        SPLIT=splits,
        CHOSEN=chosen,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        TOGETHER=together,
    )
    return Launch(product_kernel, grid, arguments, warps=tile.warps, stages=tile.stages)


def _merge(sums: Tensor, bias: Tensor | None, out: Tensor, parts: int) -> Launch:
    rows, outputs = out.shape
    arguments = dict(
        parts=sums,
        bias=bias,
        out=out,
        out_stride=out.stride(0),
        rows=rows,
        outputs=outputs,
        PARTS=parts,
        WIDTH=_STRETCH,
    )
    return Launch(merge_kernel, (rows, -(-outputs // _STRETCH)), arguments)
