"""Paged attention on a CUDA device by Baton's own kernels (`model.cuda`), behind the interface of all
backends.

Theory.  The pool is that of the other backends for devices (`torch_tiles`): tiles [block_size, head_dim],
or rows of bytes and a scale.  `prepare` makes what kernels read: places of new tokens, tables, and for each
window *items*, in two lists: decode rows, whose contexts are computed in splits, and tiles of chunks.  A
row of one token is a decode row, wherever it stands in the step, so what its position gives does not depend
on what else is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from baton.model.attention.base import AttentionBackend, AttentionShape, AttentionStep
from baton.model.attention.kv_int8 import row_bytes
from baton.model.cpu.kernels import HeadNorms
from baton.model.cuda.attending import LARGEST_DIM, SPLIT, Pages, attend, positions_of
from baton.model.cuda.kv_write import Turns, store, turn_and_store


@dataclass(frozen=True)
class TritonPlan:
    """Of a step, on the device."""

    places: Tensor
    """[T] int64: block * block size + offset"""
    positions: Tensor
    """[T] int32"""
    tables: Tensor
    """[R, W] int32"""
    singles: Tensor
    """Items of rows of one token"""
    longest: int
    """Keys of the longest of these"""
    chunks: Tensor
    """Items of the other rows"""


def why_not(shape: AttentionShape) -> str:
    """Why the kernels do not take these sizes, or ""."""
    if shape.head_dim % 2 == 0 and shape.head_dim <= LARGEST_DIM:
        return ""
    return f"heads have {shape.head_dim} elements; the kernels take even sizes up to {LARGEST_DIM}"


class TritonAttention(AttentionBackend):
    """Heads of an even number of elements, 256 at most."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        if reason := why_not(shape):
            raise ValueError(reason)
        self._row = row_bytes(shape.head_dim) if shape.kv_int8 else shape.head_dim
        self._tile_positions = positions_of(
            shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.dtype
        )
        self._pages: list[Pages] = []

    @property
    def kernel_name(self) -> str:
        return f"Triton {triton.__version__}"

    def turns(self, norms: HeadNorms | None, grows: bool) -> bool:
        return True

    @property
    def tile_name(self) -> str:
        dtype = "int8" if self.shape.kv_int8 else str(self.shape.dtype).removeprefix("torch.")
        return f"rows:{dtype}:{self.shape.block_size}x{self.shape.head_dim}"

    @property
    def tile_shape(self) -> tuple[int, ...]:
        return (self.shape.block_size, self._row)

    def bind(self, pool: Tensor) -> None:
        self.pool = pool
        self._pages = [Pages.of(pool, layer, self.shape.head_dim) for layer in range(self.shape.num_layers)]

    def _written(self, step: AttentionStep) -> tuple[Tensor, Tensor]:
        """Where the step's tokens go: places and positions of a plan."""
        rows, positions = np.repeat(np.arange(len(step.counts)), step.counts), step.positions()
        size = self.shape.block_size
        places = step.block_tables[rows, positions // size].astype(np.int64) * size + positions % size
        return self._tensor(places), self._tensor(positions.astype(np.int32))

    def prepare(self, step: AttentionStep) -> Any:
        starts, counts = step.starts.astype(np.int64), step.counts.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        single = np.flatnonzero(counts == 1)
        tiles = np.where(counts > 1, -(-counts // self._tile_positions), 0)
        row = np.repeat(np.arange(len(counts)), tiles)
        index = (np.arange(len(row)) - (np.cumsum(tiles) - tiles)[row]) * self._tile_positions
        chunks = (
            firsts[row] + index,
            np.minimum(counts[row] - index, self._tile_positions),
            starts[row] + index,
            row,
        )
        singles = firsts[single], counts[single], starts[single], single
        return TritonPlan(
            *self._written(step),
            self._tensor(np.ascontiguousarray(step.block_tables, np.int32)),
            self._tensor(np.stack(singles, 1).astype(np.int32)),
            int(starts[single].max(initial=0)) + 1,
            self._tensor(np.stack(chunks, 1).astype(np.int32)),
        )

    @property
    def records(self) -> bool:
        return True

    def plan_of_decodes(
        self, places: Tensor, positions: Tensor, tables: Tensor, items: Tensor, longest: int
    ) -> Any:
        return TritonPlan(places, positions, tables, items, longest, items[:0])

    def splits_of(self, longest: int) -> int:
        return -(-longest // SPLIT)

    def write_kv(self, layer: int, keys: Tensor, values: Tensor, plan: Any) -> None:
        store(keys, values, self._pages[layer], plan.places)

    def rotate_and_write(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        growth: Tensor | None,
        norms: HeadNorms | None,
        plan: Any,
    ) -> Tensor:
        turns = Turns(cos, sin, growth=growth)
        if norms is not None:
            turns = Turns(cos, sin, norms.queries, norms.keys, norms.eps, norms.plus, growth)
        return turn_and_store(
            qkv, self.shape.num_heads, self._pages[layer], plan.positions, plan.places, turns
        )

    def attend(
        self, layer: int, queries: Tensor, window: int | None, plan: Any, sinks: Tensor | None = None
    ) -> Tensor:
        shape, pages = self.shape, self._pages[layer]
        out = torch.empty(
            (len(queries), shape.num_heads * shape.head_dim), dtype=queries.dtype, device=queries.device
        )
        for items, longest in ((plan.singles, plan.longest), (plan.chunks, None)):
            if len(items):
                attend(
                    queries,
                    pages,
                    items,
                    plan.tables,
                    shape.scale,
                    longest=longest,
                    window=window,
                    soft_cap=shape.soft_cap,
                    sinks=sinks,
                    out=out,
                )
        return out
