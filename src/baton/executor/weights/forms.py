"""How the weights of an instance are held, by its configuration and its checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from baton.model.checkpoint.config import ModelConfig
from baton.model.layers.int8 import why_not_int8
from baton.model.layers.packed import Weights, best_form
from baton.model.layers.rounding import Grouping
from baton.model.loader import AnyDecoder
from baton.model.ops import triton
from baton.protocol.config import InstanceConfig


class ExecutorError(ValueError):
    """The configuration cannot run on this machine.  One line that names the setting and the fix."""


_BITS = {"int4": 4, "int8": 8}
_FINER_BITS = 6
"""Of v with int4: the matrix whose rounding costs most, and one of the smallest."""
_LARGE_GROUP = 128
"""Of what has more bits than 4: their steps are so fine that small groups are not seen in answers."""


def weights_form(config: InstanceConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """How layers hold their weights."""
    if config.quantization == "int8" and config.quantization_group_size is None:
        reason = "" if triton.serve(device) else why_not_int8()
        if config.device != "cpu":
            _check_device(config, device)
        elif reason:
            raise ExecutorError(f"quantization int8: {reason}; leave --quantization away")
        return "int8"
    if triton.serve(device):
        return "plain"
    return best_form(dtype, device)


def _check_device(config: InstanceConfig, device: torch.device) -> None:
    """Raises `ExecutorError` if weights are to be quantized for a device that has no kernels for them."""
    if triton.serve(device):
        return
    for flag, given in (("quantization", config.quantization), ("quantize_head", config.quantize_head)):
        if given not in (None, 16):
            raise ExecutorError(
                f"{flag} {given}: only Triton's kernels multiply by such weights on {device}, and here they "
                "do not serve (the log says why); leave it away"
            )


def groups_of(config: InstanceConfig, model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """What `Placement` needs to know of weights in groups."""
    if config.device != "cpu" and not triton.serve(device):
        _check_device(config, device)
        return {}  # they are expanded
    group = config.quantization_group_size
    if group is None:
        return {"groups": model.quantization is not None}
    grouping = None if config.quantization is None else Grouping(_BITS[config.quantization], group)
    if grouping is not None:
        size = config.tensor_parallel_size
        inputs = {
            "hidden size": model.hidden_size,
            "share of the attention heads": model.num_attention_heads * model.head_dim // size,
        }
        shares = [("share of the MLP", columns // size) for columns in model.intermediate_sizes]
        for what, count in (*inputs.items(), *shares):
            if count % 32:
                raise ExecutorError(
                    f"quantization {config.quantization}: the model's {what}, {count}, is no multiple of "
                    "32, the smallest group; leave --quantization away"
                )
    large = _LARGE_GROUP if config.quantization != "int8" else group  # (which has what was asked for)
    head = None
    if config.quantize_head != 16:
        head = Grouping(config.quantize_head, large if config.quantize_head > 4 else group)
    groups = grouping is not None or head is not None or model.quantization is not None
    finer = Grouping(_FINER_BITS, large) if config.quantization == "int4" else None
    return {"groups": groups, "grouping": grouping, "finer": finer, "head_grouping": head}


def form_told(config: InstanceConfig, model: AnyDecoder) -> str:
    """Of the weights."""
    quantized = model.config.quantization
    if config.quantization is not None and config.quantization_group_size is not None:
        experts = "" if quantized is None else f"{quantized.method}, the rest "
        head = f"head in {config.quantize_head} bits"
        finer = f"v in {_FINER_BITS} bits, " if config.quantization == "int4" else ""
        return f"{experts}{config.quantization} in groups of {config.quantization_group_size}, {finer}{head}"
    told = model.weights if quantized is None else f"{quantized.method}, {model.weights}"
    return told if config.quantize_head == 16 else f"{told}, head in {config.quantize_head} bits"
