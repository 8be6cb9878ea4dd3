"""Where the microseconds of a step go, by operation, beside what memory and arithmetic allow.

    python benchmarks/step_profile.py DIRECTORY [--quantization int8|int4] [--threads 2] [--cpu-time] [CASE …]

A case is `decode:64@200` (sequences @ tokens of context) or `prefill:2048` (tokens of one prompt).  The
executor runs alone, without an engine.  Where the model is one native call
(`model/decoder/program.py`), that one counts its operations itself.  Else every operation is wrapped
with a clock, which costs about half a microsecond a call and is part of what is shown.  `--cpu-time` counts
CPU time of the calling thread instead of the wall clock: with `--threads 1` it says what the work takes even
while others use the machine.

The limit of a product is the larger of its weight's bytes over the bandwidth and its operations over the
peak, both measured in this process, by the wall clock: they say little while others use the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _common import Table, bandwidth, machine, print_machine, write_json
from baton.executor.base import StepBatch
from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.checkpoint.config import ModelConfig
from baton.model.cpu.steps import fused_ops
from baton.model.decoder.blocks import Block
from baton.model.decoder.mixture import Mixture
from baton.model.decoder.program import Program
from baton.model.layers.layers import Matrix
from baton.model.layers.packed import Weights, best_form
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.placement import Placement
from baton.protocol.params.sampling import Sampling, Stopping

BLOCK = 64
REST = "the rest of Python"


class Clocks:
    """Seconds by operation; an operation inside another one counts for itself only."""

    def __init__(self, clock: int) -> None:
        self.clock = clock
        self.now: Callable[[], float] = partial(time.clock_gettime, clock)
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = 0.0

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inside = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            begin = self.now()
            result = inside(*args, **kwargs)
            took = self.now() - begin
            self.spent[name] += took - self._inner
            self._inner = outer + took
            return result

        object.__setattr__(owner, method, timed)


def products(block: Block) -> list[tuple[str, Matrix]]:
    """Those of all tokens."""
    attention = block.attention
    mlp = block.mlp.shared if isinstance(block.mlp, Mixture) else block.mlp
    found: list[tuple[str, Matrix]] = [("product qkv", attention.qkv), ("product o", attention.output)]
    if mlp is not None:
        found += [("product gate+up", mlp.gate_up), ("product down", mlp.down)]
    return found


def instrument(executor: TorchExecutor, clocks: Clocks) -> Program | None:
    """Returns the program, if there is one: it tells what is done between embedding and logits."""
    model, backend = executor._model, executor._backend
    clocks.wrap(backend, "prepare", "prepare attention")
    clocks.wrap(executor._sampler, "sample", "sampling")
    clocks.wrap(executor, "execute", REST)
    if model._program:
        model._program.measure(clocks.clock)
        return model._program
    for block in model.layers:
        for name, layer in products(block):
            clocks.wrap(layer, "multiply", name)
    clocks.wrap(model.embedding, "look_up", "embedding")
    clocks.wrap(model.head, "logits", "product head")
    for method in ("add_norm", "gated_mul", "quantize", "scaled"):
        clocks.wrap(model.ops, method, method.replace("_", " "))
    clocks.wrap(backend, "attend", "attention")
    if hasattr(backend, "rotate_and_write"):
        clocks.wrap(backend, "rotate_and_write", "rotate and write")
    return None


def batch_of(case: str) -> StepBatch:
    kind, _, sizes = case.partition(":")
    if kind == "prefill":
        rows, start, count = 1, 0, int(sizes)
    else:
        rows, start = map(int, sizes.split("@"))
        count = 1
    width = -(-(start + count) // BLOCK)
    tokens = np.random.default_rng(0).integers(3, 1000, rows * count)
    return StepBatch(
        step=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.full(rows, start, np.int32),
        counts=np.full(rows, count, np.int32),
        tokens=tokens.astype(np.int32),
        samples=np.ones(rows, np.bool_),
        block_tables=np.arange(rows * width, dtype=np.int32).reshape(rows, width),
        num_decodes=rows if kind == "decode" else 0,
    )


def peak(quantization: str | None, dtype: torch.dtype) -> float:
    """Operations a second of the product that is used, with a weight that stays in the cache."""
    rows, n, k = 512, 1024, 1024
    device = torch.device("cpu")
    form: Weights = "int8" if quantization else best_form(dtype, device)
    placement = Placement(
        TensorParallel(), dtype, device, form, fused_ops(dtype, device, k, quantization == "int8")
    )
    product = placement.product(torch.randn(n, k).to(dtype), None, "peak")
    x = placement.ops.quantize(torch.randn(rows, k).to(dtype))
    best = 0.0
    for _ in range(12):
        begin = time.perf_counter()
        product.multiply(x)
        best = max(best, 2 * rows * n * k / (time.perf_counter() - begin))
    return best


def limits(executor: TorchExecutor, tokens: int, rows: int, reads: float, flops: float) -> dict[str, float]:
    """Seconds a step of each product at least."""
    found: dict[str, float] = defaultdict(float)
    for block in executor._model.layers:
        for name, layer in products(block):
            out, inputs = layer._shape
            found[name] += max(layer.product.nbytes / reads, 2 * tokens * out * inputs / flops)
        if isinstance(block.mlp, Mixture):
            told = block.mlp.config
            # As many experts as tokens that choose at random need together.
            needed = told.experts * (1 - (1 - told.chosen / told.experts) ** tokens)
            for name, matrices in (("experts gate+up", block.mlp.gate_up), ("experts down", block.mlp.down)):
                out, inputs = matrices[0]._shape
                work = 2 * tokens * told.chosen * out * inputs
                found[name] += max(needed * matrices[0].product.nbytes / reads, work / flops)
    head = executor._model.head
    elements = head.share * head._hidden_size
    found["product head"] = max(head.product.nbytes / reads, 2 * rows * elements / flops)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("cases", nargs="*", default=[])
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--quantize-head", type=int, help="bits")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_intermixed_args()
    cases = given.cases or ["decode:1@200", "decode:16@200", "decode:64@200", "prefill:2048"]
    facts = machine()
    print_machine(facts)
    model = ModelConfig.from_directory(given.directory)
    batches = {case: batch_of(case) for case in cases}
    config = instance_config(
        model=str(Path(given.directory).absolute()),
        max_model_len=min(4096, model.max_position_embeddings),
        dtype=given.dtype,
        quantization=given.quantization,
        **({} if given.quantize_head is None else {"quantize_head": given.quantize_head}),
        block_size=BLOCK,
        num_blocks=max(batch.block_tables.size for batch in batches.values()) + 1,
        max_num_seqs=max(len(batch.slots) for batch in batches.values()),
        num_threads=given.threads,
    )
    executor = TorchExecutor.from_config(config, 0, "")
    print(executor.info.detail)
    reads, flops = bandwidth(), peak(given.quantization, getattr(torch, given.dtype))
    print(f"limits: {reads / 1e9:.1f} GB/s, {flops / 1e12:.2f} TOP/s\n")
    for slot in range(config.max_num_seqs):
        executor.admit(slot, np.array([5], np.int32), 1, Sampling(slot, 0.0), Stopping(1))
    results: dict[str, Any] = {}
    clocks = Clocks(time.CLOCK_THREAD_CPUTIME_ID if given.cpu_time else time.CLOCK_MONOTONIC)
    program = instrument(executor, clocks)
    for case, batch in batches.items():
        executor.execute(batch)
        if program:
            program.take_nanoseconds()
        spent: dict[str, list[float]] = defaultdict(list)
        for _ in range(given.steps):
            clocks.spent.clear()
            executor.execute(batch)
            for name, nanoseconds in program.take_nanoseconds().items() if program else ():
                clocks.spent[name] += nanoseconds / 1e9
                clocks.spent[REST] -= nanoseconds / 1e9
            for name, seconds in clocks.spent.items():
                spent[name].append(seconds)
            spent["whole step"].append(sum(clocks.spent.values()))
        lowest = limits(executor, len(batch.tokens), len(batch.slots), reads, flops)
        table = Table(
            f"{case}: microseconds, median of {given.steps} steps (best)",
            ["", "a step", "best", "a layer", "limit", "of the limit"],
        )
        layers = model.num_layers
        once = ("embedding", "product head", "sampling", "prepare attention", REST)
        for name, values in sorted(spent.items(), key=lambda item: -statistics.median(item[1])):
            median = statistics.median(values)
            if not max(values):
                continue  # the model has no such operation
            limit = sum(lowest.values()) if name == "whole step" else lowest.get(name)
            table.row(
                name,
                f"{median * 1e6:,.0f}",
                f"{min(values) * 1e6:,.0f}",
                "" if name in once or name == "whole step" else f"{median * 1e6 / layers:,.1f}",
                "" if limit is None else f"{limit * 1e6:,.0f}",
                "" if limit is None or not median else f"{limit / median:.0%}",
            )
        table.print()
        results[case] = {name: statistics.median(values) * 1e6 for name, values in spent.items()}
    executor.close()
    write_json(given.out, {"machine": facts, "limits": [reads, flops], "microseconds": results})


if __name__ == "__main__":
    main()
