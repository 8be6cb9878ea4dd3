"""Granite 3, also with experts, and 4, dense: Llama with four scalars.

4 leaves positions out where the file says so.  A layer's experts lie in two tensors.
"""

from __future__ import annotations

from dataclasses import replace

from baton.model.architectures.reading import Family, describe, read_experts, read_mlp, read_rope, read_sizes
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


def _granite(fields: Fields) -> Description:
    return _of(fields, read_mlp(fields, bias=fields.flag("mlp_bias")), Names(), turned=True)


def _granite4(fields: Fields) -> Description:
    if fields.integer("num_local_experts", 8, least=0):
        raise fields.refused("is a Granite 4 with experts, which Baton does not compute yet")
    if not set(fields.texts("layer_types") or ["mamba"]) <= {"attention", "full_attention"}:
        raise fields.refused("is a Granite 4 with Mamba layers; Baton serves its dense models only")
    names = Names(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")
    turned = fields.text("position_embedding_type") == "rope"
    return _of(fields, read_mlp(fields, size="shared_intermediate_size"), names, turned=turned)


def _granite_moe(fields: Fields) -> Description:
    experts, chosen = read_experts(fields, "num_local_experts", "num_experts_per_tok")
    mixture = MoeConfig(experts, chosen, read_mlp(fields), scores="chosen_softmax", normalized=False)
    names = MixtureNames(
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe.experts",
    )
    if not fields.flag("experts_apart"):  # (as GGUF files have them, `checkpoint.gguf_families`)
        names = replace(
            names,
            gate_up_of_all="block_sparse_moe.input_linear",
            down_of_all="block_sparse_moe.output_linear",
        )
    return _of(fields, mixture, Names(mixture=names), turned=True)


def _of(fields: Fields, mlp: MlpConfig | MoeConfig, names: Names, *, turned: bool) -> Description:
    sizes = read_sizes(fields)
    bias = fields.flag("attention_bias")
    attention = AttentionConfig(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        read_rope(fields, sizes) if turned else None,
        fields.number("attention_multiplier", 1.0, more_than=0),
        qkv_bias=bias,
        output_bias=bias,
    )
    return describe(
        fields,
        sizes,
        [LayerConfig(attention, mlp)] * sizes.layers,
        embedding_factor=fields.number("embedding_multiplier", 1.0),
        residual_factor=fields.number("residual_multiplier", 1.0),
        logits_factor=1 / fields.number("logits_scaling", 1.0, more_than=0),
        names=names,
    )


FAMILIES = (
    Family("GraniteForCausalLM", _granite),
    Family(
        "GraniteMoeForCausalLM",
        _granite_moe,
        {"intermediate_size": 11008, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    Family(
        "GraniteMoeHybridForCausalLM",
        _granite4,
        {"shared_intermediate_size": 1024},
    ),
)
