"""What one event costs the gateway and the engine, as a function of how much there is besides.

    python benchmarks/gateway_scale.py [--waiting 0 1000 4000] [--parked 0 1000] [--tokens 1000 10000 100000]
                                       [--out scale.json]

All state machines are the real ones, in one process, without sockets.  Times are medians.

1. Engine, with so many requests that wait: a `Submit`, the cancel of it, and a step's report with the
   decisions after it (`flush`), while all slots decode.
2. Gateway, with so many requests parked for want of an instance that takes them: a message of another with
   a token for each of 16 streams, and a request that is cancelled while it is parked.
3. Gateway, with prompts of so many tokens: the first placement of a request, which makes the keys of its
   blocks, and a placement again (after the loss of an instance), which must not.

Goal: 1 and 2 flat.  In 3 the first placement is linear in the prompt, as it reads it; the second is flat
but for the search in the instance's digest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from _common import Table, machine, percentile, print_machine, write_json
from baton.engine.core import EngineCore
from baton.gateway.cluster.cluster import Cluster
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.instances.inbox import Inbox
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, pack_int64
from baton.protocol.messages.commands import Admit
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.reports import StepReport, WorkerReady
from baton.protocol.messages.requests import Cancel, Hello, Load, Outputs, Submit, Welcome
from baton.protocol.params.sampling import Sampling, Stopping

BLOCK = 32
VOCAB = 50_000
SLOTS = 16
PROMPT = 64
REPEATS = 200
STREAMS = 16


def median_us(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Of one call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        work()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return percentile(times, 50)


# -- 1. the engine


def engine_with(waiting: int) -> tuple[EngineCore, list[Admit]]:
    """All slots decode; so many more wait, of 20 users in turn."""
    config = instance_config(
        model="",
        executor="simulated",
        max_model_len=4096,
        block_size=BLOCK,
        num_blocks=SLOTS * 4096 // BLOCK,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=8192,
        max_waiting=waiting + 10,
        vocab_size=VOCAB,
        log_level="warning",
    )
    core = EngineCore(config, incarnation="bench", workers=[1], now=0.0)
    core.on_report(0, WorkerReady(0, config.num_blocks or 0, BLOCK, "none", 1, VOCAB), 0.0)
    core.on_message(b"gate", Hello("gate"), 0.0)
    for index in range(SLOTS):
        core.on_message(b"gate", make_submit(index), 0.0)
    batch = core.flush(0.0).batch
    assert batch is not None
    for index in range(waiting):
        core.on_message(b"gate", make_submit(SLOTS + index), 0.0)
    core.flush(0.0)
    return core, [command for command in batch.commands if isinstance(command, Admit)]


def make_submit(number: int) -> Submit:
    prompt = [(number * 7919 + i) % VOCAB for i in range(PROMPT)]
    return Submit(number, "", pack_int32(prompt), Sampling(seed=number), Stopping(4000))


def measure_engine(waiting: int) -> dict[str, Any]:
    core, admits = engine_with(waiting)
    numbers = iter(range(1_000_000, 2_000_000))
    submits, cancels = [], []
    for _ in range(REPEATS):
        message = make_submit(next(numbers))
        began = time.perf_counter_ns()
        core.on_message(b"gate", message, 0.0)
        core.flush(0.0)
        middle = time.perf_counter_ns()
        core.on_message(b"gate", Cancel(message.id), 0.0)
        core.flush(0.0)
        submits.append((middle - began) / 1e3)
        cancels.append((time.perf_counter_ns() - middle) / 1e3)
    slots, epochs = pack_int32(a.slot for a in admits), pack_int32(a.epoch for a in admits)
    reports = iter(
        [
            StepReport(n, 1, slots, epochs, pack_int32([7] * SLOTS), seconds=0.001)
            for n in range(1, REPEATS + 1)
        ]
    )

    def step() -> None:
        core.on_report(0, next(reports), 0.0)
        core.flush(0.0)

    return {
        "waiting": waiting,
        "submit_us": percentile(submits, 50),
        "cancel_us": percentile(cancels, 50),
        "step_us": median_us(step),
    }


# -- 2. and 3. the gateway


def welcome(incarnation: str, max_model_len: int) -> Welcome:
    return Welcome(
        incarnation=incarnation,
        num_blocks=100_000,
        block_size=BLOCK,
        max_model_len=max_model_len,
        max_num_seqs=256,
        vocab_size=VOCAB,
        workers=[1],
        peer_endpoint=f"ipc:///run/{incarnation}.peer",
        source=InstanceSource("tile", BLOCK, []),
    )


def make_request(prompt: list[int]) -> EngineRequest:
    return EngineRequest("r", pack_int32(prompt), Sampling(seed=1), Stopping(4000), 0, "", Inbox())


def cluster_of(*names: str, max_model_len: int = 4096) -> Cluster:
    cluster = Cluster("gate", retry_wait_s=1000.0)
    for name in names:
        cluster.add(name)
        cluster.attach(name, f"{name}.1", 0.0)
        cluster.receive(name, welcome(f"{name}.1", max_model_len), 0.0)
        load = Load(
            waiting=0,
            running=0,
            waiting_tokens=0,
            free_blocks=100_000,
            prefill_tokens_per_s=1e4,
            decode_step_s=0.01,
        )
        cluster.receive(name, load, 0.0)
    cluster.take_outgoing()
    return cluster


def measure_gateway(parked: int) -> dict[str, Any]:
    cluster = cluster_of("a")
    streams = [make_request([index + 1, 2, 3]) for index in range(STREAMS)]
    for request in streams:
        cluster.enqueue(request, 0.0)
    numbers = [message.id for _, message in cluster.take_outgoing() if isinstance(message, Submit)]
    cluster.drain("a", 0.0)  # newcomers find no instance that takes them, and are parked
    cluster.add("b")
    waiting = [make_request([9, 9, index % VOCAB]) for index in range(parked)]
    for request in waiting:
        cluster.enqueue(request, 0.0)
    assert len(cluster.parked) == parked, f"{len(cluster.parked)} of {parked} are parked"
    outputs = Outputs(pack_int64(numbers), pack_int32([7] * len(numbers)))

    def message() -> None:
        cluster.receive("a", outputs, 0.0)
        cluster.take_outgoing()
        _ = cluster.next_deadline

    cost = median_us(message)
    assert all(len(request.tokens) == REPEATS for request in streams), "a message was lost"
    cancels = []
    for _ in range(REPEATS):
        request = make_request([8, 8, 8])
        cluster.enqueue(request, 0.0)
        began = time.perf_counter_ns()
        cluster.cancel(request)
        cancels.append((time.perf_counter_ns() - began) / 1e3)
    return {"parked": parked, "message_us": cost, "cancel_us": percentile(cancels, 50)}


def measure_placement(tokens: int) -> dict[str, Any]:
    first, second = [], []
    for repeat in range(7):
        cluster = cluster_of("a", "b", max_model_len=tokens + 8192)
        request = make_request([(repeat + i * 31) % VOCAB for i in range(tokens)])
        began = time.perf_counter_ns()
        cluster.enqueue(request, 0.0)
        first.append((time.perf_counter_ns() - began) / 1e3)
        holder = next(name for name, message in cluster.take_outgoing() if isinstance(message, Submit))
        began = time.perf_counter_ns()
        cluster.lost(holder, "it died", 0.0)
        second.append((time.perf_counter_ns() - began) / 1e3)
        assert any(isinstance(message, Submit) for _, message in cluster.take_outgoing())
    return {"tokens": tokens, "first_us": percentile(first, 50), "again_us": percentile(second, 50)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1000, 4000])
    parser.add_argument("--parked", type=int, nargs="+", default=[0, 100, 1000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--out", help="Write the result as JSON.")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    engine = [measure_engine(count) for count in options.waiting]
    gateway = [measure_gateway(count) for count in options.parked]
    placement = [measure_placement(count) for count in options.tokens]
    for title, rows in (
        (f"engine, {SLOTS} rows decode", engine),
        (f"gateway, {STREAMS} streams", gateway),
        ("gateway, placement of a prompt", placement),
    ):
        table = Table(title, list(rows[0]))
        for row in rows:
            table.row(*(f"{value:.1f}" if isinstance(value, float) else value for value in row.values()))
        table.print()
    write_json(options.out, {"machine": facts, "engine": engine, "gateway": gateway, "placement": placement})


if __name__ == "__main__":
    main()
