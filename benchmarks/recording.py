"""What recording costs: the same work with and without `--record`.

    python benchmarks/recording.py [--slots 16 64 256] [--work 400000] [--rounds 5] [--out recording.json]

1. In one process: the real core reads step reports that were made beforehand, one token for each slot; plain
   and recording, both with the codecs of the loop.
2. With real processes: an instance with the simulated executor generates `--work` tokens, 400 for each
   request.  A step costs nothing but the executor's own time ("free"), which is the worst case, or 2 ms more,
   which is still faster than any model.  Rounds with and without recording alternate, so that neighbours on
   the machine disturb both; "best" is the fastest round of each.  "engine" is the CPU time of the engine
   process, all its threads (the writer's too), per step.

Goal: less than 2 % of throughput.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import Table, machine, percentile, print_machine, write_json
from _instance import instance
from baton.engine.recording.recorder import RecordingCore, create_core
from baton.engine.recording.replay import find_recordings, replay
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32
from baton.protocol.config import CostModel, InstanceConfig
from baton.protocol.messages.commands import COMMANDS, Admit
from baton.protocol.messages.reports import REPORTS, StepReport, WorkerReady
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Hello, Outputs, Query, QueryReply, Submit
from baton.protocol.params.sampling import Sampling, Stopping

VOCAB = 50_000
BLOCK = 32
PROMPT = 32
DEADLINE_S = 120
TOKENS = 400


def make_config(slots: int, tokens: int, record: str | None, step_s: float = 0.0) -> InstanceConfig:
    blocks = -(-(2 * PROMPT + tokens) // BLOCK)
    return instance_config(
        model="",
        executor="simulated",
        max_model_len=blocks * BLOCK,
        block_size=BLOCK,
        num_blocks=blocks * slots,
        max_num_seqs=slots,
        max_num_batched_tokens=8192,
        max_waiting=1 << 20,
        vocab_size=VOCAB,
        simulated_cost=CostModel(base=step_s),
        record=record,
        record_max_bytes=8 << 30,
        log_level="warning",
    )


def make_submit(index: int, tokens: int) -> Submit:
    prompt = [(index * 7919 + i) % VOCAB for i in range(PROMPT + index % BLOCK)]
    return Submit(index, f"request-{index}", pack_int32(prompt), Sampling(seed=index), Stopping(tokens))


# -- 1. in one process


def time_core(slots: int, steps: int, record: str | None) -> float:
    """Microseconds of CPU time per step, the writer's thread included."""
    config = make_config(slots, steps, record)
    core = create_core(config, incarnation="bench", workers=[1], now=0.0)
    core.on_report(0, WorkerReady(0, config.num_blocks or 0, BLOCK, "none", 1, VOCAB), 0.0)
    core.on_message(b"gate", Hello("gate"), 0.0)
    for index in range(slots):
        core.on_message(b"gate", make_submit(index, steps), 0.0)
    batch = core.flush(0.0).batch
    admits = [command for command in batch.commands if isinstance(command, Admit)] if batch else []
    columns = [pack_int32(getattr(admit, name) for admit in admits) for name in ("slot", "epoch")]
    records = [
        REPORTS.encode(StepReport(step, 1, *columns, pack_int32([step % VOCAB] * slots), seconds=0.001))
        for step in range(1, steps)
    ]
    began = time.process_time()
    for number, data in enumerate(records):
        now = number * 0.001
        core.on_report(0, REPORTS.decode(data), now)
        core.on_clock(now)
        batch, messages, _ = core.flush(now)
        if batch is not None:
            COMMANDS.encode(batch)
        for _, message in messages:
            FROM_ENGINE.encode(message)
    if isinstance(core, RecordingCore):
        core.close()
    took = time.process_time() - began
    return took / len(records) * 1e6


def measure_core(slots: int, steps: int, rounds: int) -> dict[str, Any]:
    plain, recording = [], []
    for _ in range(rounds):
        plain.append(time_core(slots, steps, None))
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
            recording.append(time_core(slots, steps, directory))
    return {"slots": slots, "plain_us": min(plain), "recording_us": min(recording)}


# -- 2. with real processes


