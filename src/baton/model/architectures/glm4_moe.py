"""GLM 4.5 and 4.6, with experts: halves of each head are rotated, and sigmoids with a bias choose experts."""

from __future__ import annotations

from dataclasses import replace

from baton.model.architectures.reading import (
    Family,
    describe,
    read_experts,
    read_mlp,
    read_rope,
    read_sizes,
)
from baton.model.description.fields import Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig, MoeConfig, Names


def _glm4_moe(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    attention = AttentionConfig(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        read_rope(fields, sizes, partial=True),
        sizes.head_dim**-0.5,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm="head" if fields.flag("use_qk_norm") else "",
    )
    dense, mixture = read_mlp(fields), _mixture(fields)
    first = fields.integer("first_k_dense_replace", 1, least=0)
    layers = [LayerConfig(attention, mixture if at >= first else dense) for at in range(sizes.layers)]
    return describe(fields, sizes, layers, names=Names(unused=(f"model.layers.{sizes.layers}.",)))


def _mixture(fields: Fields) -> MoeConfig:
    experts, chosen = read_experts(fields, "n_routed_experts", "num_experts_per_tok")
    expert = read_mlp(fields, size="moe_intermediate_size")
    return MoeConfig(
        experts,
        chosen,
        expert,
        scores="sigmoid",
        bias="choice",
        groups=fields.integer("n_group", 1),
        chosen_groups=fields.integer("topk_group", 1),
        normalized=fields.flag("norm_topk_prob", True),
        least_sum=1e-20,
        factor=fields.number("routed_scaling_factor", 1.0),
        shared=replace(expert, size=fields.integer("n_shared_experts", 1) * expert.size),
    )


_DEFAULTS = {
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
}
FAMILIES = (Family("Glm4MoeForCausalLM", _glm4_moe, _DEFAULTS),)
