"""Paged attention on a CPU, by kernels that read the pool's tiles where they lie.

Theory.  A tile is laid out for the kernels (`model.cpu.kernels`): four bytes or pairs of bfloat16 adjacent,
or float32 with the lanes of a vector adjacent.  `prepare` makes the arrays that say what to do, in numpy and
without a loop over rows: *runs* of tokens to write, and *items* to read, one for each tile of queries: up to
32 rows (positions * query heads of a KV head), so a tile is one position of a decode row or a few of a
prefill chunk.

Every context is computed in pieces that begin at fixed positions (`model.cpu.kernels`).  A row that has a
single tile (a decode row) would keep one thread busy for long if its context is long: its pieces are items of
their own.  Elsewhere an item has all pieces of its tile.  The result is the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.attention import kv_int8
from baton.model.attention.base import AttentionBackend, AttentionShape, AttentionStep
from baton.model.cpu.kernels import (
    ITEM_COLUMNS,
    NO_WINDOW,
    RUN_COLUMNS,
    HeadNorms,
    Kernels,
    KernelShape,
    Reads,
    Runs,
    address_of,
)

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class CpuPlan:
    num_tokens: int
    runs: Runs
    reads: dict[int | None, Reads]


def supported(shape: AttentionShape) -> bool:
    """Whether the kernels serve these sizes."""
    if shape.device.type != "cpu" or shape.head_dim % 2 or shape.head_dim > 256 or shape.block_size > 128:
        return False
    if shape.dtype not in (torch.float32, torch.bfloat16):
        return False
    if shape.kv_int8:
        return shape.block_size % 4 == 0 and shape.head_dim % 4 == 0
    return shape.dtype == torch.float32 or shape.block_size % 2 == 0


def kernel_shape(shape: AttentionShape) -> KernelShape:
    return KernelShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        bfloat16=shape.dtype == torch.bfloat16,
        block_stride=shape.num_layers * 2 * shape.num_kv_heads * _tile_elements(shape),
        scale=shape.scale,
        kv_int8=shape.kv_int8,
        soft_cap=shape.soft_cap or 0.0,
    )


def _tile_elements(shape: AttentionShape) -> int:
    scale = kv_int8.SCALE_BYTES if shape.kv_int8 else 0
    return shape.block_size * (shape.head_dim + scale)


class CpuAttention(AttentionBackend):
    """`supported` shapes only."""

    def __init__(self, shape: AttentionShape, kernels: Kernels) -> None:
        super().__init__(shape)
        self.kernels = kernels
        self.tile_positions = kernel_shape(shape).tile_positions
        self.piece_blocks = kernel_shape(shape).piece_blocks
        self._layers: list[int] = []

    @property
    def kernel_name(self) -> str:
        return self.kernels.name

    def turns(self, norms: HeadNorms | None, grows: bool) -> bool:
        return self.kernels.turns(norms, grows)

    @property
    def tile_name(self) -> str:
        layout = "pairs:bfloat16" if self.shape.dtype == torch.bfloat16 else "lanes:float32"
        if self.shape.kv_int8:
            layout = "quads:int8"
        return f"{layout}:{self.shape.block_size}x{self.shape.head_dim}"

    @property
    def tile_shape(self) -> tuple[int, ...]:
        return (_tile_elements(self.shape),)

    def bind(self, pool: Tensor) -> None:
        self.pool = pool
        layer_bytes = pool[0, 0].numel() * pool.itemsize if len(pool) else 0
        self._layers = [pool.data_ptr() + layer * layer_bytes for layer in range(self.shape.num_layers)]

    # Once a step

    def prepare(self, step: AttentionStep) -> CpuPlan:
        tables = np.ascontiguousarray(step.block_tables, np.int32)
        first_tokens = np.cumsum(step.counts, dtype=np.int32)
        num_tokens = int(first_tokens[-1]) if len(first_tokens) else 0
        first_tokens -= step.counts
        return CpuPlan(
            num_tokens,
            self._runs(step, first_tokens, tables),
            {window: self._reads(step, first_tokens, tables, window) for window in self.shape.windows},
        )

    def _runs(self, step: AttentionStep, first_tokens: Int32Array, tables: Int32Array) -> Runs:
        size = self.shape.block_size
        starts, counts = step.starts, step.counts
        if step.num_decodes == len(counts):
            row, column, position, count = np.arange(len(counts)), starts // size, starts, counts
            token = first_tokens
        else:
            first_column = starts // size
            row, index = _expand((starts + counts - 1) // size + 1 - first_column)
            column = first_column[row] + index
            position = np.maximum(column * size, starts[row])
            count = np.minimum((column + 1) * size, (starts + counts)[row]) - position
            token = first_tokens[row] + position - starts[row]
        runs = np.empty((len(row), RUN_COLUMNS), np.int32)
        runs[:, 0] = token
        runs[:, 1] = count
        runs[:, 2] = tables[row, column]
        runs[:, 3] = position % size
        runs[:, 4] = position
        return Runs(runs, address_of(runs))

    def _reads(
        self, step: AttentionStep, first_tokens: Int32Array, tables: Int32Array, window: int | None
    ) -> Reads:
        items, slots = self._items(step, first_tokens, window)
        return Reads(items, tables, slots, window or NO_WINDOW, address_of(items), address_of(tables))

    def _items(
        self, step: AttentionStep, first_tokens: Int32Array, window: int | None
    ) -> tuple[Int32Array, int]:
        """([N, ITEM_COLUMNS], slots of partial results)"""
        size = self.shape.block_size
        starts, counts = step.starts, step.counts
        short = window is None and starts.max(initial=0) < self.piece_blocks * size
        if short and step.num_decodes == len(counts):  # most steps: spare the rest
            items: Int32Array = np.zeros((len(counts), ITEM_COLUMNS), np.int32)
            items[:, 0] = items[:, 3] = first_tokens
            items[:, 1] = items[:, 8] = 1
            items[:, 2] = starts
            items[:, 5] = starts // size + 1
            return items, 0
        alone: npt.NDArray[np.bool_] | bool = True
        if step.num_decodes == len(counts):
            row, token, count, position = np.arange(len(counts)), first_tokens, counts, starts
        else:
            tiles = -(-counts // self.tile_positions)
            row, index = _expand(tiles)
            index *= self.tile_positions
            token = first_tokens[row] + index
            count = np.minimum(counts[row] - index, self.tile_positions)
            position = starts[row] + index
            alone = (tiles == 1)[row]
        last = (position + count - 1) // size + 1
        first = np.zeros_like(last) if window is None else np.maximum(position - (window - 1), 0) // size
        first_piece = first // self.piece_blocks
        pieces = np.where(alone, (last - 1) // self.piece_blocks + 1 - first_piece, 1)
        slots = np.where(pieces > 1, pieces, 0)
        total = int(slots.sum())
        items = np.empty((len(row), ITEM_COLUMNS), np.int32)
        columns = (token, count, position, row, first, last, np.cumsum(slots) - slots, 0, pieces)
        for index_of, column in enumerate(columns):
            items[:, index_of] = column
        if total:
            item, piece = _expand(pieces)
            items = items[item]
            cut = (first_piece[item] + piece) * self.piece_blocks
            several = pieces[item] > 1
            items[:, 4] = np.where(several, np.maximum(items[:, 4], cut), items[:, 4])
            items[:, 5] = np.where(several, np.minimum(items[:, 5], cut + self.piece_blocks), items[:, 5])
            items[:, 7] = piece
        if step.num_decodes < len(counts):
            # The last tiles of a chunk see most: begin with them, so that threads end together.
            items = np.ascontiguousarray(items[::-1])
        return items, total

    # For each layer

    def write_kv(self, layer: int, keys: Tensor, values: Tensor, plan: CpuPlan) -> None:
        self.kernels.write(self._layers[layer], _rows(keys), _rows(values), plan.runs)

    def rotate_and_write(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        growth: Tensor | None,
        norms: HeadNorms | None,
        plan: CpuPlan,
    ) -> Tensor:
        """See `Kernels.rotate_and_write`."""
        queries = torch.empty((plan.num_tokens, self.shape.num_heads, self.shape.head_dim), dtype=qkv.dtype)
        qkv = qkv.contiguous()
        self.kernels.rotate_and_write(self._layers[layer], qkv, queries, cos, sin, growth, norms, plan.runs)
        return queries

    def attend(
        self, layer: int, queries: Tensor, window: int | None, plan: CpuPlan, sinks: Tensor | None = None
    ) -> Tensor:
        queries = _rows(queries)
        out = torch.empty((plan.num_tokens, queries.shape[1] * queries.shape[2]), dtype=queries.dtype)
        self.kernels.attend(self._layers[layer], queries, out, plan.reads[window], sinks)
        return out


def _expand(numbers: Int32Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[n] how many of each → [sum] which one, and which of its kind: [2, 1, 3] → 0 0 1 2 2 2, 0 1 0 0 1 2."""
    which = np.repeat(np.arange(len(numbers)), numbers)
    begin = np.cumsum(numbers) - numbers
    return which, np.arange(len(which)) - begin[which]


def _rows(heads: Tensor) -> Tensor:
    """[T, n, head_dim] with heads side by side; tokens may be apart."""
    apart = heads.stride(2) != 1 or heads.stride(1) != heads.shape[2]
    return heads.contiguous() if apart else heads
