"""Gemma 1, 2 and 3, text: norms of 1 + w, embeddings times the root of their size, a gelu.

2 has norms around each sublayer, bends scores and logits below a cap, and windows in every other layer; 3 has
norms of q and k instead of caps, windows in five layers of six, and other angles in these.
"""

from __future__ import annotations

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
from baton.model.description.fields import Fields
from baton.model.description.model import (
    AttentionConfig,
    Description,
    LayerConfig,
    Names,
    Norms,
    RopeConfig,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NAMES = Names(
    attention_result_norm="post_attention_layernorm",
    mlp_input_norm="pre_feedforward_layernorm",
    mlp_result_norm="post_feedforward_layernorm",
)


def _gemma(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    rope, scale = read_rope(fields, sizes), sizes.head_dim**-0.5
    bias = fields.flag("attention_bias")
    attention = AttentionConfig(
        sizes.heads, sizes.kv_heads, sizes.head_dim, rope, scale, qkv_bias=bias, output_bias=bias
    )
    # Files of the first release say gelu and mean its approximation.
    name = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    mlp = read_mlp(fields, activation=name, old_names={"gelu": "gelu_pytorch_tanh"})
    return _of(fields, sizes, [LayerConfig(attention, mlp)] * sizes.layers, Names())


def _gemma2(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    usual = [_FULL if (layer + 1) % 2 == 0 else _SLIDING for layer in range(sizes.layers)]
    kinds = layer_kinds(fields, sizes.layers) or usual
    rope = read_rope(fields, sizes)
    return _of(fields, sizes, _layers(fields, sizes, kinds, {_FULL: rope, _SLIDING: rope}), _NAMES)


def _gemma3(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    if fields.flag("use_bidirectional_attention"):
        raise fields.refused("attends in both directions; Baton serves models that see what is before")
    every = fields.integer("sliding_window_pattern", 6)
    usual = [_FULL if (layer + 1) % every == 0 else _SLIDING for layer in range(sizes.layers)]
    kinds = layer_kinds(fields, sizes.layers) or usual
    ropes = {
        _FULL: read_rope(fields, sizes, kind=_FULL, usual_theta=1_000_000.0),
        _SLIDING: read_rope(fields, sizes, kind=_SLIDING, theta="rope_local_base_freq", scaled=False),
    }
    return _of(fields, sizes, _layers(fields, sizes, kinds, ropes, qk_norm=True), _NAMES)


def _layers(
    fields: Fields, sizes: Sizes, kinds: list[str], ropes: dict[str, RopeConfig], qk_norm: bool = False
) -> list[LayerConfig]:
    scale = fields.number("query_pre_attn_scalar", 256.0, more_than=0) ** -0.5
    cap = fields.number("attn_logit_softcapping", more_than=0) if "attn_logit_softcapping" in fields else None
    bias = fields.flag("attention_bias")
    mlp = read_mlp(fields, activation="hidden_activation")

    def layer(kind: str, window: int | None) -> LayerConfig:
        attention = AttentionConfig(
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            ropes[kind],
            scale,
            window,
            bias,
            bias,
            "head" if qk_norm else "",
            cap,
        )
        return LayerConfig(attention, mlp, Norms(inputs=True, results=True))

    windows = windows_of(fields, kinds)
    return [layer(kind, window) for kind, window in zip(kinds, windows, strict=True)]


def _of(fields: Fields, sizes: Sizes, layers: list[LayerConfig], names: Names) -> Description:
    cap = "final_logit_softcapping"
    return describe(
        fields,
        sizes,
        layers,
        names=names,
        norm_plus_one=True,
        embedding_factor=sizes.hidden**0.5,
        logits_cap=fields.number(cap, more_than=0) if cap in fields else None,
    )


_USUAL = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
FAMILIES = (
    Family(
        "GemmaForCausalLM",
        _gemma,
        {
            "head_dim": 256,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    Family("Gemma2ForCausalLM", _gemma2, _USUAL | _CAPS),
    Family("Gemma3ForCausalLM", _gemma3, _USUAL),
)
