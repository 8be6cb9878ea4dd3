"""Granite 3 and 4, dense: Llama with four scalars; of 4, positions are left out where the file says so."""

from __future__ import annotations

from baton.model.architectures.reading import Family, describe, read_mlp, read_rope, read_sizes
from baton.model.description.fields import Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig, MlpConfig, Names


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


def _of(fields: Fields, mlp: MlpConfig, names: Names, *, turned: bool) -> Description:
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
        "GraniteMoeHybridForCausalLM",
        _granite4,
        {"shared_intermediate_size": 1024},
    ),
)
