"""How many times kernels would be compiled for batches of all sizes: `python -m tests.model.cuda.variants`.

Triton's own function tells what a launch's kernel is specialized for, without a device.  Launches come from
the wrappers, for batches that differ in what differs from step to step: rows, widths of tables, contexts, and
where arrays begin in a step's one copy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from baton.model.cpu.sampling import SlotParameters
from baton.model.cuda.attending import attend_launches
from baton.model.cuda.kv_write import Turns, store_launch
from baton.model.cuda.launch import Launch
from baton.model.cuda.products import layout
from baton.model.cuda.products.int8 import int8_launch
from baton.model.cuda.products.pairs import Sorted, sort_kernel, sort_launch
from baton.model.cuda.products.tiles import product_launches
from baton.model.cuda.rows import add_norm_launch, gated_mul_launch, row_sums_launch
from baton.model.cuda.sampling import Edits, Wishes, edit_launch, sample_launches
from baton.model.weights.quantized import Quantized
from tests.model.cuda.compiled import BF16, pages, weight_of

ROWS = (1, 2, 3, 4, 16, 17, 32, 48)
WIDTHS = (1, 3, 16)
LONGEST = (100, 300, 4096, 5000)
VOCAB = 4096


def numbers(count: int, begin: int) -> torch.Tensor:
    """int32 [count] that begin at word `begin` of an array."""
    return torch.zeros(begin + count, dtype=torch.int32)[begin:]


def launches() -> Iterator[Launch]:
    wishes = Wishes.of(SlotParameters.of_greedy(8, VOCAB), torch.device("cpu"))
    kept, weight = pages(2, 64, BF16), weight_of(layout.INT4, 64, 1024, 256)
    table, norm = torch.zeros(64, 32), torch.zeros(64, dtype=BF16)
    codes, scales = torch.zeros(256, 512, dtype=torch.int8), torch.zeros(256)
    for rows in ROWS:
        q, k, v = (torch.zeros(rows, heads, 64, dtype=BF16) for heads in (8, 2, 2))
        items, out = torch.zeros(rows, 4, dtype=torch.int32), torch.zeros(rows, 512, dtype=BF16)
        for width in WIDTHS:
            tables = torch.zeros(rows, width, dtype=torch.int32)
            for longest in (None, *LONGEST):
                yield from attend_launches(q, kept, items, tables, 0.1, longest, None, None, None, out)
        places = torch.zeros(rows, dtype=torch.int64)
        turns = Turns(table, table, norm, norm, 1e-6)
        yield store_launch(k, v, kept, places, q, torch.zeros_like(q), numbers(rows, rows % 4), turns)
        logits, tokens = torch.zeros(rows, VOCAB), torch.zeros(rows, dtype=torch.int32)
        yield from sample_launches(logits, numbers(rows, rows % 3), numbers(rows, rows), wishes, tokens)
        one, few, each = (torch.zeros(rows, dtype=kind) for kind in (torch.int32, torch.uint8, torch.float32))
        yield edit_launch(torch.zeros(rows, VOCAB), Edits(one, one, each, few, few, each, each, each, each))
        x, wide = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 512, dtype=BF16)
        for fixed in (False, True):
            yield from product_launches(x, weight, torch.zeros(rows, 256, dtype=BF16), None, fixed)
        quantized = Quantized(torch.zeros(rows, 512, dtype=torch.uint8), each)
        yield int8_launch(quantized, codes, scales, None, torch.zeros(rows, 256, dtype=BF16))
        ids, order = torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows * 8, dtype=torch.int32)
        tiles = torch.zeros(rows * 8 // 16 + 64, 3, dtype=torch.int32)
        yield sort_launch(ids, None, Sorted(order, order, tiles), torch.zeros(64, dtype=torch.int64), 16)
        yield add_norm_launch(x, x, torch.zeros(1024, dtype=BF16), x, 1e-6, 0.0, 1.0)
        yield gated_mul_launch(x, wide, "silu")
        yield row_sums_launch(torch.zeros(rows, 64), torch.zeros(rows, 1))


def main() -> None:
    """Prints for each kernel, by its constants, how many variants there are; as JSON."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    found: dict[str, set[str]] = defaultdict(set)
    for launch in launches():
        kernel: Any = launch.kernel
        _, special, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(
            **launch.arguments
        )
        constants = [launch.arguments[param.name] for param in kernel.params if param.is_constexpr]
        found[f"{kernel.__name__} {constants} {launch.warps}"].add(str(special))
    widths = {kernel for kernel in found if kernel.startswith(sort_kernel.__name__)}
    assert len(widths) == 2, "few pairs and many"
    print(json.dumps({name: len(variants) for name, variants in found.items()}))


if __name__ == "__main__":
    main()
