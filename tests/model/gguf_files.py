"""Writers of GGUF files, for tests: from tiny checkpoints, as llama.cpp's converter writes them.

Written with the `gguf` package, whose quantizers and dequantizers are the reference.  It has no quantizers
for the K types: for these, blocks are made here, of random codes and of scales as they are in real files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.gguf_experts import describe_experts, put_back, take_experts

gguf = pytest.importorskip("gguf")
GGUFWriter, GGMLQuantizationType = gguf.GGUFWriter, gguf.GGMLQuantizationType

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Glm4ForCausalLM": "glm4",
    "GptOssForCausalLM": "gpt-oss",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "OlmoeForCausalLM": "olmoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "Glm4MoeForCausalLM": "glm4moe",
}
ODD_NAMES = {"granitemoe": "GRANITE_MOE", "glm4moe": "GLM4_MOE"}
PAIRED = ("llama", "smollm3", "granite", "granitemoe")
PLUS_ONE = ("gemma", "gemma2", "gemma3")
K_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes of a block where there is a float16"""
Kinds = Callable[[str], str]
"""From a tensor's name in the file to its type"""


def quantized(weight: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """[out, in] float32 → bytes [out, n].  K types: blocks of about the same size of weights."""
    try:
        return gguf.quants.quantize(weight, GGMLQuantizationType[kind])
    except NotImplementedError:
        return random_blocks(weight.shape, kind, float(np.abs(weight).mean()), seed)


def random_blocks(shape: tuple[int, int], kind: str, size: float, seed: int) -> np.ndarray:
    """Of weights with a mean magnitude near `size`."""
    rng = np.random.default_rng(seed)
    elements, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, nbytes), dtype=np.uint8)
    values = {"Q4_K": (size / 150, size / 20), "Q5_K": (size / 300, size / 20), "Q6_K": (size / 1000,)}[kind]
    for place, value in zip(K_SCALES[kind], values, strict=True):
        halves = (value * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
        blocks[:, :, place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def dequantized(data: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(data, GGMLQuantizationType[kind])


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter has q and k of Llama: pairs (2i, 2i+1) instead of halves."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    shape = (heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    directory: Path,
    path: Path,
    kinds: Kinds | str = "Q8_0",
    *,
    change: Callable[[Any], None] | None = None,
    tokenizer: bool = False,
    arch: str = "",
) -> dict[str, Tensor]:
    """Writes the checkpoint of `directory` (safetensors) to a GGUF file.

    `arch`: another name of the same architecture.  Returns its weights as they are then, under their usual
    names and in their usual order: what a float32 model must hold to be the same one.
    """
    kind_of = (lambda name: kinds) if isinstance(kinds, str) else kinds
    config = json.loads((directory / "config.json").read_text())
    arch = arch or ARCHITECTURES[config["architectures"][0]]
    writer = GGUFWriter(path, arch)
    _describe(writer, config, arch)
    if tokenizer:
        add_tokenizer(writer, directory)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[ODD_NAMES.get(arch, arch.upper().replace("-", "_"))], config["num_hidden_layers"]
    )
    shift = 1.0 if arch in PLUS_ONE else 0.0
    found: dict[str, Tensor] = {}
    tensors = load_file(directory / "model.safetensors")
    stacks = take_experts(tensors)
    for theirs, stack in stacks.items():
        kind = kind_of(theirs) if theirs.endswith("weight") else "F32"
        data = quantized(stack.float().flatten(0, -2).numpy(), kind)
        writer.add_tensor(theirs, data.reshape(*stack.shape[:-1], -1), raw_dtype=GGMLQuantizationType[kind])
        stacks[theirs] = torch.from_numpy(dequantized(data, kind)).view(stack.shape)
    found |= put_back(stacks, arch)
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        part = name.replace("e_score_correction_bias", "e_score_correction.bias")
        theirs = names.get_name(part, try_suffixes=(".weight", ".bias"))
        if name.endswith("sinks"):
            theirs = f"{names.get_name(name)}.weight"
        assert theirs is not None, name
        weight = (tensor.squeeze() if part != name else tensor).float().numpy()
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        turned = arch in PAIRED and ("q_proj" in name or "k_proj" in name)
        if turned:
            weight = permuted(weight, heads)
        if name.endswith("norm.weight"):
            weight = weight + np.float32(shift)
        kind = kind_of(theirs) if weight.ndim == 2 and "ffn_gate_inp" not in theirs else "F32"
        data = quantized(weight, kind, number)
        writer.add_tensor(theirs, data, raw_dtype=GGMLQuantizationType[kind])
        exact = dequantized(data, kind).reshape(weight.shape)
        exact = unpermuted(exact, heads) if turned else exact
        if name.endswith("norm.weight"):
            exact = exact - np.float32(shift)
        usual = name.replace("mlp.moe_statics.", "mlp.gate.moe_statics.").replace("router.layer", "router")
        found[usual] = torch.from_numpy(np.ascontiguousarray(exact)).view(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def _describe(writer: Any, config: dict[str, Any], arch: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    if arch != "phi3" or config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(head_dim * share))
    kind = rope.get("rope_type", "default")
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    elif arch == "phi3":
        writer.add_sliding_window(0)
    if arch == "gemma3" and local["rope_theta"] != 10_000.0:
        writer.add_float32("gemma3.rope.freq_base_swa", local["rope_theta"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch in ("granite", "granitemoe"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch.endswith("moe") or arch == "gpt-oss":
        describe_experts(writer, config)
    if arch == "olmo2" and window:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        _add_longrope(writer, config, rope)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))


def _add_longrope(writer: Any, config: dict[str, Any], rope: dict[str, Any]) -> None:
    original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    scale = config["max_position_embeddings"] / original
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(
        math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    )
    for name in ("long", "short"):
        factors = np.array(rope[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    base = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    found = []
    for frequency in base:
        wavelength = 2 * np.pi / frequency
        original = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


def add_tokenizer(writer: Any, directory: Path) -> None:
    """Of a byte-level tokenizer.json, as llama.cpp's converter writes one."""
    found = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    # (Control tokens are 3, those that a user defined 4.)
    added = {token["content"]: 3 if token["special"] else 4 for token in found["added_tokens"]}
    vocabulary = dict(found["model"]["vocab"]) | {
        token["content"]: token["id"] for token in found["added_tokens"]
    }
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([added.get(token, 1) for token in tokens])
    merges = found["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if config.get(name):
            add(vocabulary[config[name]])
    writer.add_add_bos_token(False)
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])
