"""The CPU kernels, each beside its limit, which is measured in the same process and in turns with it.

    python benchmarks/cpu_kernels.py [--only attention …] [--builds avx512bf16 numba …] [--quick]
                                     [--cpu-time] [--out FILE]

* attention: decode over the paged pool in GB/s of keys and values read, beside what a plain read of memory
  gives; prefill of a chunk in GFLOP/s (4 * head_dim for each pair of query and visible key), beside PyTorch's
  matrix product.  Builds: each instruction set of the C++ library, numba, and plain PyTorch; each with keys
  and values in bf16 and in eight bits ("kv int8"), whose speed beside bf16's is the last column.
* products: those of a layer of ERNIE-4.5-0.3B's shape, weights cold, and its output head, beside the larger
  of two limits: the bytes of the weights at the rate of a plain read, and the operations at the rate that
  the kernel of this kind (of int8, for weights in groups) reaches with 1,024 rows and a weight that stays in
  the cache.  "torch": oneDNN, packed weights.  Kinds: fp32, bf16, int8, and 4, 6 and 8 bits in groups of
  inputs.
* sampling: a step of 64 rows of 100,000 logits, beside one plain read of them.

A time is the median of several rounds; a round runs every build once, then its limit.  "of limit" is the
median of the ratios within rounds, since neighbours on the memory bus come and go.  On a machine that has
other work, `--cpu-time` gives the CPU time of one thread instead.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from _common import Table, machine, print_machine, write_json
from baton.model.attention import AttentionShape, AttentionStep, CpuAttention, TorchPieces
from baton.model.attention.base import AttentionBackend
from baton.model.attention.cpu_backend import kernel_shape
from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.linear import NativeInt8Product, NativeProduct, serves
from baton.model.cpu.native_kernels import NativeKernels
from baton.model.cpu.sampling import native_kernel
from baton.model.layers.int8 import Int8Product, why_not_onednn_int8
from baton.model.layers.packed import OneDnnProduct
from baton.model.ops.fused import Activations, FusedOps
from baton.model.sampling.sampler import Sampler
from baton.model.weights.group_rows import quantize_in_blocks
from baton.model.weights.grouped import Grouped
from baton.model.weights.quantized import quantize_activations
from baton.protocol.params.sampling import Sampling, Stopping

SHAPES = {"ernie-0.3b": (16, 2, 128), "qwen3-0.6b": (16, 8, 128)}
"""Query heads, KV heads, head_dim."""
LIMIT = "limit"
KV_INT8 = " kv int8"
"""Behind a build's name."""

Work = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Options:
    builds: list[str]
    quick: bool
    clock: Clock
    kinds: list[str]

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 15


def rounds(works: dict[str, Work], number: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each work in each round; one round more, the first, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for index in range(number + 1):
        first = index % len(works)  # who comes after whom matters: caches
        for name in [*works][first:] + [*works][:first]:
            begin = clock()
            works[name]()
            if index:
                times[name].append(clock() - begin)
    return times


def read_limit(megabytes: int = 512) -> tuple[Work, float]:
    """(a plain read of memory by all threads, its bytes)"""
    data = torch.ones(megabytes << 18, dtype=torch.float32)
    return lambda: data.sum(), float(data.nbytes)


def product_limit(dtype: torch.dtype) -> tuple[Work, float]:
    """(a matrix product, its floating-point operations)"""
    left, right = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    packed = torch.ops.mkldnn._reorder_linear_weight(right, 1024)
    return (
        lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""),
        2.0 * 1024**3,
    )


def backends(shape: AttentionShape, builds: list[str]) -> dict[str, AttentionBackend]:
    made: dict[str, AttentionBackend] = {}
    for build in builds:
        if build == "torch":
            made[build] = TorchPieces(shape)
        elif build == "numba":
            from baton.model.cpu.numba.kernels import NumbaKernels

            made[build] = CpuAttention(shape, NumbaKernels(kernel_shape(shape)))
        else:
            made[build] = CpuAttention(shape, NativeKernels(kernel_shape(shape), load(build)))
    return made


