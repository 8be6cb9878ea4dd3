"""Prefill on one instance, decode on others: how much of what the cost model allows is reached.

    python benchmarks/disaggregation.py --shape fastdeploy [--requests 1000] [--scale 1.0]
    python benchmarks/disaggregation.py --shape starved [--bad stopped] [--rounds 3]
    python benchmarks/disaggregation.py --executor torch

Real processes and sockets: `baton serve` with its instances, clients over HTTP that stream.  The executor is
simulated, so a step takes what the cost model says (or longer, if this machine cannot keep up).

**fastdeploy** is the workload of FastDeploy #7724: 1 prefilling and 1 decoding instance, 1,000 requests, 256
at once, 1,280 tokens of input and 700 of output in the mean (uniform from half to one and a half of it; the
original distribution is not known).  There it took 275 s before the change and 260 s after it.  The cost
model is set so that the *ideal* of this workload takes about as long: 700,000 tokens in 260 s are 2,700 a
second, so a decode step with 256 sequences takes about 92 ms (a base of 15 ms, as one of prefill has, and
0.3 ms a sequence), and prefill runs at 50,000 tokens a second beyond the base, so that it does not limit.
`--scale 0.1` makes every step ten times as short: that is ten times as hard for everything that is no step.

The ideal is computed (`_ideal.py`): the same requests, clients and steps, and nothing else takes any time.

**starved** has 1 prefilling and 3 decoding instances, one of which is bad: `full`, its slots taken by long
requests of others; or `stopped`, its engine gets SIGSTOP for 5 s, runs for a moment, and so on.  More clients
ask than all slots hold, so the two good ones should decode as much as without the bad one (goal: 98 %).
FastDeploy's change was made for this case.  The kinds alternate, and the best round of each counts, so that
neighbours on the machine disturb all of them; "sequences a step" says how full the good ones were whatever
the machine did.

`--executor torch` runs the embedded model on a small load, split and as one mixed instance, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from _clients import Server, long_model, random_prompt, random_sizes, serving, stream
from _common import Table, machine, percentile, print_machine, write_json
from _ideal import Timed, simulate, total_s
from baton.protocol.config import CostModel

COST = CostModel(base=15e-3, per_prefill_token=2e-5, per_decode_sequence=3e-4)
STARVED_COST = CostModel(base=20e-3, per_prefill_token=2e-5, per_decode_sequence=4e-4)
STARVED_SLOTS = 32
STOP_S, RUN_S = 5.0, 0.2
BLOCK = 32
BUDGET = 2048
CONTEXT = 4096


def scaled(cost: CostModel, scale: float) -> CostModel:
    return CostModel(*(scale * value for value in msgspec.structs.astuple(cost)))


def simulated(cost: CostModel, slots: int) -> list[str]:
    """Flags of the executor, and that every request is handed over."""
    numbers = ",".join(f"{value:.9g}" for value in msgspec.structs.astuple(cost))
    return [
        *("--executor", "simulated", "--simulated-cost", numbers),
        *("--max-num-seqs", str(slots), "--max-num-batched-tokens", str(BUDGET)),
        *("--block-size", str(BLOCK), "--max-model-len", str(CONTEXT), "--disaggregation-threshold", "0"),
    ]


async def closed_loop(server: Server, sizes: Sequence[tuple[int, int]], at_once: int) -> list[Timed]:
    """`at_once` clients, each with one request after the other."""
    rng = random.Random(5)
    prompts = [random_prompt(size[0], rng) for size in sizes]
    left = iter(range(len(sizes)))
    done: list[Timed] = []

    async def client() -> None:
        for number in left:
            timed = await stream(server, prompts[number], sizes[number][1])
            done.append(timed)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return done


def describe(requests: Sequence[Timed]) -> dict[str, float]:
    """Total, and the latencies that a client sees, in seconds."""
    first = [request.first_token_s for request in requests]
    several = [request for request in requests if request.num_output > 1]
    per_token = [request.per_token_s for request in several]
    second = [request.second_token_s for request in several]
    gaps = [
        later - earlier
        for request in several
        for earlier, later in zip(request.times[1:], request.times[2:], strict=False)
    ]
    tokens = sum(len(request.times) for request in requests)
    seconds = total_s(requests)
    return {
        "total_s": seconds,
        "tokens_per_s": tokens / seconds,
        "ttft_mean_s": sum(first) / len(first),
        "ttft_p99_s": percentile(first, 99),
        "tpot_mean_s": sum(per_token) / len(per_token),
        "tpot_p99_s": percentile(per_token, 99),
        "itl_p50_s": percentile(gaps, 50),
        "itl_p99_s": percentile(gaps, 99),
        "first_to_second_mean_s": sum(second) / len(second),
        "first_to_second_p99_s": percentile(second, 99),
    }


def split_of_handover(stats: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Where the time of a hand-over goes, means in seconds, as the engines have counted it.

    reserve: from `Reserve` to `Reserved`; message: `Handoff` and `Taken` on their way; fetch tail: from
    `Handoff` at D until every page is there."""
    totals: dict[str, float] = {}
    for answer in stats.values():
        for name, value in answer["handovers"].items():
            if isinstance(value, int | float):
                totals[name] = totals.get(name, 0) + value
    taken, seated = max(totals["taken"], 1), max(totals["seated"], 1)
    tail = totals["fetch_tail_seconds"] / seated
    return {
        "reserve_s": totals["reserve_seconds"] / max(totals["reserved"], 1),
        "fetch_tail_s": tail,
        "message_s": totals["taken_seconds"] / taken - tail,
        "handed_over": totals["handed"],
        "stayed": totals["departures"] - totals["handed"],
    }


