"""A bfloat16 checkpoint with the layers' products quantized, in compressed-tensors' format, for vLLM.

`int4`: symmetric, in groups, 16-bit activations (`pack-quantized`); `int8`: a scale a channel, activations
quantized token by token (`int-quantized`).  Rounded to the nearest; embedding and head stay as they are, as
llm-compressor's recipes leave them.  One file at a time is read and written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from answering import chosen_share, headers, split


def convert(checkpoint: Path, target: Path, bits: int, group: int) -> Path:
    """The directory of the quantized checkpoint; made the first time.  `group`: inputs a scale, of 4 bits."""
    if target.exists():
        return target
    from safetensors import safe_open
    from safetensors.torch import save_file

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    places: dict[str, str] = {}
    for file in sorted(checkpoint.iterdir()):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as source:
                tensors: dict[str, Any] = {}
                for name in source.keys():  # noqa: SIM118 (no mapping)
                    tensors |= quantized(name, source.get_tensor(name), bits, group)
            save_file(tensors, str(partial / file.name), metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file.name)
        elif file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(file, partial / file.name)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = description(bits, group)
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    if len(set(places.values())) > 1:
        index = {"metadata": {}, "weight_map": places}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    partial.rename(target)
    return target


def weight_bytes(directory: Path) -> dict[str, int]:
    """Of a checkpoint of safetensors files."""
    sizes = (
        (name, about["data_offsets"][1] - about["data_offsets"][0]) for name, about in headers(directory)
    )
    return split(sizes, chosen_share(directory))


def description(bits: int, group: int) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
    activations = None
    if bits == 4:
        weights |= {"strategy": "group", "group_size": group}
    else:
        weights |= {"strategy": "channel"}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if bits == 4 else "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }


def quantized(name: str, weight: Any, bits: int, group: int) -> dict[str, Any]:
    """What a tensor of the checkpoint becomes: name → tensor.  Only products of the layers change."""
    import torch

    if weight.ndim != 2 or ".layers." not in name:
        return {name: weight}
    size = group if bits == 4 else weight.shape[1]
    largest = 2 ** (bits - 1) - 1
    rows = weight.float().reshape(weight.shape[0], -1, size)
    scales = (rows.abs().amax(2) / largest).clamp_(min=1e-8).to(weight.dtype)
    codes = (rows / scales.float().unsqueeze(2)).round_().clamp_(-largest - 1, largest).flatten(1)
    found = {f"{name}_scale": scales}
    if bits == 8:
        return found | {name: codes.to(torch.int8)}
    nibbles = (codes.to(torch.int32) + 8).reshape(weight.shape[0], -1, 8)
    packed = (nibbles << torch.arange(0, 32, 4, dtype=torch.int32)).sum(2, dtype=torch.int32)
    return found | {f"{name}_packed": packed, f"{name}_shape": torch.tensor(weight.shape)}
