"""What a transfer moves, and what a transport is.

Theory.  Only the owner of memory writes it: a page is fetched by the rank that wants it, into blocks of its
own that no slot uses yet, and nobody ever writes into another process's pool.  So nothing can land late.
Whether the bytes were the right ones is not this package's question: the engines hold leases for that, and
look at them again after a fetch is over.

A pool is `[block, layer, K/V, head, tile]`, bytes; a page is one block of it on one rank.  A rank fetches its
own heads of each page, from whichever ranks of the source have them (`layout.py`).

A transport is a class with two halves.  The *source* half is what `export` starts and what other processes
use without asking this one's token loop.  The *reader* half is `copy`, a generator (see `tasks.py`): it
yields whenever it waits or has worked for about a millisecond, so that one thread serves many fetches
and a dropped one stops there.  After `copy` has ended, returned or been closed, it writes no more.

| transport | source half | reader half | waits for |
| --- | --- | --- | --- |
| `shared_memory` | a memfd | maps it, one copy from pool to pool | nothing |
| `tcp` | a page server in the worker's transfer thread | receives straight into its blocks | the socket |
| `nixl` | a registered pool | READ | its agent, polled |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton.protocol.messages.handover import PoolSource
from baton.transfer.tasks import Wait

Bytes = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
Copying = Generator[Wait | None, Any, int]
"""A task (`tasks.py`) that returns the bytes copied."""

SILENCE_S = 3.0
"""A source that sends nothing for so long is given up.  Far below a lease, far above a scheduling delay."""


class Landing(Protocol):
    """Pages on their way to a device."""

    def done(self) -> bool:
        """Whether they are there: the device does not touch them any more."""


class TransferError(RuntimeError):
    """Pages could not be copied; one line that names the source and the reason."""


@dataclass(frozen=True)
class PoolView:
    """The KV pool of a rank, as bytes."""

    num_blocks: int
    block_bytes: int
    num_layers: int
    kv_heads: int
    head_start: int
    """Index of the first head among those of the whole model."""
    total_kv_heads: int
    memory: memoryview | None
    """All of it, writable; None if a CPU cannot address it."""
    fd: int | None
    """The memfd that `memory` maps; None: other processes cannot map it."""
    address: int
    device: int = -1
    """Index of the CUDA device; -1: main memory."""
    land: Callable[[Int32Array, int, int], Landing] | None = None
    """Takes blocks, first layer, number of layers: copies these pages from `memory`, which was written, to
    the device, where steps read them.  None: steps read `memory`."""

    @property
    def tile_bytes(self) -> int:
        return self.block_bytes // (self.num_layers * 2 * self.kv_heads)

    def array(self) -> Bytes:
        """uint8 [block, layer, K/V, head, byte of the tile]."""
        if self.memory is None:
            raise TransferError("the KV pool is on a device: only the transport nixl can move its pages")
        shape = (self.num_blocks, self.num_layers, 2, self.kv_heads, self.tile_bytes)
        return np.frombuffer(self.memory, np.uint8).reshape(shape)

    def without_memory(self) -> PoolView:
        """The same sizes after the memory is gone."""
        return replace(self, memory=None, fd=None, address=0, land=None)

    def source(self, rank: int) -> PoolSource:
        """As a message, before any transport has added where it is."""
        return PoolSource(
            rank=rank,
            host=this_host(),
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            num_layers=self.num_layers,
            kv_heads=self.kv_heads,
            head_start=self.head_start,
            total_kv_heads=self.total_kv_heads,
        )


class Copy(NamedTuple):
    """Part of a fetch: what a reader takes from one rank of the source.  `pages[i]` goes to `blocks[i]`."""

    source: PoolSource
    pages: Int32Array
    blocks: Int32Array
    first_layer: int
    num_layers: int
    source_head: int
    """First of the heads to copy, counted within the source's rank."""
    head: int
    """The same within this rank."""
    num_heads: int
    grant: bytes = b""
    """What the source's engine has given for these pages (`grants.py`)."""


class Transport(Protocol):
    """One way for pages to travel.  Used by one thread."""

    name: str
    parallel: int
    """So many fetches from one source may be under way at once."""

    def export(self, source: PoolSource) -> PoolSource:
        """Adds how this rank's pages can be fetched."""

    def why_not(self, source: PoolSource) -> str:
        """Why `copy` cannot work with this source; "" if it can."""

    def copy(self, copy: Copy) -> Copying:
        """Copies; raises `TransferError`."""

    def tick(self) -> bool:
        """Lets go of sources that are gone or have long not been used.  Returns whether any is kept: then
        it is called again in about a second."""

    def close(self) -> None: ...


def this_host() -> str:
    """Names the machine since its last start, and the pid namespace (in which /proc/PID means the same)."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
