"""GLM-4: half of each head is rotated, as neighbours; fused gate and up; 0414 has norms of results.

With experts (4.5, 4.6) it is another model: rotated in halves, gate and up apart, sigmoids choose.
"""

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
from baton.model.description.model import AttentionConfig, Description, LayerConfig, MoeConfig, Names, Norms


def _glm(fields: Fields) -> Description:
    return _of(fields, Norms())


def _glm4(fields: Fields) -> Description:
    return _of(fields, Norms(results=True))


def _of(fields: Fields, norms: Norms) -> Description:
    sizes = read_sizes(fields)
    attention = AttentionConfig(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        read_rope(fields, sizes, partial=True, neighbours=True),
        sizes.head_dim**-0.5,
        qkv_bias=fields.flag("attention_bias"),
    )
    names = Names(
        gate_up="mlp.gate_up_proj",
        attention_result_norm="post_self_attn_layernorm",
        mlp_result_norm="post_mlp_layernorm",
    )
    layers = [LayerConfig(attention, read_mlp(fields), norms)] * sizes.layers
    return describe(fields, sizes, layers, names=names)


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
    experts, chosen = read_experts(fields, "n_routed_experts", "num_experts_per_tok")
    expert = read_mlp(fields, size="moe_intermediate_size")
    shared = fields.integer("n_shared_experts", 1)
    mixture = MoeConfig(
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
        shared=replace(expert, size=shared * expert.size),
    )
    first = fields.integer("first_k_dense_replace", 1, least=0)
    dense = read_mlp(fields)
    layers = [LayerConfig(attention, mixture if at >= first else dense) for at in range(sizes.layers)]
    return describe(fields, sizes, layers, names=Names(unused=(f"model.layers.{sizes.layers}.",)))


_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-7,
}
_MOE_DEFAULTS = {
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
}
FAMILIES = (
    Family("GlmForCausalLM", _glm, _DEFAULTS),
    Family("Glm4ForCausalLM", _glm4, _DEFAULTS),
    Family("Glm4MoeForCausalLM", _glm4_moe, _MOE_DEFAULTS),
)
