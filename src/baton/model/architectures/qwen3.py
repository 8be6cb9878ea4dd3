"""Qwen3: Llama whose query and key heads are normalized, each over its head_dim, before rotation."""

from __future__ import annotations

from baton.model.architectures.blocks import Attention
from baton.model.architectures.llama import LlamaForCausalLM
from baton.model.attention import AttentionBackend
from baton.model.checkpoint.config import ModelConfig
from baton.model.cpu.kernels import HeadNorms
from baton.model.layers.layers import Layer
from baton.model.layers.piece import Piece
from baton.model.layers.placement import Placement


class HeadNormWeights(Layer):
    """One RMSNorm weight [head_dim] for all query heads and one for all key heads."""

    def __init__(self, name: str, head_dim: int, placement: Placement) -> None:
        super().__init__()
        self.queries = placement.parameter(f"{name}.q_norm.weight", head_dim)
        self.keys = placement.parameter(f"{name}.k_norm.weight", head_dim)
        self.pieces = [
            Piece(f"{name}.q_norm.weight", (head_dim,), "queries"),
            Piece(f"{name}.k_norm.weight", (head_dim,), "keys"),
        ]


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
        self.head_norm_weights = HeadNormWeights(name, config.head_dim, placement)
        weights = self.head_norm_weights
        self.head_norms = HeadNorms(weights.queries, weights.keys, config.norm_eps)


class Qwen3ForCausalLM(LlamaForCausalLM):
    attention_class = Qwen3Attention
