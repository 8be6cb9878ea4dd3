"""Sampling for slots whose parameters the host knows: `cpu.sampling.KernelSampling` on a device.

Theory.  The host writes what a request asks for when it takes a slot, and the mask of a constrained one
before each token.  The device has a copy of all.  Before a step the host compares what it sent last with what
there is, for the slots of the step: parameters are sent whole, because they change with an admission only;
masks row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.cpu.sampling import SlotParameters
from baton.model.cuda.sampling import Edits, Wishes, edit, sample

Int32Array = npt.NDArray[np.int32]

_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "streams", "masked")


class TritonSampling:
    """Draws tokens for slots.  The arrays of `parameters` are looked at in each call, and must stay."""

    def __init__(self, parameters: SlotParameters, vocab_size: int, device: torch.device) -> None:
        self._have = parameters
        self._vocab_size = vocab_size
        self._device = device
        self._sent = {name: getattr(parameters, name).copy() for name in _COLUMNS}
        self.wishes = Wishes.of(parameters, device)
        """What the device has.  Its tensors stay."""
        self._chosen: tuple[Tensor, Tensor] | None = None

    def takes(self, logits: Tensor) -> bool:
        return logits.dtype is torch.float32 and logits.device == self._device and logits.stride(1) == 1

    def sample(self, logits: Tensor, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """Logits [n, vocab] of these slots, positions of the new tokens [n] → tokens [n].  See `takes`."""
        if logits.shape[1] != self._vocab_size:
            raise ValueError(f"logits {list(logits.shape)} of a vocabulary of {self._vocab_size}")
        if self._chosen is not None and logits is self._chosen[0] and not self._have.masked[slots].any():
            chosen: Int32Array = self._chosen[1].cpu().numpy()
            return chosen
        self.send(slots)
        both = torch.from_numpy(np.stack((slots, positions)).astype(np.int32)).to(self._device)
        found: Int32Array = sample(logits, both[0], both[1], self.wishes).cpu().numpy()
        return found

    def edit(self, logits: Tensor, entries: Mapping[str, npt.NDArray[Any]]) -> None:
        """Edits logits [n, vocab], float32, in place; `entries`: the arrays of `cuda.sampling.Edits`.  They
        go to the device in one copy."""
        parts = {name: np.ascontiguousarray(array).view(np.uint8) for name, array in entries.items()}
        sizes = {name: -(-len(part) // 16) * 16 for name, part in parts.items()}
        whole, first, places = np.zeros(sum(sizes.values()), np.uint8), 0, {}
        for name, part in parts.items():
            whole[first : first + len(part)] = part
            places[name] = slice(first, first + len(part))
            first += sizes[name]
        there = torch.from_numpy(whole).to(self._device)
        types = {name: torch.from_numpy(array[:0]).dtype for name, array in entries.items()}
        edit(logits, Edits(**{name: there[place].view(types[name]) for name, place in places.items()}))

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """As `sample`, of slots and positions int32 [n] on the device, without masks that are not sent yet;
        the tokens stay there."""
        return sample(logits, slots, positions, self.wishes)

    def have_chosen(self, logits: Tensor, tokens: Tensor) -> None:
        """`choose` gave these tokens of these logits: `sample` of the same tensor need not do it again."""
        self._chosen = logits, tokens

    def send(self, slots: Int32Array, into: Callable[[Tensor], npt.NDArray[Any]] | None = None) -> None:
        """What changed of these slots goes to the device.  `into`: gives an array to write, for a tensor
        there; None: the copies wait for the device."""
        for name, sent in self._sent.items():
            here = getattr(self._have, name)
            if not np.array_equal(here[slots], sent[slots]):
                sent[:] = here
                signed = here.view(np.int64) if here.dtype == np.uint64 else here
                target: Tensor = getattr(self.wishes, name)
                if into is None:
                    target.copy_(torch.from_numpy(signed))
                else:
                    into(target)[:] = signed
        masked = np.unique(slots[self._have.masked[slots] != 0])
        if len(masked):
            bits = torch.from_numpy(self._have.masks[masked].view(np.int32)).to(self._device)
            self.wishes.masks.index_copy_(0, torch.from_numpy(masked.astype(np.int64)).to(self._device), bits)
