"""What the model asks of attention, and what an attention backend owns: the inside of a tile.

Theory.  The KV pool is `[block, layer, K/V, kv_head, tile]`.  A *tile* is what one KV head keeps of the
`block_size` positions of one block; how it is laid out inside is the backend's own business, which it
names (`tile_name`), so that two instances that exchange blocks can check that they mean the same thing.

A step goes `prepare` once, then for each layer `write_kv` and `attend`.  `prepare` turns block tables
into whatever indices, masks and groups of rows the backend needs; layers share them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.cpu.kernels import HeadNorms

Int32Array = npt.NDArray[np.int32]
Upload = Callable[[npt.NDArray[Any]], Tensor]
"""Where an array will be on the device."""


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one rank."""

    num_layers: int
    num_heads: int
    """Query heads of this rank; a multiple of num_kv_heads."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    """Of the dot products."""
    windows: frozenset[int | None]
    """The different windows of the layers (None: no window)."""
    dtype: torch.dtype
    """Of queries, keys and values, and of the pool unless `kv_int8`."""
    device: torch.device
    kv_int8: bool = False
    """The pool holds keys and values in eight bits (`kv_int8`)."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks: bool = False
    """Layers have them: see `AttentionBackend.attend`."""


@dataclass(slots=True)
class AttentionStep:
    """The rows of a step: as in `executor.base.StepBatch`, of which this is the part that concerns KV."""

    starts: Int32Array
    """[R]"""
    counts: Int32Array
    """[R]"""
    block_tables: Int32Array
    """[R, W]"""
    num_decodes: int
    """So many rows at the front have count 1."""

    def positions(self) -> npt.NDArray[np.int64]:
        """[T] of each query token."""
        shifts = np.repeat(self.starts - (np.cumsum(self.counts) - self.counts), self.counts)
        result: npt.NDArray[np.int64] = np.arange(len(shifts)) + shifts
        return result


class AttentionBackend(ABC):
    """Writes and reads the KV pool of one rank."""

    pool: Tensor
    """As bound."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.upload: Upload | None = None
        """How `prepare` brings an array to the device; None: by a copy that waits for the device."""

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """An array that `prepare` made, where the pool is."""
        if self.upload is not None:
            return self.upload(array)
        tensor = torch.from_numpy(array)
        return tensor if self.shape.device.type == "cpu" else tensor.to(self.shape.device)

    @property
    def pool_dtype(self) -> torch.dtype:
        """Of the pool's elements: bytes where it holds integers and scales."""
        return torch.uint8 if self.shape.kv_int8 else self.shape.dtype

    @property
    def block_bytes(self) -> int:
        """Of a block: all layers."""
        shape = self.shape
        tiles = shape.num_layers * 2 * shape.num_kv_heads
        return tiles * math.prod(self.tile_shape) * self.pool_dtype.itemsize

    @property
    @abstractmethod
    def tile_name(self) -> str:
        """Names the layout of a tile, its dtype and sizes included."""

    @property
    @abstractmethod
    def tile_shape(self) -> tuple[int, ...]:
        """Shape of a tile, in elements of `pool_dtype`, for (block_size, head_dim)."""

    @abstractmethod
    def bind(self, pool: Tensor) -> None:
        """Takes the pool [blocks, layers, 2, kv_heads, *tile_shape] to work on."""

    @property
    def kernel_name(self) -> str:
        """What computes, for people."""
        return "PyTorch"

    def turns(self, norms: HeadNorms | None, grows: bool) -> bool:
        """Whether it has `rotate_and_write`, with these norms; `grows`: queries are multiplied."""
        return False

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
        """Normalizes and rotates queries and keys, stores keys and values; where `turns` says so.

        qkv: [T, (heads + 2 * kv_heads) * head_dim]; cos, sin: [positions, head_dim / 2] float32; growth:
        [positions].  Returns queries [T, heads, head_dim].
        """
        raise NotImplementedError

    @property
    def records(self) -> bool:
        """Whether it has `plan_of_decodes`, so that a step can be recorded and replayed."""
        return False

    def plan_of_decodes(
        self, places: Tensor, positions: Tensor, tables: Tensor, items: Tensor, longest: int
    ) -> Any:
        """A plan of rows of one token, of numbers that lie on the device and change there: places int64 [R]
        (-1: a row that is not there), positions int32 [R], tables int32 [R, W], items int32 [R, 4] (first
        token, tokens: 0 or 1, position, row).  `longest`: keys of a row at most."""
        raise NotImplementedError

    def before_replay(
        self, rows: int, width: int, step: AttentionStep, upload: Upload
    ) -> Callable[[], None] | None:
        """What the device is to be given before each replay, and before the recording, of a step of decode
        rows alone that was padded to `rows` rows and tables of `width` columns; None: nothing.  It is called
        on the host before `plan_of_decodes` is, with what `upload` brings to the device."""
        return None

    def splits_of(self, longest: int) -> int:
        """Parts in which such rows are computed, whose sums are kept for a while."""
        return 1

    def clear_opened(self, step: AttentionStep) -> None:
        """Zeroes the blocks that the step opens."""
        blocks = self.opened(step.starts, step.counts, step.block_tables)
        if len(blocks):
            self.pool.index_fill_(0, torch.from_numpy(blocks).to(self.pool.device), 0)

    def opened(
        self, starts: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], tables: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """Blocks whose first position is written by such rows and whose last one is not."""
        size = self.shape.block_size
        ends = starts + counts
        last = (ends - 1) // size
        opened = (last * size >= starts) & (ends % size != 0)
        found: npt.NDArray[np.int64] = tables[opened, last[opened]].astype(np.int64)
        return found

    @abstractmethod
    def prepare(self, step: AttentionStep) -> Any:
        """Indices and masks of a step, for the other two methods.  [T] = sum of counts."""

    @abstractmethod
    def write_kv(self, layer: int, keys: Tensor, values: Tensor, plan: Any) -> None:
        """Stores keys and values [T, kv_heads, head_dim] at their positions."""

    @abstractmethod
    def attend(
        self, layer: int, queries: Tensor, window: int | None, plan: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """Causal attention of queries [T, heads, head_dim] over everything written up to each position.

        With a window w, position p sees p-w+1 … p.  `sinks`: float32 [heads], a score that takes part in the
        softmax of each of the head's queries, whatever the window, and sees nothing.  Returns
        [T, heads * head_dim].
        """
