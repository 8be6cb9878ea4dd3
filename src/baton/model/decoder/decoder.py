"""One rank's decoder, built from a description, as plain modules.

All tokens of a step, of whatever rows, are one batch [T, hidden]; only attention knows rows, through its
backend.  Under tensor parallelism a rank has its share of the heads and of the MLP's columns.  Its parts are
in `blocks`; where all of it has kernels a step is one native call (`program`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.attention import AttentionBackend, AttentionStep
from baton.model.checkpoint.config import ModelConfig
from baton.model.decoder.blocks import Attention, Block, LayerContext
from baton.model.decoder.mixture import Mixture
from baton.model.decoder.mtp import Ends, Mtp
from baton.model.decoder.program import Program, program_of
from baton.model.layers.layers import Module, RMSNorm, Scores, VocabParallelEmbedding
from baton.model.layers.placement import Placement
from baton.model.layers.rotary import Rotary
from baton.model.ops.fused import PLAIN, Result


@dataclass(frozen=True)
class Prepared:
    """What a step on a device needs beside its tokens."""

    plan: Any
    """The attention backend's."""
    positions: Tensor | None = None
    """int64 [T]; None: the backend rotates by itself."""
    present: Tensor | None = None
    """int64 [T], below 0 for rows that are padding; None: there are none."""


