"""Llama 2, 3 and their kin, as plain modules; the other architectures are told as differences from it.

A decoder block is `x + Attention(norm(x))`, then `x + MLP(norm(x))` with a SwiGLU MLP.  All tokens of a
step, of whatever rows, are one batch [T, hidden]; only attention knows rows, through its backend.
Under tensor parallelism a rank has its share of the heads and of the MLP's columns.
Its parts are in `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.architectures.blocks import Attention, Block, LayerContext
from baton.model.architectures.program import Program, program_of
from baton.model.attention import AttentionBackend, AttentionStep, CpuAttention
from baton.model.checkpoint.config import ModelConfig
from baton.model.layers.layers import Module, RMSNorm, VocabParallelEmbedding
from baton.model.layers.placement import Placement
from baton.model.layers.rotary import Rotary
from baton.model.ops.fused import PLAIN, Result


class LlamaForCausalLM(Module):
    """One rank's model.  Parameters are allocated uninitialised; see `loader`."""

    attention_class: type[Attention] = Attention

    def __init__(
        self, config: ModelConfig, placement: Placement, backend: AttentionBackend, max_model_len: int
    ) -> None:
        self.config = config
        self.weights = placement.weights
        self.placement = placement
        self.backend = backend
        self.ops = placement.ops
        sizes, tied = (config.vocab_size, config.hidden_size), config.tie_word_embeddings
        self.embedding = VocabParallelEmbedding(
            "model.embed_tokens", *sizes, placement, lookup=True, head=tied
        )
        self.rotary = Rotary(config.rope, config.head_dim, max_model_len, placement.device)
        self.layers: list[Block] = []
        for index in range(config.num_layers):
            name = f"model.layers.{index}"
            attention = self.attention_class(
                f"{name}.self_attn", index, config, placement, backend, max_model_len
            )
            self.layers.append(Block(name, attention, config, placement))
        self.norm = RMSNorm("model.norm", config.hidden_size, config.norm_eps, placement)
        self.head = (
            self.embedding
            if tied
            else VocabParallelEmbedding("lm_head", *sizes, placement, lookup=False, head=True)
        )
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

    def _int64(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.norm.weight.device)

    def _run_layers(
        self, tokens: Tensor, step: AttentionStep, on_layers: Callable[[int], None] | None
    ) -> Tensor:
        cpu = isinstance(self.backend, CpuAttention)
        self.rotary.reach(step.block_tables.shape[1] * self.backend.shape.block_size)
        turns = None if cpu else self.rotary.at(self._int64(step.positions()))
        plan = self.backend.prepare(step)
        context = LayerContext(self.rotary, turns, plan)
        x = self.embedding.look_up(tokens)
        y: Result | None = None
        for done, layer in enumerate(self.layers, start=1):
            y = layer(x, y, context)
            if on_layers is not None:
                on_layers(done)
        self.ops.add(x, y)
        return x

    def rows(
        self,
        tokens: npt.NDArray[np.int32],
        step: AttentionStep,
        wanted: npt.NDArray[np.int64],
        on_layers: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As a call: the hidden states of those `wanted` alone, in their order, and their logits."""
        hidden, logits = self(tokens, step, wanted, on_layers, whole=False)
        if self.is_program and len(wanted) < len(tokens):
            return hidden[: len(wanted)], logits  # (the program has moved them there: native/program.cpp)
        return hidden[self._int64(wanted)], logits

    def final(self, hidden: Tensor) -> Tensor:
        """[n, hidden] before the last norm → after it, in the model's dtype."""
        normed = self.norm(hidden, form=PLAIN)
        assert isinstance(normed, Tensor)
        return normed

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden] before the last norm → [n, vocab] in the model's dtype; None on ranks but the first."""
        return self.head.logits(self.norm(hidden, form=self.head.form))

    def weights_change(self) -> None:
        """Weights are about to be loaded, into other places of memory."""
        self._program = None

    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes() for layer in self.layers_within())
