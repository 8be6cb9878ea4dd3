"""How the weights of an instance are held, by its configuration and its checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from baton.model.architectures.llama import LlamaForCausalLM
from baton.model.checkpoint.config import ModelConfig
from baton.model.layers.int8 import why_not_int8
from baton.model.layers.packed import Weights, best_form
from baton.model.layers.rounding import Grouping
from baton.protocol.config import InstanceConfig


class ExecutorError(ValueError):
    """The configuration cannot run on this machine.  One line that names the setting and the fix."""


def weights_form(config: InstanceConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """How layers hold their weights."""
    if config.quantization == "int8":
        reason = why_not_int8() if config.device == "cpu" else "it is computed on CPUs only"
        if reason:
            raise ExecutorError(f"quantization int8: {reason}; leave --quantization away")
        return "int8"
    return best_form(dtype, device)


def groups_of(config: InstanceConfig, model: ModelConfig) -> dict[str, Any]:
    """What `Placement` needs to know of weights in groups."""
    if config.device != "cpu":
        return {}  # they are expanded
    group = config.quantization_group_size
    grouping = Grouping(4, group) if config.quantization == "int4" else None
    if grouping is not None:
        size = config.tensor_parallel_size
        inputs = {
            "hidden size": model.hidden_size,
            "share of the attention heads": model.num_attention_heads * model.head_dim // size,
            "share of the MLP": model.intermediate_size // size,
        }
        for what, count in inputs.items():
            if count % 32:
                raise ExecutorError(
                    f"quantization int4: the model's {what}, {count}, is no multiple of 32, the "
                    "smallest group; leave --quantization away"
                )
    head = None if config.quantize_head == 16 else Grouping(config.quantize_head, group)
    groups = grouping is not None or head is not None or model.quantization is not None
    return {"groups": groups, "grouping": grouping, "head_grouping": head}


def form_told(config: InstanceConfig, model: LlamaForCausalLM) -> str:
    """Of the weights."""
    if config.quantization == "int4":
        return f"int4 in groups of {config.quantization_group_size}, head in {config.quantize_head} bits"
    quantized = model.config.quantization
    return model.weights if quantized is None else f"{quantized.method}, {model.weights}"
