"""GLM-4, dense: half of each head is rotated, as neighbours; fused gate and up; 0414 has norms of results."""

from __future__ import annotations

from baton.model.architectures.reading import Family, describe, read_mlp, read_rope, read_sizes
from baton.model.description.fields import Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig, Names, Norms


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


_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-7,
}
FAMILIES = (Family("GlmForCausalLM", _glm, _DEFAULTS), Family("Glm4ForCausalLM", _glm4, _DEFAULTS))