class Decoder(Module):
    """One rank's model.  Parameters are allocated uninitialised; see `loader`."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        backend: AttentionBackend,
        max_model_len: int,
        mtp_backend: AttentionBackend | None = None,
    ) -> None:
        """`mtp_backend`: of the layer that guesses further tokens; None: there is none."""
        self.config = config
        self.weights = placement.weights
        self.placement = placement
        self.backend = backend
        self.ops = placement.ops
        sizes, tied = (config.vocab_size, config.hidden_size), config.tie_word_embeddings
        self.embedding = VocabParallelEmbedding(
            "model.embed_tokens", *sizes, placement, lookup=True, head=tied
        )
        told, growth = config.rotaries, config.layers[0].attention.growth
        self.rotaries = [
            Rotary(rope, config.head_dim, max_model_len, placement.device, growth) for rope in told
        ]
        self.layers: list[Block] = []
        for number, layer in enumerate(config.layers):
            index = told.index(layer.attention.rope)
            rotary = index, self.rotaries[index]
            attention = Attention(number, config, rotary, placement, backend, max_model_len)
            self.layers.append(Block(attention, config, placement))
        self.norm = RMSNorm(
            "model.norm", config.hidden_size, config.norm_eps, placement, float(config.norm_plus_one)
        )
        self.head = (
            self.embedding
            if tied
            else VocabParallelEmbedding("lm_head", *sizes, placement, lookup=False, head=True)
        )
        self.scores = (
            Scores("score", len(config.labels), config.hidden_size, placement) if config.labels else None
        )
        self.embedding_factor = float(torch.tensor(config.embedding_factor).to(placement.dtype))
        """As families that scale their embeddings have it: in the dtype of the model."""
        self.mtp: Mtp | None = None
        if mtp_backend is not None:
            assert config.mtp is not None
            index = told.index(config.mtp.layer.attention.rope)
            ends = Ends(self.embedding, self.norm, self.head)
            rotary = index, self.rotaries[index]
            self.mtp = Mtp(config, placement, mtp_backend, max_model_len, rotary, ends)
        self._program: Program | Literal[False] | None = None
        """All of it as one native call, where there is one; None: not made yet."""

    def __call__(
        self,
        tokens: npt.NDArray[np.int32],
        step: AttentionStep,
        wanted: npt.NDArray[np.int64] | None = None,
        on_layers: Callable[[int], None] | None = None,
        whole: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [T] → [T, hidden] before the last norm, and `logits` of those `wanted` (None: of all).

        Writes their KV.  Both results are valid until the next call.  `on_layers(n)` follows layer n: its
        sums over the ranks are complete, so all of them have written.  Not `whole`: the caller will not look
        at the hidden states, so they need not be complete.
        """
        if self._program is None:
            self._program = program_of(self) or False
        if self._program:
            return self._program(tokens, step, wanted, on_layers, whole)
        self.backend.clear_opened(step)
        hidden = self._run_layers(self._int64(tokens), step, on_layers)
        chosen = hidden if wanted is None else hidden[self._int64(wanted)]
        return hidden, self.logits(chosen) if len(chosen) else None

    @property
    def is_program(self) -> bool:
        """Whether a step is one native call, as was seen in the first one."""
        return bool(self._program)

    @property
    def mixtures(self) -> list[Mixture]:
        """In the order of their layers."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Mixture)]

    def record_chosen(self, record: bool) -> None:
        """From the next step on: whether `chosen` is wanted of it.  The whole last layer is computed then."""
        if self._program is None:
            self._program = program_of(self) or False
        if self._program:
            self._program.record_chosen = record
            return
        for mixture in self.mixtures:
            mixture.record = record

    def chosen(self) -> npt.NDArray[np.int32]:
        """[mixtures, T, chosen]: the experts of each token of the last step, ids ascending, if they were
        recorded."""
        if self._program:
            assert self._program.chosen is not None
            return np.asarray(self._program.chosen.numpy())
        found = [mixture.chosen for mixture in self.mixtures if mixture.chosen is not None]
        return np.asarray(torch.stack(found).cpu().numpy())

    def _int64(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.norm.weight.device)

    def _run_layers(
        self, tokens: Tensor, step: AttentionStep, on_layers: Callable[[int], None] | None
    ) -> Tensor:
        return self._through(tokens, self._context(step), on_layers)

    def prepare(self, step: AttentionStep, upload: Callable[[npt.NDArray[Any]], Tensor]) -> Prepared:
        """The host's half of a step that `on_device` computes: `upload` tells where an array will be then."""
        self._reach(step)
        self.backend.upload = upload
        try:
            plan = self.backend.prepare(step)
        finally:
            self.backend.upload = None
        return Prepared(plan, None if self._rotated else upload(step.positions()))

    def on_device(
        self,
        tokens: Tensor,
        prepared: Prepared,
        wanted: Tensor | None = None,
        on_layers: Callable[[int], None] | None = None,
    ) -> Tensor | None:
        """Token ids [T], and of which to have logits (None: of all), on the device → logits.  Nothing waits
        for the device, and nothing is read that the host may change.  Blocks that the step opens are not
        cleared."""
        turns, growth = {}, None
        if prepared.positions is not None:
            turns = self._turns(prepared.positions)
            growth = self.rotaries[0].growth_at(prepared.positions)
        hidden = self._through(
            tokens, LayerContext(turns, growth, prepared.plan, prepared.present), on_layers
        )
        chosen = hidden if wanted is None else hidden[wanted]
        return self.logits(chosen) if len(chosen) else None

    def _through(
        self, tokens: Tensor, context: LayerContext, on_layers: Callable[[int], None] | None
    ) -> Tensor:
        x = self.embedding.look_up(tokens)
        if self.embedding_factor != 1:
            x = self.ops.temper(x, self.embedding_factor)
        y: Result | None = None
        for done, layer in enumerate(self.layers, start=1):
            y = layer(x, y, context)
            if on_layers is not None:
                on_layers(done)
        self.ops.add(x, y, self.config.residual_factor)
        return x

    def _context(self, step: AttentionStep) -> LayerContext:
        self._reach(step)
        plan = self.backend.prepare(step)
        if self._rotated:
            return LayerContext({}, None, plan)
        positions = self._int64(step.positions())
        return LayerContext(self._turns(positions), self.rotaries[0].growth_at(positions), plan)

    def _reach(self, step: AttentionStep) -> None:
        for rotary in self.rotaries:
            rotary.reach(step.block_tables.shape[1] * self.backend.shape.block_size)

    def _turns(self, positions: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        return {index: rotary.at(positions) for index, rotary in enumerate(self.rotaries)}

    @property
    def _rotated(self) -> bool:
        """Whether the backend rotates in all layers."""
        return all(layer.attention.rotates for layer in self.layers)

    def rows(
        self,
        tokens: npt.NDArray[np.int32],
        step: AttentionStep,
        wanted: npt.NDArray[np.int64],
        on_layers: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As a call: the hidden states of those `wanted` alone, in their order, and their logits."""
        hidden, logits = self(tokens, step, wanted, on_layers, whole=False)
        if self._program and not self._program.record_chosen and len(wanted) < len(tokens):
            return hidden[: len(wanted)], logits  # (the program has moved them there: native/program.cpp)
        return hidden[self._int64(wanted)], logits

    def final(self, hidden: Tensor) -> Tensor:
        """[n, hidden] before the last norm → after it, in the model's dtype."""
        normed = self.norm(hidden, form=PLAIN)
        assert isinstance(normed, Tensor)
        return normed

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden] before the last norm → [n, vocab] in float32; None on ranks but the first."""
        found = self.head.logits(self.norm(hidden, form=self.head.form))
        factor, cap = self.config.logits_factor, self.config.logits_cap
        if found is None or (factor == 1 and cap is None):
            return found
        return self.ops.temper(found, factor, cap)

    def weights_change(self) -> None:
        """Weights are about to be loaded, into other places of memory."""
        self._program = None
        for layer in self.layers:
            if isinstance(layer.mlp, Mixture):
                layer.mlp.weights_change()

    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes() for layer in self.layers_within())
