"""Llama 2, 3 and their kin: rotated heads, a gated MLP, a norm before each."""

from __future__ import annotations

from baton.model.architectures.reading import Family, describe, read_mlp, read_rope, read_sizes
from baton.model.description.fields import Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig


def _llama(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias")
    attention = AttentionConfig(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        read_rope(fields, sizes),
        sizes.head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias"))
    return describe(fields, sizes, [LayerConfig(attention, mlp)] * sizes.layers)


FAMILIES = (Family("LlamaForCausalLM", _llama),)
