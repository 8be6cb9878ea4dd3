"""The numbers of a step on their way to the device: one copy from pinned memory, which nobody waits for.

Theory.  Whatever the host knows of a step (tokens, tables, positions, indices) is written into one *slab* of
pinned memory and goes to the device by one copy.  `put` gives the place on the device where an array will be,
before it is there: so a step is prepared in any order, `send` copies, and what is launched afterwards finds
it.  What has its own place on the device (a graph's buffers, parameters of slots) is written into the slab
too, and copied there: `into`.

A slab is written again only when the device has read it, which an event says; there are as many as steps may
be in flight, and one for the step that is prepared.  On the device one place is enough: the next step's
copy runs behind all that reads this one's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.executor.streams.queue import DeviceQueue, Event

SLABS = 3
_FIRST_BYTES = 1 << 16
_ALIGNED = 16


class _Slab:
    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.read: Event | None = None
        """The device has copied what the slab held last."""
        self.kept: list[Tensor] = []
        """Pinned memory of what had no room."""


class Staging:
    """Of one queue.  For each step: `begin`, any number of `put` and `into`, `send`."""

    def __init__(self, queue: DeviceQueue, device: torch.device) -> None:
        self._queue, self._device = queue, device
        self._slabs = [_Slab() for _ in range(SLABS)]
        self._turn = 0
        self._there = torch.empty(0, dtype=torch.uint8, device=device)
        self._room = _FIRST_BYTES
        self._used = self._sent = 0
        self._copies: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """A step is prepared; waits until the device has read what this slab held, three steps ago."""
        self._turn = (self._turn + 1) % SLABS
        slab = self._slabs[self._turn]
        if slab.read is not None:
            slab.read.wait()
        slab.kept.clear()
        self._room = max(self._room, 1 << (self._used - 1).bit_length() if self._used else 0)
        self._used = self._sent = 0
        self._copies.clear()
        if len(slab.bytes) < self._room:
            slab.tensor = self._queue.pinned(self._room, torch.uint8)
            slab.bytes = slab.tensor.numpy()
        if len(self._there) < self._room:
            self._there = torch.empty(self._room, dtype=torch.uint8, device=self._device)

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """Where the array will be on the device, of the same type and shape, from `send` until the next
        step's.  The array may be changed as soon as this returns."""
        dtype, size = torch_dtype(array.dtype), array.nbytes
        start = self._take(size)
        if start is None:
            host, there = self._apart(size), torch.empty(array.shape, dtype=dtype, device=self._device)
            self._copies.append((there, host.view(dtype).view(array.shape)))
            place = host.numpy()
        else:
            place = self._slabs[self._turn].bytes[start : start + size]
            there = self._there[start : start + size].view(dtype).view(array.shape)
            self._sent = start + size
        np.copyto(place.view(array.dtype).reshape(array.shape), array)
        return there

    def into(self, target: Tensor) -> npt.NDArray[Any]:
        """An array like `target`, a tensor on the device, to be filled before `send`, which copies it there.
        What it holds before means nothing."""
        size = target.numel() * target.element_size()
        start = self._take(size)
        host = self._apart(size) if start is None else self._slabs[self._turn].tensor[start : start + size]
        shaped = host.view(target.dtype).view(target.shape)
        self._copies.append((target, shaped))
        return shaped.numpy()

    def send(self, now: bool = False) -> None:
        """Gives the device the copies, and marks when it has made them.  `now`: it has nothing else to do,
        and what follows is not given to its queue."""
        slab, sent, there = self._slabs[self._turn], self._sent, self._there
        copies, read = list(self._copies), self._queue.event()

        def copy() -> None:
            with torch.inference_mode():
                if sent:
                    there[:sent].copy_(here[:sent], non_blocking=True)
                for target, host in copies:
                    target.copy_(host, non_blocking=True)
            read.record()

        here, slab.read = slab.tensor, read
        if now:
            copy()
        else:
            self._queue.run(copy)

    def _take(self, size: int) -> int | None:
        """Where so many bytes go in the slab; None: it is full, and the next ones will be larger."""
        start = -(-self._used // _ALIGNED) * _ALIGNED
        self._used = start + size
        return start if self._used <= self._room else None

    def _apart(self, size: int) -> Tensor:
        host = self._queue.pinned(size, torch.uint8)
        self._slabs[self._turn].kept.append(host)
        return host


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
