"""What it costs to get work into a running worker, beside a manager process in the same run.

    python benchmarks/command_log.py [--seconds 3] [--out command_log.json]

1. Looking for new work when there is none, once a step; the ticket that tells rank 1 what rank 0 applies.
2. From the engine's send of a 1,280-token request to its being in the slot, worker asleep and worker busy.
3. Step times (start to start) while such requests arrive at 200/s, and while none does.

The worker is the real one, `baton.worker`, with the simulated executor: a step takes 1 ms, slept, as a step
on an accelerator would.  The other way in is described in `_manager_baseline.py`.
Goals: a look < 0.2 us, a ticket < 20 us (median).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

import _manager_baseline as baseline
import baton.worker.main
from _common import Table, machine, print_machine, summary, write_json
from baton.executor.base import Int32Array, StepBatch, StepResult
from baton.executor.simulated.executor import SimulatedExecutor
from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingReader, create_ring
from baton.ipc.ticket import TicketReader, TicketWriter, create_tickets
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32
from baton.protocol.config import CostModel
from baton.protocol.messages.commands import COMMANDS, Admit, CommandBatch, Control
from baton.protocol.params.sampling import Sampling, Stopping
from baton.worker.command_log import CommandLog
from baton.worker.rounds import SPIN_S
from baton.worker.slots.slots import Slots
from baton.worker.wiring import GroupWiring, WorkerWiring

PROMPT = 1280
RATE = 200
BLOCK = 64
BACKGROUND = 8
BACKGROUND_TOKENS = 16_384
SLOTS = 256
SYSTEMS = ("command log", "manager, TCP", "manager, unix socket")

CONFIG = instance_config(
    model="",
    executor="simulated",
    max_model_len=BACKGROUND_TOKENS + 1,
    block_size=BLOCK,
    num_blocks=SLOTS * 21 + BACKGROUND * (BACKGROUND_TOKENS // BLOCK + 1),
    max_num_seqs=SLOTS,
    max_num_batched_tokens=8192,
    vocab_size=50_000,
    simulated_cost=CostModel(base=1e-3),
    log_level="warning",
)


class Recorder(SimulatedExecutor):
    """Notes when each request is in its slot and when each step starts; writes it down at the end."""

    path = ""
    admits: list[float]
    steps: list[float]

    def admit(
        self, slot: int, tokens: Int32Array, num_prompt: int, sampling: Sampling, stopping: Stopping
    ) -> None:
        super().admit(slot, tokens, num_prompt, sampling, stopping)
        if slot >= BACKGROUND:
            self.admits.append(time.perf_counter())

    def execute(self, batch: StepBatch) -> StepResult:
        self.steps.append(time.perf_counter())
        return super().execute(batch)

    def close(self) -> None:
        Path(self.path).write_text(json.dumps({"admits": self.admits, "steps": self.steps}))


def make_recorder(path: str) -> Recorder:
    executor = Recorder.from_config(CONFIG)
    assert isinstance(executor, Recorder)
    executor.path, executor.admits, executor.steps = path, [], []
    return executor


def child(arguments: list[str]) -> None:
    """What the benchmark starts of itself."""
    kind, *rest = arguments
    if kind == "ring":
        wiring, path = rest
        baton.worker.main.create_executor = lambda *_: make_recorder(path)
        sys.exit(baton.worker.main.run_worker(msgspec.json.decode(wiring, type=WorkerWiring)))
    elif kind == "manager":
        address, flag, path = rest
        slots = Slots(
            max_num_seqs=SLOTS,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens,
            max_model_len=CONFIG.max_model_len,
            block_size=BLOCK,
            num_blocks=CONFIG.num_blocks or 0,
        )
        baseline.run_worker(address, flag, slots, make_recorder(path))
    else:
        follow_tickets(*rest)


# ---- the engine's side of each system


class RingEngine:
    """Sends through the command log and reads the reports."""

    def __init__(self, directory: Path) -> None:
        self._group = GroupWiring(CONFIG, "")
        self._path = directory / "worker.json"
        wiring = self._group.worker(0)
        argv = child_argv("ring", msgspec.json.encode(wiring).decode(), str(self._path))
        self._worker = subprocess.Popen(argv, pass_fds=wiring.descriptors())
        self._sequence = 0
        while not any(True for _ in self._group.reports[0].records()):
            time.sleep(0.01)

    def send(self, command: Admit | Control) -> float:
        sent = time.perf_counter()
        self._sequence += 1
        self._group.commands.write(COMMANDS.encode(CommandBatch(self._sequence, [command])))
        return sent

    def idle(self, seconds: float) -> None:
        """Reads what came and waits."""
        for _ in self._group.reports[0].records():
            pass
        self._group.commands.flush()
        time.sleep(seconds)

    def stop(self) -> dict[str, list[float]]:
        self.send(Control("shutdown"))
        self._worker.wait(10)
        return json.loads(self._path.read_text())  # type: ignore[no-any-return]


class ManagerEngine:
    """Puts batches of one request into the manager's queue."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._path = directory / "worker.json"
        self._server, address, flag = baseline.start_server(directory, kind)
        self._client = baseline.Client(address, flag)
        fds = () if flag is None else (flag,)
        argv = child_argv("manager", address, "-" if flag is None else str(flag), str(self._path))
        self._worker = subprocess.Popen(argv, pass_fds=fds)
        time.sleep(1.0)

    def send(self, command: Admit) -> float:
        request = baseline.to_request(command)
        sent = time.perf_counter()
        self._client.put([request])
        return sent

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def look(self) -> dict[str, float]:
        """Seconds of a look, for each way to look."""
        ways = {"num_tasks": self._client.num_tasks, "the worker's check": self._client.check}
        return {
            name: float(min(timeit.repeat(way, number=100, repeat=5))) / 100 for name, way in ways.items()
        }

    def stop(self) -> dict[str, list[float]]:
        self._client.put([None])
        self._worker.wait(10)
        self._server.kill()
        self._server.wait(10)
        return json.loads(self._path.read_text())  # type: ignore[no-any-return]


