"""Compiles kernels for devices that are not there, and says what they need of one.

`python -m tests.model.cuda.compiled` prints the table of docs/cuda.md; with `--json` what the test reads.
It needs Triton and no device: ptxas is in its wheel, and so is cuobjdump, which says the registers and the
stack of what it made.  The launches are made by the wrappers, so arguments, constants and warps are those
of a step.

Triton specializes a kernel by whether a pointer or an integer is a multiple of 16 and whether an integer is
1, but for arguments of which the kernel says that it must not; that is done here by the same rules.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.model.attention.kv_int8 import row_bytes
from baton.model.cpu.sampling import SlotParameters
from baton.model.cuda.attending import Pages, attend_launches
from baton.model.cuda.kv_write import Turns, store_launch
from baton.model.cuda.launch import Launch
from baton.model.cuda.products import layout
from baton.model.cuda.products.int8 import int8_launch, quantize_launch
from baton.model.cuda.products.pairs import Sorted, combine_launch, sort_launch
from baton.model.cuda.products.tiles import expert_launch, expert_tile, product_launches
from baton.model.cuda.rows import add_norm_launch, gated_mul_launch, row_sums_launch
from baton.model.cuda.sampling import Edits, Wishes, edit_launch, sample_launches
from baton.model.ops.routing import Routed
from baton.model.weights.quantized import Quantized

TARGETS = (80, 90, 100)
"""A100, H100 and H200, B200."""
LAYERS, BLOCKS, TOKENS = 2, 5, 4
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Used(NamedTuple):
    """Of one kernel on one device."""

    kernel: str
    target: int
    warps: int
    registers: int
    shared: int
    """bytes"""
    spilled: int
    """bytes of the stack a thread: registers that there was no room for"""
    fused: int
    """multiply-adds of float32 that round once"""
    rounds_fused: int
    """of these, such that round to an integer a product that has not been rounded"""


def pages(kv_heads: int, dim: int, dtype: torch.dtype, block: int = 16) -> Pages:
    row = row_bytes(dim) if dtype == torch.uint8 else dim
    return Pages.of(torch.zeros(BLOCKS, LAYERS, 2, kv_heads, block, row, dtype=dtype), 1, dim)


def attending(
    heads: int,
    kv_heads: int,
    dim: int,
    decode: bool,
    dtype: torch.dtype = BF16,
    kept: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> list[Launch]:
    return attend_launches(
        torch.zeros(TOKENS, heads, dim, dtype=dtype),
        pages(kv_heads, dim, kept or dtype),
        torch.zeros(TOKENS, 4, dtype=torch.int32),
        torch.zeros(TOKENS, 32, dtype=torch.int32),
        dim**-0.5,
        32768 if decode else None,
        window,
        soft_cap,
        torch.zeros(heads) if sinks else None,
        torch.zeros(TOKENS, heads * dim, dtype=dtype),
    )


def storing(heads: int, kv_heads: int, dim: int, kept: torch.dtype, norms: bool) -> Launch:
    q, k, v = (torch.zeros(TOKENS, n, dim, dtype=BF16) for n in (heads, kv_heads, kv_heads))
    weight = torch.zeros(dim, dtype=BF16) if norms else None
    turns = Turns(torch.zeros(64, dim // 2), torch.zeros(64, dim // 2), weight, weight, 1e-6)
    places, positions = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, dtype=torch.int32)
    return store_launch(k, v, pages(kv_heads, dim, kept), places, q, torch.zeros_like(q), positions, turns)


def storing_alone(kv_heads: int, dim: int, kept: torch.dtype) -> Launch:
    """As attention alone is tested: no model does so on a device."""
    k, v = (torch.zeros(TOKENS, kv_heads, dim, dtype=BF16) for _ in range(2))
    places = torch.zeros(TOKENS, dtype=torch.int64)
    return store_launch(k, v, pages(kv_heads, dim, kept), places, None, None, None, None)


def launches() -> Iterator[tuple[str, Launch]]:
    """By names for people: what models of each shape launch."""
    decode, merge = attending(32, 8, 128, decode=True)
    yield "decode, 4 heads of 128 a KV head", decode
    yield "decode, its merge", merge
    yield "chunk, 4 heads of 128 a KV head", attending(32, 8, 128, decode=False)[0]
    yield "decode, KV in 8 bits", attending(32, 8, 128, decode=True, kept=torch.uint8)[0]
    yield "chunk, KV in 8 bits", attending(32, 8, 128, decode=False, kept=torch.uint8)[0]
    special = dict(window=4096, soft_cap=50.0)
    yield "decode, heads of 256, window, soft-cap", attending(16, 8, 256, decode=True, **special)[0]
    yield "chunk, heads of 256, window, soft-cap", attending(16, 8, 256, decode=False, **special)[0]
    yield "chunk, heads of 64, window, sinks", attending(64, 8, 64, False, window=128, sinks=True)[0]
    yield "decode, float32", attending(8, 2, 128, decode=True, dtype=F32)[0]
    yield "chunk, float32", attending(8, 2, 128, decode=False, dtype=F32)[0]
    yield "chunk, float32, heads of 256", attending(8, 2, 256, decode=False, dtype=F32)[0]
    for name, one in (("decode", True), ("chunk", False)):
        yield f"{name}, float16", attending(32, 8, 128, one, F16)[0]
        yield f"{name}, float32, KV in 8 bits", attending(8, 2, 128, one, F32, torch.uint8)[0]
    yield "chunk, 20 heads a KV head", attending(20, 1, 128, decode=False)[0]
    yield (
        "chunk, heads of 128, window, soft-cap, sinks",
        attending(32, 8, 128, False, window=1024, soft_cap=50.0, sinks=True)[0],
    )
    yield "rotate and store, head norms", storing(32, 8, 128, BF16, norms=True)
    yield "rotate and store, KV in 8 bits", storing(32, 8, 128, torch.uint8, norms=False)
    yield "store", storing_alone(8, 128, BF16)
    yield "store, KV in 8 bits", storing_alone(8, 128, torch.uint8)
    for size, dtype, name in (
        (4096, BF16, "4096"),
        (16384, BF16, "16384"),
        (16384, F32, "float32, 16384"),
        (65536, BF16, "65536"),
        (65536, F32, "float32, 65536"),
    ):
        x, weight = torch.zeros(TOKENS, size, dtype=dtype), torch.zeros(size, dtype=dtype)
        yield f"add and norm, {name}", add_norm_launch(x, x, weight, x, 1e-6, 0.0, 1.0)
    yield "sums of rows, 128", row_sums_launch(torch.zeros(TOKENS, 128), torch.zeros(TOKENS, 1))
    gate, out = torch.zeros(TOKENS, 2 * 14336, dtype=BF16), torch.zeros(TOKENS, 14336, dtype=BF16)
    for name, activation in (("SwiGLU", "silu"), ("GELU", "gelu_tanh"), ("gpt-oss's gate", "swiglu_oai")):
        yield name, gated_mul_launch(gate, out, activation)

    yield from sampling()
    yield from products()


def sampling() -> Iterator[tuple[str, Launch]]:
    """Of a vocabulary of 151,936."""
    vocab, numbers = 151936, torch.zeros(TOKENS, dtype=torch.int32)
    wishes = Wishes.of(SlotParameters.of_greedy(8, vocab), torch.device("cpu"))
    logits = torch.zeros(TOKENS, vocab)
    names = "sampling: largest of chunks", "sampling: masses of chunks", "sampling: choice"
    yield from zip(names, sample_launches(logits, numbers, numbers, wishes, numbers), strict=True)
    floats, bytes_ = torch.zeros(TOKENS), torch.zeros(TOKENS, dtype=torch.uint8)
    edits = Edits(numbers, numbers, floats, bytes_, bytes_, floats, floats, floats, floats)
    yield "sampling: edits", edit_launch(torch.zeros(TOKENS, vocab), edits)


def weight_of(
    kind: int, group: int, inputs: int = 4096, outputs: int = 4096, experts: int = 1
) -> layout.Laid:
    """With zero points in eighths, but for MXFP4."""
    width = group if kind == layout.INT8 else group // 2
    places = (experts, inputs // group, outputs)
    codes = torch.zeros(*places, width, dtype=torch.int8 if kind == layout.INT8 else torch.uint8)
    scales, zeros = torch.zeros(places, dtype=torch.float16), torch.zeros(places, dtype=torch.int8)
    there = None if kind == layout.E2M1 else zeros
    return layout.Laid(kind, outputs, inputs, codes, group, scales, there, 0.125)


def zeros_of(dtype: torch.dtype) -> Tensor:
    return torch.zeros(4096, 4096, dtype=dtype)


def multiplying(
    weight: layout.Laid,
    rows: int,
    fixed: bool = False,
    dtype: torch.dtype = BF16,
    result: torch.dtype | None = None,
) -> list[Launch]:
    x = torch.zeros(rows, weight.inputs, dtype=dtype)
    return product_launches(x, weight, torch.zeros(rows, weight.outputs, dtype=result or dtype), None, fixed)


def products() -> Iterator[tuple[str, Launch]]:
    """Of 4,096 by 4,096; few rows in parts, and many."""
    few, many = 8, 4096
    weights = {
        "4 bits, groups of 32": weight_of(layout.INT4, 32),
        "4 bits, groups of 64": weight_of(layout.INT4, 64),
        "4 bits, groups of 128": weight_of(layout.INT4, 128),
        "8 bits, groups of 128": weight_of(layout.INT8, 128),
        "MXFP4": weight_of(layout.E2M1, 32, 2880, 2880),
    }
    for name, weight in weights.items():
        yield f"product, {name}, few rows", multiplying(weight, few)[0]
        yield f"product, {name}, many rows", multiplying(weight, many)[0]
    yield "product, its merge", multiplying(weight, few)[1]
    weight = weights["4 bits, groups of 64"]
    yield "product, 4 bits, float32", multiplying(weight, many, dtype=F32)[0]
    for bits in ("4 bits", "8 bits"):
        weight = weights[f"{bits}, groups of 128"]
        yield f"product, {bits}, groups of 128, float32", multiplying(weight, many, dtype=F32)[0]
    for name, rows in (("few", few), ("many", many)):
        weight = weights["4 bits, groups of 128"]
        yield f"product, 4 bits, groups of 128, float16, {name} rows", multiplying(weight, rows, dtype=F16)[0]
    plain = layout.plain(zeros_of(BF16))
    fixed = {"bf16": plain, **{kind: weights[kind] for kind in ("4 bits, groups of 32", "MXFP4")}}
    for kind, weight in fixed.items():
        yield f"deterministic product, {kind}, few rows", multiplying(weight, few, fixed=True)[0]
        yield f"deterministic product, {kind}, many rows", multiplying(weight, many, fixed=True)[0]
    yield "deterministic product, float32", multiplying(layout.plain(zeros_of(F32)), few, True, F32)[0]
    for name, rows in (("few", few), ("many", many)):
        yield (
            f"head, 8 bits, {name} rows",
            multiplying(weights["8 bits, groups of 128"], rows, result=F32)[-1],
        )
        yield f"deterministic head, {name} rows", multiplying(plain, rows, True, result=F32)[-1]
    x, values = torch.zeros(many, 4096, dtype=BF16), torch.zeros(many, 4096, dtype=torch.uint8)
    codes, scales = torch.zeros(4096, 4096, dtype=torch.int8), torch.zeros(4096)
    for name, rows in (("few", few), ("many", many)):
        bytes_ = Quantized(values[:rows], scales[:rows])
        yield f"bytes by bytes, {name} rows", int8_launch(bytes_, codes, scales, None, x[:rows])
    yield "activations to bytes", quantize_launch(x, values, scales)
    for size in (28672, 53248):
        wide, bytes_wide = (torch.zeros(TOKENS, size, dtype=dtype) for dtype in (BF16, torch.uint8))
        yield f"activations to bytes, {size}", quantize_launch(wide, bytes_wide, torch.zeros(TOKENS))
    yield from mixing()


def mixing() -> Iterator[tuple[str, Launch]]:
    """Of 128 experts, 8 a token, 2,048 by 768: few tokens and many."""
    hidden, inner, experts, chosen = 2048, 768, 128, 8
    weights = {
        "": layout.plain(torch.zeros(2 * inner, hidden, dtype=BF16)),
        ", 4 bits": weight_of(layout.INT4, 64, hidden, 2 * inner),
        ", 8 bits": weight_of(layout.INT8, 64, hidden, 2 * inner),
        ", MXFP4": weight_of(layout.E2M1, 32, 2880, 5760),
    }
    for tokens, name in ((4, "few"), (4096, "many")):
        ids = torch.zeros(tokens, chosen, dtype=torch.int32)
        order = torch.zeros(ids.numel(), dtype=torch.int32)
        for fixed, kind, weight in ((fixed, *one) for fixed in (False, True) for one in weights.items()):
            if fixed and name == "few":  # (as of many: one tile)
                continue
            x = torch.zeros(tokens, weight.inputs, dtype=BF16)
            out = torch.zeros(ids.numel(), weight.outputs, dtype=BF16)
            codes = weight.codes.expand(experts, *weight.codes.shape[1:])
            tile = expert_tile(replace(weight, codes=codes), BF16, ids.numel(), fixed)
            tiles = torch.zeros(ids.numel() // tile.rows + experts, 3, dtype=torch.int32)
            called = f"deterministic experts{kind}" if fixed else f"experts{kind}, {name} tokens"
            yield called, expert_launch(x, weight, out, tiles, tile, order, chosen)
    x = torch.zeros(tokens, hidden, dtype=BF16)
    counts = torch.zeros(experts, dtype=torch.int64)
    yield "experts: pairs sorted", sort_launch(ids, None, Sorted(order, order, tiles), counts, tile.rows)
    found, routed = torch.zeros(ids.numel(), hidden, dtype=BF16), Routed(ids, torch.zeros(tokens, chosen))
    yield "experts: results added up", combine_launch(found, order, routed, x, torch.zeros_like(x))


_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_for(launch: Launch, target: int) -> Any:
    """As Triton would for a device of this kind at the first launch."""
    names = launch.kernel.arg_names
    constants = {param.name for param in launch.kernel.params if param.is_constexpr}
    signature: dict[str, str] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    assert set(names) == set(launch.arguments), set(names) ^ set(launch.arguments)
    for index, (name, param) in enumerate(zip(names, launch.kernel.params, strict=True)):
        value, special = launch.arguments[name], not param.do_not_specialize
        if name in constants or value is None or (isinstance(value, int) and value == 1 and special):
            signature[name] = "constexpr"
            values[(index,)] = value
        elif isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
            if not param.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and special:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float)
            signature[name] = "fp32"
    source = ASTSource(launch.kernel, signature, values, attributes)
    options = {
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        "enable_fp_fusion": launch.fused,
    }
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def used(name: str, launch: Launch, target: int) -> Used:
    found = compile_for(launch, target)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.cubin"
        code.write_bytes(found.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(code)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", said).group(1)) for what in ("REG", "STACK"))
    added = re.findall(r"fma\.rn\.f32 [^;]*, (\S+);", found.asm["ptx"])
    rounds = added.count("0f4B400000")  # 1.5 * 2^23
    return Used(name, target, launch.warps, registers, found.metadata.shared, stack, len(added), rounds)


def table(rows: list[Used]) -> str:
    """In Markdown: a row a kernel, registers and shared memory for each target."""
    head = ["kernel", "warps", *(f"sm_{target}" for target in TARGETS)]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name in dict.fromkeys(row.kernel for row in rows):
        of = [row for row in rows if row.kernel == name]
        cells = [f"{row.registers} registers, {row.shared} B" for row in of]
        cells = [
            cell + (f", {row.spilled} B spilled" if row.spilled else "")
            for cell, row in zip(cells, of, strict=True)
        ]
        lines.append(f"| {name} | {of[0].warps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    rows = [used(name, launch, target) for name, launch in launches() for target in TARGETS]
    if "--json" in sys.argv:
        print(json.dumps({"table": table(rows), "rows": [row._asdict() for row in rows]}))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
