"""Llama 2, 3 and their kin, as plain modules; the other architectures are told as differences from it.

A decoder block is `x + Attention(norm(x))`, then `x + MLP(norm(x))` with a SwiGLU MLP.  All tokens of a
step, of whatever rows, are one batch [T, hidden]; only attention knows rows, through its backend.
Under tensor parallelism a rank has its share of the heads and of the MLP's columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from baton.model.attention import AttentionBackend
from baton.model.config import ModelConfig
from baton.model.layers import (
    Linear,
    Placement,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
)
from baton.model.rotary import Rotary, rotate


@dataclass(frozen=True)
class LayerContext:
    """What the layers of one step share."""

    cos: Tensor
    sin: Tensor
    plan: Any
    """The attention backend's."""


class Attention(nn.Module):
    def __init__(
        self,
        name: str,
        layer: int,
        config: ModelConfig,
        placement: Placement,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        super().__init__()
        rank, size = placement.parallel.rank, placement.parallel.size
        self.layer = layer
        self.window = config.window_of(layer, max_model_len)
        self.backend = backend
        self.head_dim = config.head_dim
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

    def normalize(self, queries_and_keys: Tensor) -> Tensor:
        """[T, heads + kv_heads, head_dim], before rotation."""
        return queries_and_keys

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        split = self.num_heads + self.num_kv_heads
        rotated = rotate(self.normalize(heads[:, :split]), context.cos, context.sin)
        self.backend.write_kv(self.layer, rotated[:, self.num_heads :], heads[:, split:], context.plan)
        mixed = self.backend.attend(self.layer, rotated[:, : self.num_heads], self.window, context.plan)
        out: Tensor = self.output(mixed)
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, name: str, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
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

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate).mul_(up))
        return out


class LlamaForCausalLM(nn.Module):
    """One rank's model.  Parameters are allocated uninitialised; see `loader`."""

    attention_class: type[Attention] = Attention

    def __init__(
        self, config: ModelConfig, placement: Placement, backend: AttentionBackend, max_model_len: int
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = VocabParallelEmbedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, placement
        )
        self.rotary = Rotary(config.rope, config.head_dim, max_model_len, placement.device)
        self.layers = nn.ModuleList()
        for index in range(config.num_layers):
            name = f"model.layers.{index}"
            attention = self.attention_class(
                f"{name}.self_attn", index, config, placement, backend, max_model_len
            )
            self.layers.append(Block(name, attention, config, placement))
        self.norm = RMSNorm("model.norm", config.hidden_size, config.norm_eps, placement)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else VocabParallelEmbedding("lm_head", config.vocab_size, config.hidden_size, placement)
        )

    def forward(
        self, tokens: Tensor, positions: Tensor, plan: Any, on_layers: Callable[[int], None] | None = None
    ) -> Tensor:
        """Token ids [T] at positions [T] → [T, hidden] before the last norm.  Writes their KV.

        `on_layers(n)` follows layer n: its sums over the ranks are complete, so all of them have written.
        """
        cos, sin = self.rotary.at(positions)
        context = LayerContext(cos, sin, plan)
        x: Tensor = self.embedding(tokens)
        for done, layer in enumerate(self.layers, start=1):
            x = layer(x, context)
            if on_layers is not None:
                on_layers(done)
        return x

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden] of `forward` → [n, vocab] float32 on rank 0; None on the other ranks."""
        return self.head.logits(self.norm(hidden))

    def weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())


class Block(nn.Module):
    def __init__(self, name: str, attention: Attention, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", size, eps, placement)
        self.attention = attention
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, placement)
        self.mlp = MLP(f"{name}.mlp", config, placement)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        out: Tensor = self.mlp(self.mlp_norm(x)).add_(x)
        return out
