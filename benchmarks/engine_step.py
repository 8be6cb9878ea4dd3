"""What the engine costs per step and per token, with a worker that costs nothing.

    python benchmarks/engine_step.py [--slots 1 64 256 1024] [--steps 2000] [--seconds 3] [--pace-us 500]
                                     [--out step.json]

1. In one process: the real core reads step reports that were made beforehand, one token for each slot.
   "core" is intake, decisions and outputs; "with codec" adds decoding the report and encoding commands and
   outputs.  Growth and prefix hashing, due every block, are spread over the steps and are in the mean.
2. With real processes: engine loop, rings and a worker whose executor returns constants, at once and then
   after a pause of `--pace-us` a step, as a small model would.  At once, the worker runs freely: steps/s is
   what the slower of the two reaches, and the engine finds several reports a turn.  "engine CPU" is the CPU
   time of the engine process, all its threads, per step; "gateway CPU" that of the process that reads.

Goal: less than 3 us of the engine's time per token.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

import baton.worker.main
from _common import Table, machine, percentile, print_machine, write_json
from baton.engine.core import EngineCore
from baton.engine.shell.loop import EngineLoop
from baton.executor.base import ExecutorInfo, Int32Array, StepBatch, StepResult
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32
from baton.protocol.config import CostModel, InstanceConfig
from baton.protocol.messages.commands import COMMANDS, Admit
from baton.protocol.messages.reports import REPORTS, StepReport, WorkerReady
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Hello, Query, QueryReply, Submit
from baton.protocol.params.sampling import Sampling, Stopping
from baton.worker.wiring import GroupWiring, WorkerWiring

VOCAB = 50_000
BLOCK = 32
PROMPT = 64
REPEATS = 5
TOKENS = 1 << 23
"""Of all slots together: more than any run generates."""
DEADLINE_S = 60


def make_config(slots: int, pace_s: float = 0.0) -> InstanceConfig:
    return instance_config(
        model="",
        executor="simulated",
        max_model_len=TOKENS // slots + 2 * PROMPT,
        block_size=BLOCK,
        num_blocks=TOKENS // BLOCK + slots * 2 * PROMPT // BLOCK,
        max_num_seqs=slots,
        max_num_batched_tokens=8192,
        max_waiting=slots,
        vocab_size=VOCAB,
        simulated_cost=CostModel(base=pace_s),
        command_ring_bytes=1 << 22,
        report_ring_bytes=1 << 22,
        log_level="warning",
    )


def make_submit(index: int, slots: int) -> Submit:
    """Prompts of different lengths, so that blocks fill at different steps; no two share a prefix."""
    prompt = [(index * 7919 + i) % VOCAB for i in range(PROMPT + index % BLOCK)]
    return Submit(index, "", pack_int32(prompt), Sampling(seed=index), Stopping(TOKENS // slots))


# -- 1. in one process


def core_with(slots: int) -> tuple[EngineCore, list[Admit]]:
    config = make_config(slots)
    core = EngineCore(config, incarnation="bench", workers=[1], now=0.0)
    core.on_report(0, WorkerReady(0, config.num_blocks or 0, BLOCK, "none", 1, VOCAB), 0.0)
    core.on_message(b"gate", Hello("gate"), 0.0)
    for index in range(slots):
        core.on_message(b"gate", make_submit(index, slots), 0.0)
    batch = core.flush(0.0).batch
    assert batch is not None
    return core, [command for command in batch.commands if isinstance(command, Admit)]


def make_reports(admits: list[Admit], steps: int) -> list[StepReport]:
    rng = np.random.default_rng(0)
    slots = pack_int32(admit.slot for admit in admits)
    epochs = pack_int32(admit.epoch for admit in admits)
    tokens = rng.integers(0, VOCAB, (steps, len(admits)), dtype=np.int32)
    return [
        StepReport(step, 1, slots, epochs, tokens[step - 1].tobytes(), seconds=0.001)
        for step in range(1, steps + 1)
    ]


def measure_core(slots: int, steps: int) -> dict[str, float]:
    """Mean microseconds per step; medians over repeats."""
    plain, coded = [], []
    for _ in range(REPEATS):
        core, admits = core_with(slots)
        reports = make_reports(admits, steps)
        began = time.process_time()
        for report in reports:
            core.on_report(0, report, 0.0)
            core.flush(0.0)
        plain.append((time.process_time() - began) / steps * 1e6)
        core, admits = core_with(slots)
        records = [REPORTS.encode(report) for report in reports]
        began = time.process_time()
        for record in records:
            core.on_report(0, REPORTS.decode(record), 0.0)
            batch, messages, _ = core.flush(0.0)
            if batch is not None:
                COMMANDS.encode(batch)
            for _, message in messages:
                FROM_ENGINE.encode(message)
        coded.append((time.process_time() - began) / steps * 1e6)
    return {"slots": slots, "core_us": percentile(plain, 50), "codec_us": percentile(coded, 50)}


# -- 2. with real processes


class Constant:
    """An executor that returns the same token for every row, at once or after the pause of its cost model."""

    one_step_late = False

    def __init__(self, config: InstanceConfig) -> None:
        self.info = ExecutorInfo(config.num_blocks or 0, BLOCK, "none", 1, VOCAB, "constant")
        self._tokens = np.full(config.max_num_seqs, 7, np.int32)
        self._pace_s = config.simulated_cost.base

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def execute(self, batch: StepBatch) -> StepResult:
        if self._pace_s:
            time.sleep(self._pace_s)
        return StepResult(self._tokens[: int(batch.samples.sum())])

    def close(self) -> None:
        pass


def child(arguments: list[str]) -> None:
    """What the benchmark starts of itself."""
    if arguments[0] == "worker":
        wiring = msgspec.json.decode(arguments[1], type=WorkerWiring)
        baton.worker.main.create_executor = lambda config, *_: Constant(config)
        sys.exit(baton.worker.main.run_worker(wiring))
    config, endpoint, directory = msgspec.json.decode(arguments[1], type=InstanceConfig), *arguments[2:]
    group = GroupWiring(config, f"{directory}/rendezvous")
    wiring = group.worker(0)
    command = [sys.executable, __file__, "--child", "worker", msgspec.json.encode(wiring).decode()]
    worker = subprocess.Popen(command, pass_fds=wiring.descriptors())
    group.close_worker_ends()
    loop = EngineLoop(
        config,
        incarnation="bench",
        endpoint=endpoint,
        commands=group.commands,
        reports=group.reports,
        doorbell=group.doorbell,
        worker_pids=[worker.pid],
    )
    code = loop.run()
    worker.wait()
    sys.exit(code)


@contextmanager
def instance(config: InstanceConfig) -> Iterator[tuple[subprocess.Popen[bytes], zmq.Socket[bytes]]]:
    """The engine's process and a socket that is connected to it."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        endpoint = f"ipc://{directory}/engine.sock"
        command = [sys.executable, __file__, "--child", "engine", msgspec.json.encode(config).decode()]
        engine = subprocess.Popen([*command, endpoint, directory])
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gateway = context.socket(zmq.DEALER)
        gateway.setsockopt(zmq.RCVHWM, 0)
        gateway.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        gateway.connect(endpoint)
        gateway.send(TO_ENGINE.encode(Hello("bench")))
        try:
            gateway.recv()
            yield engine, gateway
        finally:
            engine.terminate()
            engine.wait()
            gateway.close(0)
            context.term()


