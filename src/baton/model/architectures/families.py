"""Which families there are, which one a config.json is of, and why others are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton.model.architectures import (
    ernie4_5,
    gemma,
    glm4,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
    smollm3,
)
from baton.model.architectures.reading import Family
from baton.model.description.fields import Fields, UnsupportedModel

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for module in (llama, mistral, qwen, ernie4_5, smollm3, granite, phi3, olmo, glm4, gemma)
    for family in module.FAMILIES
}
"""By name in `config.json`."""


_REFUSED = (
    (r"^(DeepseekV[23]|KimiK2|Glm4MoeLite|Mistral4|LongcatFlash)", "attention over compressed keys (MLA)"),
    (
        r"^(Qwen3Next|Qwen3_5|KimiLinear|Bamba|FalconH1|Jamba|NemotronH|Zamba)",
        "layers with a recurrent state",
    ),
    (r"^(Mamba|FalconMamba|Rwkv|RecurrentGemma|xLSTM|Lfm2)", "layers with a recurrent state"),
    (r"(Bert|Roberta|Electra|XLNet|Deberta)", "an encoder, which sees what comes after a token too"),
    (r"^(T5|MT5|UMT5|Bart|MBart|Pegasus|Whisper|Marian)", "an encoder and a decoder"),
    (r"(Moe|Mixtral|GptOss|Dbrx|Grok|Llama4|MiniMax|PhiMoE|Olmoe)", "mixtures of experts"),
)
"""By patterns of names: what Baton does not compute."""


_TEXT_AND_IMAGES = ("Mistral3ForConditionalGeneration", "Gemma3ForConditionalGeneration")
_TEXT_MODELS = {
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""By `model_type` of a text_config."""
_OF_THE_WHOLE = (
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config"),
    "tie_word_embeddings",
)


def text_part(raw: Mapping[str, Any], name: str, file: str) -> Mapping[str, Any]:
    """The config.json as if the model had only its decoder; `raw` itself of a model of texts.

    Raises `UnsupportedModel`.
    """
    whole = Fields(raw, name, file)
    if not set(whole.texts("architectures") or []) & set(_TEXT_AND_IMAGES):
        return raw
    text = whole.within("text_config")
    kind = text.text("model_type") or ""
    if kind not in _TEXT_MODELS:
        raise text.wrong("model_type", f"must be one of {', '.join(_TEXT_MODELS)}")
    outside = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
    return {**text.all(), **outside, "architectures": [_TEXT_MODELS[kind]]}


def family_of(raw: Mapping[str, Any], name: str, file: str) -> Family:
    """Raises `UnsupportedModel`."""
    names = Fields(raw, name, file).texts("architectures") or []
    for candidate in names:
        if candidate in FAMILIES:
            return FAMILIES[candidate]
    served = f"Baton serves: {', '.join(known.removesuffix('ForCausalLM') for known in FAMILIES)}"
    if not names:
        raise UnsupportedModel(f"{name!r} names no architecture in its {file}; {served}")
    reason = next((f" ({reason})" for pattern, reason in _REFUSED if re.search(pattern, names[0])), "")
    raise UnsupportedModel(f"{name!r} is a {names[0][:60]!r}{reason}; {served}")
