"""Tiny random checkpoints of every architecture, made by transformers, which is also the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
}


def make_checkpoint(
    directory: Path,
    variant: str,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Saves a random model to `directory` and returns it, for reference."""
    import transformers

    family, settings = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **settings, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.normal_(1.0, 0.3)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab] natural log-probabilities of what follows each token."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
