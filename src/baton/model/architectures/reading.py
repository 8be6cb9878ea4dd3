"""What families read alike from a config.json: sizes, rotary parameters, windows, the MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from baton.model.description.fields import MAX_CONTEXT, Fields, shown
from baton.model.description.model import (
    Activation,
    AttentionConfig,
    Description,
    LayerConfig,
    MlpConfig,
    RopeConfig,
)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
"""factors: by what each frequency is divided, one by one (GGUF files of Llama 3)."""
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ORIGINAL = "original_max_position_embeddings"
_MAX_LAYERS = 4096
_MAX_EXPERTS = 1024
_MAX_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 14


@dataclass(frozen=True)
class Family:
    """How the config.json of one architecture is read."""

    architecture: str
    """As config.json names it."""
    describe: Callable[[Fields], Description]
    """Raises `UnsupportedModel`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of fields that a file leaves out: as in the architecture's class of transformers (a test compares)."""


@dataclass(frozen=True)
class Sizes:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    """Positions that the model is made for."""


def read_sizes(fields: Fields) -> Sizes:
    """Raises `UnsupportedModel`, as all that follows."""
    heads = fields.integer("num_attention_heads", most=_MAX_HEADS)
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
    vocab = fields.integer("vocab_size")
    if "head_dim" not in fields and hidden % heads:
        raise fields.refused(f"hidden_size {hidden} is no multiple of its {heads} heads")
    head_dim = fields.integer("head_dim", max(1, hidden // heads), most=_MAX_HEAD_DIM)
    kv_heads = fields.integer("num_key_value_heads", heads, most=_MAX_HEADS)
    if heads % kv_heads:
        raise fields.refused(f"{heads} attention heads are no multiple of {kv_heads} KV heads")
    if head_dim % 2:
        raise fields.refused(f"head_dim {head_dim} is odd; rotary embedding needs it even")
    context = fields.integer("max_position_embeddings", most=MAX_CONTEXT)
    return Sizes(vocab, hidden, layers, heads, kv_heads, head_dim, context)


def read_mlp(
    fields: Fields,
    *,
    bias: bool = False,
    size: str = "intermediate_size",
    activation: str = "hidden_act",
    old_names: Mapping[str, str] = MappingProxyType({}),
) -> MlpConfig:
    """`size`, `activation`: names of fields; `old_names`: of activations."""
    name = fields.text(activation) or "silu"
    name = old_names.get(name, name)
    if name not in _ACTIVATIONS:
        raise fields.refused(f"{activation} {shown(name)}; Baton computes {', '.join(_ACTIVATIONS)}")
    return MlpConfig(fields.integer(size), _ACTIVATIONS[name], bias)


def read_experts(fields: Fields, experts: str, chosen: str) -> tuple[int, int]:
    """How many there are, and how many each token goes to, by the names of the fields.

    transformers 5 saves `num_local_experts` for whatever a family called it.
    """
    experts = (
        experts
        if fields.mentions(experts)
        else next(
            (other for other in ("num_local_experts", "num_experts") if fields.mentions(other)), experts
        )
    )
    count = fields.integer(experts, most=_MAX_EXPERTS)
    return count, fields.integer(chosen, most=count)


def layers_with_experts(fields: Fields, layers: int) -> list[bool]:
    """By `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.any("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.wrong("mlp_only_layers", "must be a list of layers")
    return [(at + 1) % step == 0 and at not in dense for at in range(layers)]


def describe(fields: Fields, sizes: Sizes, layers: Sequence[LayerConfig], **other: Any) -> Description:
    """`other`: fields of the description that are not the usual ones."""
    return Description(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        max_position_embeddings=sizes.context,
        layers=tuple(layers),
        norm_eps=fields.number("rms_norm_eps", 1e-6, more_than=0),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        **other,
    )


def layer_kinds(fields: Fields, layers: int) -> list[str] | None:
    """`layer_types`: sliding_attention or full_attention for each layer; None if the file has none."""
    kinds = fields.texts("layer_types")
    if kinds is not None and (
        len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}
    ):
        raise fields.refused(
            f"layer_types must name full_attention or sliding_attention for each of {layers} layers"
        )
    return kinds


def windows_of(fields: Fields, kinds: Sequence[str]) -> list[int | None]:
    """Of layers of these kinds.  Without a `sliding_window` none has one."""
    if "sliding_window" not in fields:
        return [None] * len(kinds)
    window = fields.integer("sliding_window", most=MAX_CONTEXT)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def read_attention(fields: Fields, sizes: Sizes) -> AttentionConfig:
    """Llama's: all of a head is rotated, and all four products have biases, or none."""
    bias = fields.flag("attention_bias")
    return AttentionConfig(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        read_rope(fields, sizes),
        sizes.head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
    )


def read_rope(
    fields: Fields,
    sizes: Sizes,
    *,
    partial: bool = False,
    neighbours: bool = False,
    kind: str = "",
    scaled: bool = True,
    theta: str = "rope_theta",
    usual_theta: float = 10_000.0,
    old_names: Mapping[str, str] = MappingProxyType({}),
) -> RopeConfig:
    """Both styles: {"rope_theta", "rope_scaling"} and {"rope_parameters": {"rope_theta", …}}.

    A file that was saved in the newer style and given a `rope_scaling` by hand (as model cards advise for
    YaRN) has both: `rope_scaling` wins, as in transformers.  Its theta is still that of `rope_parameters`,
    unless it names one.

    `partial`: the family may rotate a part of each head.  `kind`: of layers, where `rope_parameters` has an
    object for each; not `scaled`: `rope_scaling` is not for these.  `theta`: the field of a whole file.
    `old_names`: of types.
    """
    parameters = fields.within("rope_parameters")
    if kind and any(isinstance(value, dict) for value in fields.object("rope_parameters").values()):
        parameters = parameters.within(kind)
    scaling = fields.within("rope_scaling")
    given = scaling if scaled and fields.object("rope_scaling") else parameters
    found = given.all()
    if any(isinstance(value, dict) for value in found.values()):
        raise fields.refused("rope_parameters differ from layer to layer; Baton needs one set")
    places = ((given, "rope_theta"), (parameters, "rope_theta"), (fields, theta))
    bases = (place.number(key, more_than=0) for place, key in places if key in place)
    name = given.text("rope_type") or given.text("type") or "default"
    name = old_names.get(name, name)
    if name not in ROPE_TYPES:
        raise fields.refused(f"rope type {name!r}; Baton computes {', '.join(ROPE_TYPES)}")
    share = _share(fields, given, sizes, partial)
    for key in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
        found.pop(key, None)
    rope = RopeConfig(next(bases, usual_theta), name, found, share, neighbours)
    _check_parameters(fields, given, sizes, rope)
    return rope


def _share(fields: Fields, given: Fields, sizes: Sizes, partial: bool) -> float:
    key = "partial_rotary_factor"
    share = next((place.number(key, more_than=0) for place in (given, fields) if key in place), 1.0)
    if share != 1 and not partial:
        raise fields.refused(f"{key} {share:g}; Baton rotates whole heads of this family only")
    rotated = int(sizes.head_dim * share)
    if share > 1 or rotated < 2 or rotated % 2:
        raise fields.refused(f"{key} {share:g} of heads of {sizes.head_dim}: it must leave an even number")
    return share


def _check_parameters(fields: Fields, given: Fields, sizes: Sizes, rope: RopeConfig) -> None:
    """Of the type; fills in those that a file may leave out."""
    found, count = rope.parameters, rope.rotated(sizes.head_dim) // 2
    if rope.type in ("llama3", "yarn", "longrope"):
        place = given if _ORIGINAL in given else fields
        found[_ORIGINAL] = place.integer(_ORIGINAL, sizes.context, most=MAX_CONTEXT)
    if rope.type in ("yarn", "longrope"):
        found["factor"] = given.number("factor", sizes.context / found[_ORIGINAL], more_than=0)
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
            if key in given:
                given.number(key)
    for key in {"factors": ("factors",), "longrope": ("short_factor", "long_factor")}.get(rope.type, ()):
        factors = given.any(key)
        if (
            not isinstance(factors, list)
            or not all(_is_positive(factor) for factor in factors)
            or len(factors) != count
        ):
            raise given.wrong(key, f"must be a list of {count} positive numbers")
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(rope.type, ()):
        given.number(key, more_than=0)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
