"""Compute threads against everything else on the same cores: how they wait, how many, and where.

    python benchmarks/threads.py [MODEL] [--streams 16] [--rounds 5] [--only NAME ...] [--out threads.json]

One server for each policy, all running, loaded in turn by `--streams` clients at once over HTTP, so that
gateway and engine take their part of the cores.  Medians of the rounds are printed: output tokens a second,
the cores that the workers kept busy meanwhile, and their CPU while there was nothing to do.

| policy | what differs from the default |
| --- | --- |
| default | helpers look for work for 200 us, then sleep; as many threads as cores, divided by the instances |
| no spin, spin long | helpers sleep at once, or look for 2,000 us (`BATON_SPIN_US`) |
| one thread | `--num-threads 1` |
| pinned | each worker on the cores of its own share |
| 1P1D … | the same for `--prefill 1 --decode 1`; *undivided*: each worker has a thread for every core |
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import NamedTuple

import uvloop

from _clients import Server, random_prompt, random_sizes, serving, stream
from _common import Table, machine, percentile, print_machine, write_json
from idle import children, cpu_seconds, engines

_IDLE_S = 1.0


class Policy(NamedTuple):
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    pinned: bool = False


_PAIR = ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")
_CORES = sorted(os.sched_getaffinity(0))
POLICIES = {
    "default": Policy(),
    "no spin": Policy(environment=(("BATON_SPIN_US", "0"),)),
    "spin long": Policy(environment=(("BATON_SPIN_US", "2000"),)),
    "one thread": Policy(("--num-threads", "1")),
    "pinned": Policy(pinned=True),
    "1P1D": Policy(_PAIR),
    "1P1D undivided": Policy((*_PAIR, "--num-threads", str(len(_CORES)))),
    "1P1D pinned": Policy(_PAIR, pinned=True),
}


@contextmanager
def running(policy: Policy, model: str | None, streams: int) -> Iterator[tuple[Server, list[int]]]:
    """A server and the process ids of its workers."""
    before = {name: os.environ.get(name) for name, _ in policy.environment}
    os.environ.update(policy.environment)
    flags = [*([model] if model else []), "--max-num-seqs", str(streams), *policy.flags]
    with serving(*flags) as server:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        workers = [worker for engine in sorted(engines(server.process.pid)) for worker in children(engine)]
        if policy.pinned:
            share = max(1, len(_CORES) // len(workers))
            for number, worker in enumerate(workers):
                mine = [_CORES[(number * share + i) % len(_CORES)] for i in range(share)]
                for thread in os.listdir(f"/proc/{worker}/task"):
                    os.sched_setaffinity(int(thread), mine)
        yield server, workers


async def load(server: Server, options: argparse.Namespace) -> tuple[float, float]:
    """(output tokens a second, 99th percentile of the seconds between two tokens).

    Each client sends its requests one after the other; lengths differ, so that some prefill while others
    decode."""
    rng = random.Random(1)
    sizes = random_sizes(options.streams * options.requests, options.prompt, options.output, rng)
    gaps: list[float] = []

    async def client(mine: list[tuple[int, int]]) -> None:
        for num_prompt, num_output in mine:
            timed = await stream(server, random_prompt(num_prompt, rng), num_output)
            gaps.extend(later - sooner for sooner, later in pairwise(timed.times))

    began = time.perf_counter()
    await asyncio.gather(*(client(sizes[first :: options.streams]) for first in range(options.streams)))
    tokens = sum(num_output for _, num_output in sizes)
    return tokens / (time.perf_counter() - began), percentile(gaps, 99)


def busy(workers: list[int]) -> float:
    return sum(map(cpu_seconds, workers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a directory; default: the embedded model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=3, help="one after the other, of each client")
    parser.add_argument("--prompt", type=int, default=128, help="tokens, on average")
    parser.add_argument("--output", type=int, default=64, help="tokens, on average")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=POLICIES, metavar="NAME")
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    names = options.only or list(POLICIES)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    idle: dict[str, float] = {}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(POLICIES[name], options.model, options.streams))
            for name in names
        }
        for number in range(options.rounds + 1):
            for name, (server, workers) in servers.items():
                before, began = busy(workers), time.perf_counter()
                speed, gap = uvloop.run(load(server, options))
                cores = (busy(workers) - before) / (time.perf_counter() - began)
                if number:  # (the first one warms up)
                    found[name].append((speed, gap, cores))
        for name, (_, workers) in servers.items():
            before = busy(workers)
            time.sleep(_IDLE_S)
            idle[name] = (busy(workers) - before) / _IDLE_S
    title = f"{options.streams} clients, about {options.prompt} tokens in and {options.output} out"
    columns = ("policy", "output tokens/s", "least to most", "ITL p99, ms", "cores busy", "cores while idle")
    table = Table(title, columns)
    rows = {}
    for name, rounds in found.items():
        speeds = [speed for speed, _, _ in rounds]
        rows[name] = {
            "tokens_per_s": statistics.median(speeds),
            "min": min(speeds),
            "max": max(speeds),
            "itl_p99_s": statistics.median(gap for _, gap, _ in rounds),
            "cores_busy": statistics.median(cores for _, _, cores in rounds),
            "cores_idle": idle[name],
        }
        row = rows[name]
        spread = f"{row['min']:,.0f} to {row['max']:,.0f}"
        cells = (f"{1e3 * row['itl_p99_s']:.1f}", f"{row['cores_busy']:.2f}", f"{row['cores_idle']:.3f}")
        table.row(name, f"{row['tokens_per_s']:,.0f}", spread, *cells)
    table.print()
    write_json(options.out, {"benchmark": "threads", "machine": facts, "rows": rows, "rounds": found})


if __name__ == "__main__":
    main()
