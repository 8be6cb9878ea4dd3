"""The KV pool of the simulated executor: `[block, layer, K/V, head, tile]`, like a real one, full of token
ids.

Theory.  A page that has arrived in part must show.  So each position of a block lies in one tile only:
position p in tile p mod 2L of the L layers' K and V.  A layer that was not copied is then a gap in the token
sequence.  Ranks hold their own heads and yet must all read the whole sequence, so every head has it, each
disguised with a pattern of its own (the head's number in the model): a head in the wrong place is
garbage.  A reader goes through the heads in turns, so after a few steps it has looked at all.

A cell is token + 1, xor the pattern; memory that was never written is 0, which no cell is.  A tile may be
made larger than its tokens, so that pages have the size of a real model's.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.executor.base import Int32Array
from baton.ipc.memory import create_memory
from baton.protocol.rules.ranks import heads_of_rank
from baton.transfer.base import PoolView

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

_PATTERN = 0x9E3779B1
_NOWHERE = np.int64(1) << 40


class TokenPool:
    """The pool of rank `rank` of `size`.  `shared` puts it into a memfd, which others can read."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_layers: int = 1,
        total_kv_heads: int = 1,
        tile_bytes: int = 0,
        rank: int = 0,
        size: int = 1,
        shared: bool = False,
    ) -> None:
        """`tile_bytes` 0: as small as the tokens allow."""
        first, stop = heads_of_rank(total_kv_heads, rank, size)
        tiles = 2 * num_layers
        self._width = -(-block_size // tiles)  # cells of a tile that hold tokens
        words = max(self._width, -(-tile_bytes // 4))
        shape = (num_blocks, num_layers, 2, stop - first, words)
        self.fd: int | None = None
        if shared:
            self.fd = create_memory("baton-kv", 4 * int(np.prod(shape)))
            self.cells: UInt32Array = np.frombuffer(mmap.mmap(self.fd, 0), np.uint32).reshape(shape)
        else:
            self.cells = np.zeros(shape, np.uint32)
        self._layers, self._heads, self._block_size = num_layers, stop - first, block_size
        heads = np.arange(first, stop, dtype=np.uint64)
        self._patterns: UInt32Array = (heads * np.uint64(_PATTERN) & np.uint64(0x7FFFFFFF)).astype(np.uint32)
        # The position (in its block) of each cell of a head's part of a block, one tile after the other.
        self.order = (np.arange(self._width) * tiles + np.arange(tiles)[:, None]).reshape(-1)
        self.order[self.order >= block_size] = _NOWHERE
        # Where the cells of the first head are: of each position in its block, and of each block.
        positions = np.arange(block_size)
        self._places = positions % tiles * (self._heads * words) + positions // tiles
        self._block_cells = np.int64(self.cells[0].size)
        self._flat = self.cells.reshape(-1)
        # The first head's part of each block; with as small a tile as possible a row.
        self._head = self.cells[:, :, :, 0, : self._width]
        if words == self._width:
            self._head = self._head.reshape(num_blocks, -1)
        self._disguised = bool(self._patterns.any())
        self._cell_of = self.order.argsort(kind="stable")[:block_size]  # of each position
        self.view = PoolView(
            num_blocks=num_blocks,
            block_bytes=self.cells[0].nbytes,
            num_layers=num_layers,
            kv_heads=self._heads,
            head_start=first,
            total_kv_heads=total_kv_heads,
            memory=memoryview(self.cells.data).cast("B"),
            fd=self.fd,
            address=self.cells.ctypes.data,
        )

    @property
    def num_layers(self) -> int:
        return self._layers

    def write(
        self, blocks: Int32Array, positions: npt.NDArray[Any], tokens: Int32Array, layer: int = -1
    ) -> None:
        """Tokens at positions (within their blocks); `layer` not -1: only what of them lies there."""
        tiles = 2 * self._layers
        if layer >= 0:
            kept = positions % tiles // 2 == layer
            blocks, positions, tokens = blocks[kept], positions[kept], tokens[kept]
        cells = self._places[positions] + blocks * self._block_cells
        stored = tokens.astype(np.uint32)
        stored += 1
        if not self._disguised:
            self._flat[cells] = stored
            return
        for pattern in self._patterns:
            self._flat[cells] = stored ^ pattern
            cells += self.cells.shape[-1]

    def read(self, tables: Int32Array, lengths: Int32Array) -> UInt32Array:
        """[R, W * len(order)] token + 1 of every cell of the blocks `tables` [R, W], in the order of cells.

        `lengths` [R] decide which of the heads are looked at.
        """
        if self._heads > 1:
            heads = (np.arange(tables.shape[1]) + lengths[:, None]) % self._heads
            found: UInt32Array = self.cells[tables, :, :, heads, : self._width]
            found = found ^ self._patterns[heads][:, :, None, None, None]
            return found.reshape(len(tables), -1)
        flat = self._head.take(tables, axis=0).reshape(len(tables), -1)
        return flat ^ self._patterns[0] if self._disguised else flat

    def tokens_in(self, block: int) -> list[int]:
        """What the first head of a block holds, by position; -1 where nothing was written."""
        found = self.read(np.array([[block]], np.int32), np.zeros(1, np.int32))[0]
        placed: list[int] = (found[self._cell_of].astype(np.int64) - 1).tolist()
        return placed

    def close(self) -> None:
        """Other processes cannot open the memory any more; those that have it mapped keep it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
