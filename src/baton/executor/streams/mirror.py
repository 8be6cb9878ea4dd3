"""The pages of a pool that lies on a device, in main memory, where other processes read and write them.

Theory.  A hand-over moves pages from process to process, and what it moves them with (`transfer/transports`)
needs memory that a CPU can address.  So beside the device's pool there is another one of the same shape, a
memfd: its *mirror*.  Page b of the mirror is page b of the device, as far as it was *shown*:

* A step shows the blocks that it fills, and the last ones of prompts that end in it: whatever another
  instance may be told of.  They are copied beside the next steps, behind an event of this one, and nothing is
  told of them before the event behind the copy.
* What arrives from another instance is written into the mirror, and *landed*, copied to the device, before
  the engine hears of it: so before any step is composed that reads it.

Nobody else writes there, so an instance can hand on what it was handed.  The kernel gives the memory as it is
used, and it is pinned stretch by stretch; it may come to as much as the pool on the device.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.executor.base import Int32Array, StepBatch
from baton.executor.streams.queue import DeviceQueue, Event
from baton.ipc.huge_pages import HugeMapping
from baton.ipc.memory import create_memory

logger = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]
_STRETCH = 64 << 20
"""Bytes that are pinned at once."""


class Mirror:
    """Of the pool `there` [block, layer, …], whose steps run in `queue`."""

    def __init__(self, queue: DeviceQueue, there: Tensor, block_size: int) -> None:
        self._queue = queue
        self._there, self._block_size = there, block_size
        size = there.numel() * there.element_size()
        self._block_bytes = size // len(there)
        self.fd = create_memory("baton-mirror", size)
        self.mapping = HugeMapping(self.fd)
        self._words = torch.frombuffer(self.mapping.bytes, dtype=torch.uint8)
        self._here = self._words.view(there.dtype).view(there.shape)
        self._outwards, self._inwards = queue.beside(), queue.beside()
        self._lock = threading.Lock()
        self._pinned = 0
        self._told = False

    def show(self, blocks: Int64Array, first_layer: int = 0, layers: int | None = None) -> None:
        """Work of the device: copies these pages here, in the order of what runs it."""
        stop = None if layers is None else first_layer + layers
        for block in blocks.tolist():
            self._here[block, first_layer:stop].copy_(self._there[block, first_layer:stop], non_blocking=True)

    def show_step(self, batch: StepBatch) -> bool:
        """A step was computed, and the device has nothing else to do: copies what it shows, and waits until
        that is over.  Returns whether there was anything."""
        blocks = self.shown_by(batch)
        if not len(blocks):
            return False
        shown = self._queue.event()
        with torch.inference_mode():
            self.show(blocks)
        shown.record()
        shown.wait()
        return True

    def shown_by(self, batch: StepBatch) -> Int64Array:
        """As the function, and they are about to be copied."""
        blocks = shown_by(batch, self._block_size)
        if len(blocks):
            self._use(blocks)
        return blocks

    def show_beside(
        self, blocks: Int64Array, final: Event, shown: Event, first_layer: int = 0, layers: int | None = None
    ) -> None:
        """From within the queue's work: records `final` there, and behind it, beside what follows, copies;
        records `shown` when that is over."""
        final.record()
        self._outwards.behind(final)

        def copy() -> None:
            with torch.inference_mode():
                self.show(blocks, first_layer, layers)
            shown.record()

        self._outwards.run(copy)

    def shown(self) -> Event:
        """For `show_beside`."""
        return self._outwards.event()

    def _use(self, blocks: Int64Array | Int32Array) -> None:
        """Pages of these blocks are about to be copied: their memory is pinned.  From any thread."""
        stop = (int(blocks.max()) + 1) * self._block_bytes
        with self._lock:
            first, last = self._pinned, min(-(-stop // _STRETCH) * _STRETCH, len(self._words))
            if last <= first:
                return
            self._pinned = last
            self.mapping.use(last)
            for start in range(first, last, _STRETCH):
                reason = self._queue.pin(self._words[start : min(start + _STRETCH, last)])
                if reason and not self._told:
                    self._told = True
                    logger.warning("main memory cannot be pinned, so hand-overs are slower: %s", reason)

    def land(self, blocks: Int32Array, first_layer: int, layers: int) -> Event:
        """These pages were written here: copies them to the device.  For the thread that fetches."""
        if len(blocks):
            self._use(blocks)
        landed = self._inwards.event()

        def copy() -> None:
            with torch.inference_mode():
                for block in blocks.tolist():
                    part = self._here[block, first_layer : first_layer + layers]
                    self._there[block, first_layer : first_layer + layers].copy_(part, non_blocking=True)
            landed.record()

        self._inwards.run(copy)
        return landed

    def close(self) -> None:
        """Nothing is copied any more; the memory goes with the last view of it."""
        self._queue.unpin(self._words[: self._pinned], _STRETCH)
        self._pinned = 0


def shown_by(batch: StepBatch, block_size: int) -> Int64Array:
    """The blocks that a step shows, once it is over."""
    ends = batch.starts + batch.counts
    first, full = batch.starts // block_size, ends // block_size
    prompts = np.arange(len(ends)) >= batch.num_decodes
    stop = full + (prompts & batch.samples & (ends % block_size != 0))
    rows = np.flatnonzero(stop > first)
    found = [batch.block_tables[row, first[row] : stop[row]] for row in rows]
    return np.unique(np.concatenate(found)).astype(np.int64) if found else np.empty(0, np.int64)
