"""ERNIE 4.5 (dense): Llama whose rotary pairs are the neighbours (2i, 2i+1) of a head.

Rows of the q and k projections are reordered when they are loaded, so that pairs become (i, i + half) and
the rotation is Llama's: queries and keys are permuted alike, which no dot product notices.
"""

from __future__ import annotations

from functools import partial

from baton.model.architectures.blocks import Attention
from baton.model.architectures.llama import LlamaForCausalLM
from baton.model.checkpoint.config import ModelConfig
from baton.model.layers.layers import Linear
from baton.model.layers.placement import Placement
from baton.model.weights.rows import pairs_to_halves


class Ernie45Attention(Attention):
    def make_qkv(
        self, name: str, parts: list[tuple[str, int, int, int]], config: ModelConfig, placement: Placement
    ) -> Linear:
        reorder = partial(pairs_to_halves, head_dim=config.head_dim)
        transforms = {f"{name}.q_proj": reorder, f"{name}.k_proj": reorder}
        return Linear(parts, config.hidden_size, config.qkv_bias, placement, transforms)


class Ernie45ForCausalLM(LlamaForCausalLM):
    attention_class = Ernie45Attention
