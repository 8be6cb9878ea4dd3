"""How fast KV pages travel between two processes, and what it costs the steps that run meanwhile.

    python benchmarks/transfer.py [--out FILE] [--quick] [--only bandwidth|slowdown]

* Bandwidth: `TransferService`, as a worker runs it, fetches scattered pages of another process, from the call
  of `fetch` to the report.  In turns with it, page for page the same bytes: for shared memory a `memcpy` from
  the mapped pool into the own one; for TCP a plain blocking socket, `sendmsg` on one side and `recvmsg_into`
  on the other.  "Best" compares the fastest of each: what else the machine does adds to both, but not evenly.
* `tcp+secret`: the same with the pages encrypted, as between members of a cluster.  Beside it what one core's
  AES-256-GCM does, which is the most that encryption leaves: by `openssl speed` (the system's, records of
  16 KiB), and by the package that seals the records; and the most that TCP and it leave together.  "A CPU
  second" of the reader and of the source moves so much: on a busy machine that says more than the time
  ("–": too little to tell).
* Slowdown: two worker groups (real processes, simulated executor) decode; in turns, D fetches from P, or not.
  With "host-bound" steps the loop computes all the time, with "device" steps it sleeps as if for an
  accelerator.

A page is 36 layers x K/V x 16 KiB = 1,152 KiB (16 tokens of a model with 8 heads of 64 in bfloat16).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import queue
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from _common import Table, machine, percentile, print_machine, write_json
from baton.executor.simulated.pool import TokenPool
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32
from baton.protocol.config import CostModel, InstanceConfig
from baton.protocol.messages.commands import (
    COMMANDS,
    TRANSFERS,
    Admit,
    Command,
    CommandBatch,
    Fetch,
    Grant,
    TransferBatch,
)
from baton.protocol.messages.handover import InstanceSource, PoolSource
from baton.protocol.messages.reports import REPORTS, Fetched, StepReport, StrangersRefused, WorkerReady
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.cluster_secret import NO_SECRETS, SECRETS_VARIABLE, ClusterSecret, Secrets
from baton.transfer.service import TransferService
from baton.transfer.transports.sealing import HEAD_BYTES, RECORD_BYTES, TAG_BYTES, Seal
from baton.worker.wiring import GroupWiring, worker_argv

LAYERS, TILE_BYTES, BLOCK = 36, 16384, 16
PAGE_BYTES = LAYERS * 2 * TILE_BYTES
POOL = 320
WINDOW = 64
TOKEN = b"of the benchmark"
SECRETS = Secrets((ClusterSecret.make(bytes(32)),))
ENCRYPTED = "tcp+secret"


def secrets_of(transfer: str) -> Secrets:
    return SECRETS if transfer == ENCRYPTED else NO_SECRETS


def config(transfer: str, **changes: Any) -> InstanceConfig:
    values: dict[str, Any] = {
        "model": "",
        "executor": "simulated",
        "max_model_len": 100_000,
        "block_size": BLOCK,
        "num_blocks": POOL,
        "vocab_size": 50_000,
        "simulated_layers": LAYERS,
        "simulated_tile_bytes": TILE_BYTES,
        "peer_endpoint": "ipc://unused",
        "transfer": transfer.partition("+")[0],
        "log_level": "warning",
    }
    return instance_config(**(values | changes))


def make_pool() -> TokenPool:
    pool = TokenPool(POOL, BLOCK, num_layers=LAYERS, tile_bytes=TILE_BYTES, shared=True)
    pool.cells[:] = np.arange(pool.cells[0, 0, 0].size, dtype=np.uint32)  # touches every page
    return pool


# ---- bandwidth


def serve(transfer: str, key: str) -> None:
    """The source process: a service, and a plain socket that sends the pages it is asked for.  `key`: of the
    reader (`PoolSource.reader_key`), in hex."""
    pool = make_pool()
    service = TransferService(0, pool.view, config(transfer), print, secrets=secrets_of(transfer))
    service.start()
    service.grant(Grant(TOKEN, "reader", [bytes.fromhex(key)], pack_int32(range(POOL)), 1e6))
    raw = socket.create_server(("127.0.0.1", 0))
    print(msgspec.json.encode((service.source, raw.getsockname()[1])).decode(), flush=True)
    memory = pool.view.memory
    assert memory is not None
    connection, _ = raw.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while packed := connection.recv(4 * POOL):
        pages = array("i", packed)
        buffers = [memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] for page in pages]
        send_all(connection, buffers)
    service.close()


def send_all(connection: socket.socket, buffers: list[memoryview]) -> None:
    while buffers:
        sent = connection.sendmsg(buffers[:WINDOW])
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if sent:
            buffers[0] = buffers[0][sent:]


def receive_all(connection: socket.socket, buffers: list[memoryview]) -> None:
    while buffers:
        count = connection.recvmsg_into(buffers[:WINDOW], 0, socket.MSG_WAITALL)[0]
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]


class Pair:
    """A source process and a reader in this one."""

    def __init__(self, transfer: str) -> None:
        self.pool = make_pool()
        self.reports: queue.Queue[Fetched | StrangersRefused] = queue.Queue()
        self.service = TransferService(
            0, self.pool.view, config(transfer), self.reports.put, secrets=secrets_of(transfer)
        )
        self.service.start()
        mine = self.service.source
        key = mine.reader_key.hex() if mine is not None else ""
        argv = [sys.executable, __file__, "--serve", transfer, "--key", key]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        source, port = msgspec.json.decode(line, type=tuple[PoolSource, int])
        self.source = InstanceSource("token-ids", BLOCK, [source])
        self.raw = socket.create_connection(("127.0.0.1", port))
        self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = self.pool.view.memory
        assert memory is not None
        self.memory = memory
        self.address = self.pool.view.address
        self.there = self._map(source) if source.shared_memory else 0

    def _map(self, source: PoolSource) -> int:
        pid, fd, *_ = source.shared_memory.split(":")
        memory = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        self.mapped = np.frombuffer(mmap.mmap(memory, 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        os.close(memory)
        return int(self.mapped.ctypes.data)

    def fetch(self, pages: list[int], blocks: list[int]) -> None:
        self.service.fetch(Fetch(1, self.source, pack_int32(pages), pack_int32(blocks), 0, -1, TOKEN))
        found = self.reports.get(timeout=30)
        assert isinstance(found, Fetched)
        assert not found.error, found.error

    def cpu_s(self) -> tuple[float, float]:
        """Seconds of processors that the reader and the source have used."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return time.process_time(), sum(int(one.read_text().split()[0]) for one in threads) / 1e9

    def memcpy(self, pages: list[int], blocks: list[int]) -> None:
        move, here, there = ctypes.memmove, self.address, self.there
        for page, block in zip(pages, blocks, strict=True):
            move(here + block * PAGE_BYTES, there + page * PAGE_BYTES, PAGE_BYTES)

    def socket(self, pages: list[int], blocks: list[int]) -> None:
        self.raw.sendall(pack_int32(pages))
        receive_all(self.raw, [self.memory[b * PAGE_BYTES : (b + 1) * PAGE_BYTES] for b in blocks])

    def close(self) -> None:
        self.raw.close()
        self.service.close()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