# -- the shape of FastDeploy #7724


def fastdeploy(options: argparse.Namespace, model: str) -> dict[str, Any]:
    cost = scaled(COST, options.scale)
    sizes = random_sizes(options.requests, 1280, 700, random.Random(1))
    ideal = describe(simulate(sizes, options.concurrency, cost, budget=BUDGET, slots=options.concurrency))
    results: dict[str, Any] = {"cost": msgspec.to_builtins(cost), "ideal": ideal, "runs": {}}
    for preparing in options.max_preparing:
        flags = [model, "--prefill", "1", "--decode", "1", *simulated(cost, options.concurrency)]
        flags += ["--max-preparing", preparing] if preparing != "default" else []
        with serving(*flags) as server:
            asyncio.run(closed_loop(server, [(64, 4)] * 4, 4))  # imports, connections
            requests = asyncio.run(closed_loop(server, sizes, options.concurrency))
            result = describe(requests) | split_of_handover(server.stats())
        result["first_decode_s"] = result["first_to_second_mean_s"] - result["fetch_tail_s"]
        result["of_ideal"] = ideal["total_s"] / result["total_s"]
        results["runs"][preparing] = result
        print(
            f"max-preparing {preparing}: {result['total_s']:.1f} s, {result['of_ideal']:.1%} of ideal",
            flush=True,
        )
    _print_fastdeploy(results, options)
    return results


def _print_fastdeploy(results: dict[str, Any], options: argparse.Namespace) -> None:
    runs = results["runs"]
    table = Table(
        f"1P1D, {options.requests} requests, {options.concurrency} at once, time × {options.scale:g}",
        ["", "ideal", *(f"max-preparing {name}" for name in runs)],
    )
    for name, ideal in results["ideal"].items():
        table.row(name, _number(name, ideal), *(_number(name, run[name]) for run in runs.values()))
    first_decode = results["ideal"]["first_to_second_mean_s"]
    parts = {"reserve_s": 0.0, "message_s": 0.0, "fetch_tail_s": 0.0, "first_decode_s": first_decode}
    for name, ideal in parts.items():
        table.row(name, _number(name, ideal), *(_number(name, run[name]) for run in runs.values()))
    for name in ("handed_over", "stayed"):
        table.row(name, "", *(f"{run[name]:.0f}" for run in runs.values()))
    table.row("of ideal", "100 %", *(f"{run['of_ideal']:.1%}" for run in runs.values()))
    table.print()


def _number(name: str, value: float) -> str:
    if name in ("total_s", "tokens_per_s"):
        return f"{value:.1f}"
    return f"{value * 1e3:.1f} ms"


# -- one decoding instance is bad


@contextmanager
def stopping(pid: int) -> Iterator[None]:
    """A process that runs for a moment every five seconds."""
    over = threading.Event()

    def main() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOP_S)
            os.kill(pid, signal.SIGCONT)
            over.wait(RUN_S)

    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def engine_pid(server: Server, name: str) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    for pid in children:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"baton.launch.instances.processes.instance" in words:
            launch = json.loads(words[words.index(b"baton.launch.instances.processes.instance") + 1])
            if launch["config"]["name"] == name:
                return int(pid)
    raise LookupError(f"the server has no instance {name!r}")


async def _measure(
    server: Server, seconds: float, at_once: int, good: Sequence[str], filling: int
) -> dict[str, float]:
    """Tokens that each of the good instances generates in a second, while more clients ask than have slots.

    `filling`: so many requests fill decode-2 first, and stay there."""
    rng = random.Random(3)
    stop = False

    async def client() -> None:
        while not stop:
            (size,) = random_sizes(1, 256, 160, rng)
            await stream(server, random_prompt(size[0], rng), size[1])

    fillers = []
    if filling:
        others = [name for name in server.stats() if name != "decode-2"]
        for name in others:
            server.post(f"/cluster/instances/{name}", {"state": "draining"})
        fillers = [asyncio.create_task(stream(server, random_prompt(64, rng), 3900)) for _ in range(filling)]
        await asyncio.sleep(3.0)
        for name in others:
            server.post(f"/cluster/instances/{name}", {"state": "active"})
    clients = [asyncio.create_task(client()) for _ in range(at_once)]
    await asyncio.sleep(seconds / 4)  # until it is steady
    before = await asyncio.to_thread(server.stats)
    await asyncio.sleep(seconds)
    after = await asyncio.to_thread(server.stats)
    stop = True
    for task in (*fillers, *clients):
        task.cancel()
    ends = await asyncio.gather(*fillers, *clients, return_exceptions=True)
    failed = [end for end in ends if isinstance(end, Exception)]
    if failed:
        raise failed[0]
    result: dict[str, float] = {}
    for name in good:
        tokens, steps, took = (
            after[name][key] - before[name][key] for key in ("generation_tokens", "steps", "uptime_s")
        )  # (by its own clock: the question waits for the one that is stopped)
        result[name] = tokens / took
        result[f"{name} a step"] = tokens / max(steps, 1)
    result["both"] = sum(result[name] for name in good)
    result["a step"] = sum(result[f"{name} a step"] for name in good) / len(good)
    return result | {f"{key} at P": after["prefill-0"]["handovers"][key] for key in ("refused", "stayed")}


