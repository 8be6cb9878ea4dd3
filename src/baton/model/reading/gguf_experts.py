"""Experts of a GGUF file as if each had tensors of its own: there those of a layer are one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from baton.model.checkpoint.gguf import GgufTensor

_STACK = re.compile(r"(?P<experts>.+\.experts)\.(?P<part>\w+)\.(?P<last>weight|bias)")


def experts_apart(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """(Name, tensor) of each by transformers' names: …mlp.experts.gate_proj.weight of all experts becomes
    …mlp.experts.0.gate_proj.weight and so on, which lie one after the other."""
    for name, tensor in tensors.items():
        if name.endswith("moe_statics.e_score_correction_bias"):  # (ERNIE has it as a row)
            yield name, replace(tensor, shape=(1, *tensor.shape))
            continue
        found = _STACK.fullmatch(name)
        if found is None or len(tensor.shape) != (3 if found["last"] == "weight" else 2):
            yield name, tensor
            continue
        count, *shape = tensor.shape
        size = tensor.nbytes // count if count else 0
        for expert in range(count):
            ours = f"{found['experts']}.{expert}.{found['part']}.{found['last']}"
            offset = tensor.offset + expert * size
            yield (
                ours,
                replace(tensor, name=f"{tensor.name}[{expert}]", shape=tuple(shape), offset=offset),
            )
