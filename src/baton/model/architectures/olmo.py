"""OLMo 2 and 3: norms of what a sublayer gives, not of what it takes, and of q and k whole; windows in 3.

OLMoE, the mixture of experts, has its norms where Llama has them.
"""

from __future__ import annotations

from baton.model.architectures.reading import (
    Family,
    describe,
    layer_kinds,
    read_experts,
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
    MoeConfig,
    Names,
    Norms,
    RopeConfig,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NAMES = Names(attention_result_norm="post_attention_layernorm", mlp_result_norm="post_feedforward_layernorm")
_RESULTS = Norms(inputs=False, results=True)


def _olmo2(fields: Fields) -> Description:
    layers = read_sizes(fields).layers
    return _of(fields, [_FULL] * layers)


def _olmo3(fields: Fields) -> Description:
    layers = read_sizes(fields).layers
    usual = [_FULL if (layer + 1) % 4 == 0 else _SLIDING for layer in range(layers)]
    return _of(fields, layer_kinds(fields, layers) or usual)


def _olmoe(fields: Fields) -> Description:
    if "clip_qkv" in fields:
        raise fields.refused("clip_qkv bounds queries, keys and values, which Baton does not compute")
    experts, chosen = read_experts(fields, "num_experts", "num_experts_per_tok")
    mixture = MoeConfig(experts, chosen, read_mlp(fields), normalized=fields.flag("norm_topk_prob"))
    return _of(fields, [_FULL] * read_sizes(fields).layers, mixture, Norms(), Names())


def _of(
    fields: Fields,
    kinds: list[str],
    mlp: MoeConfig | None = None,
    norms: Norms = _RESULTS,
    names: Names = _NAMES,
) -> Description:
    sizes, bias = read_sizes(fields), fields.flag("attention_bias")
    ropes = {kind: _rope(fields, kind) for kind in set(kinds)}
    second = mlp or read_mlp(fields)

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
        return LayerConfig(attention, second, norms)

    windows = windows_of(fields, kinds)
    layers = [layer(kind, window) for kind, window in zip(kinds, windows, strict=True)]
    return describe(fields, sizes, layers, names=names)


def _rope(fields: Fields, kind: str) -> RopeConfig:
    """Scaling is for layers that see everything."""
    return read_rope(fields, read_sizes(fields), kind=kind, scaled=kind == _FULL)


FAMILIES = (
    Family(
        "OlmoeForCausalLM",
        _olmoe,
        {"rms_norm_eps": 1e-5, "intermediate_size": 2048, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    Family("Olmo2ForCausalLM", _olmo2, {"rms_norm_eps": 1e-5}),
    Family(
        "Olmo3ForCausalLM", _olmo3, {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0}
    ),
)
