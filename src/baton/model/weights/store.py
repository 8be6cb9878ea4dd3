"""Where the weights of a model lie: one owner for the memory of all tensors that last as long as the model.

Theory.  What a worker packs is a function of the checkpoint and of how it is held.  So all of it is made
through a store, by name, in the order of the layers, and a store can be

* private memory of the process (`PrivateStore`);
* a weight image that is being filled (`image.ImageWriter`);
* a weight image that has been filled, by this process or another one, mapped read-only
  (`image.ImageReader`).  It is `complete`: what `make` gives holds its numbers already, and nothing is read
  or packed.

Beside tensors there are facts: numbers that follow from the checkpoint, as an exponent that all scales share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from baton.model.weights.own_memory import own_memory

Facts = Mapping[str, int | float | str]
_LARGE = 1 << 18
"""Bytes from which on a tensor has a mapping of its own."""


class WeightStore(Protocol):
    """Each name is made once for a model."""

    complete: bool
    """What `make` gives holds its numbers already, and may not be written."""

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Contiguous; zero, unless `complete`, for the caller to fill."""

    def note(self, name: str, facts: Callable[[], Facts]) -> Facts:
        """Unless `complete` keeps and returns what `facts` returns; else what was kept."""


class PrivateStore:
    """Memory of this process, or of its device.  A tensor's memory goes when the tensor does."""

    complete = False

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        elements = math.prod(shape)
        if device.type != "cpu" or elements * dtype.itemsize < _LARGE:
            return torch.zeros(shape, dtype=dtype, device=device)
        return own_memory(elements, dtype).view(shape)

    def note(self, name: str, facts: Callable[[], Facts]) -> Facts:
        return facts()


@dataclass(frozen=True)
class Shelf:
    """What of a store belongs to one weight."""

    store: WeightStore = field(default_factory=PrivateStore)
    name: str = ""

    @property
    def complete(self) -> bool:
        return self.store.complete

    def make(self, part: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.store.make(f"{self.name}/{part}", shape, dtype, torch.device("cpu"))

    def keep(self, part: str, tensor: Tensor) -> Tensor:
        """A copy."""
        return self.make(part, tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def note(self, part: str, facts: Callable[[], Facts]) -> Facts:
        return self.store.note(f"{self.name}/{part}", facts)
