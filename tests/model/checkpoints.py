"""Tiny random checkpoints of every architecture, made by transformers, which is also the reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

VOCAB = 197
"""Odd, so that tensor parallelism has to pad it."""
MAX_POSITIONS = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.3, 2.0, 4.0, 6.0, 8.0],
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PIXTRAL = _SIGLIP | {"model_type": "pixtral", "head_dim": 8}
_QWEN2_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 64, "window_size": 8, "fullatt_block_indexes": [0],
}  # fmt: skip
_QWEN3_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 64, "deepstack_visual_indexes": [0],
}  # fmt: skip
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": [6, 5, 5]}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ODD: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 107,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
}
_GRANITE4: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "layer_types": ["attention"] * 3,
    "mamba_n_heads": 8,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        {"num_key_value_heads": 2, "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-biased-linear": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        },
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 24, "head_dim": 32}),
    "mistral-no-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16, "rope_parameters": _YARN_ROPE}),
    "ernie4_5": ("Ernie4_5", {"num_key_value_heads": 2, "head_dim": 32, "use_bias": False}),
    "ernie4_5-biased": (
        "Ernie4_5",
        {"num_key_value_heads": 2, "head_dim": 16, "use_bias": True, "tie_word_embeddings": False},
    ),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "smollm3-odd": (
        "SmolLM3",
        {
            **_ODD,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 21,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite": (
        "Granite",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
        },
    ),
    "granite-odd": (
        "Granite",
        {
            **_ODD,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.9,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            **_GRANITE4,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
        },
    ),
    "granite4-no-positions": ("GraniteMoeHybrid", {**_ODD, **_GRANITE4, "shared_intermediate_size": 70}),
    "phi3": (
        "Phi3",
        {
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": _LONGROPE,
        },
    ),
    "phi3-long": (  # transformers changes the angles of all positions with the length; here all are long
        "Phi3",
        {
            "num_key_value_heads": 4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4,
            "rope_parameters": _LONGROPE,
        },
    ),
    "phi3-odd": ("Phi3", {**_ODD, "sliding_window": 19}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo2-odd": ("Olmo2", {**_ODD, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": (
        "Olmo3",
        {
            "num_key_value_heads": 2,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "rope_parameters": {"full_attention": _YARN_ROPE, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    "olmo3-odd": ("Olmo3", {**_ODD, "sliding_window": 15, "layer_types": [_SLIDING, _FULL, _FULL]}),
    "glm": ("Glm", {"num_key_value_heads": 2, "head_dim": 32}),
    "glm4": ("Glm4", {"num_key_value_heads": 2, "head_dim": 32}),
    "glm4-odd": ("Glm4", {**_ODD, "partial_rotary_factor": 0.25, "attention_bias": False}),
    "ministral": ("Ministral", {**_ODD, "sliding_window": 24, "layer_types": [_SLIDING, _FULL, _SLIDING]}),
    "ministral3": (
        "Ministral3",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {
                **_YARN_ROPE,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 24, "num_hidden_layers": 4},
    ),
    "gemma2-odd": (
        "Gemma2",
        {
            **_ODD,
            "sliding_window": 17,
            "query_pre_attn_scalar": 13,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-images": (
        "Gemma3Text",
        {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "images": ("Gemma3", _SIGLIP)},
    ),
    "qwen2_5-vl": (
        "Qwen2_5_VLText",
        {
            "num_key_value_heads": 2,
            "rope_parameters": _MROPE | {"mrope_section": [2, 3, 3]},
            "images": ("Qwen2_5_VL", _QWEN2_VISION),
        },
    ),
    "qwen3-vl": (
        "Qwen3VLText",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": _MROPE | {"mrope_interleaved": True},
            "tie_word_embeddings": True,
            "images": ("Qwen3VL", _QWEN3_VISION),
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeText",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": _MROPE | {"mrope_interleaved": True},
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
            "images": ("Qwen3VLMoe", _QWEN3_VISION),
        },
    ),
    "mistral-images": (
        "Mistral",
        {"num_key_value_heads": 2, "sliding_window": None, "images": ("Mistral3", _PIXTRAL)},
    ),
    "ernie4_5-moe": (
        "Ernie4_5_Moe",
        {
            "num_key_value_heads": 2,
            "moe_num_experts": 16,
            "moe_k": 6,
            "moe_intermediate_size": 32,
            "num_nextn_predict_layers": 1,
        },
    ),
    "ernie4_5-moe-odd": (
        "Ernie4_5_Moe",
        {
            **_ODD,
            "num_hidden_layers": 4,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_intermediate_size": 37,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-odd": (
        "Qwen3Moe",
        {
            **_ODD,
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 41,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 21,
            "attention_bias": True,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4-moe-odd": (
        "Glm4Moe",
        {
            **_ODD,
            "n_routed_experts": 6,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 19,
            "n_shared_experts": 3,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2}),
    "mixtral-odd": ("Mixtral", {**_ODD, "num_local_experts": 3, "sliding_window": 19}),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
        },
    ),
    "granite-moe-odd": (
        "GraniteMoe",
        {
            **_ODD,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.3,
            "logits_scaling": 3.0,
        },
    ),
    "olmoe": ("Olmoe", {"num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4}),
    "olmoe-odd": (
        "Olmoe",
        {**_ODD, "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 12},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {**_YARN_ROPE, "rope_theta": 150_000.0, "truncate": False},
        },
    ),
    "gpt-oss-odd": (
        "GptOss",
        {
            **_ODD,
            "layer_types": [_FULL, _SLIDING, _FULL],
            "sliding_window": 15,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "gemma3-odd": ("Gemma3Text", {**_ODD, "sliding_window": 11, "sliding_window_pattern": 2}),
}

MORE_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-odd": ("Llama", _ODD),
    "mistral-odd": ("Mistral", {**_ODD, "sliding_window": 19}),
    "qwen2-odd": ("Qwen2", {**_ODD, "head_dim": 12}),
    "qwen3-odd": ("Qwen3", _ODD),
    "ernie4_5-odd": ("Ernie4_5", {**_ODD, "use_bias": True}),
    "granite4-odd": (
        "GraniteMoeHybrid",
        {**_GRANITE4, **_ODD, "head_dim": 12, "shared_intermediate_size": 107},
    ),
    "glm-odd": ("Glm", {**_ODD, "partial_rotary_factor": 0.25}),
    "gemma-odd": ("Gemma", _ODD),
    "ministral-even": (
        "Ministral",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
        },
    ),
    "ministral3-odd": ("Ministral3", {**VARIANTS["ministral3"][1], **_ODD}),
}
"""For benchmarks/family_parity.py: shapes whose code other variants run in the tests."""
MIXTURES = [name for name in VARIANTS if "moe" in name or "mixtral" in name or "gpt-oss" in name]
"""Of experts."""
_GPT2: dict[str, Any] = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": MAX_POSITIONS,
    "n_inner": 107,
}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLm", {"num_key_value_heads": 2, "partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "stablelm-odd": (
        "StableLm",
        {
            "num_key_value_heads": 1,
            "intermediate_size": 107,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-neox-odd": (
        "GPTNeoX",
        {"intermediate_size": 107, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 24}),
    "opt": ("OPT", {"ffn_dim": 107, "word_embed_proj_dim": 32}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),  # (its head has a bias)
    "cohere2": ("Cohere2", {"num_key_value_heads": 2, "sliding_window": 24, "num_hidden_layers": 4}),
    "nemotron": ("Nemotron", {"num_key_value_heads": 2, "head_dim": 16}),
    "apertus": ("Apertus", {"num_key_value_heads": 2}),  # (parameters of one number)
    "granite-swa": ("GraniteSWA", {"num_key_value_heads": 2, "sliding_window": 24}),  # (sinks)
    "gpt2": ("GPT2", _GPT2),  # (weights as [in, out]; the head is its table)
}
"""Families that Baton has no description of: transformers computes them."""


def make_checkpoint(
    directory: Path,
    variant: str,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Saves a random model to `directory` and returns it, for reference."""
    import transformers

    family, settings = (VARIANTS | ADAPTED | MORE_SHAPES)[variant]
    common = {key: _COMMON[key] for key in _TOKENS} if family == "GPT2" else _COMMON
    settings = copy.deepcopy({**common, **settings, **changes})  # (configurations write into their parts)
    images = settings.pop("images", None)
    config: Any = getattr(transformers, f"{family}Config")(**settings)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"
    if images is not None:
        kind, vision = images
        tied = settings.get("tie_word_embeddings", getattr(config, "tie_word_embeddings", False))
        config = getattr(transformers, f"{kind}Config")(
            text_config=config, vision_config=vision, tie_word_embeddings=tied
        )
        name = f"{kind}ForConditionalGeneration"
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).to(dtype).eval()
    if getattr(config, "num_experts_per_tok", None) is not None:
        model.set_experts_implementation("eager")  # (its faster one does not take odd sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj_bias"):
                parameter.normal_(0.0, 4.0)  # some gates and ups are beyond 7
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif name.endswith(("gate.weight", "router.weight")):
                parameter.normal_(0.0, 0.5)  # (of mixtures: routers are made of zeros)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 3.0)
            elif "norm" in name:
                parameter.normal_(0.0 if family.startswith("Gemma") else 1.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def make_classifier(directory: Path, variant: str, labels: int) -> Any:
    """As `make_checkpoint`: the same model with a head of scores instead of one of tokens."""
    import transformers

    decoder = make_checkpoint(directory, variant)
    config = decoder.config
    config.num_labels, config.pad_token_id = labels, 0
    kind = type(decoder).__name__.replace("ForCausalLM", "ForSequenceClassification")
    model: Any = getattr(transformers, kind)(config).eval()
    model.model.load_state_dict(decoder.model.state_dict())
    torch.manual_seed(1)
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.3)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory)
    return model


def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab] natural log-probabilities of what follows each token."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def reference_routes(model: Any, tokens: list[int]) -> npt.NDArray[np.int64]:
    """[len(tokens), mixtures, chosen] the experts that each token goes to, ids ascending."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, outputs: found.append(outputs[-1]))
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.asarray(torch.stack(found, dim=1).sort(dim=-1).values.numpy())
