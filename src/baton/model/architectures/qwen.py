"""Qwen 2 and 3: Llama with biases (2) or norms (3) of q and k, and windows in upper layers.

3 also has mixtures of experts.
"""

from __future__ import annotations

from baton.model.architectures.reading import (
    Family,
    describe,
    layer_kinds,
    layers_with_experts,
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
)

_OLD_ROPES = {"mrope": "default"}
"""Of models that see images, too: of texts it is the same."""


def _qwen2(fields: Fields) -> Description:
    return _qwen(fields, qkv_bias=True, output_bias=False)


def _qwen3(fields: Fields) -> Description:
    bias = fields.flag("attention_bias")
    return _qwen(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _qwen(fields: Fields, *, qkv_bias: bool, output_bias: bool, qk_norm: bool = False) -> Description:
    sizes = read_sizes(fields)
    rope, mlp = read_rope(fields, sizes, old_names=_OLD_ROPES), read_mlp(fields)

    def layer(window: int | None) -> LayerConfig:
        attention = AttentionConfig(
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            rope,
            sizes.head_dim**-0.5,
            window,
            qkv_bias,
            output_bias,
            "head" if qk_norm else "",
        )
        return LayerConfig(attention, mlp)

    return describe(fields, sizes, [layer(window) for window in _windows(fields, sizes.layers)])


def _qwen3_moe(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias")
    window = fields.flag("use_sliding_window") and "sliding_window" in fields
    attention = AttentionConfig(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        read_rope(fields, sizes, old_names=_OLD_ROPES),
        sizes.head_dim**-0.5,
        fields.integer("sliding_window", most=MAX_CONTEXT) if window else None,
        bias,
        bias,
        "head",
    )
    dense = read_mlp(fields)
    experts, chosen = read_experts(fields, "num_experts", "num_experts_per_tok")
    expert = read_mlp(fields, size="moe_intermediate_size")
    mixture = MoeConfig(experts, chosen, expert, normalized=fields.flag("norm_topk_prob"))
    mixed = layers_with_experts(fields, sizes.layers)
    layers = [LayerConfig(attention, mixture if has else dense) for has in mixed]
    return describe(fields, sizes, layers, names=Names(mixture=MixtureNames(stacked="halves")))


def _windows(fields: Fields, layers: int) -> list[int | None]:
    kinds = layer_kinds(fields, layers)
    if not fields.flag("use_sliding_window"):
        return [None] * layers
    if kinds is None:
        first = fields.integer("max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return windows_of(fields, kinds)


FAMILIES = (
    Family("Qwen2ForCausalLM", _qwen2, {"num_key_value_heads": 32}),
    Family("Qwen3ForCausalLM", _qwen3, {"num_key_value_heads": 32, "head_dim": 128}),
    Family(
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        {
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "sliding_window": 4096,
        },
    ),
)
