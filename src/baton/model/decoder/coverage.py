"""What of a model has native kernels, and whether they can be one call (`program.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from baton.model.attention import AttentionBackend, CpuAttention
from baton.model.checkpoint.config import ModelConfig
from baton.model.cpu.library import native
from baton.model.cpu.native_kernels import NativeKernels
from baton.model.cpu.products import NativeWeight
from baton.model.cpu.steps import NativeOps
from baton.model.decoder.blocks import Block
from baton.model.decoder.mixture import MLP, Mixture
from baton.model.layers.layers import RMSNorm, VocabParallelEmbedding
from baton.model.layers.rotary import Rotary
from baton.model.ops.fused import FusedOps

MAX_WINDOWS = 2
"""Of different layers, at most."""
MAX_ROTARIES = 2
"""Likewise."""


class Whole(Protocol):
    """What of a model (`Decoder`) is described."""

    config: ModelConfig
    backend: AttentionBackend
    ops: FusedOps
    embedding: VocabParallelEmbedding
    embedding_factor: float
    rotaries: list[Rotary]
    layers: list[Block]
    norm: RMSNorm
    head: VocabParallelEmbedding


def in_pytorch(model: Whole) -> list[str]:
    """What has no native kernel here, for people: PyTorch computes it between native operations."""
    if native() is None:
        return ["all layers"]
    found = []
    backend = model.backend
    if not isinstance(backend, CpuAttention) or not isinstance(backend.kernels, NativeKernels):
        found.append("attention")
    if not isinstance(model.ops, NativeOps):
        found.append("norms and gates")
    mixtures = [
        n for n, b in enumerate(model.layers) if isinstance(b.mlp, Mixture) and b.mlp.native() is None
    ]
    if mixtures:
        found.append(f"experts of {_layers_told(mixtures)}")
    products = [
        number
        for number, block in enumerate(model.layers)
        if number not in mixtures and not all(isinstance(one, NativeWeight) for one in _products_of(block))
    ]
    if products:
        found.append(f"products of {_layers_told(products)}")
    if not isinstance(model.head.product, NativeWeight):
        found.append("the head")
    return found


def why_apart(model: Whole) -> str:
    """Why operations that are all native are not one call, or ""."""
    if model.embedding.parallel.size > 1:
        return "several ranks"
    if len({block.attention.window for block in model.layers}) > MAX_WINDOWS:
        return f"more than {MAX_WINDOWS} windows"
    if len(model.rotaries) > MAX_ROTARIES:
        return f"more than {MAX_ROTARIES} rotary embeddings"
    mixtures = [block.mlp.native() for block in model.layers if isinstance(block.mlp, Mixture)]
    if len({mixture.sizes for mixture in mixtures if mixture is not None}) > 1:
        return "mixtures of several sizes"
    return ""


def _layers_told(numbers: list[int]) -> str:
    """[1, 2, 3] → "layers 1-3"; [4] → "layer 4"."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]}-{numbers[-1]}"
    return f"layers {', '.join(map(str, numbers))}"


def products(model: Whole) -> Iterator[NativeWeight]:
    """All of them, of experts the first's."""
    for block in model.layers:
        for product in _products_of(block):
            yield cast(NativeWeight, product)
    yield cast(NativeWeight, model.head.product)


def _products_of(block: Block) -> Iterator[object]:
    matrices = [block.attention.qkv, block.attention.output]
    mixture = block.mlp if isinstance(block.mlp, Mixture) else None
    if mixture is not None:
        matrices += [mixture.gate_up[0], mixture.down[0]]
    mlp = block.mlp if isinstance(block.mlp, MLP) else block.mlp.shared
    if mlp is not None:
        matrices += [mlp.gate_up, mlp.down]
    return (matrix.product for matrix in matrices)
