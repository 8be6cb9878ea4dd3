"""Models by their shapes, with random weights that are made on the device: no checkpoint is read.

What a step takes does not depend on the numbers.  The executor is the real one, by its own constructor: only
`load_model` is another one, which fills the layers' tensors where they are.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from baton.executor import torch_executor
from baton.executor.torch_late import LateTorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.attention import AttentionBackend
from baton.model.checkpoint.config import ModelConfig
from baton.model.decoder.decoder import Decoder
from baton.model.layers.layers import RMSNorm
from baton.model.layers.placement import Placement
from baton.model.loader import AnyDecoder

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What a shape is made into for a try on a CPU."""


def shape_of(name: str, tiny: bool) -> dict[str, Any]:
    return SHAPES[name] | (TINY if tiny else {})


@dataclass(frozen=True)
class Sizes:
    """What a step moves and computes."""

    weight_bytes: int
    """Read in each step"""
    weights: int
    """Multiplied with each token"""
    head: int
    """Multiplied with each token that yields something"""
    kv_bytes: int
    """Of one position"""
    attention: int
    """Operations for each pair of a query and a key, in all layers"""

    def bytes_of(self, rows: int, keys: int) -> float:
        """Of a step of so many rows, each with so many keys."""
        return self.weight_bytes + rows * keys * self.kv_bytes

    def operations_of(self, tokens: int, yielding: int, pairs: float) -> float:
        return 2 * (tokens * self.weights + yielding * self.head) + pairs * self.attention


def sizes_of(shape: dict[str, Any], bytes_each: int = 2, kv_each: int = 2) -> Sizes:
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape.get("head_dim") or hidden // heads
    layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * shape["intermediate_size"]
    head = hidden * shape["vocab_size"]
    return Sizes(
        (layers * layer + head) * bytes_each,
        layers * layer,
        head,
        layers * 2 * kv_heads * dim * kv_each,
        layers * 4 * heads * dim,
    )


def random_executor(shape: dict[str, Any], device: torch.device, **settings: Any) -> LateTorchExecutor:
    """Of a model whose weights are random numbers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        save_file({"nothing": torch.zeros(1)}, Path(folder, "model.safetensors"))
        config = instance_config(model=folder, device=device.type, dtype="bfloat16", **settings)
        with mock.patch.object(torch_executor, "load_model", _filled_with_random_numbers):
            return LateTorchExecutor.from_config(config, 0, "")


def _filled_with_random_numbers(
    directory: Path,
    config: ModelConfig,
    placement: Placement,
    backend: AttentionBackend,
    max_model_len: int,
    *_: object,
) -> AnyDecoder:
    """In the place of `loader.load_model`."""
    with torch.device("cpu"):
        model = Decoder(config, placement, backend, max_model_len)
    torch.manual_seed(0)
    for layer in model.layers_within():
        filled: dict[str, Any] = dict(layer.open())
        for tensor in filled.values():
            if isinstance(layer, RMSNorm):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, 0.02)
        layer.close(filled)
    return model


def write_checkpoint(directory: Path, shape: dict[str, Any], device: torch.device) -> None:
    """A whole checkpoint of random numbers, for processes that read one, with the embedded tokenizer."""
    from baton.model.checkpoint.hub import EMBEDDED_MODEL, resolve_model

    (directory / "config.json").write_text(json.dumps(shape))
    embedded = Path(resolve_model(EMBEDDED_MODEL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((embedded / name).read_bytes())
    torch.manual_seed(0)
    tensors = {
        name: (torch.ones(size, device=device) if len(size) == 1 else torch.randn(size, device=device) * 0.02)
        .bfloat16()
        .cpu()
        for name, size in _tensors_of(shape).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _tensors_of(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of Qwen3, by their names in a checkpoint."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape["vocab_size"], hidden)}
    for number in range(shape["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden),
            "self_attn.o_proj": (hidden, heads),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        found |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
    found["model.norm.weight"] = (hidden,)
    return found
