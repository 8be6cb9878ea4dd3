"""Each kernel alone, at sizes of Llama 8B, beside its bytes over the bandwidth and operations over the peak.

A kernel that fails is a line that says why; the next one is measured all the same.  What is smaller than the
device's L2 cache comes from there when it is repeated: then more than the limit is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from _gpu.figures import Figures
from _gpu.measuring import Device
from baton.model.attention.base import AttentionShape, AttentionStep
from baton.model.attention.triton_backend import TritonAttention
from baton.model.cpu.kernels import HeadNorms
from baton.model.cpu.sampling import SlotParameters
from baton.model.cuda.products.int8 import quantize
from baton.model.cuda.products.linear import TritonGroups, TritonInt8, TritonPlain
from baton.model.cuda.rows import add_norm, gated_mul
from baton.model.cuda.sampling import Wishes, sample
from baton.model.weights.grouped import MIDDLE, Grouped

BF16 = torch.bfloat16
BLOCK = 32
Case = tuple[str, Callable[[], object], float, float]
"""Name, what is run, bytes, operations."""


def measure_kernels(device: Device, figures: Figures) -> None:
    for cases in (_attention, _rows, _sampling, _products, _quantized):
        try:
            for name, run, moved, operations in cases(device):
                _measure(name, run, moved, operations, device, figures)
        except Exception as error:
            figures.add(f"{cases.__name__.strip('_')}: the rest", note=_told(error))


def _measure(
    name: str,
    run: Callable[[], object],
    moved: float,
    operations: float,
    device: Device,
    figures: Figures,
) -> None:
    try:
        with torch.inference_mode():
            seconds = device.seconds(run)
    except Exception as error:
        figures.add(name, note=_told(error))
        return
    note = f"{moved / seconds / 1e9:.0f} GB/s"
    if operations:
        note += f", {operations / seconds / 1e12:.1f} TFLOP/s"
    figures.add(name, seconds=seconds, limit_s=device.limit(moved, operations), note=note)


def _told(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return f"FAILED: {text[:300]}"


def _attention(device: Device) -> Iterator[Case]:
    heads, kv_heads, dim = (4, 2, 16) if device.tiny else (32, 8, 128)
    decodes = ((1, 40),) if device.tiny else ((1, 1024), (1, 8192), (8, 32768), (64, 1024), (256, 1024))
    chunks = ((8, 3),) if device.tiny else ((2048, 0), (512, 8192), (8192, 0))
    for kv_int8 in (False, True):
        shape = AttentionShape(
            1, heads, kv_heads, dim, BLOCK, dim**-0.5, frozenset({None}), BF16, device.device, kv_int8
        )
        backend = TritonAttention(shape)
        blocks = max(rows * -(-keys // BLOCK) for rows, keys in (*decodes, *((1, n + b) for n, b in chunks)))
        sizes = blocks, 1, 2, kv_heads, *backend.tile_shape
        backend.bind(torch.zeros(sizes, dtype=backend.pool_dtype, device=device.device))
        form = ", KV in 8 bits" if kv_int8 else ""
        position = 2 * kv_heads * backend.tile_shape[-1] * backend.pool_dtype.itemsize
        for rows, keys in decodes:
            per = -(-keys // BLOCK)
            starts, counts = np.full(rows, keys - 1, np.int32), np.ones(rows, np.int32)
            tables = np.arange(rows * per, dtype=np.int32).reshape(rows, per)
            plan = backend.prepare(AttentionStep(starts, counts, tables, rows))
            queries = torch.randn(rows, heads, dim, device=device.device).to(BF16)
            moved = rows * keys * position + 4.0 * queries.numel()
            pairs = 4.0 * rows * keys * heads * dim
            yield f"attention, {rows} rows of {keys}{form}", _attending(backend, queries, plan), moved, pairs
        for tokens, before in chunks:
            table = np.arange(-(-(tokens + before) // BLOCK), dtype=np.int32)[None]
            step = AttentionStep(np.array([before], np.int32), np.array([tokens], np.int32), table, 0)
            plan = backend.prepare(step)
            queries = torch.randn(tokens, heads, dim, device=device.device).to(BF16)
            pairs = 4.0 * heads * dim * tokens * (before + (tokens + 1) / 2)
            moved = (tokens + before) * position + 4.0 * queries.numel()
            name = f"attention, chunk of {tokens} after {before}{form}"
            yield name, _attending(backend, queries, plan), moved, pairs
        yield from _storing(device, backend, heads, kv_heads, dim, position, form)


def _attending(backend: TritonAttention, queries: torch.Tensor, plan: Any) -> Callable[[], object]:
    return lambda: backend.attend(0, queries, None, plan)


def _storing(
    device: Device, backend: TritonAttention, heads: int, kv_heads: int, dim: int, position: int, form: str
) -> Iterator[Case]:
    where, width = device.device, (heads + 2 * kv_heads) * dim
    angles = torch.randn(4096, dim // 2, device=where)
    weights = torch.ones(dim, device=where, dtype=BF16)
    cos, sin = angles.cos(), angles.sin()
    norms = HeadNorms(weights, weights, 1e-6, 0.0)
    for tokens in (3,) if device.tiny else (1, 256, 2048):
        table = np.arange(-(-tokens // BLOCK), dtype=np.int32)[None]
        plan = backend.prepare(AttentionStep(np.zeros(1, np.int32), np.array([tokens], np.int32), table, 0))
        qkv = torch.randn(tokens, width, device=where).to(BF16)

        moved = 2.0 * tokens * (width + heads * dim) + tokens * position
        yield (
            f"norms, rotate and store, {tokens} tokens{form}",
            _turning(backend, qkv, cos, sin, norms, plan),
            moved,
            0.0,
        )


def _turning(
    backend: TritonAttention,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms,
    plan: Any,
) -> Callable[[], object]:
    return lambda: backend.rotate_and_write(0, qkv, cos, sin, None, norms, plan)


def _rows(device: Device) -> Iterator[Case]:
    hidden, inner = (64, 96) if device.tiny else (4096, 14336)
    weight = torch.ones(hidden, device=device.device, dtype=BF16)
    for rows in (2,) if device.tiny else (1, 64, 2048):
        x, y = (torch.randn(rows, hidden, device=device.device).to(BF16) for _ in range(2))
        gate_up = torch.randn(rows, 2 * inner, device=device.device).to(BF16)
        yield f"add and norm, {rows} rows", _norming(x, y, weight), 8.0 * x.numel(), 0.0
        yield f"SwiGLU, {rows} rows", _gating(gate_up), 3.0 * gate_up.numel(), 0.0


def _norming(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    return lambda: add_norm(x, y, weight, 1e-6, 0.0, 1.0)


def _gating(gate_up: torch.Tensor) -> Callable[[], object]:
    return lambda: gated_mul(gate_up)


def _sampling(device: Device) -> Iterator[Case]:
    vocab = 600 if device.tiny else 151936
    wishes = {"greedy": (0.0, vocab, 1.0), "temperature": (0.6, vocab, 1.0), "top-k, top-p": (0.7, 50, 0.9)}
    for rows in (2,) if device.tiny else (1, 64, 256):
        logits = torch.randn(rows, vocab, device=device.device) * 3
        slots, positions = (torch.arange(rows, dtype=torch.int32, device=device.device) for _ in range(2))
        for name, (temperature, top_k, top_p) in wishes.items():
            have = SlotParameters.of_greedy(rows, vocab)
            have.temperature[:], have.top_k[:], have.top_p[:] = temperature, top_k, top_p
            sent = Wishes.of(have, device.device)
            run = _drawing(logits, slots, positions, sent)
            yield f"sampling, {rows} rows, {name}", run, 4.0 * logits.numel(), 0.0  # (they are read twice)


def _drawing(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, wishes: Wishes
) -> Callable[[], object]:
    return lambda: sample(logits, slots, positions, wishes)


_PRODUCTS = (("qkv", (6144, 4096)), ("o", (4096, 4096)), ("gate, up", (28672, 4096)), ("down", (4096, 14336)))
_TINY_PRODUCTS = (("qkv", (96, 64)),)


def _products(device: Device) -> Iterator[Case]:
    """cuBLAS at the shapes of Llama 8B: what the rest of a step is measured by."""
    for name, (outputs, inputs) in _TINY_PRODUCTS if device.tiny else _PRODUCTS:
        weight = torch.randn(outputs, inputs, device=device.device).to(BF16)
        for rows in (1,) if device.tiny else (1, 8, 64, 256, 2048):
            x = torch.randn(rows, inputs, device=device.device).to(BF16)
            moved = 2.0 * (weight.numel() + x.numel() + rows * outputs)
            yield f"product {name}, {rows} rows", _product(x, weight), moved, 2.0 * rows * weight.numel()


def _product(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.nn.functional.linear(x, weight)


def _quantized(device: Device) -> Iterator[Case]:
    """Weights of 4 bits and bytes by bytes, and products whose bits do not depend on the batch
    (`--deterministic`), beside the bytes that they read."""
    for name, (outputs, inputs) in _TINY_PRODUCTS if device.tiny else _PRODUCTS[2:]:
        group = 32 if device.tiny else 128
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        groups = (outputs, inputs // group)
        scales, zeros = torch.full(groups, 0.01), torch.full(groups, MIDDLE[4])
        four = TritonGroups(Grouped(codes, scales, zeros, group, 4), None, BF16, device.device, False)
        weight = torch.randn(outputs, inputs, device=device.device).to(BF16)
        eight, fixed = TritonInt8(weight, None, device.device), TritonPlain(weight, None, True)
        for rows in (2,) if device.tiny else (1, 8, 64, 2048):
            x = torch.randn(rows, inputs, device=device.device).to(BF16)
            around, operations = 2.0 * (x.numel() + rows * outputs), 2.0 * rows * weight.numel()
            told = f"product {name}, {rows} rows"
            yield f"{told}, W4A16", _by(four, x), four.nbytes + around, operations
            yield f"{told}, W8A8", _by(eight, quantize(x)), weight.numel() + around, operations
            yield f"{told}, fixed order", _by(fixed, x), 2.0 * weight.numel() + around, operations


def _by(product: TritonGroups | TritonInt8 | TritonPlain, x: Any) -> Callable[[], object]:
    return lambda: product.multiply(x)
