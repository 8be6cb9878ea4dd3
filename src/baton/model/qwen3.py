"""Qwen3: Llama whose query and key heads are normalized, each over its head_dim, before rotation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from baton.model.attention import AttentionBackend
from baton.model.config import ModelConfig
from baton.model.layers import Layer, Piece, Placement
from baton.model.llama import Attention, LlamaForCausalLM


class HeadNorm(Layer):
    """RMSNorm of each head, with one weight for all query heads and one for all key heads.

    The weights are kept once per head, [heads, head_dim], so that queries and keys are one product.
    """

    def __init__(
        self, name: str, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, placement: Placement
    ) -> None:
        super().__init__()
        self.weight = placement.empty(num_heads + num_kv_heads, head_dim)
        self.head_size = (head_dim,)
        self.eps = eps
        self.pieces = [
            Piece(f"{name}.q_norm.weight", (head_dim,), self.weight[:num_heads]),
            Piece(f"{name}.k_norm.weight", (head_dim,), self.weight[num_heads:]),
        ]

    def forward(self, heads: Tensor) -> Tensor:
        return F.rms_norm(heads, self.head_size, None, self.eps).mul_(self.weight)


class Qwen3Attention(Attention):
    def __init__(
        self,
        name: str,
        layer: int,
        config: ModelConfig,
        placement: Placement,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        super().__init__(name, layer, config, placement, backend, max_model_len)
        self.head_norm = HeadNorm(
            name, self.num_heads, self.num_kv_heads, config.head_dim, config.norm_eps, placement
        )

    def normalize(self, queries_and_keys: Tensor) -> Tensor:
        normalized: Tensor = self.head_norm(queries_and_keys)
        return normalized


class Qwen3ForCausalLM(LlamaForCausalLM):
    attention_class = Qwen3Attention
