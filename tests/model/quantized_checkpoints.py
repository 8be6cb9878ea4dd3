"""Writers of quantized files, for tests: from matrices in floating point and a `Grouped` for each.

Each is written from the format's description, not from the readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.model.weights.grouped import Grouped
from baton.model.weights.quantize import quantize

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_along_columns(codes: Tensor, bits: int) -> Tensor:
    """[rows, n] → int32 [rows, n * bits / 32], the first in the lowest bits."""
    many = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % many)).unflatten(1, (-1, many))
    whole = sum(codes[:, :, place] << (bits * place) for place in range(many))
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def packed(weight: Grouped, symmetric: bool, scales: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """compressed-tensors, pack-quantized."""
    found = {
        "weight_packed": words_along_columns(weight.codes, weight.bits),
        "weight_scale": weight.scales.to(scales),
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = words_along_columns(weight.zeros.t(), weight.bits).t().contiguous()
    return found


def int8(weight: Grouped) -> dict[str, Tensor]:
    """compressed-tensors, int-quantized by channel: every group of a row has the same scale."""
    values = (weight.codes.int() - 128).to(torch.int8)
    return {"weight": values, "weight_scale": weight.scales[:, :1].contiguous()}


def awq(weight: Grouped, scales: torch.dtype = torch.float16) -> dict[str, Tensor]:
    def shuffled(columns: Tensor) -> Tensor:
        return columns.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)

    return {
        "qweight": words_along_columns(shuffled(weight.codes.t()), 4),
        "qzeros": words_along_columns(shuffled(weight.zeros.t()), 4),
        "scales": weight.scales.t().to(scales).contiguous(),
    }


def gptq(weight: Grouped, version: int = 1, scales: torch.dtype = torch.float16) -> dict[str, Tensor]:
    inputs = torch.arange(weight.in_features) if weight.order is None else weight.order.long()
    codes = torch.empty_like(weight.codes)
    codes[:, inputs] = weight.codes
    indices = torch.empty(weight.in_features, dtype=torch.int32)
    indices[inputs] = torch.arange(weight.in_features, dtype=torch.int32) // weight.group
    zeros = weight.zeros.long() - (1 if version == 1 else 0)
    return {
        "qweight": words_along_columns(codes, weight.bits).t().contiguous(),
        "qzeros": words_along_columns(zeros.t() & ((1 << weight.bits) - 1), weight.bits),
        "scales": weight.scales.t().to(scales).contiguous(),
        "g_idx": indices,
    }


def rewrite(
    directory: Path,
    quantization: dict[str, Any],
    write: Callable[[str, Tensor], tuple[Grouped, dict[str, Tensor]] | None],
) -> dict[str, Grouped]:
    """Replaces the matrices of `directory` that `write` (module, weight) takes; returns them by module."""
    path = directory / "model.safetensors"
    tensors, made = load_file(path), {}
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if module.split(".")[-1] not in (*PROJECTIONS, "lm_head") or name == module:
            continue
        found = write(module, tensors[name])
        if found is not None:
            del tensors[name]
            made[module] = found[0]
            tensors |= {f"{module}.{last}": part.contiguous() for last, part in found[1].items()}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return made


def compressed_config(
    bits: int = 4, group: int | None = 32, symmetric: bool = True, **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        **more,
    }


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool, scales: torch.dtype) -> Grouped:
    """A `Grouped` whose scales the file's type holds exactly; zero points are whole, as in files."""
    found = quantize(weight, bits, group, symmetric)
    return Grouped(found.codes, found.scales.to(scales).float(), found.zeros.round(), group, bits)


def by_channel(weight: Tensor, bits: int, group: int) -> Grouped:
    """Symmetric, with one scale a row, which bf16 holds exactly."""
    middle = 1 << (bits - 1)
    scale = (weight.float().abs().amax(dim=1, keepdim=True) / (middle - 1)).bfloat16().float()
    codes = (weight.float() / scale).round().clamp(-middle, middle - 1) + middle
    scales = scale.repeat(1, weight.shape[1] // group)
    return Grouped(codes.to(torch.uint8), scales, torch.full_like(scales, middle), group, bits)


def in_order(weight: Tensor, bits: int, group: int, scales: torch.dtype, seed: int = 3) -> Grouped:
    """Its inputs sorted in some way before they were cut into groups; alike in matrices of a width."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    found = rounded(weight[:, order], bits, group, False, scales)
    return Grouped(found.codes, found.scales, found.zeros, group, bits, order.int())


MXFP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """[…, inputs] → the nearest in MXFP4, float32, and `blocks` […, inputs / 32, 16], `scales`."""
    grouped = weight.float().unflatten(-1, (-1, 32))
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    exponents = torch.floor(torch.log2(largest)) - 2  # the largest number is below 2^3
    numbers = torch.tensor(MXFP4_NUMBERS)
    signed = torch.cat((numbers, -numbers))
    codes = (grouped / 2**exponents).unsqueeze(-1).sub(signed).abs().argmin(-1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    near = (signed[codes] * 2**exponents).flatten(-2)
    return near, {"blocks": blocks, "scales": (exponents.squeeze(-1) + 127).to(torch.uint8)}


def rewrite_gpt_oss(directory: Path) -> dict[str, Tensor]:
    """Puts the experts of a gpt-oss checkpoint, saved by transformers, into MXFP4.

    Returns what they are now, by the names and in the shapes that they had: outputs last.
    """
    path = directory / "model.safetensors"
    tensors, found = load_file(path), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        near, stored = mxfp4(tensors.pop(name).transpose(1, 2))
        found[name] = near.transpose(1, 2).contiguous()
        tensors |= {f"{name}_{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps(config))
    return found
