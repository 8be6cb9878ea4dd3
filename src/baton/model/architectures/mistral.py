"""Mistral: Llama with windows; Ministral 3: queries that grow with positions; Mixtral: experts."""

from __future__ import annotations

from collections.abc import Sequence

from baton.model.architectures.reading import (
    Family,
    Sizes,
    describe,
    layer_kinds,
    read_experts,
    read_mlp,
    read_rope,
    read_sizes,
    windows_of,
)
from baton.model.description.fields import MAX_CONTEXT, Fields
from baton.model.description.model import (
    AttentionConfig,
    Description,
    LayerConfig,
    MixtureNames,
    MoeConfig,
    Names,
    QueryGrowth,
)

_NAMES = Names()
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


def _mixtral(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    experts, chosen = read_experts(fields, "num_local_experts", "num_experts_per_tok")
    mixture = MoeConfig(experts, chosen, read_mlp(fields))
    names = MixtureNames(
        router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2"
    )
    windows = windows_of(fields, ["sliding_attention"] * sizes.layers)
    return _of(fields, sizes, windows, mlp=mixture, names=Names(mixture=names))


def _of(
    fields: Fields,
    sizes: Sizes,
    windows: Sequence[int | None],
    growth: QueryGrowth | None = None,
    mlp: MoeConfig | None = None,
    names: Names = _NAMES,
) -> Description:
    rope, second = read_rope(fields, sizes), mlp or read_mlp(fields)

    def layer(window: int | None) -> LayerConfig:
        scale = sizes.head_dim**-0.5
        attention = AttentionConfig(
            sizes.heads, sizes.kv_heads, sizes.head_dim, rope, scale, window, growth=growth
        )
        return LayerConfig(attention, second)

    return describe(fields, sizes, [layer(window) for window in windows], names=names)


FAMILIES = (
    Family("MistralForCausalLM", _mistral, {"num_key_value_heads": 8, "sliding_window": 4096}),
    Family("MinistralForCausalLM", _ministral, {"num_key_value_heads": 8, "sliding_window": 4096}),
    Family(
        "Ministral3ForCausalLM",
        _ministral3,
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": _YARN},
    ),
    Family(
        "MixtralForCausalLM",
        _mixtral,
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
)
