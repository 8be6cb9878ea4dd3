"""What `quantization_config` in a config.json says: which modules hold small integers, and laid out how.

Three programs' words for the same things are settled here: compressed-tensors (llm-compressor: groups of
targets, an `ignore` list, both with `re:` patterns), AWQ (`modules_to_not_convert`) and GPTQ (`dynamic`
patterns of GPTQModel).  What Baton cannot compute faithfully is an `UnsupportedModel` that names it.

No torch: the launcher reads this in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from baton.model.description.fields import Fields, shown

Layout = Literal["packed", "int", "awq", "gptq", "mxfp4", "gguf"]
"""packed, int: compressed-tensors' `pack-quantized` and `int-quantized`; gguf: each tensor says its own."""

SERVED: Final = (
    "compressed-tensors (pack-quantized and int-quantized in 4 or 8 bits), AWQ (gemm), GPTQ in 4 or 8 bits, "
    "MXFP4 (experts of gpt-oss), "
    "GGUF (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, F16, BF16, F32)"
)
_GROUPS: Final = (32, 64, 128)
_BITS: Final = (4, 8)
_MAX_LISTED: Final = 1 << 16


@dataclass(frozen=True)
class Scheme:
    """How one module's weight is stored."""

    layout: Layout
    bits: int
    group: int | None
    """Inputs that share a scale; None: a whole row"""
    symmetric: bool
    ordered: bool = False
    """Inputs may have been sorted before they were cut into groups: `g_idx`."""
    zeros_less_one: bool = False
    """GPTQ's first version stores zero points less one."""


Rule = Callable[[str], bool]


@dataclass(frozen=True)
class Quantization:
    """Which modules of a checkpoint are quantized."""

    method: str
    """As config.json names it"""
    rules: tuple[tuple[Rule, Scheme | None], ...]
    """The first that holds for a module's name decides; None: not quantized"""

    def scheme_of(self, module: str) -> Scheme | None:
        """`module`: such as model.layers.0.mlp.up_proj."""
        return next((scheme for rule, scheme in self.rules if rule(module)), None)

    @property
    def is_of_experts(self) -> bool:
        """Only experts are quantized: the rest, in floating point, may be while it is loaded."""
        return self.method == "mxfp4"

    def schemes(self) -> set[Scheme]:
        return {scheme for _, scheme in self.rules if scheme is not None}


def read_quantization(fields: Fields) -> Quantization | None:
    """Of a whole config.json; None without a quantization_config.  Raises `UnsupportedModel`."""
    if not fields.object("quantization_config"):
        return None
    inside = fields.within("quantization_config")
    method = (inside.text("quant_method") or "an unknown method").lower()
    read = {
        "compressed-tensors": _compressed_tensors,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }.get(method)
    if read is None:
        raise inside.refused(f"quantized by {method[:60]!r}, which Baton does not serve; it serves {SERVED}")
    return Quantization(method, tuple(read(inside)))


def _compressed_tensors(fields: Fields) -> list[tuple[Rule, Scheme | None]]:
    if any(fields.object(key) for key in ("transform_config",)):
        raise fields.refused("compressed-tensors with a transform_config (rotated weights) is not served")
    sparse = Fields(fields.object("sparsity_config"), "", inside="sparsity_config")
    if (sparse.text("format") or "dense") != "dense":
        raise fields.refused("compressed-tensors with sparse weights is not served")
    rules: list[tuple[Rule, Scheme | None]] = []
    classes = {"lm_head": "Linear", "embed_tokens": "Embedding"}

    def matches(target: str) -> Rule:
        if target.startswith("re:"):
            return _pattern(fields, target[3:])
        return lambda module: module == target or classes.get(module.split(".")[-1], "Linear") == target

    rules += [(matches(name), None) for name in _names(fields, "ignore")]
    groups = fields.object("config_groups")
    if not groups:
        raise fields.wrong("config_groups", "must describe how weights are quantized")
    found: list[tuple[str, Scheme]] = []
    for key, value in groups.items():
        if not isinstance(value, dict):
            raise fields.refused(
                f"quantization_config.config_groups.{key} {shown(value)}: Baton reads it "
                "spelt out, as an object"
            )
        group = Fields(value, fields.model, inside=f"quantization_config.config_groups.{key}")
        if not group.object("weights"):
            continue  # of activations alone
        scheme = _compressed_scheme(fields, group, key)
        found += [(target, scheme) for target in _names(group, "targets")]
    # As the library has it: a module's own name goes before patterns, and these before classes.
    order = sorted(
        found, key=lambda item: (2 if item[0] in ("Linear", "Embedding") else "re:" in item[0], item[0])
    )
    return rules + [(matches(target), scheme) for target, scheme in order]


