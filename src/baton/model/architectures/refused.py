"""Which models Baton does not compute, and why: by an architecture's name, or by fields of a config.json.

These are refused whichever way a model is run.  A family that `families.py` has is served all the same, and
what stands neither there nor here is not known to be out of reach.  No torch: this is read before anything is
downloaded or loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any, Final

_MLA: Final = "has attention over compressed keys (MLA)"
_RECURRENT: Final = "has layers with a recurrent state"
_ENCODER: Final = "is an encoder, which sees what comes after a token too"
_BOTH: Final = "is an encoder and a decoder"
_IMAGES: Final = "reads images or sound besides texts"
_DIFFUSION: Final = "writes its tokens in any order (diffusion)"
_SHARED_KV: Final = "has layers that share keys, and embeddings of its layers"
_CHUNKS: Final = "has attention within chunks"
_NO_TEXTS: Final = "does not go on with texts"

_BY_NAME: Final = tuple(
    (re.compile("|".join(patterns.split())), reason)
    for reason, patterns in (
        (_DIFFUSION, "DiffusionGemma ^LLaDA ^Dream(Model|For) BlockDiffusion$"),
        (
            _MLA,
            "^Deepseek_?V[234] ^Kimi_?K ^Glm4MoeLite ^GlmMoeDsa ^Mistral4 ^MistralLarge4 ^LongcatFlash "
            "^MiniCPM3 ^AXK",
        ),
        (
            _RECURRENT,
            "^Qwen3Next ^Qwen3_5 ^Qwen4 ^KimiLinear ^Bamba ^Falcon_?H1 ^Jamba ^Nemotron_?H ^Zamba "
            "^OlmoHybrid ^MiniMax(Text|M1|For) ^BailingHybrid ^RetNet ^(Falcon|Codestral)?_?Mamba "
            "^(Rwkv|RWKV) ^RecurrentGemma ^xLSTM ^Lfm[23]",
        ),
        (_SHARED_KV, "^Gemma(3n|4)"),
        (_CHUNKS, "^Llama4"),
        (
            _BOTH,
            "^(UM|M|Long)?T5 ^SwitchTransformers ^(M|PL)?Bart ^BigBirdPegasus ^Pegasus ^Marian ^M2M100 ^Nllb "
            "^Blenderbot ^(LED|FSMT)For ^ProphetNet EncoderDecoder ^SeamlessM4T ^Mvp ^Whisper ^Moonshine "
            "^Speech ^Canary ^CohereAsr ^Pix2Struct ^Florence2 ^Kyutai ^DiaFor",
        ),
        (
            _ENCODER,
            "Bert(?!Generation|LMHead|Decoder) Roberta Electra XLNet Deberta ^MPNet ^Gte(For|Model) "
            "^NewModel ^ErnieM?(For|Model) ^Esmc?(For|Model) ^Longformer ^Funnel ^FNet ^Camembert "
            "ForMaskedLM$",
        ),
        (
            _NO_TEXTS,
            "^(ViT|CLIP|Siglip|Dino|Swin|Wav2Vec2|Hubert|Detr)[A-Z0-9]?[a-z0-9]*(Model|For) "
            "For(ImageClassification|CTC|ObjectDetection)$",
        ),
        (
            _IMAGES,
            "VL Vision Audio Omni O(cr|CR) A(sr|SR) Speech Llava Idefics PaliGemma Mllama Molmo Multimodal "
            "Voxtral Fuyu Chameleon Emu3 Janus ^Git",
        ),
    )
)
"""The first that fits tells the reason; patterns, apart by spaces, of the names of architectures."""

_KINDS_WITH_STATE: Final = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "rglru", "ssm", "hybrid", "moe_mamba"}
)
"""Of `layer_types` and fields like it."""
_FIELDS_WITH_STATE: Final = frozenset(
    {"mamba_d_state", "mamba_state_dim", "ssm_state_size", "ssm_cfg", "time_mix_extra_dim", "lru_width"}
    | {"conv_L_cache", "linear_num_key_heads", "linear_attn_config"}
)
_FIELDS_OF_MLA: Final = frozenset({"kv_lora_rank"})
_FIELDS_OF_IMAGES: Final = frozenset({"vision_config", "audio_config", "vision_encoder", "mm_vision_tower"})


def why_refused(raw: Mapping[str, Any]) -> str:
    """What the model of this config.json has that Baton does not compute ("has layers with …"), or ""."""
    names = raw.get("architectures")
    for name in names if isinstance(names, list) else ():
        for pattern, reason in _BY_NAME:
            if isinstance(name, str) and pattern.search(name):
                return reason
    return _by_fields(raw)


def _by_fields(raw: Mapping[str, Any]) -> str:
    """For names that nobody has written down."""
    text = raw.get("text_config")
    parts = [raw, text] if isinstance(text, Mapping) else [raw]
    given = {key for part in parts for key, value in part.items() if value is not None}
    if raw.get("is_encoder_decoder") is True:
        return _BOTH
    if given & _FIELDS_OF_MLA:
        return _MLA
    if any(_has_state(part) for part in parts):
        return _RECURRENT
    return _IMAGES if given & _FIELDS_OF_IMAGES else ""


def _has_state(part: Mapping[str, Any]) -> bool:
    kinds: Set[object] = set()
    for key in ("layer_types", "layers_block_type", "block_types", "attn_type_list"):
        value = part.get(key)
        kinds |= {kind for kind in value if isinstance(kind, str)} if isinstance(value, list) else set()
    return bool(kinds & _KINDS_WITH_STATE) or any(part.get(key) is not None for key in _FIELDS_WITH_STATE)
