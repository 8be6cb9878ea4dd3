"""ERNIE 4.5 with experts: ERNIE 4.5, some of whose layers have a router, experts and shared experts."""

from __future__ import annotations

from dataclasses import replace

from baton.model.architectures import ernie4_5
from baton.model.architectures.reading import Family, describe, read_experts, read_mlp, read_sizes
from baton.model.description.fields import Fields
from baton.model.description.model import (
    Description,
    LayerConfig,
    MixtureNames,
    MlpConfig,
    MoeConfig,
    MtpConfig,
    Names,
)


def _ernie_moe(fields: Fields) -> Description:
    if fields.flag("use_bias"):
        raise fields.refused("use_bias: its output head has a bias, which Baton does not compute")
    sizes = read_sizes(fields)
    attention = ernie4_5.attention_of(fields, sizes)
    dense = read_mlp(fields)
    mixture = _mixture(fields)
    every = fields.integer("moe_layer_interval", 1)
    first = fields.integer("moe_layer_start_index", 1, least=0)
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    last = sizes.layers - 1 if last == -1 else last
    layers = [
        LayerConfig(attention, mixture if (at + 1) % every == 0 and first <= at <= last else dense)
        for at in range(sizes.layers)
    ]
    names = Names(
        mixture=MixtureNames(
            router_bias=(
                "mlp.moe_statics.e_score_correction_bias",
                "mlp.gate.moe_statics.e_score_correction_bias",
            ),
            bias_is_row=True,
        ),
        unused=("model.mtp_",),
    )
    mtp = None
    more = fields.integer("num_nextn_predict_layers", 0, least=0)
    if more and layers[0].mlp == dense:  # (it is made as the first layer is)
        mtp = MtpConfig(
            layers[0],
            block="model.mtp_block",
            embedding_norm="model.mtp_emb_norm.0",
            hidden_norm="model.mtp_hidden_norm.0",
            projection="model.mtp_linear_proj.0",
        )
    return describe(fields, sizes, layers, names=names, mtp=mtp)


def _mixture(fields: Fields) -> MoeConfig:
    experts, chosen = read_experts(fields, "moe_num_experts", "moe_k")
    expert = read_mlp(fields, size="moe_intermediate_size")
    shared: MlpConfig | None = None
    if count := fields.integer("moe_num_shared_experts", 2, least=0):
        shared = replace(expert, size=count * expert.size)
    return MoeConfig(
        experts,
        chosen,
        expert,
        bias="choice",
        least_sum=fields.number("moe_norm_min", 1e-12, more_than=0),
        shared=shared,
    )


_DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
}
FAMILIES = (Family("Ernie4_5_MoeForCausalLM", _ernie_moe, _DEFAULTS),)