Engine = RingEngine | ManagerEngine


@contextmanager
def engine_of(system: str) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if system == SYSTEMS[0]:
            yield RingEngine(directory)
        else:
            yield ManagerEngine(directory, "tcp" if "TCP" in system else "unix")


def child_argv(*arguments: str) -> list[str]:
    return [sys.executable, __file__, "--child", *arguments]


def make_admit(slot: int, epoch: int, prompt: int, max_tokens: int) -> Admit:
    blocks = math.ceil((prompt + max_tokens) / BLOCK)
    first = slot * (BACKGROUND_TOKENS // BLOCK + 1)
    if slot >= BACKGROUND:
        first = BACKGROUND * (BACKGROUND_TOKENS // BLOCK + 1) + (slot - BACKGROUND) * 21
    return Admit(
        slot=slot,
        epoch=epoch,
        tokens=pack_int32((slot * 31 + i * 7) % CONFIG.vocab_size for i in range(prompt)),
        num_prompt=prompt,
        num_computed=0,
        blocks=pack_int32(range(first, first + blocks)),
        sampling=Sampling(seed=0, temperature=0.0),
        stopping=Stopping(max_tokens=max_tokens),
    )


def send_requests(engine: Engine, seconds: float) -> list[float]:
    """At `RATE`, at random distances, so that they fall on every part of a step.  Returns when sent."""
    rng, sent = random.Random(0), []
    admits = [make_admit(slot, 0, PROMPT, 1) for slot in range(BACKGROUND, SLOTS)]
    due = time.perf_counter()
    for number in range(int(RATE * seconds)):
        due += rng.uniform(0.5, 1.5) / RATE
        epoch, index = divmod(number, len(admits))
        command = msgspec.structs.replace(admits[index], epoch=epoch)
        engine.idle(max(0.0, due - time.perf_counter()))
        sent.append(engine.send(command))
    engine.idle(0.05)
    return sent


def run_background(engine: Engine) -> None:
    for slot in range(BACKGROUND):
        engine.send(make_admit(slot, 0, 16, BACKGROUND_TOKENS - 16))
    engine.idle(0.1)


def measure_system(system: str, seconds: float) -> dict[str, Any]:
    """Latency asleep and busy, step times quiet and loaded, and the cost of a look."""
    result: dict[str, Any] = {"system": system}
    with engine_of(system) as engine:
        if isinstance(engine, ManagerEngine):
            result["look_s"] = engine.look()
        sent = send_requests(engine, seconds / 2)
        admits = engine.stop()["admits"]
    result["asleep_s"] = summary([b - a for a, b in zip(sent, admits, strict=True)])
    with engine_of(system) as engine:
        run_background(engine)
        quiet = time.perf_counter()
        end = quiet + seconds
        while time.perf_counter() < end:
            engine.idle(0.05)
        loaded = time.perf_counter()
        sent = send_requests(engine, seconds)
        end = time.perf_counter()
        record = engine.stop()
    result["busy_s"] = summary([b - a for a, b in zip(sent, record["admits"], strict=True)])
    for name, since, until in (("step_quiet_s", quiet, loaded), ("step_loaded_s", loaded, end)):
        steps = [step for step in record["steps"] if since < step < until]
        result[name] = summary([b - a for a, b in pairwise(steps)])
    return result


# ---- looks and tickets


def measure_look() -> float:
    """Seconds of one `has_news` of a worker's command log, with nothing there."""
    log = CommandLog(RingReader(create_ring(1 << 20, 1), 0))
    return float(min(timeit.repeat(log.has_news, number=100_000, repeat=5))) / 100_000


def follow_tickets(
    tickets: str, bell: str, leader_bell: str, rounds: str, gap: str, start: str, spin: str
) -> None:
    """Rank 1: at the same moments as the leader its step is over, and it takes the next ticket."""
    reader = TicketReader(int(tickets), 0, Doorbell(int(bell)), {}, Doorbell(int(leader_bell)))
    taken = []
    for number in range(1, int(rounds) + 1):
        wait_until(float(start) + number * float(gap))
        reader.wait(number, timeout_s=10.0, spin_s=float(spin))
        taken.append(time.perf_counter())
    print(json.dumps(taken))


def measure_ticket(rounds: int, gap: float, *, asleep: bool) -> dict[str, float]:
    """From the leader's `publish` to the follower's holding the ticket.

    asleep: the follower has long been waiting; else both come out of a step at the same moment.
    """
    fd, bell, leader_bell = create_tickets(1), Doorbell.create(), Doorbell.create()
    start = time.perf_counter() + 1.0
    fds = (fd, bell.fileno(), leader_bell.fileno())
    shift = gap / 2 if asleep else 0.0
    numbers = (*fds, rounds, gap, start - shift, 0.0 if asleep else SPIN_S)
    follower = subprocess.Popen(
        child_argv("ticket", *map(str, numbers)), pass_fds=fds, stdout=subprocess.PIPE, text=True
    )
    writer, published = TicketWriter(fd, [bell]), []
    for number in range(1, rounds + 1):
        wait_until(start + number * gap)
        published.append(time.perf_counter())
        while not writer.publish(number, number):
            time.sleep(0.001)
    taken = json.loads(follower.communicate(timeout=30)[0])
    return summary([b - a for a, b in zip(published, taken, strict=True)])


def wait_until(moment: float) -> None:
    """Sleeps most of the time and spins the rest, as a step that ends at `moment`."""
    if (left := moment - time.perf_counter()) > 0.0005:
        time.sleep(left - 0.0003)
    while time.perf_counter() < moment:
        pass


# ---- output


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.2f}" if seconds < 1e-5 else f"{seconds * 1e6:,.0f}"


def print_tables(result: dict[str, Any]) -> None:
    looks = Table("A look for new work when there is none, once a step (us)", ("way", "us"))
    looks.row("command log: one 64-bit word", us(result["look_s"]))
    for system in result["systems"]:
        for name, seconds in system.get("look_s", {}).items():
            looks.row(f"{system['system']}: {name}", us(seconds))
    looks.print()
    tickets = Table("Ticket from rank 0 to rank 1 (us)", ("follower", "p50", "p99"))
    for name, found in result["ticket_s"].items():
        tickets.row(name, us(found["p50"]), us(found["p99"]))
    tickets.print()
    latency = Table(
        f"From send of a {PROMPT}-token request to its being in the slot (us); a busy worker's step is 1 ms",
        ("way", "asleep p50", "asleep p99", "busy p50", "busy p99"),
    )
    jitter = Table(
        f"Step time, start to start (us), with no arrivals and with {RATE} requests of {PROMPT} tokens/s",
        ("way", "none p50", "none p99", f"{RATE}/s p50", f"{RATE}/s p99"),
    )
    for system in result["systems"]:
        asleep, busy = system["asleep_s"], system["busy_s"]
        latency.row(system["system"], *(us(found[q]) for found in (asleep, busy) for q in ("p50", "p99")))
        quiet, loaded = system["step_quiet_s"], system["step_loaded_s"]
        jitter.row(system["system"], *(us(found[q]) for found in (quiet, loaded) for q in ("p50", "p99")))
    latency.print()
    jitter.print()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of load, for each measurement")
    parser.add_argument("--out", help="write the result as JSON to this file")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    rounds = int(options.seconds * 500)
    result = {
        "benchmark": "command_log",
        "machine": facts,
        "request": {"prompt_tokens": PROMPT, "per_second": RATE, "step_s": CONFIG.simulated_cost.base},
        "look_s": measure_look(),
        "ticket_s": {
            "directly after a step": measure_ticket(rounds, 0.002, asleep=False),
            "asleep": measure_ticket(rounds, 0.002, asleep=True),
        },
        "systems": [measure_system(system, options.seconds) for system in SYSTEMS],
    }
    print_tables(result)
    write_json(options.out, result)


if __name__ == "__main__":
    main()
