"""Which families there are, which one a config.json is of, and why others are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from baton.model.architectures import (
    ernie4_5,
    ernie4_5_moe,
    gemma,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
    smollm3,
)
from baton.model.architectures.adapted import adapted_family, why_not_adapted
from baton.model.architectures.reading import Family
from baton.model.architectures.refused import why_refused
from baton.model.description.fields import Fields, UnsupportedModel

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for module in (
        llama,
        mistral,
        qwen,
        ernie4_5,
        ernie4_5_moe,
        smollm3,
        granite,
        phi3,
        olmo,
        glm4,
        glm4_moe,
        gemma,
        gpt_oss,
    )
    for family in module.FAMILIES
}
"""By name in `config.json`."""

Implementation = Literal["baton", "transformers"]
"""Whose code computes a model: the decoder here, or classes of transformers (`model/adapted`)."""


_MIXTURES = re.compile("Moe|MoE|Mixtral|Dbrx|Grok|MiniMaxM2|Olmoe|Qwen2Moe")
"""Families with mixtures of experts that are not in the table yet."""

_TEXT_AND_IMAGES = (
    "Mistral3ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
_TEXT_MODELS = {
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
"""By `model_type` of a text_config.  Of texts alone M-RoPE's three positions are the same, so it is RoPE."""
_QWEN2_VL: Final = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
_TEXT_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {"rope_theta": 500_000.0},
    "qwen3_vl_moe_text": {
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "rope_theta": 500_000.0,
        "norm_topk_prob": True,
    },
}
"""Of fields that a text_config leaves out, where they are not those of the family."""
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Kinds whose published files have the fields of the text part outside, beside the vision_config."""
_SCORES = "ForSequenceClassification"
_BODY = "Model"
_END = "eos_token_id"
_OF_THE_WHOLE = (
    *("bos_token_id", "dtype", "torch_dtype", "quantization_config"),
    "tie_word_embeddings",
)


def text_part(raw: Mapping[str, Any], name: str, file: str) -> Mapping[str, Any]:
    """The config.json as if the model had only its decoder; `raw` itself of a model of texts.

    Raises `UnsupportedModel`.
    """
    whole = Fields(raw, name, file)
    if not set(whole.texts("architectures") or []) & set(_TEXT_AND_IMAGES):
        return raw
    text, kind = whole.within("text_config"), ""
    if "text_config" in whole:
        kind = text.text("model_type") or ""
    elif (flat := _FLAT.get(whole.text("model_type") or "")) is not None:
        text, kind = Fields({key: value for key, value in raw.items() if key != _END}, name, file), flat
    if kind not in _TEXT_MODELS:
        if reason := why_refused({**text.all(), "architectures": []}):
            raise whole.refused(f"its text_config is of a model that {reason}")
        raise text.wrong("model_type", f"must be one of {', '.join(_TEXT_MODELS)}")
    outside = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
    both = [end for part in (raw, text.all()) for end in _listed(part.get(_END))]
    if kind in _FLAT.values() and text.flag("tie_word_embeddings"):
        outside["tie_word_embeddings"] = True  # (whatever is said outside, as in the class)
    defaults = {key: value for key, value in _TEXT_DEFAULTS.get(kind, {}).items() if not _says(text, key)}
    return {**text.all(), **outside, **defaults, _END: both or None, "architectures": [_TEXT_MODELS[kind]]}


def _says(text: Fields, key: str) -> bool:
    """transformers 5 calls the number of experts otherwise."""
    return key in text or (key == "num_experts" and "num_local_experts" in text)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def reads_only(raw: Mapping[str, Any]) -> bool:
    """Whether the class has no head at all (`Qwen3Model`), as models of vectors are saved."""
    names = raw.get("architectures")
    return isinstance(names, list) and bool(names) and all(str(name).endswith(_BODY) for name in names)


def classifies(raw: Mapping[str, Any]) -> bool:
    """Whether the model has a head of scores instead of one of tokens.  (Not one that is to be made of two
    tokens, as vLLM is told with `classifier_from_token`.)"""
    if raw.get("classifier_from_token") is not None:
        return False
    names = raw.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_SCORES) for name in names)


def _family(name: str) -> Family | None:
    """Of an architecture, be it one that ends in scores, or in hidden states."""
    for end in (_SCORES, _BODY):
        if name.endswith(end):
            name = f"{name.removesuffix(end).removesuffix('Text')}ForCausalLM"
    return FAMILIES.get(name)


def check_known(raw: Mapping[str, Any], name: str, file: str) -> None:
    """Before anything else of a model is read or downloaded.  Raises `UnsupportedModel` if it is one of those
    that Baton is known not to compute."""
    names = Fields(raw, name, file).texts("architectures") or []
    if any(_family(known) or known in _TEXT_AND_IMAGES for known in names):
        return
    if reason := why_refused(raw):
        what = f"is a {names[0][:60]!r}" if names else f"names no architecture in its {file}"
        raise UnsupportedModel(f"{name!r} {what}, which Baton does not serve: it {reason}; {_served()}")
    if names:
        _check_adapted(raw, name, names[0])


def _check_adapted(raw: Mapping[str, Any], name: str, architecture: str) -> None:
    if not (reason := why_not_adapted(raw, architecture)):
        return
    if architecture in FAMILIES:
        raise UnsupportedModel(
            f"{name!r} is a {architecture!r}, which transformers cannot compute here: {reason}; leave "
            "--model-impl away"
        )
    raise UnsupportedModel(
        f"{name!r} is a {architecture[:60]!r}, which Baton does not serve: it is no family of Baton's, "
        f"and {reason}"
    )


def family_of(
    raw: Mapping[str, Any], name: str, file: str, asked: Implementation | Literal["auto"] = "auto"
) -> tuple[Family, Implementation]:
    """Also, who computes it; auto: the decoder here, for families that it has.  Raises `UnsupportedModel`."""
    names = Fields(raw, name, file).texts("architectures") or []
    if asked != "transformers":
        for candidate in names:
            family = _family(candidate)
            if family is not None:
                return family, "baton"
    check_known(raw, name, file)
    if not names:
        raise UnsupportedModel(f"{name!r} names no architecture in its {file}; {_served()}")
    if asked == "baton":
        reason = ": it has mixtures of experts" if _MIXTURES.search(names[0]) else ""
        raise UnsupportedModel(
            f"{name!r} is a {names[0][:60]!r}, which Baton does not serve{reason}; {_served()}"
        )
    _check_adapted(raw, name, names[0])
    return adapted_family(names[0]), "transformers"


def _served() -> str:
    return f"Baton serves: {', '.join(known.removesuffix('ForCausalLM') for known in FAMILIES)}"
