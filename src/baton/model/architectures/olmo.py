"""OLMo 2 and 3: norms of what a sublayer gives, not of what it takes, and of q and k whole; windows in 3."""

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
from baton.model.description.model import AttentionConfig, Description, LayerConfig, Names, Norms, RopeConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NAMES = Names(attention_result_norm="post_attention_layernorm", mlp_result_norm="post_feedforward_layernorm")


def _olmo2(fields: Fields) -> Description:
    layers = read_sizes(fields).layers
    return _of(fields, [_FULL] * layers)


def _olmo3(fields: Fields) -> Description:
    layers = read_sizes(fields).layers
    usual = [_FULL if (layer + 1) % 4 == 0 else _SLIDING for layer in range(layers)]
    return _of(fields, layer_kinds(fields, layers) or usual)


def _of(fields: Fields, kinds: list[str]) -> Description:
    sizes, bias = read_sizes(fields), fields.flag("attention_bias")
    ropes = {kind: _rope(fields, kind) for kind in set(kinds)}
    mlp, norms = read_mlp(fields), Norms(inputs=False, results=True)

    def layer(kind: str, window: int | None) -> LayerConfig:
        attention = AttentionConfig(
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            ropes[kind],
            sizes.head_dim**-0.5,
            window,
            bias,
            bias,
            "wide",
        )
        return LayerConfig(attention, mlp, norms)

    windows = windows_of(fields, kinds)
    layers = [layer(kind, window) for kind, window in zip(kinds, windows, strict=True)]
    return describe(fields, sizes, layers, names=_NAMES)


def _rope(fields: Fields, kind: str) -> RopeConfig:
    """Scaling is for layers that see everything."""
    return read_rope(fields, read_sizes(fields), kind=kind, scaled=kind == _FULL)


FAMILIES = (
    Family("Olmo2ForCausalLM", _olmo2, {"rms_norm_eps": 1e-5}),
    Family(
        "Olmo3ForCausalLM", _olmo3, {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0}
    ),
)