def starved(options: argparse.Namespace, model: str) -> dict[str, Any]:
    cost = scaled(STARVED_COST, options.scale)
    good = ("decode-0", "decode-1")
    kinds = ("none", *options.bad)
    runs: dict[str, list[dict[str, float]]] = {bad: [] for bad in kinds}
    for number in range(options.rounds):
        for bad in kinds if number % 2 == 0 else reversed(kinds):
            result = starved_once(bad, cost, options.seconds, good, model)
            runs[bad].append(result)
            print(f"round {number + 1}, decode-2 {bad}: {result}", flush=True)
    best = {bad: max(found, key=lambda result: result["both"]) for bad, found in runs.items()}
    ideal = STARVED_SLOTS / (cost.base + STARVED_SLOTS * cost.per_decode_sequence)
    table = Table(
        f"1P3D, {STARVED_SLOTS} slots each: tokens a second of the two good ones, best of {options.rounds}",
        ["decode-2", *good, "both", "of the run without it", "of ideal", "sequences a step"],
    )
    for bad, result in best.items():
        result["of_without"] = result["both"] / best["none"]["both"]
        table.row(
            {"none": "is not there"}.get(bad, f"is {bad}"),
            *(f"{result[name]:.0f}" for name in (*good, "both")),
            f"{result['of_without']:.1%}",
            f"{result['both'] / (2 * ideal):.1%}",
            f"{result['a step']:.1f}",
        )
    table.print()
    return {"cost": msgspec.to_builtins(cost), "runs": runs}


def starved_once(
    bad: str, cost: CostModel, seconds: float, good: Sequence[str], model: str
) -> dict[str, float]:
    decoders = "2" if bad == "none" else "3"
    flags = [model, "--prefill", "1", "--decode", decoders, *simulated(cost, STARVED_SLOTS)]
    with serving(*flags) as server:
        at_once = STARVED_SLOTS * 5
        if bad == "stopped":
            with stopping(engine_pid(server, "decode-2")):
                return asyncio.run(_measure(server, seconds, at_once, good, 0))
        filling = STARVED_SLOTS if bad == "full" else 0
        return asyncio.run(_measure(server, seconds, at_once, good, filling))


# -- the embedded model


def embedded(options: argparse.Namespace) -> dict[str, Any]:
    count, at_once = min(options.requests, 100), min(options.concurrency, 16)
    sizes = random_sizes(count, 256, 64, random.Random(1))
    shapes = {"1P1D": ("--prefill", "1", "--decode", "1"), "mixed": ("--mixed", "1")}
    results: dict[str, Any] = {"runs": {}}
    for name, flags in shapes.items():
        with serving(*flags, "--dtype", "float32", "--disaggregation-threshold", "0") as server:
            asyncio.run(closed_loop(server, [(64, 4)] * 4, 4))
            result = describe(asyncio.run(closed_loop(server, sizes, at_once)))
            if name != "mixed":
                result |= split_of_handover(server.stats())
        results["runs"][name] = result
    table = Table(f"the embedded model, {count} requests, {at_once} at once", ["", *shapes])
    for key in results["runs"]["1P1D"]:
        table.row(key, *(_number(key, run[key]) if key in run else "" for run in results["runs"].values()))
    table.print()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=["fastdeploy", "starved"], default="fastdeploy")
    parser.add_argument("--executor", choices=["simulated", "torch"], default="simulated")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--scale", type=float, default=1.0, help="of the time that steps take")
    parser.add_argument("--max-preparing", nargs="+", default=["1", "5", "default"])
    parser.add_argument("--bad", nargs="+", choices=["full", "stopped"], default=["full", "stopped"])
    parser.add_argument("--seconds", type=float, default=30.0, help="measured in each run of `starved`")
    parser.add_argument("--rounds", type=int, default=3, help="of `starved`; the best of each kind counts")
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    if options.executor == "torch":
        result = embedded(options)
    else:
        with long_model(CONTEXT) as model:
            result = {"fastdeploy": fastdeploy, "starved": starved}[options.shape](options, model)
    write_json(options.out, {"machine": facts, **result})


if __name__ == "__main__":
    main()
