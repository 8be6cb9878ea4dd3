"""gpt-oss: mixtures of experts with biases, attention with sinks, windows in every other layer."""

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
    MixtureNames,
    MlpConfig,
    MoeConfig,
    Names,
)

_NAMES = Names(
    mixture=MixtureNames(router="mlp.router", router_bias=("mlp.router.bias",), stacked="gpt_oss"),
)
_GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _gpt_oss(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    usual = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(sizes.layers)]
    kinds = layer_kinds(fields, sizes.layers) or usual
    rope, bias = read_rope(fields, sizes, usual_theta=150_000.0), fields.flag("attention_bias")
    for key, value in _GATE.items():
        if (given := fields.number(key)) != value:
            raise fields.refused(f"{key} {given:g}; Baton computes gpt-oss' gate with {value:g}")
    plain = read_mlp(fields)
    if plain.activation != "silu":
        raise fields.refused(f"hidden_act {plain.activation}; the gate of gpt-oss is made of silu")
    experts, chosen = read_experts(fields, "num_local_experts", "num_experts_per_tok")
    mixture = MoeConfig(
        experts,
        chosen,
        expert=MlpConfig(plain.size, "swiglu_oai", bias=True),
        scores="chosen_softmax",
        bias="logits",
        normalized=False,
    )

    def layer(window: int | None) -> LayerConfig:
        attention = AttentionConfig(
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            rope,
            sizes.head_dim**-0.5,
            window,
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
        )
        return LayerConfig(attention, mixture)

    layers = [layer(window) for window in windows_of(fields, kinds)]
    return describe(fields, sizes, layers, names=_NAMES)


FAMILIES = (
    Family(
        "GptOssForCausalLM",
        _gpt_oss,
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            **_GATE,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
)
