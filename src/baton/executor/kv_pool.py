"""The memory of the KV cache of one rank: `[block, layer, K/V, kv_head, tile]`, one block one page.

On a CPU the pool is a memfd, mapped shared: a descriptor that can be handed to another process, which
reads pages of it without asking.  It leaves nothing behind in the file system when processes die.  The kernel
gives it memory when it is first used, so a large pool costs nothing until then; in huge pages, if it can.

What of a block lies past its request's last position is zero: the executor clears a block when it is
opened and will not be filled at once.  So no bytes of an earlier request travel with a page, and a value
that is masked out is finite.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from baton.executor.base import Int32Array
from baton.executor.streams.mirror import Mirror
from baton.executor.streams.queue import DeviceQueue
from baton.ipc.huge_pages import HugeMapping
from baton.ipc.memory import create_memory
from baton.ipc.processes.control_groups import ROOT, memory_left
from baton.transfer.base import PoolView


class KvPool:
    """`tensor` has shape [num_blocks, layers, 2, kv_heads, *tile_shape]."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        tile_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        mirrored: DeviceQueue | None = None,
    ) -> None:
        """`mirrored`: the queue of a device whose pages other processes may fetch (`streams/mirror.py`)."""
        shape = (num_blocks, num_layers, 2, num_kv_heads, *tile_shape)
        self.num_blocks = num_blocks
        self.block_bytes = prod(shape[1:]) * dtype.itemsize
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
        self._mapping: HugeMapping | None = None
        self._used = 0
        self.fd: int | None = None
        """Descriptor of the memory, or of its mirror; owned by the pool."""
        self.mirror: Mirror | None = None
        if device.type != "cpu" or mirrored is not None:
            self.tensor: Tensor = torch.zeros(shape, dtype=dtype, device=device)
            if mirrored is not None:
                self.mirror = Mirror(mirrored, self.tensor, tile_shape[0])
                self.fd = self.mirror.fd
            return
        size = num_blocks * self.block_bytes
        self.fd = create_memory("baton-kv", size)
        self._mapping = HugeMapping(self.fd)
        # The tensor keeps the mapping alive; it is unmapped with the last view of it.
        self.tensor = torch.frombuffer(self._mapping.bytes, dtype=dtype).view(shape)

    def use(self, block_tables: Int32Array) -> None:
        """These blocks are about to be used; so are those with smaller numbers, which are given out first."""
        if self._mapping is not None and self._used < self.num_blocks and block_tables.size:
            last = int(block_tables.max())
            if last >= self._used:
                self._mapping.use((last + 1) * self.block_bytes)
                self._used = last + 1

    def view(self, head_start: int, total_kv_heads: int) -> PoolView:
        """The pool as transfers see it."""
        mapping = self._mapping if self.mirror is None else self.mirror.mapping
        return PoolView(
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            num_layers=self._num_layers,
            kv_heads=self._num_kv_heads,
            head_start=head_start,
            total_kv_heads=total_kv_heads,
            memory=None if mapping is None else memoryview(mapping.bytes),
            fd=self.fd,
            address=self.tensor.data_ptr(),
            device=-1 if self.tensor.device.type == "cpu" else self.tensor.device.index or 0,
            land=None if self.mirror is None else self.mirror.land,
        )

    def close(self) -> None:
        if self.mirror is not None:
            self.mirror.close()
        self.tensor = torch.empty(0)
        self._mapping = self.mirror = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def available_memory(root: Path = ROOT) -> int:
    """Bytes that new allocations may use: of the machine, and of its control groups if one has less.

    `root`: of the file system, for tests.
    """
    return int(min(_field(root / "proc/meminfo", "MemAvailable:") * 1024, memory_left(root)))


def _field(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == key:
            return int(words[1])
    raise ValueError(f"{path} has no {key}")