def bandwidth(transfer: str, counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Ours and the baseline in turns over the same pages."""
    pair, rng, found = Pair(transfer), random.Random(1), []
    name, baseline = ("memcpy", pair.memcpy) if transfer == "shared_memory" else ("raw socket", pair.socket)
    try:
        for count in counts:
            times: dict[str, list[float]] = {transfer: [], name: []}
            cpu = [0.0, 0.0]  # of the reader and of the source, while ours runs
            for round_ in range(rounds + 2):
                pages, blocks = rng.sample(range(POOL), count), rng.sample(range(POOL), count)
                ways: list[tuple[str, Callable[[list[int], list[int]], None]]]
                ways = [(transfer, pair.fetch), (name, baseline)]
                for way, copy in ways if round_ % 2 else reversed(ways):
                    before = pair.cpu_s()
                    began = time.perf_counter()
                    copy(pages, blocks)
                    if round_ >= 2:  # the first ones map memory
                        times[way].append(time.perf_counter() - began)
                        if way == transfer:
                            used = zip(pair.cpu_s(), before, strict=True)
                            cpu = [total + now - then for total, (now, then) in zip(cpu, used, strict=True)]
            size = count * PAGE_BYTES
            ours, theirs = (statistics.median(times[way]) for way in (transfer, name))
            found.append(
                {
                    "transport": transfer,
                    "pages": count,
                    "mib": round(size / 2**20, 1),
                    "gb_s": size / ours / 1e9,
                    "baseline": name,
                    "baseline_gb_s": size / theirs / 1e9,
                    "share": statistics.median(
                        b / a for a, b in zip(times[transfer], times[name], strict=True)
                    ),
                    "share_of_best": min(times[name]) / min(times[transfer]),
                    "ms": ours * 1e3,
                    "gb_cpu_s": [rounds * size / one / 1e9 if one > 0.02 else 0.0 for one in cpu],
                }
            )
    finally:
        pair.close()
    return found


# ---- slowdown


class Group:
    """The engine's end of one worker process."""

    def __init__(self, settings: InstanceConfig, secrets: Secrets) -> None:
        self.wiring = GroupWiring(settings, "")
        wiring = self.wiring.worker(0)
        environment = os.environ | {SECRETS_VARIABLE: secrets.dump()}
        self.worker = subprocess.Popen(worker_argv(wiring), pass_fds=wiring.descriptors(), env=environment)
        self.wiring.close_worker_ends()
        self.sequence = 0
        self.fetches = 0
        self.steps: list[float] = []
        self.fetched: list[Fetched] = []
        self.ready: WorkerReady | None = None
        while self.ready is None:
            self.poll(0.1)

    def send(self, *commands: Command) -> None:
        self.sequence += 1
        self.wiring.commands.write(COMMANDS.encode(CommandBatch(self.sequence, list(commands))))

    def transfer(self, command: Fetch | Grant) -> None:
        assert self.wiring.transfers is not None
        self.fetches += 1
        self.wiring.transfers.write(TRANSFERS.encode(TransferBatch(self.fetches, [command])))

    def poll(self, timeout_s: float) -> None:
        select.select([self.wiring.doorbell.fileno()], [], [], timeout_s)
        self.wiring.doorbell.drain()
        for record in self.wiring.reports[0].records():
            report = REPORTS.decode(record)
            if isinstance(report, StepReport):
                self.steps.append(report.seconds)
            elif isinstance(report, Fetched):
                assert not report.error, report.error
                self.fetched.append(report)
            elif isinstance(report, WorkerReady):
                self.ready = report

    def decode_for_ever(self) -> None:
        """Eight requests that share the blocks of a long table: what they read does not matter here."""
        for slot in range(8):
            table = [slot + 8 * (index % 2) for index in range(6000)]
            prompt = pack_int32([7] * 300)
            stopping = Stopping(max_tokens=90_000)
            self.send(Admit(slot, 0, prompt, 300, 0, pack_int32(table), Sampling(0, 0.0), stopping))

    def close(self) -> None:
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait(10)
        self.wiring.close()


def slowdown(
    transfer: str, step_ms: float, every_s: float, slices: int, slice_s: float
) -> list[dict[str, Any]]:
    """Steps of P and D, in slices with and without fetches (16 pages, one each `every_s`)."""
    cost = CostModel(base=step_ms / 1e3)
    settings = config(transfer, simulated_cost=cost, max_num_seqs=8)
    prefill, decode = (Group(settings, secrets_of(transfer)) for _ in range(2))
    rng = random.Random(2)
    try:
        for group in (prefill, decode):
            group.decode_for_ever()
        for group in (prefill, decode):
            assert group.ready is not None
            assert group.ready.source is not None
        keys = [decode.ready.source.reader_key]
        prefill.transfer(Grant(TOKEN, "decode", keys, pack_int32(range(POOL)), 1e6))
        source = InstanceSource("token-ids", BLOCK, [prefill.ready.source])
        seen: dict[tuple[str, bool], list[float]] = {}
        next_at = 0.0
        for index in range(2 * slices + 2):
            fetching = bool(index % 2)
            for group in (prefill, decode):
                group.poll(0)
                group.steps.clear()
            until = time.monotonic() + slice_s
            outstanding = len(decode.fetched)
            while (now := time.monotonic()) < until:
                if fetching and outstanding == len(decode.fetched) and now >= next_at:
                    outstanding += 1
                    next_at = now + every_s
                    pages = pack_int32(rng.sample(range(20, POOL), 16))
                    decode.transfer(Fetch(index * 10_000 + outstanding, source, pages, pages, 0, -1, TOKEN))
                decode.poll(0.002)
                prefill.poll(0)
            while outstanding > len(decode.fetched):
                decode.poll(0.1)
            if index >= 2:
                seen.setdefault(("P", fetching), []).extend(prefill.steps)
                seen.setdefault(("D", fetching), []).extend(decode.steps)
        return [
            {
                "transport": transfer,
                "side": side,
                "steps": "host-bound" if step_ms == 0 else f"device {step_ms:g} ms",
                "load": "flat out" if every_s == 0 else f"18 MiB each {every_s * 1e3:g} ms",
                "p50_ms": (percentile(seen[side, False], 50) * 1e3, percentile(seen[side, True], 50) * 1e3),
                "p99_ms": (percentile(seen[side, False], 99) * 1e3, percentile(seen[side, True], 99) * 1e3),
                "mean_slowdown": statistics.fmean(seen[side, True]) / statistics.fmean(seen[side, False]) - 1,
            }
            for side in ("P", "D")
        ]
    finally:
        prefill.close()
        decode.close()


def show_bandwidth(rounds: int) -> list[dict[str, Any]]:
    columns = [
        "transport",
        "MiB",
        "ms",
        "GB/s",
        "baseline GB/s",
        "share",
        "best",
        "GB a CPU second: reader, source",
    ]
    table, rows = Table("Pool to pool, scattered pages", columns), []
    for transfer in ("shared_memory", "tcp", ENCRYPTED):
        for row in bandwidth(transfer, [1, 16, 128], rounds):
            rows.append(row)
            baseline = f"{row['baseline_gb_s']:.2f} ({row['baseline']})"
            shares = [f"{100 * row[key]:.0f} %" for key in ("share", "share_of_best")]
            numbers = f"{row['ms']:.2f}", f"{row['gb_s']:.2f}", baseline, *shares
            cpu = ", ".join(f"{value:.2f}" if value else "–" for value in row["gb_cpu_s"])
            table.row(row["transport"], row["mib"], *numbers, cpu)
    table.print()
    return rows


def aes() -> dict[str, float]:
    """Bytes a second of AES-256-GCM on one core: of the system's OpenSSL in records of TLS's size, and of the
    package `cryptography` in ours, sealing and opening."""
    found = {}
    command = ["openssl", "speed", "-evp", "aes-256-gcm", "-bytes", "16384", "-seconds", "2"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found["openssl"] = float(said.split()[-1].removesuffix("k")) * 1e3
    one, other = Seal(bytes(32)), Seal(bytes(32))
    content = memoryview(bytearray(os.urandom(RECORD_BYTES)))
    record = memoryview(bytearray(RECORD_BYTES + HEAD_BYTES + TAG_BYTES))
    seconds = {"seal": 0.0, "open": 0.0}
    for _ in range(4000):
        began = time.thread_time()
        one.seal(content, record)
        sealed = time.thread_time()
        other.open(record[HEAD_BYTES:], content)
        seconds["seal"] += sealed - began
        seconds["open"] += time.thread_time() - sealed
    return found | {name: 4000 * RECORD_BYTES / one_s for name, one_s in seconds.items()}


def show_aes(rows: list[dict[str, Any]]) -> dict[str, float]:
    """And which part of it pages reach that are encrypted, in a second of the reader's processor.

    Beside it the most that can be reached: the kernel copies each byte on its way, which costs what pages in
    clear cost, and the same processor then opens it (or sealed it before)."""
    found = aes()
    clear = {row["mib"]: row["gb_cpu_s"] for row in rows if row["transport"] == "tcp"}
    rows = [row for row in rows if row["transport"] == ENCRYPTED]
    table = Table("AES-256-GCM, one core", ["of", "GB/s", *(f"{row['mib']} MiB" for row in rows)])
    for name, bytes_s in found.items():
        reached = (row["gb_cpu_s"][0] for row in rows)
        shares = (f"{100e9 * one / bytes_s:.0f} %" if one else "–" for one in reached)
        table.row(name, f"{bytes_s / 1e9:.2f}", *shares)
    for end, (side, name) in enumerate((("reader", "open"), ("source", "seal"))):
        shares = []
        for row in rows:
            ours, theirs = row["gb_cpu_s"][end], clear[row["mib"]][end]
            most = 1 / (1 / theirs + 1e9 / found[name]) if theirs else 0.0
            shares.append(f"{100 * ours / most:.0f} % of {most:.2f}" if ours and most else "–")
        table.row(f"TCP in clear, then {name} ({side})", "", *shares)
    table.print()
    return found


def show_slowdown(slices: int, slice_s: float) -> list[dict[str, Any]]:
    columns = ["transport", "steps", "load", "of", "p50 ms", "p99 ms", "mean"]
    table, rows = Table("Steps while pages travel (without → with)", columns), []
    for transfer in ("shared_memory", "tcp", ENCRYPTED):
        for step_ms, every_s in ((0.0, 0.05), (0.0, 0.0), (10.0, 0.05), (10.0, 0.0)):
            for row in slowdown(transfer, step_ms, every_s, slices, slice_s):
                rows.append(row)
                times = [" → ".join(f"{value:.2f}" for value in row[key]) for key in ("p50_ms", "p99_ms")]
                mean = f"{100 * row['mean_slowdown']:+.1f} %"
                table.row(row["transport"], row["steps"], row["load"], row["side"], *times, mean)
    table.print()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="write the result as JSON")
    parser.add_argument("--quick", action="store_true", help="a few rounds, for a look")
    parser.add_argument("--only", choices=["bandwidth", "slowdown"])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        threading.Thread(target=watch_parent, daemon=True).start()
        serve(arguments.serve, arguments.key)
        return
    facts = machine()
    print_machine(facts)
    result: dict[str, Any] = {"machine": facts}
    if arguments.only != "slowdown":
        rows = result["bandwidth"] = show_bandwidth(6 if arguments.quick else 40)
        result["aes"] = show_aes(rows)
    if arguments.only != "bandwidth":
        result["slowdown"] = show_slowdown(*((2, 0.5) if arguments.quick else (6, 1.0)))
    write_json(arguments.out, result)


def watch_parent() -> None:
    """Ends this process with the one that started it."""
    parent = os.pidfd_open(os.getppid())
    select.select([parent], [], [])
    os._exit(0)


if __name__ == "__main__":
    main()
