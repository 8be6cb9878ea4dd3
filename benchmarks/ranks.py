"""What tensor-parallel ranks of one host pay for adding up: in memory that they share, and by gloo.

    python benchmarks/ranks.py [--ranks 2] [--threads 1] [--rounds 7] [--out ranks.json]

As many processes as ranks, each with both groups, add up the same bfloat16 numbers, both ways by turns.
Medians of the rounds; a model of L layers does this 2 L times a step.  The limit is memory: a rank copies
its own numbers, reads those of all, and writes the sum, at the speed with which it copies as many bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _common import Table, machine, print_machine, write_json

SIZES = [(1, 1024), (1, 4096), (64, 1024), (64, 4096), (512, 4096), (2048, 4096)]
"""Tokens of a step, hidden size."""
_SECONDS = 0.05
"""Of a round, for each way, about."""

Times = dict[str, list[float]]


def rank(number: int, options: argparse.Namespace, directory: str, pipe: Connection) -> None:
    """Sends the seconds of each round, by size and way."""
    import torch

    from baton.model.layers import shared_ranks
    from baton.model.layers.parallel import TensorParallel

    torch.set_num_threads(options.threads)
    meets = Path(directory) / "shared", Path(directory) / "gloo"
    shared = TensorParallel.connect(number, options.ranks, str(meets[0]), "cpu", 60)
    shared_ranks.rank_functions = lambda: None
    gloo = TensorParallel.connect(number, options.ranks, str(meets[1]), "cpu", 60)
    found = []
    with torch.inference_mode():
        for rows, width in SIZES:
            tensor = torch.zeros(rows, width, dtype=torch.bfloat16)
            other = torch.zeros_like(tensor)
            times: Times = {"shared": [], "gloo": [], "copy": []}
            for turn in range(options.rounds + 1):
                for name, way in (("shared", shared), ("gloo", gloo)):
                    count = repetitions(tensor.numel())
                    way.minimum(0)
                    began = time.perf_counter()
                    for _ in range(count):
                        way.all_reduce(tensor)
                    times[name] += [(time.perf_counter() - began) / count] if turn else []
                began = time.perf_counter()
                for _ in range(count):
                    other.copy_(tensor)
                times["copy"] += [(time.perf_counter() - began) / count] if turn else []
            found.append(times)
    pipe.send(found)
    for way in (shared, gloo):
        way.minimum(0)
        way.close()


def repetitions(numbers: int) -> int:
    """The same on all ranks."""
    return max(3, int(_SECONDS / (100e-6 + 2 * numbers / 1e9)))


def measure(options: argparse.Namespace) -> list[Times]:
    """Of each size; of all ranks together."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.ranks):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=rank, args=(number, options, directory, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            every = [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return [
        {
            name: [max(turn) for turn in zip(*(one[place][name] for one in every), strict=True)]
            for name in found
        }
        for place, found in enumerate(every[0])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    columns = ("tokens x hidden size", "KiB", "gloo, us", "shared memory, us", "ratio", "limit, us")
    table = Table(f"a sum over {options.ranks} ranks, {options.threads} threads each", columns)
    rows: list[dict[str, Any]] = []
    for (tokens, width), times in zip(SIZES, measure(options), strict=True):
        gloo, shared, copy = (1e6 * statistics.median(times[name]) for name in ("gloo", "shared", "copy"))
        limit = copy * (options.ranks + 3) / 2
        size = 2 * tokens * width / 1024
        cells = f"{size:.0f}", f"{gloo:.0f}", f"{shared:.0f}", f"{gloo / shared:.1f}", f"{limit:.0f}"
        table.row(f"{tokens} x {width}", *cells)
        names = "tokens", "hidden_size", "gloo_us", "shared_us", "limit_us"
        rows.append(dict(zip(names, (tokens, width, gloo, shared, limit), strict=True)))
    table.print()
    write_json(
        options.out, {"machine": facts, "ranks": options.ranks, "threads": options.threads, "rows": rows}
    )


if __name__ == "__main__":
    main()