def attention_case(
    model: str, block_size: int, starts: list[int], counts: list[int], options: Options
) -> tuple[dict[str, list[float]], dict[str, float], float]:
    """(seconds of each build, a layer, and of the limit; bytes of KV that each reads; operations)"""
    heads, kv_heads, dim = SHAPES[model]
    dtype = torch.bfloat16
    ends = np.add(starts, counts)
    heads_read = float(ends.sum()) * 2 * kv_heads
    pairs = sum((start + 1 + start + count) * count / 2 for start, count in zip(starts, counts, strict=True))
    # Decode: as many layers, one after the other, as it takes to find none of them in a cache.
    layers = min(64, 1 + int(128e6 / (heads_read * dim))) if counts[0] == 1 else 1
    device = torch.device("cpu")
    shape = AttentionShape(
        layers, heads, kv_heads, dim, block_size, dim**-0.5, frozenset({None}), dtype, device
    )
    blocks = -(-ends // block_size)
    tables = np.zeros((len(starts), int(blocks.max())), np.int32)
    order = np.random.default_rng(0).permutation(int(blocks.sum()))
    for row, begin in enumerate(np.cumsum(blocks) - blocks):
        tables[row, : blocks[row]] = order[begin : begin + blocks[row]]
    decodes = sum(count == 1 for count in counts)
    step = AttentionStep(np.array(starts, np.int32), np.array(counts, np.int32), tables, decodes)
    queries = torch.randn(sum(counts), heads, dim).to(dtype)
    works: dict[str, Work] = {}
    read: dict[str, float] = {}
    for kind, sizes in (("", shape), (KV_INT8, replace(shape, kv_int8=True))):
        pool: torch.Tensor | None = None
        for name, backend in backends(sizes, options.builds).items():
            size = (len(order), layers, 2, kv_heads, *backend.tile_shape)
            pool = filled(size, backend.pool_dtype, dim) if pool is None else pool
            backend.bind(pool.view(size))
            works[name + kind] = _all_layers(backend, queries, backend.prepare(step), layers)
            read[name + kind] = heads_read * (dim + 4 if kind else dim * dtype.itemsize)
    limit, _ = read_limit() if decodes == len(counts) else product_limit(dtype)
    times = rounds(works | {LIMIT: limit}, options.rounds, options.clock)
    for name in works:
        times[name] = [seconds / layers for seconds in times[name]]
    return times, read, 4.0 * dim * heads * pairs


def filled(size: tuple[int, ...], dtype: torch.dtype, dim: int) -> torch.Tensor:
    """A pool of random numbers; of bytes every float32 is a scale of about 1/127."""
    if dtype != torch.uint8:
        return torch.empty(size, dtype=dtype).normal_()
    pool = torch.randint(0x3C00, 0x3C20, (math.prod(size) // 4,), dtype=torch.int32).mul_(1 << 16)
    pool += torch.randint(1 << 16, pool.shape, dtype=torch.int32)
    return pool.view(torch.uint8).view(size)


def _all_layers(backend: AttentionBackend, queries: torch.Tensor, plan: Any, layers: int) -> Work:
    def work() -> None:
        for layer in range(layers):
            backend.attend(layer, queries, None, plan)

    return work


def attention(options: Options) -> list[dict[str, Any]]:
    """Decode and prefill of both shapes."""
    results = []
    read_bytes, product_work = read_limit(1)[1] * 512, product_limit(torch.bfloat16)[1]
    decode = Table(
        "attention, decode: GB/s of KV", ["case", "build", "us", "GB/s", "limit", "of limit", "of bf16"]
    )
    prefill = Table(
        "attention, prefill: GFLOP/s", ["case", "build", "us", "GFLOP/s", "limit", "of limit", "of bf16"]
    )
    cases = [(64, [1023] * 64, [1] * 64), (64, [2047] * 16, [1] * 16), (64, [0], [2048])]
    if not options.quick:
        cases += [(64, [1023], [1]), (64, [2047], [1]), (64, [127] * 64, [1] * 64)]
        cases += [(size, [1023] * 16, [1] * 16) for size in (64, 32, 16)]
        cases += [(64, [0], [512]), (64, [1536], [512])]
    for model in SHAPES:
        for block_size, starts, counts in cases:
            times, read, work = attention_case(model, block_size, starts, counts, options)
            is_decode = counts[0] == 1
            name = f"{model} {len(starts)} x {starts[0]}+{counts[0]}, blocks of {block_size}"
            for build, seconds in times.items():
                if build == LIMIT:
                    continue
                amount, full = (read[build], read_bytes) if is_decode else (work, product_work)
                rate = amount / statistics.median(seconds)
                limit = full / statistics.median(times[LIMIT])
                ratio = statistics.median(
                    (amount / mine) / (full / best) for mine, best in zip(seconds, times[LIMIT], strict=True)
                )
                row = [f"{statistics.median(seconds) * 1e6:.0f}", f"{rate / 1e9:.1f}", f"{limit / 1e9:.1f}"]
                plain = times[build.removesuffix(KV_INT8)]
                faster = statistics.median(one / mine for mine, one in zip(seconds, plain, strict=True))
                (decode if is_decode else prefill).row(name, build, *row, f"{ratio:.2f}", f"{faster:.2f}")
                results.append(
                    {
                        "case": name,
                        "build": build,
                        "seconds": seconds,
                        "rate": rate,
                        "limit": limit,
                        "of_limit": ratio,
                        "of_bf16": faster,
                    }
                )
    decode.print()
    prefill.print()
    return results


SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}


def sampling(options: Options) -> list[dict[str, Any]]:
    """64 rows of 100,000 logits, flat (the worst case of top-p) and peaked as a model's are."""
    rows, vocab = 64, 100_000
    table = Table(f"sampling, {rows} x {vocab:,}: milliseconds", ["case", "build", "ms", "limit", "of limit"])
    results = []
    slots, positions = np.arange(rows, dtype=np.int32), np.full(rows, 9, np.int32)
    for spread in (3.0,) if options.quick else (3.0, 9.0):
        logits = torch.randn(rows, vocab) * spread
        for name, wish in SAMPLINGS.items():
            works: dict[str, Work] = {}
            for build in options.builds:
                if build == "numba":
                    continue  # has no build of this kernel
                kernel = None if build == "torch" else native_kernel(load(build))
                sampler = Sampler(vocab, rows, kernel)
                for slot in range(rows):
                    wanted = Sampling(seed=slot, **wish)  # type: ignore[arg-type]
                    sampler.admit(slot, np.zeros(1, np.int32), 1, wanted, Stopping(9))
                works[build] = partial(sampler.sample, logits, slots, positions)
            times = rounds(works | {LIMIT: logits.sum}, options.rounds, options.clock)
            best = statistics.median(times[LIMIT])
            case = f"{name}, spread {spread:g}"
            for build in works:
                seconds = statistics.median(times[build])
                table.row(case, build, f"{seconds * 1e3:.2f}", f"{best * 1e3:.2f}", f"{best / seconds:.3f}")
                results.append({"case": case, "build": build, "seconds": times[build], "limit": times[LIMIT]})
    table.print()
    return results


PRODUCTS: dict[str, list[tuple[int, int]]] = {
    "layer": [(2560, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "head": [(103_424, 1024)],
}
"""Outputs and inputs: qkv, o, gate + up, down; the output head."""


KINDS = ("fp32", "bf16", "int8", "int4 g128", "int4 g64", "int4 g32", "int6 g128", "int8 g128", "int8 g64")
"""Of weights; g: inputs a group, with zero points."""


def product_of(build: str, weight: torch.Tensor, kind: str) -> Callable[[Activations], object] | None:
    """None where a build has no such kernel."""
    if build == "torch":
        if kind == "int8" and not why_not_onednn_int8():
            return Int8Product(weight, None, FusedOps(True)).multiply
        return OneDnnProduct(weight, None).multiply if kind in ("fp32", "bf16") else None
    if build == "numba":
        return None
    if " g" in kind:
        return NativeGroupedProduct(load(build), in_groups(weight, kind), None, weight.dtype).multiply
    if not serves(load(build), torch.int8 if kind == "int8" else weight.dtype):
        return None
    return (NativeInt8Product if kind == "int8" else NativeProduct)(load(build), weight, None).multiply


def in_groups(weight: torch.Tensor, kind: str) -> Grouped:
    """Of this shape; values do not matter here."""
    bits, group = int(kind[3]), int(kind.partition(" g")[2])
    shape = (len(weight), weight.shape[1] // group)
    if bits == 4:  # as --quantization int4 has them: in eighths, in a word with a scale of 6 bits
        scales, zeros = torch.randint(32, 64, shape) / 64, torch.randint(121, shape) / 8
    else:
        scales, zeros = torch.rand(shape).half().float(), torch.randint(1 << bits, shape).float()
    return Grouped(torch.randint(1 << bits, weight.shape, dtype=torch.uint8), scales, zeros, group, bits)


def rows_for(kind: str, x: torch.Tensor) -> Activations:
    return quantize_in_blocks(x) if " g" in kind else quantize_activations(x) if kind == "int8" else x


def weight_bytes_of(kind: str, n: int, k: int) -> float:
    if " g" not in kind:
        return n * k * {"fp32": 4, "bf16": 2, "int8": 1}[kind]
    bits = int(kind[3])  # of 4 bits, a scale and its zero take 2 bytes, else 2 and 1
    return n * k * (bits / 8 + (2 if bits == 4 else 3) / int(kind.partition(" g")[2]))


def product_case(
    shapes: list[tuple[int, int]], tokens: int, kind: str, options: Options
) -> tuple[dict[str, list[float]], list[float]]:
    """(seconds of each build for all shapes, least seconds by the limits), in each round"""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    weight_bytes = sum(weight_bytes_of(kind, n, k) for n, k in shapes)
    copies = 1 + int(128e6 / weight_bytes)  # one after the other, to find none of them in a cache
    inputs = {k: rows_for(kind, torch.randn(tokens, k).to(dtype)) for k in {k for _, k in shapes}}
    works: dict[str, Work] = {}
    peak: Work | None = None
    best = "int8" if " g" in kind else kind
    many = rows_for(best, torch.randn(1024, 1024).to(dtype))
    for build in options.builds:
        made = [
            (product_of(build, torch.randn(n, k).to(dtype), kind), inputs[k])
            for _ in range(copies)
            for n, k in shapes
        ]
        calls: list[Work] = [partial(product, x) for product, x in made if product is not None]
        if calls:
            works[build] = partial(_each, calls)
            cached = product_of(build, torch.randn(1024, 1024).to(dtype), best)
            peak = peak or (None if cached is None else partial(cached, many))
    if peak is None:
        return {}, []
    read, read_bytes = read_limit()
    times = rounds(works | {"read": read, "peak": peak}, options.rounds, options.clock)
    operations = 2.0 * tokens * sum(n * k for n, k in shapes)
    limit = [
        max(weight_bytes / read_bytes * reading, operations / (2.0 * 1024**3) * computing)
        for reading, computing in zip(times.pop("read"), times.pop("peak"), strict=True)
    ]
    return {build: [seconds / copies for seconds in found] for build, found in times.items()}, limit


def _each(calls: list[Work]) -> None:
    for call in calls:
        call()


def products(options: Options) -> list[dict[str, Any]]:
    """Few and many rows, of each kind of weights."""
    table = Table("products: microseconds", ["case", "build", "us", "limit", "of limit"])
    results = []
    for part, shapes in PRODUCTS.items():
        for kind in options.kinds:
            for tokens in (1, 16, 64) if options.quick or part == "head" else (1, 4, 16, 64, 256, 2048):
                times, limit = product_case(shapes, tokens, kind, options)
                case = f"{part}, {kind}, {tokens} rows"
                for build, seconds in times.items():
                    ratio = statistics.median(
                        least / mine for least, mine in zip(limit, seconds, strict=True)
                    )
                    took, least = statistics.median(seconds), statistics.median(limit)
                    table.row(case, build, f"{took * 1e6:,.0f}", f"{least * 1e6:,.0f}", f"{ratio:.2f}")
                    results.append({"case": case, "build": build, "seconds": seconds, "of_limit": ratio})
    table.print()
    return results


SECTIONS: dict[str, Callable[[Options], list[dict[str, Any]]]] = {
    "attention": attention,
    "products": products,
    "sampling": sampling,
}
"""Each prints its tables and returns what goes into the JSON."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    known = [name for name in instruction_sets() if name != "plain"]
    parser.add_argument(
        "--builds", nargs="*", default=[*known, "numba", "torch"], help=f"of {known}, numba, torch"
    )
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="of products' weights")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and cases")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread")
    parser.add_argument("--out", help="a JSON file for the result")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        torch.set_num_threads(1)
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    options = Options(arguments.builds, arguments.quick, clock, arguments.kinds)
    facts = machine() | {"threads": torch.get_num_threads(), "torch": torch.__version__}
    print_machine(facts)
    with torch.inference_mode():
        found = {name: SECTIONS[name](options) for name in arguments.only}
    write_json(arguments.out, {"machine": facts, **found})


if __name__ == "__main__":
    main()
