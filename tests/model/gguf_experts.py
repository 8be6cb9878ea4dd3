"""Experts as llama.cpp's converter lays them out: a layer's gates, ups and downs are a tensor each."""

from __future__ import annotations

import re
from typing import Any

import torch
from gguf import ExpertGatingFuncType
from torch import Tensor

_ALL = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(|_bias)")
_GRANITE = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.(input|output)_linear\.weight")
_ONE = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def describe_experts(writer: Any, config: dict[str, Any]) -> None:
    """By a `gguf.GGUFWriter`."""
    counts = ("moe_num_experts", "num_experts", "n_routed_experts", "num_local_experts")
    writer.add_expert_count(next(config[name] for name in counts if name in config))
    writer.add_expert_used_count(config.get("moe_k") or config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    elif config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "n_routed_experts" in config:
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if "moe_k" in config:
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])


def take_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes them out of a checkpoint's; [experts, out, in] or [experts, out], by llama.cpp's names."""
    found: dict[str, Tensor] = {}
    apart: dict[str, dict[int, Tensor]] = {}
    for name in list(tensors):
        if of_all := _ALL.fullmatch(name):  # gpt-oss
            layer, matrix, bias = of_all.groups()
            tensor, last = tensors.pop(name), "bias" if bias else "weight"
            tensor = tensor if bias else tensor.transpose(1, 2)
            parts = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}
            for part, rows in (parts if matrix == "gate_up" else {"down": tensor}).items():
                found[f"blk.{layer}.ffn_{part}_exps.{last}"] = rows.contiguous()
        elif of_all := _GRANITE.fullmatch(name):
            layer, which = of_all.groups()
            parts = tensors.pop(name).chunk(2 if which == "input" else 1, dim=1)
            for part, rows in zip(("gate", "up") if which == "input" else ("down",), parts, strict=True):
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = rows.contiguous()
        elif of_one := _ONE.fullmatch(name):
            layer, expert, part = of_one.groups()
            stack = apart.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})
            stack[int(expert)] = tensors.pop(name)
    for name, stack in apart.items():
        found[name] = torch.stack([stack[expert] for expert in range(len(stack))])
    return found


def put_back(stacks: dict[str, Tensor], arch: str) -> dict[str, Tensor]:
    """Likewise → what transformers' model has."""
    found: dict[str, Tensor] = {}
    for name, gate in stacks.items():
        if "ffn_gate_exps" not in name:
            continue
        up, down = (stacks[name.replace("gate", part)] for part in ("up", "down"))
        experts = f"model.layers.{name.split('.')[1]}.mlp.experts."
        last = "_bias" if name.endswith("bias") else ""
        if arch == "granitemoe":
            experts = experts.replace("mlp.", "block_sparse_moe.")
        if arch == "gpt-oss":
            gate_up = torch.stack((gate, up), dim=2).flatten(1, 2)
            found[f"{experts}gate_up_proj{last}"] = gate_up if last else gate_up.transpose(1, 2)
            found[f"{experts}down_proj{last}"] = down if last else down.transpose(1, 2)
        else:
            found[f"{experts}gate_up_proj"] = torch.cat((gate, up), dim=1)
            found[f"{experts}down_proj"] = down
    return found
