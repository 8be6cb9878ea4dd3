"""Qwen 2 and 3, dense: Llama with biases (2) or norms (3) of q and k, and windows in upper layers."""

from __future__ import annotations

from baton.model.architectures.reading import (
    Family,
    describe,
    layer_kinds,
    read_mlp,
    read_rope,
    read_sizes,
    windows_of,
)
from baton.model.description.fields import Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig


def _qwen2(fields: Fields) -> Description:
    return _qwen(fields, qkv_bias=True, output_bias=False)


def _qwen3(fields: Fields) -> Description:
    bias = fields.flag("attention_bias")
    return _qwen(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _qwen(fields: Fields, *, qkv_bias: bool, output_bias: bool, qk_norm: bool = False) -> Description:
    sizes = read_sizes(fields)
    rope, mlp = read_rope(fields, sizes), read_mlp(fields)

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
)
