"""Mistral and Ministral: Llama with windows and, from Ministral 3 on, queries that grow with positions."""

from __future__ import annotations

from collections.abc import Sequence

from baton.model.architectures.reading import (
    Family,
    Sizes,
    describe,
    layer_kinds,
    read_mlp,
    read_rope,
    read_sizes,
    windows_of,
)
from baton.model.description.fields import MAX_CONTEXT, Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig, QueryGrowth

_YARN = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mistral(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    return _of(fields, sizes, windows_of(fields, ["sliding_attention"] * sizes.layers))


def _ministral(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    kinds = layer_kinds(fields, sizes.layers) or ["sliding_attention"] * sizes.layers
    return _of(fields, sizes, windows_of(fields, kinds))


def _ministral3(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    place = fields.within("rope_parameters")
    growth = None
    if "llama_4_scaling_beta" in place:
        original = place.integer("original_max_position_embeddings", sizes.context, most=MAX_CONTEXT)
        growth = QueryGrowth(place.number("llama_4_scaling_beta"), original)
    return _of(fields, sizes, windows_of(fields, ["sliding_attention"] * sizes.layers), growth)


def _of(
    fields: Fields, sizes: Sizes, windows: Sequence[int | None], growth: QueryGrowth | None = None
) -> Description:
    rope, mlp = read_rope(fields, sizes), read_mlp(fields)

    def layer(window: int | None) -> LayerConfig:
        scale = sizes.head_dim**-0.5
        attention = AttentionConfig(
            sizes.heads, sizes.kv_heads, sizes.head_dim, rope, scale, window, growth=growth
        )
        return LayerConfig(attention, mlp)

    return describe(fields, sizes, [layer(window) for window in windows])


FAMILIES = (
    Family("MistralForCausalLM", _mistral, {"num_key_value_heads": 8, "sliding_window": 4096}),
    Family("MinistralForCausalLM", _ministral, {"num_key_value_heads": 8, "sliding_window": 4096}),
    Family(
        "Ministral3ForCausalLM",
        _ministral3,
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": _YARN},
    ),
)