def run_instance(slots: int, requests: int, step_s: float, record: str | None) -> dict[str, float]:
    with instance(make_config(slots, TOKENS, record, step_s), DEADLINE_S) as (pid, gateway):
        cpu = _cpu_seconds(pid)
        began = time.perf_counter()
        for index in range(requests):
            gateway.send(TO_ENGINE.encode(make_submit(index, TOKENS)))
        ended = 0
        while ended < requests:
            message = FROM_ENGINE.decode(gateway.recv())
            if isinstance(message, Outputs):
                ended += len(message.finished)
        took = time.perf_counter() - began
        cpu = _cpu_seconds(pid) - cpu
        gateway.send(TO_ENGINE.encode(Query(1, "stats")))
        while not isinstance(reply := FROM_ENGINE.decode(gateway.recv()), QueryReply):
            pass
        steps = reply.body["steps"]
    return {"tokens_per_s": requests * TOKENS / took, "engine_cpu_us": cpu / max(steps, 1) * 1e6}


def measure_instance(slots: int, work: int, step_s: float, rounds: int) -> dict[str, Any]:
    requests = max(slots, work // TOKENS // (1 if step_s == 0 else 4))
    plain, recording = [], []
    size = 0
    for number in range(rounds):
        for record in (False, True) if number % 2 else (True, False):
            if not record:
                plain.append(run_instance(slots, requests, step_s, None))
                continue
            with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
                recording.append(run_instance(slots, requests, step_s, directory))
                (found,) = find_recordings(Path(directory))
                size = sum(path.stat().st_size for path in found.iterdir())
                result = replay(found)
                if not result.identical:
                    raise RuntimeError(f"not replayed identically: {result.difference or result.damage}")
    row: dict[str, Any] = {
        "slots": slots,
        "step_s": step_s,
        "requests": requests,
        "rounds": rounds,
        "bytes_per_token": size / (requests * TOKENS),
    }
    for name, runs in (("plain", plain), ("recording", recording)):
        speeds = [run["tokens_per_s"] for run in runs]
        row[name] = {
            "best_tokens_per_s": max(speeds),
            "median_tokens_per_s": percentile(speeds, 50),
            "engine_cpu_us": min(run["engine_cpu_us"] for run in runs),
        }
    return row


def _cpu_seconds(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--work", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    cores = [measure_core(slots, TOKENS, options.rounds) for slots in options.slots]
    table = Table(
        f"In one process, {TOKENS} steps, best of {options.rounds}",
        ["running slots", "plain CPU us/step", "recording CPU us/step", "more us/step", "more"],
    )
    for row in cores:
        more = row["recording_us"] - row["plain_us"]
        table.row(
            row["slots"],
            f"{row['plain_us']:.1f}",
            f"{row['recording_us']:.1f}",
            f"{more:.1f}",
            f"{more / row['plain_us']:.1%}",
        )
    table.print()
    instances = [
        measure_instance(slots, options.work, step_s, options.rounds)
        for step_s in (0.0, 0.002)
        for slots in options.slots
    ]
    table = Table(
        f"With real processes, {options.rounds} rounds each",
        [
            "running slots, step",
            "best, plain tok/s",
            "best, recording tok/s",
            "cost (best)",
            "cost (median)",
            "engine us/step, plain",
            "recording",
            "bytes/token",
        ],
    )
    for row in instances:
        plain, recording = row["plain"], row["recording"]
        costs = [1 - recording[name] / plain[name] for name in ("best_tokens_per_s", "median_tokens_per_s")]
        table.row(
            f"{row['slots']}, {'free' if row['step_s'] == 0 else '2 ms'}",
            f"{plain['best_tokens_per_s']:,.0f}",
            f"{recording['best_tokens_per_s']:,.0f}",
            *(f"{cost:.1%}" for cost in costs),
            f"{plain['engine_cpu_us']:.0f}",
            f"{recording['engine_cpu_us']:.0f}",
            f"{row['bytes_per_token']:.1f}",
        )
    table.print()
    write_json(options.out, {"machine": facts, "core": cores, "instance": instances})


if __name__ == "__main__":
    main()
