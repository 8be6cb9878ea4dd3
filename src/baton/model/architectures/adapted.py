"""Decoders without a family here, which the classes of transformers compute: what is known before loading.

A config.json gives sizes under one of a few names; what the class really asks of attention is seen when it is
run without weights (`model/adapted`).  Whether the installed transformers has the class, and whether its
attention goes through the library's interface, is read in the text of its module: neither transformers nor
torch is imported, so this takes milliseconds.  Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from baton.model.architectures.reading import Family
from baton.model.description.fields import MAX_CONTEXT, Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig, MlpConfig, RopeConfig

_LEAST: Final = (5, 22)
"""The first version of transformers with which models of `model/adapted` were tried and gave its own tokens:
5.0 does not build them, with 5.18 and 5.20 Gemma 2's differ."""
_ASK: Final = f'pip install "transformers>={_LEAST[0]}.{_LEAST[1]}"'
_INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
}
"""Of fields, the usual one first."""
_ORIGINAL: Final = "original_max_position_embeddings"
_ATTENTION_KINDS: Final = {"full_attention", "sliding_attention"}


def adapted_family(architecture: str) -> Family:
    return Family(architecture, _describe)


def installed() -> str:
    """The version of transformers, or ""."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


def why_not_adapted(raw: Mapping[str, Any], architecture: str) -> str:
    """Why the classes of transformers cannot compute this model here, as far as can be told without them: a
    clause; or ""."""
    found = installed()
    if not found:
        return f"transformers is not installed here ({_ASK})"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < _LEAST:
        return f"of the transformers {found} here it cannot be run ({_ASK})"
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "it is no class that goes on with texts (…ForCausalLM)"
    if not architecture.isidentifier():
        return "its architecture is no name of a class"
    text = _module_of(architecture, str(raw.get("model_type") or ""))
    if text is None:
        own = "; code that comes with a checkpoint (auto_map) is not run" if raw.get("auto_map") else ""
        return f"transformers {found} has no such class{own}"
    if _INTERFACE not in text:
        return f"its attention bypasses the interface of transformers ({_INTERFACE})"
    if re.search(r"^class \w*Experts\w*\(", text, re.MULTILINE) and _has_experts(raw):
        return "it has mixtures of experts, whose products transformers computes in its own way"
    kinds = raw.get("layer_types")
    others = {str(kind) for kind in kinds} - _ATTENTION_KINDS if isinstance(kinds, list) else set()
    if others:
        return f"it has layers of the kind {sorted(others)[0][:40]!r}"
    return ""


def _has_experts(raw: Mapping[str, Any]) -> bool:
    counts = (value for key, value in raw.items() if re.search(r"num_.*experts$|^n_routed_experts$", key))
    given = [count for count in counts if isinstance(count, int)]
    return not given or any(count > 0 for count in given)


def _module_of(architecture: str, model_type: str) -> str | None:
    """The text of the module of transformers that has a class of this name."""
    folder = _models_folder()
    if folder is None:
        return None
    begin = f"\nclass {architecture}("
    usual = model_type.replace("-", "_")
    if usual.isidentifier():
        path = folder / usual / f"modeling_{usual}.py"
        if path.is_file() and begin in (text := path.read_text(encoding="utf-8")):
            return text
    for path in sorted(folder.glob("*/modeling_*.py")):
        if begin in (text := path.read_text(encoding="utf-8")):
            return text
    return None


@cache
def _models_folder() -> Path | None:
    spec = find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "models"


def _describe(fields: Fields) -> Description:
    """What a config.json says; `model.adapted.shapes` knows better once the class has been run."""

    def integer(what: str, default: int | None = None, most: int | None = None) -> int:
        names = _NAMES[what]
        name = next((name for name in names if name in fields), names[0])
        return fields.integer(name, default, most=most or 1 << 24)

    context = integer("context", most=MAX_CONTEXT)
    hidden, heads = integer("hidden"), integer("heads", most=1 << 16)
    kv_heads = integer("kv_heads", heads, most=1 << 16)
    head_dim = fields.integer("head_dim", max(1, hidden // heads), most=1 << 14)
    layer = LayerConfig(
        AttentionConfig(heads, kv_heads, head_dim, _longrope(fields, context), head_dim**-0.5),
        MlpConfig(integer("inner", 4 * hidden)),
    )
    return Description(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=_context(fields, context),
        layers=(layer,) * integer("layers", most=4096),
        norm_eps=0.0,  # the class has it
        tie_word_embeddings=False,
    )


def _longrope(fields: Fields, context: int) -> RopeConfig | None:
    """Of other rotaries nothing needs to be known: the class has them."""
    for inside in (fields.within("rope_scaling"), fields.within("rope_parameters")):
        if "longrope" in (inside.any("rope_type"), inside.any("type")):
            place = inside if _ORIGINAL in inside else fields
            original = place.integer(_ORIGINAL, context, most=MAX_CONTEXT)
            return RopeConfig(type="longrope", parameters={_ORIGINAL: original})
    return None


def _context(fields: Fields, longest: int) -> int:
    """YaRN stretches the context that a model was first trained on, whatever the other field says."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.within(key)
        if "yarn" in (rope.any("rope_type"), rope.any("type")) and "factor" in rope and _ORIGINAL in rope:
            longest = max(longest, int(rope.integer(_ORIGINAL, most=MAX_CONTEXT) * rope.number("factor")))
    return longest