def ask_stats(gateway: zmq.Socket[bytes]) -> dict[str, Any]:
    gateway.send(TO_ENGINE.encode(Query(1, "stats")))
    while not isinstance(reply := FROM_ENGINE.decode(gateway.recv()), QueryReply):
        pass
    return reply.body


def cpu_seconds(pid: int) -> float:
    return (
        sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
        / 1e9
    )


def measure_processes(slots: int, seconds: float, pace_s: float) -> dict[str, float]:
    with instance(make_config(slots, pace_s)) as (engine, gateway):
        for index in range(slots):
            gateway.send(TO_ENGINE.encode(make_submit(index, slots)))
        deadline = time.monotonic() + DEADLINE_S
        while ask_stats(gateway)["generation_tokens"] < 4 * slots:
            if time.monotonic() > deadline:
                raise TimeoutError("the instance does not get going")
        before, cpu, began = ask_stats(gateway), cpu_seconds(engine.pid), time.perf_counter()
        own = time.process_time()
        while time.perf_counter() - began < seconds:
            gateway.recv()
        own = time.process_time() - own
        after, cpu, took = ask_stats(gateway), cpu_seconds(engine.pid) - cpu, time.perf_counter() - began
    steps = after["steps"] - before["steps"]
    tokens = after["generation_tokens"] - before["generation_tokens"]
    return {
        "slots": slots,
        "pace_us": pace_s * 1e6,
        "steps_per_s": steps / took,
        "tokens_per_s": tokens / took,
        "engine_cpu_us": cpu / steps * 1e6,
        "engine_cpu_us_per_token": cpu / tokens * 1e6,
        "gateway_cpu_us": own / steps * 1e6,
        "step_us_in_worker": (after["step_seconds"] - before["step_seconds"]) / steps * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--pace-us", type=float, default=500.0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    in_process = [measure_core(slots, min(options.steps, TOKENS // slots)) for slots in options.slots]
    table = Table(
        f"In one process, {options.steps} steps, median of {REPEATS} runs",
        ["running slots", "core us/step", "core us/token", "with codec us/step", "with codec us/token"],
    )
    for row in in_process:
        slots = row["slots"]
        cells = (row["core_us"], row["core_us"] / slots, row["codec_us"], row["codec_us"] / slots)
        table.row(slots, *(f"{cell:.3f}" if cell < 10 else f"{cell:.1f}" for cell in cells))
    table.print()
    processes = [
        measure_processes(slots, options.seconds, pace_us * 1e-6)
        for pace_us in (0.0, options.pace_us)
        for slots in options.slots
    ]
    table = Table(
        f"With real processes, a worker of constants, {options.seconds:g} s on {os.cpu_count()} cores",
        [
            "running slots",
            "pause us",
            "steps/s",
            "tokens/s",
            "engine CPU us/step",
            "engine CPU us/token",
            "gateway CPU us/step",
            "worker us/step",
        ],
    )
    for row in processes:
        table.row(
            row["slots"],
            f"{row['pace_us']:.0f}",
            f"{row['steps_per_s']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['engine_cpu_us']:.1f}",
            f"{row['engine_cpu_us_per_token']:.3f}",
            f"{row['gateway_cpu_us']:.1f}",
            f"{row['step_us_in_worker']:.1f}",
        )
    table.print()
    write_json(options.out, {"machine": facts, "in_process": in_process, "processes": processes})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
