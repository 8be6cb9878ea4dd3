"""How evenly a mixture's experts are loaded, for the metric `baton:expert_tokens_total`.

Theory.  A series an expert and layer would be thousands, and one an expert, over all layers, says nothing:
the same number means another expert in each.  What an operator asks is how many tokens go to experts that
have more than their share.  So tokens (each counts once for each expert that it goes to) are told by the load
of the expert that took them: what it took, over what an expert of its layer took on average.  A balanced
mixture has nearly all of them near 1; if a fourth are above 4, a fourth of the work is at crowded experts.

With few tokens chance alone loads experts unevenly, so loads are those of some dozens of tokens an expert.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
from torch import Tensor

from baton.model.decoder.mixture import Mixture
from baton.model.layers.layers import Module
from baton.protocol.messages.reports import EXPERT_LOADS

ENOUGH: Final = 32
"""Tokens an expert, on average."""


class ExpertLoad:
    """Of the model that an executor runs."""

    def __init__(self) -> None:
        self._of: weakref.ref[Module] | None = None
        self._counts: list[Tensor] = []
        """Of each mixture, as it goes on counting."""
        self._before: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self._chosen, self._enough = 1, 0
        self._since = 0

    def after_step(self, model: Module, tokens: int) -> list[int]:
        """Tokens by load, as `StepReport.expert_tokens`, every so many tokens; else empty."""
        return self.told([one.cpu().numpy() for one in self._counts]) if self.due(model, tokens) else []

    def due(self, model: Module, tokens: int) -> bool:
        """A step of so many tokens is computed: whether `told` is to be given the `counts` behind it."""
        if self._of is None or self._of() is not model:
            self._start(model)
        if not self._counts:
            return False
        self._since += tokens * self._chosen
        if self._since < self._enough:
            return False
        self._since = 0
        return True

    @property
    def counts(self) -> list[Tensor]:
        """[experts] of each mixture, as it goes on counting; as of the last `due`."""
        return self._counts

    def told(self, counts: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> list[int]:
        """What was behind a step that was due → as `after_step`."""
        found = np.zeros(len(EXPERT_LOADS) + 1, np.int64)
        for now, before in zip(counts, self._before, strict=True):
            taken = now - before
            before += taken
            loads = taken * (len(taken) / max(1, int(taken.sum())))
            np.add.at(found, np.searchsorted(EXPERT_LOADS, loads), taken)
        return [int(count) for count in found]

    def _start(self, model: Module) -> None:
        layers = getattr(model, "layers", [])
        mixtures = [block.mlp for block in layers if isinstance(getattr(block, "mlp", None), Mixture)]
        self._of = weakref.ref(model)
        self._counts = [mixture.tokens for mixture in mixtures]
        self._before = [counts.cpu().numpy().copy() for counts in self._counts]
        if mixtures:
            told = mixtures[0].config
            self._chosen, self._enough = told.chosen, ENOUGH * told.experts
        self._since = 0
