"""ERNIE 4.5, dense: Llama whose rotary pairs are neighbours, with one flag for all biases."""

from __future__ import annotations

from baton.model.architectures.reading import Family, Sizes, describe, read_mlp, read_rope, read_sizes
from baton.model.description.fields import Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig


def attention_of(fields: Fields, sizes: Sizes) -> AttentionConfig:
    """Also of the family's mixtures of experts."""
    bias = fields.flag("use_bias")
    return AttentionConfig(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        read_rope(fields, sizes, neighbours=True),
        sizes.head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
    )


def _ernie(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    mlp = read_mlp(fields, bias=fields.flag("use_bias"))
    return describe(fields, sizes, [LayerConfig(attention_of(fields, sizes), mlp)] * sizes.layers)


_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
FAMILIES = (Family("Ernie4_5ForCausalLM", _ernie, _DEFAULTS),)
