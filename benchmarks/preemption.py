"""What a KV pool that is far too small costs: preemptions, throughput, and whether the tokens stay right.

    python benchmarks/preemption.py [--requests 200] [--small 150] [--out preemption.json]

Starts an instance (engine and worker processes, simulated executor with a cost model) three times: with a
pool that fits everything that can run at once, with one of `--small` blocks, and with that and no headroom at
admission (`admission_headroom` 0).  Each gets the same crowd: prompts of 32 to 192 tokens, all at once,
max_tokens 400, ended by stop tokens at 160 on average.  Every answer is compared with the oracle, which is
what the request would have got alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import msgspec

from _common import Table, machine, percentile, print_machine, write_json
from _instance import instance
from baton.executor.simulated.executor import simulated_next_token
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.config import CostModel
from baton.protocol.messages.requests import (
    FROM_ENGINE,
    TO_ENGINE,
    Failing,
    Outputs,
    Query,
    QueryReply,
    Submit,
)
from baton.protocol.params.sampling import Sampling, Stopping

VOCAB = 1000
STOPS = tuple(range(6))
MAX_TOKENS = 400
BLOCK = 16
SLOTS = 64
DEADLINE_S = 300
COST = CostModel(base=2e-3, per_prefill_token=2e-5, per_decode_sequence=2e-5)
CONFIG = instance_config(
    model="",
    executor="simulated",
    max_model_len=1024,
    block_size=BLOCK,
    max_num_seqs=SLOTS,
    max_num_batched_tokens=1024,
    max_waiting=100_000,
    vocab_size=VOCAB,
    simulated_cost=COST,
    log_level="warning",
)


def crowd(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(32, 193))] for _ in range(count)]


def oracle(prompt: list[int]) -> list[int]:
    """The tokens of the request if it were alone."""
    text = list(prompt)
    while len(text) < len(prompt) + MAX_TOKENS:
        text.append(simulated_next_token(text, VOCAB))
        if text[-1] in STOPS:
            break
    return text[len(prompt) :]


def run(
    num_blocks: int, headroom: int | None, prompts: list[list[int]]
) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """All prompts at once.  Returns measurements and the tokens of each request."""
    config = msgspec.structs.replace(CONFIG, num_blocks=num_blocks, admission_headroom=headroom)
    tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    with instance(config, DEADLINE_S) as (_, gateway):
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            sampling, stopping = Sampling(seed=0, temperature=0.0), Stopping(MAX_TOKENS, 0, STOPS)
            gateway.send(TO_ENGINE.encode(Submit(number, "", pack_int32(prompt), sampling, stopping)))
        latencies: list[float] = []
        gaps: list[float] = []
        last: dict[int, float] = {}
        while len(latencies) < len(prompts):
            message = FROM_ENGINE.decode(gateway.recv())
            now = time.perf_counter()
            if isinstance(message, Failing):
                raise RuntimeError(message.message)
            if not isinstance(message, Outputs):
                continue
            for number, token in zip(unpack_int64(message.ids), unpack_int32(message.tokens), strict=True):
                tokens[number].append(token)
                if number in last:
                    gaps.append(now - last[number])
                last[number] = now
            for finished in message.finished:
                if finished.reason not in ("stop", "length"):
                    raise RuntimeError(f"request {finished.id}: {finished.reason}, {finished.message}")
                latencies.append(now - began)
        took = time.perf_counter() - began
        gateway.send(TO_ENGINE.encode(Query(1, "stats")))
        while not isinstance(reply := FROM_ENGINE.decode(gateway.recv()), QueryReply):
            pass
    stats = reply.body
    result = {
        "num_blocks": num_blocks,
        "seconds": took,
        "generated": stats["generation_tokens"],
        "tokens_per_s": stats["generation_tokens"] / took,
        "preemptions": stats["preemptions"],
        "recomputed_tokens": stats["recomputed_tokens"],
        "latency_p50_s": percentile(latencies, 50),
        "itl_p50_ms": percentile(gaps, 50) * 1e3,
        "itl_p99_ms": percentile(gaps, 99) * 1e3,
        "held_afterwards": stats["blocks"]["held"],
        "headroom_tokens": stats["headroom_tokens"],
    }
    return result, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--small", type=int, default=150, help="blocks of the pool that is too small")
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    prompts = crowd(options.requests)
    expected = {number: oracle(prompt) for number, prompt in enumerate(prompts)}
    fits = SLOTS * -(-(192 + MAX_TOKENS) // BLOCK)
    table = Table(
        f"{options.requests} requests at once, {SLOTS} slots, {BLOCK} tokens a block",
        ["", "fits", "too small", "no headroom"],
    )
    results = []
    for num_blocks, headroom in ((fits, None), (options.small, None), (options.small, 0)):
        result, tokens = run(num_blocks, headroom, prompts)
        result["wrong_answers"] = sum(tokens[number] != expected[number] for number in expected)
        results.append(result)
    for name in results[0]:
        table.row(
            name,
            *(
                f"{result[name]:.4g}" if isinstance(result[name], float) else result[name]
                for result in results
            ),
        )
    table.print()
    shares = [f"{result['tokens_per_s'] / results[0]['tokens_per_s']:.0%}" for result in results[1:]]
    print(f"throughput of the small pool: {shares[0]} of the large one's; {shares[1]} without headroom")
    write_json(options.out, {"machine": facts, "cost": msgspec.to_builtins(COST), "runs": results})
    if any(result["wrong_answers"] or result["held_afterwards"] for result in results):
        sys.exit("wrong answers, or blocks that are still held")


if __name__ == "__main__":
    main()
