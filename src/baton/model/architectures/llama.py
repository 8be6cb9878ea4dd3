"""Llama 2, 3 and their kin: rotated heads, a gated MLP, a norm before each."""

from __future__ import annotations

from baton.model.architectures.reading import Family, describe, read_attention, read_mlp, read_sizes
from baton.model.description.fields import Fields
from baton.model.description.model import Description, LayerConfig


def _llama(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    attention = read_attention(fields, sizes)
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias"))
    return describe(fields, sizes, [LayerConfig(attention, mlp)] * sizes.layers)


FAMILIES = (Family("LlamaForCausalLM", _llama),)
