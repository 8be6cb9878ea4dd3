"""How the backends in plain PyTorch keep keys and values, and find them.

Theory.  A tile is `[block_size, head_dim]`, keys and values alike, so a block table is a list of tiles and
`index_select` over tiles yields `[…, blocks * block_size, head_dim]` without a transposition.  Indices are
computed once a step relative to a layer's first tile; a layer is then a view that starts at its offset.

In eight bits a row is bytes: the integers of a position, then its scale (`kv_int8`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.attention.base import AttentionBackend, AttentionShape, AttentionStep
from baton.model.attention.kv_int8 import from_rows, row_bytes, to_rows

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Writes:
    """Where a step's tokens go."""

    num_tokens: int
    key_rows: Tensor
    """[T * kv_heads] where keys go, in rows of head_dim elements from the layer's first."""
    value_rows: Tensor


def rows_of(step: AttentionStep) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Starts, counts and block tables."""
    return step.starts.astype(np.int64), step.counts.astype(np.int64), step.block_tables.astype(np.int64)


class TorchTiles(AttentionBackend):
    """What the backends share."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._heads_per_kv = shape.num_heads // shape.num_kv_heads
        self._block_tiles = shape.num_layers * 2 * shape.num_kv_heads
        self._row = row_bytes(shape.head_dim) if shape.kv_int8 else shape.head_dim
        self._tile_bytes = shape.block_size * shape.head_dim * shape.dtype.itemsize
        self._layer_tiles: list[Tensor] = []
        self._layer_rows: list[Tensor] = []
        self._workspace = torch.empty(0, dtype=self.pool_dtype, device=shape.device)
        heads = np.arange(shape.num_kv_heads, dtype=np.int64)
        self._head_tiles = heads[:, None]
        self._head_rows = heads[None, :] * shape.block_size

    @property
    def tile_name(self) -> str:
        dtype = "int8" if self.shape.kv_int8 else str(self.shape.dtype).removeprefix("torch.")
        return f"rows:{dtype}:{self.shape.block_size}x{self.shape.head_dim}"

    @property
    def tile_shape(self) -> tuple[int, ...]:
        return (self.shape.block_size, self._row)

    def bind(self, pool: Tensor) -> None:
        self.pool = pool
        shape = self.shape
        tiles = pool.view(-1, shape.block_size * self._row)
        rows = pool.view(-1, self._row)
        per_layer = 2 * shape.num_kv_heads
        self._layer_tiles = [tiles[layer * per_layer :] for layer in range(shape.num_layers)]
        self._layer_rows = [rows[layer * per_layer * shape.block_size :] for layer in range(shape.num_layers)]

    def _writes(
        self, starts: Int64Array, counts: Int64Array, tables: Int64Array, num_decodes: int
    ) -> tuple[int, Tensor, Tensor]:
        """The fields of `Writes`."""
        if num_decodes == len(counts):
            rows, positions = np.arange(num_decodes), starts
        else:
            rows = np.repeat(np.arange(len(counts)), counts)
            first = np.cumsum(counts) - counts
            positions = np.arange(len(rows)) - first[rows] + starts[rows]
        size = self.shape.block_size
        blocks = tables[rows, positions // size]
        base: Int64Array = blocks * (self._block_tiles * size) + positions % size
        key_rows = (base[:, None] + self._head_rows).reshape(-1)
        value_rows = key_rows + self.shape.num_kv_heads * size
        return len(rows), self._tensor(key_rows), self._tensor(value_rows)

    def _tile_indices(self, blocks: Int64Array) -> Int64Array:
        """[B, W] block ids → flat [2, B, kv_heads, W] tiles, from the layer's first."""
        keys = (blocks * self._block_tiles)[:, None, :] + self._head_tiles
        return np.stack((keys, keys + self.shape.num_kv_heads)).reshape(-1)

    def write_kv(self, layer: int, keys: Tensor, values: Tensor, plan: Writes) -> None:
        rows = self._layer_rows[layer]
        head_dim = self.shape.head_dim
        for where, heads in ((plan.key_rows, keys), (plan.value_rows, values)):
            flat = heads.reshape(-1, head_dim)
            rows.index_copy_(0, where, to_rows(flat) if self.shape.kv_int8 else flat)

    def _gather(self, layer: int, tiles: Tensor, dtype: torch.dtype) -> Tensor:
        """[n] tiles → [n, block_size * head_dim], perhaps in the workspace: valid until the next gather.

        `dtype`: of the result where the pool holds integers; else it is the pool's.
        """
        width = self.shape.block_size * self._row
        needed = tiles.shape[0] * width
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(
                1 << (needed - 1).bit_length(), dtype=self.pool_dtype, device=self.shape.device
            )
        found = self._workspace[:needed].view(-1, width)
        torch.index_select(self._layer_tiles[layer], 0, tiles, out=found)
        if not self.shape.kv_int8:
            return found
        return from_rows(found.view(-1, self._row), self.shape.head_dim, dtype).view(len(tiles), -1)