def _compressed_scheme(whole: Fields, group: Fields, key: str) -> Scheme:
    weights = Fields(group.object("weights"), group.model, inside=f"config_groups.{key}.weights")
    form = group.text("format") or whole.text("format") or "pack-quantized"
    kind = weights.text("type", "int")
    bits = weights.integer("num_bits", 8, most=64)
    if form not in ("pack-quantized", "int-quantized", "naive-quantized") or kind != "int":
        raise whole.refused(
            f"compressed-tensors in the format {form!r} ({kind} in {bits} bits) is not served; "
            f"Baton serves {SERVED}"
        )
    strategy = weights.text("strategy") or ("group" if weights.any("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise whole.refused(
            f"compressed-tensors weights by {strategy!r}; Baton reads them by group or channel"
        )
    layout: Layout = "packed" if form == "pack-quantized" else "int"
    if layout == "int" and bits != 8:
        raise whole.refused(f"compressed-tensors {form} in {bits} bits; Baton reads it in 8 bits")
    inputs = group.object("input_activations")
    if inputs:
        activations = Fields(inputs, group.model, inside=f"config_groups.{key}.input_activations")
        if activations.text("type", "int") != "int" or activations.integer("num_bits", 8) != 8:
            raise whole.refused(
                "compressed-tensors with activations in other than 8-bit integers is not served"
            )
        if activations.any("dynamic") is False:
            raise whole.refused(
                "compressed-tensors with static scales of activations is not served; Baton reads dynamic ones"
            )
    order = weights.any("actorder")
    return Scheme(
        layout=layout,
        bits=_bits(whole, bits),
        group=_group(whole, weights.integer("group_size", least=-1)) if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        ordered=order in (True, "group", "GROUP"),
    )


def _awq(fields: Fields) -> list[tuple[Rule, Scheme | None]]:
    version = (fields.text("version") or "gemm").lower()
    if version != "gemm":
        raise fields.refused(f"AWQ in the layout {version!r} is not served; Baton reads gemm")
    if not fields.flag("zero_point", True):
        raise fields.refused("AWQ without zero points is not served")
    size = "group_size" if "group_size" in fields else "q_group_size"
    scheme = Scheme(
        layout="awq",
        bits=_bits(fields, fields.integer("bits", fields.integer("w_bit", 4)), (4,)),
        group=_group(fields, fields.integer(size, 128, least=-1)),
        symmetric=False,
    )
    kept = _names(fields, "modules_to_not_convert")
    return [
        *((_part_of(name), None) for name in ("lm_head", "embed_tokens", *kept)),
        (lambda module: True, scheme),
    ]


def _gptq(fields: Fields) -> list[tuple[Rule, Scheme | None]]:
    form = (fields.text("checkpoint_format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise fields.refused(f"GPTQ in the layout {form!r} is not served; Baton reads gptq and gptq_v2")

    def scheme(given: Fields) -> Scheme:
        def of(key: str) -> Fields:
            return given if key in given else fields

        return Scheme(
            layout="gptq",
            bits=_bits(fields, of("bits").integer("bits")),
            group=_group(fields, of("group_size").integer("group_size", 128, least=-1)),
            symmetric=of("sym").flag("sym", True),
            ordered=of("desc_act").flag("desc_act"),
            zeros_less_one=form == "gptq",
        )

    rules: list[tuple[Rule, Scheme | None]] = []
    for pattern, value in fields.object("dynamic").items():
        sign, expression = (pattern[:2], pattern[2:]) if pattern[:2] in ("-:", "+:") else ("+:", pattern)
        inside = Fields(value if isinstance(value, dict) else {}, fields.model, inside="dynamic")
        rules.append((_pattern(fields, expression), None if sign == "-:" else scheme(inside)))
    rules.append((_part_of("embed_tokens"), None))
    if not fields.flag("lm_head"):
        rules.append((_part_of("lm_head"), None))
    rules += [(_part_of(name), None) for name in _names(fields, "modules_to_not_convert")]
    blocks = fields.any("modules_in_block_to_quantize")
    if isinstance(blocks, list):
        names = [name for item in blocks for name in (item if isinstance(item, list) else [item])]
        chosen = tuple(str(name) for name in names)
        rules.append((lambda module: module != "lm_head" and not module.endswith(chosen), None))
    return [*rules, (lambda module: True, scheme(fields))]


def _mxfp4(fields: Fields) -> list[tuple[Rule, Scheme | None]]:
    """Experts, whatever `modules_to_not_convert` says: files of theirs in floating point are read as such."""
    scheme = Scheme(layout="mxfp4", bits=4, group=32, symmetric=True)
    return [(_part_of(".mlp.experts."), scheme)]


def _bits(fields: Fields, bits: int, served: tuple[int, ...] = _BITS) -> int:
    if bits not in served:
        raise fields.refused(f"weights in {bits} bits; Baton reads {' and '.join(map(str, served))}")
    return bits


def _group(fields: Fields, size: int) -> int | None:
    """-1: a whole row."""
    if size == -1:
        return None
    if size not in _GROUPS:
        raise fields.refused(f"weights in groups of {size} inputs; Baton reads groups of 32, 64 and 128")
    return size


def _names(fields: Fields, key: str) -> list[str]:
    names = fields.texts(key) or []
    if len(names) > _MAX_LISTED:
        raise fields.refused(f"quantization_config.{key} has {len(names)} names, more than a model has parts")
    return names


def _part_of(name: str) -> Rule:
    return lambda module: name in module


def _pattern(fields: Fields, expression: str) -> Rule:
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise fields.refused(f"quantization_config: pattern {shown(expression)}: {error}") from None
    return lambda module: compiled.match(module) is not None
