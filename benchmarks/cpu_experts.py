"""The experts of a mixture's layer and its router, each beside its limit, measured in turns with it.

    python benchmarks/cpu_experts.py [--kinds bf16 int8 'int4 g64' …] [--tokens 1 16 64 2048] [--quick]
                                     [--experts 64 --chosen 6 --hidden 2560 --size 1536]
                                     [--cpu-time] [--out FILE]

* experts: from activations that are quantized already to the weighted sum.  Tokens choose experts at random,
  anew in each call, and all experts together are larger than the caches, so weights are cold.  The limit is
  the larger of two: the bytes of the chosen experts at the rate of a plain read, and the operations at the
  rate that the kernel of this kind (of int8, for weights in groups) reaches with 1,024 rows and a weight that
  stays in the cache.
* router: [tokens, hidden] in bfloat16 to experts and weights, in float32.  "of experts": its time beside
  theirs.

The shape is a layer's of ERNIE-4.5-21B-A3B.  As in `cpu_kernels.py`, a time is the median of several rounds,
"of limit" the median of the ratios within rounds, and `--cpu-time` the CPU time of one thread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from functools import partial
from typing import Any

import torch

from _common import Table, machine, print_machine, write_json
from baton.model.cpu.experts import NativeExperts, NativeRouter, Routed
from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import Native, native
from baton.model.cpu.linear import NativeInt8Product, NativeProduct
from baton.model.cpu.products import NativeWeight
from baton.model.description.model import MlpConfig, MoeConfig
from cpu_kernels import (
    KINDS,
    Clock,
    Work,
    in_groups,
    product_of,
    read_limit,
    rounds,
    rows_for,
    weight_bytes_of,
)

ROUTINGS = 8
"""Different choices of experts, called one after the other."""


def products_like(library: Native, n: int, k: int, kind: str, count: int) -> list[NativeWeight]:
    """Each in memory of its own; of the same values."""
    weight = torch.randn(n, k).bfloat16()
    if " g" in kind:
        grouped = in_groups(weight, kind)
        return [NativeGroupedProduct(library, grouped, None, weight.dtype) for _ in range(count)]
    made = NativeInt8Product if kind == "int8" else NativeProduct
    return [made(library, weight, None) for _ in range(count)]


def choices(tokens: int, config: MoeConfig) -> list[Routed]:
    """Of one token, each routing takes other experts than those before it, as far as there are any."""
    found = []
    left: list[int] = []
    for _ in range(ROUTINGS):
        rows = []
        for _ in range(tokens):
            if tokens > 1 or len(left) < config.chosen:
                left = torch.randperm(config.experts).tolist()
            rows.append(sorted(left[: config.chosen]))
            left = left[config.chosen :]
        ids = torch.tensor(rows, dtype=torch.int32)
        found.append(Routed(ids, torch.rand(tokens, config.chosen)))
    return found


def case(
    experts: NativeExperts,
    router: NativeRouter,
    tokens: int,
    kind: str,
    config: MoeConfig,
    rate: tuple[int, Clock],
) -> dict[str, Any]:
    """Seconds of a call of each, and the limit, in each round."""
    hidden, size = int(experts.down[0].n), config.expert.size
    plain = torch.randn(tokens, hidden).bfloat16()
    x = rows_for(kind, plain)
    routings = choices(tokens, config)
    each = weight_bytes_of(kind, 2 * size, hidden) + weight_bytes_of(kind, hidden, size)
    weight_bytes = each * statistics.mean(len(set(routed.ids.flatten().tolist())) for routed in routings)
    operations = 2.0 * tokens * config.chosen * 3 * hidden * size

    def all_experts() -> None:
        for routed in routings:
            experts(x, routed)

    def all_routers() -> None:
        for _ in routings:
            router(plain)

    best = "int8" if " g" in kind else kind
    library = native()
    assert library is not None
    cached = product_of(library.instruction_set, torch.randn(1024, 1024).bfloat16(), best)
    assert cached is not None
    read, read_bytes = read_limit()
    peak = partial(cached, rows_for(best, torch.randn(1024, 1024).bfloat16()))
    works: dict[str, Work] = {"experts": all_experts, "router": all_routers, "read": read, "peak": peak}
    times = rounds(works, *rate)
    return {
        "experts": [seconds / ROUTINGS for seconds in times["experts"]],
        "router": [seconds / ROUTINGS for seconds in times["router"]],
        "limit": [
            max(weight_bytes / read_bytes * reading, operations / (2.0 * 1024**3) * computing)
            for reading, computing in zip(times["read"], times["peak"], strict=True)
        ],
        "weight_bytes": weight_bytes,
        "operations": operations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=["bf16", "int8", "int4 g64"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16, 64, 2048])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--size", type=int, default=1536, help="of an expert")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread")
    parser.add_argument("--out", help="a JSON file for the result")
    told = parser.parse_args()
    library = native()
    if library is None:
        raise SystemExit("the native library is not built: python hatch_build.py")
    if told.cpu_time:
        torch.set_num_threads(1)
    rate = 3 if told.quick else 9, time.thread_time if told.cpu_time else time.perf_counter
    config = MoeConfig(told.experts, told.chosen, MlpConfig(told.size))
    facts = machine() | {"threads": torch.get_num_threads(), "torch": torch.__version__}
    print_machine(facts)
    table = Table(
        f"{told.chosen} of {told.experts} experts, {told.hidden} x {told.size}: microseconds",
        ["case", "experts", "limit", "of limit", "GB/s", "TOP/s", "router", "of experts"],
    )
    results = []
    with torch.inference_mode():
        rows = torch.randn(told.experts, told.hidden) / math.sqrt(told.hidden)
        router = NativeRouter(library, NativeProduct(library, rows, None), None, config)
        for kind in told.kinds:
            gate_up = products_like(library, 2 * told.size, told.hidden, kind, told.experts)
            down = products_like(library, told.hidden, told.size, kind, told.experts)
            experts = NativeExperts(library, gate_up, down, "silu", torch.bfloat16)
            for tokens in told.tokens:
                found = case(experts, router, tokens, kind, config, rate)
                took, least, routing = (
                    statistics.median(found[name]) for name in ("experts", "limit", "router")
                )
                ratio = statistics.median(
                    best / mine for best, mine in zip(found["limit"], found["experts"], strict=True)
                )
                table.row(
                    f"{kind}, {tokens} tokens",
                    f"{took * 1e6:,.0f}",
                    f"{least * 1e6:,.0f}",
                    f"{ratio:.2f}",
                    f"{found['weight_bytes'] / took / 1e9:.1f}",
                    f"{found['operations'] / took / 1e12:.2f}",
                    f"{routing * 1e6:,.0f}",
                    f"{routing / took:.3f}",
                )
                results.append({"kind": kind, "tokens": tokens, "of_limit": ratio, **found})
    table.print()
    write_json(told.out, {"machine": facts, "experts": results})


if __name__ == "__main__":
    main()
