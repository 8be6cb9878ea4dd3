"""What attention needs of its kernels.  Two sets exist: C++ (`native_kernels`) and numba (`numba.kernels`).

Theory.  The backend (`model.attention.cpu_backend`) turns a step into arrays of work, once; for each layer it
hands the kernels these arrays, the address of the layer in the pool, and the tensors of the layer.  Layouts:

* the pool is `[block, layer, K/V, kv_head, tile]`; `layer` is the address of the layer's first K tile in
  block 0; the tile of (block b, K/V v, KV head h) begins
  `b * block_stride + (v * num_kv_heads + h) * (elements of a tile)` elements further;
* a tile of bfloat16 has pairs adjacent: K `[head_dim / 2, block_size, 2]`, V `[block_size / 2, head_dim, 2]`;
  a tile of float32: K `[head_dim, block_size]`, V `[block_size, head_dim]`; a tile in eight bits has four
  adjacent, K `[head_dim / 4, block_size, 4]` of 128 + q, V `[block_size / 4, head_dim, 4]` of q, and behind
  them a float32 scale for each position (`model.attention.kv_int8`).

What lies past a request's last position, and blocks that the window hides wholly, may hold anything and must
not matter, NaN included.

A position's result depends on the position and its context alone: not on which other positions are computed
with it, not on the batch, not on the number of threads.  So whatever a kernel adds up in parts, it cuts at
fixed positions: a context into *pieces*, which have a softmax each and are merged from the first to the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.ops.fused import rms_norm

Int32Array = npt.NDArray[np.int32]

PIECE_TOKENS = 512
"""Of a piece of a context, rounded down to whole blocks.  Instances that exchange blocks have the same."""
QUERY_ROWS = 32
"""Rows of a query tile at most: positions * query heads of the KV head."""
NO_WINDOW = 1 << 30

RUN_COLUMNS = 5
"""Of `runs`, [N, 5]: consecutive tokens of one row that lie in one block: first token of the step, number of
tokens, block id, offset in the block of the first, position of the first."""

ITEM_COLUMNS = 9
"""Of `Reads.items`, [N, 9]: a tile of queries and the blocks that it walks over (each for all KV heads):
first token of the step, number of positions (all their query heads belong to the tile), position of the
first, row of `tables`, first column of the table, last column + 1, slot, piece, pieces.

A tile with pieces > 1 is shared out, an item for each piece of its context; their results (m, l, O) go to
slots slot … slot + pieces - 1 of a buffer and are added up in this order.  An item with pieces = 1 has all
blocks of its tile, and the thread that computes it adds its pieces up in the same way."""


@dataclass(frozen=True)
class KernelShape:
    """The sizes of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Even, at most 256; a multiple of 4 with `kv_int8`."""
    block_size: int
    """At most 128; even for bfloat16; a multiple of 4 with `kv_int8`."""
    bfloat16: bool
    """Queries, keys and values, and the pool unless `kv_int8`; else float32."""
    block_stride: int
    """Elements of the pool from a tile to the same tile of the next block."""
    scale: float
    """Of the dot products."""
    kv_int8: bool
    """The pool's elements are bytes."""
    soft_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: they stay as they are."""

    @property
    def head_chunks(self) -> int:
        """A KV head with more than 32 query heads is served in so many chunks of them."""
        return -(-self.num_heads // self.num_kv_heads // QUERY_ROWS)

    @property
    def piece_blocks(self) -> int:
        """Blocks of a piece of a context."""
        return max(1, PIECE_TOKENS // self.block_size)

    @property
    def tile_positions(self) -> int:
        """Positions of a full tile of queries."""
        return max(1, QUERY_ROWS // (self.num_heads // self.num_kv_heads))


@dataclass(frozen=True)
class Reads:
    """What the layers of one window read in a step."""

    items: Int32Array
    """[N, ITEM_COLUMNS]"""
    tables: Int32Array
    """[R, W] block ids, contiguous."""
    slots: int
    """Slots of partial results that the items name."""
    window: int
    """A position sees so many positions up to itself; NO_WINDOW: all."""
    items_address: int
    tables_address: int


@dataclass(frozen=True)
class Runs:
    """Where the step's tokens are written."""

    runs: Int32Array
    """[N, RUN_COLUMNS]"""
    address: int


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each query and key head, before the rotation."""

    queries: Tensor
    """[head_dim] weights, of the model's dtype."""
    keys: Tensor
    eps: float
    plus: float = 0.0
    """Added to the weights."""

    def of(self, heads: Tensor, num_queries: int) -> Tensor:
        """[T, query heads, then key heads, head_dim] → the same, normed, in PyTorch."""
        parts = heads[:, :num_queries], heads[:, num_queries:]
        weights = self.queries, self.keys
        found = [
            rms_norm(part, weight, self.eps, self.plus) for part, weight in zip(parts, weights, strict=True)
        ]
        return torch.cat(found, dim=1)


class Kernels(Protocol):
    """The last dimension of every tensor is contiguous."""

    name: str
    """For people: which build it is."""

    def turns(self, norms: HeadNorms | None, grows: bool) -> bool:
        """Whether `rotate_and_write` does all that a layer does to queries and keys; `grows`: to queries."""

    def write(self, layer: int, keys: Tensor, values: Tensor, runs: Runs) -> None:
        """Stores keys and values, each [T, num_kv_heads, head_dim] (any stride between tokens)."""

    def rotate_and_write(
        self,
        layer: int,
        qkv: Tensor,
        queries: Tensor,
        cos: Tensor,
        sin: Tensor,
        growth: Tensor | None,
        norms: HeadNorms | None,
        runs: Runs,
    ) -> None:
        """qkv [T, heads + 2 * kv_heads, head_dim] contiguous → queries [T, heads, head_dim] normed and
        rotated; keys (likewise) and values stored.

        growth: float32 [positions] by which queries are multiplied.

        cos and sin: float32 [positions, head_dim / 2] (any stride between positions): halves (a, b) of a
        head become (a cos - b sin, b cos + a sin).
        """

    def attend(
        self, layer: int, queries: Tensor, out: Tensor, reads: Reads, sinks: Tensor | None = None
    ) -> None:
        """queries [T, heads, head_dim] (any stride between tokens) → out [T, heads * head_dim].

        sinks: float32 [heads], as in `AttentionBackend.attend`.
        """


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Of the array's first element; the array must be kept."""
    address: int = array.__array_interface__["data"][0]
    return address
