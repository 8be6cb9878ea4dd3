"""Llama 2, 3 and their kin, as plain modules; the other architectures are told as differences from it.

A decoder block is `x + Attention(norm(x))`, then `x + MLP(norm(x))` with a SwiGLU MLP.  All tokens of a
step, of whatever rows, are one batch [T, hidden]; only attention knows rows, through its backend.
Under tensor parallelism a rank has its share of the heads and of the MLP's columns.

The residual stream x is one tensor for the whole step.  A sublayer's result y is not added at once: the next
norm takes (x, y), adds and normalizes in one pass (`fused.FusedOps.add_norm`).  Of a layer there remain four
products, two such norms, the SwiGLU, and what attention does: rotate and store, attend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.attention import AttentionBackend, AttentionStep, CpuAttention
from baton.model.checkpoint.config import ModelConfig
from baton.model.cpu.kernels import HeadNorms
from baton.model.cpu.program import Program, program_of
from baton.model.layers.fused import Activations, Result
from baton.model.layers.layers import (
    Linear,
    Module,
    Placement,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
)
from baton.model.layers.rotary import Rotary, rotate


@dataclass(frozen=True)
class LayerContext:
    """What the layers of one step share."""

    rotary: Rotary
    turns: tuple[Tensor, Tensor] | None
    """cos and sin of the step's positions; None where the attention backend rotates by itself."""
    plan: Any
    """The attention backend's."""


class Attention(Module):
    def __init__(
        self,
        name: str,
        layer: int,
        config: ModelConfig,
        placement: Placement,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        rank, size = placement.parallel.rank, placement.parallel.size
        self.layer = layer
        self.window = config.window_of(layer, max_model_len)
        self.backend = backend
        self.ops = placement.ops
        self.head_dim = config.head_dim
        self.head_norms: HeadNorms | None = None
        self.num_heads = config.num_attention_heads // size
        first_kv, stop_kv = config.kv_heads_of_rank(rank, size)
        self.num_kv_heads = stop_kv - first_kv
        dim = config.head_dim
        queries = config.num_attention_heads * dim
        keys = config.num_kv_heads * dim
        share = self.num_heads * dim
        parts = [
            (f"{name}.q_proj", queries, rank * share, (rank + 1) * share),
            (f"{name}.k_proj", keys, first_kv * dim, stop_kv * dim),
            (f"{name}.v_proj", keys, first_kv * dim, stop_kv * dim),
        ]
        self.qkv = self.make_qkv(name, parts, config, placement)
        self.output = RowParallelLinear(
            f"{name}.o_proj", queries, config.hidden_size, config.output_bias, placement
        )

    def make_qkv(
        self, name: str, parts: list[tuple[str, int, int, int]], config: ModelConfig, placement: Placement
    ) -> Linear:
        return Linear(parts, config.hidden_size, config.qkv_bias, placement)

    def __call__(self, x: Activations, context: LayerContext) -> Result:
        qkv = self.ops.dequantize(self.qkv.multiply(x))
        if isinstance(self.backend, CpuAttention):
            rotary = context.rotary
            queries = self.backend.rotate_and_write(
                self.layer, qkv, rotary.cos, rotary.sin, self.head_norms, context.plan
            )
        else:
            queries = self._rotate_and_write(qkv, context)
        mixed = self.backend.attend(self.layer, queries, self.window, context.plan)
        return self.output.multiply(self.ops.quantize(mixed))

    def _rotate_and_write(self, qkv: Tensor, context: LayerContext) -> Tensor:
        """[T, out of qkv] → queries [T, heads, head_dim], for a backend that does not rotate."""
        assert context.turns is not None
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        split = self.num_heads + self.num_kv_heads
        turning = heads[:, :split]
        if self.head_norms is not None:
            queries, keys = turning[:, : self.num_heads], turning[:, self.num_heads :]
            norms, size = self.head_norms, (self.head_dim,)
            turning = torch.cat(
                (
                    F.rms_norm(queries, size, norms.queries, norms.eps),
                    F.rms_norm(keys, size, norms.keys, norms.eps),
                ),
                dim=1,
            )
        rotated = rotate(turning, *context.turns)
        self.backend.write_kv(self.layer, rotated[:, self.num_heads :], heads[:, split:], context.plan)
        return rotated[:, : self.num_heads]


class MLP(Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, name: str, config: ModelConfig, placement: Placement) -> None:
        self.ops = placement.ops
        self.gate_up = column_parallel(
            [f"{name}.gate_proj", f"{name}.up_proj"],
            config.intermediate_size,
            config.hidden_size,
            config.mlp_bias,
            placement,
        )
        self.down = RowParallelLinear(
            f"{name}.down_proj", config.intermediate_size, config.hidden_size, config.mlp_bias, placement
        )

    def __call__(self, x: Activations) -> Result:
        return self.down.multiply(self.ops.silu_mul(self.gate_up.multiply(x)))


class LlamaForCausalLM(Module):
    """One rank's model.  Parameters are allocated uninitialised; see `loader`."""

    attention_class: type[Attention] = Attention

    def __init__(
        self, config: ModelConfig, placement: Placement, backend: AttentionBackend, max_model_len: int
    ) -> None:
        self.config = config
        self.weights = placement.weights
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

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden] before the last norm → [n, vocab] in the model's dtype; None on ranks but the first."""
        return self.head.logits(self.norm(hidden))

    def weights_change(self) -> None:
        """Weights are about to be loaded, into other places of memory."""
        self._program = None

    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes() for layer in self.layers_within())


class Block(Module):
    def __init__(self, name: str, attention: Attention, config: ModelConfig, placement: Placement) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", size, eps, placement)
        self.attention = attention
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, placement)
        self.mlp = MLP(f"{name}.mlp", config, placement)

    def __call__(self, x: Tensor, y: Result | None, context: LayerContext) -> Result:
        """Adds y, and all of this block's result but its last term, to x, in place; returns that term."""
        mixed = self.attention(self.attention_norm(x, y), context)
        return self.mlp(self.mlp_norm(x, mixed))
