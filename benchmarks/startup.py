"""From the command to an answer: where the time of a start goes, and what memory the processes hold.

    python benchmarks/startup.py [MODEL ...] [--rounds 3] [--out startup.json]

Starts `baton serve` for the embedded model and for each MODEL (a directory), waits for the line that says it
is ready, asks for one token, and stops it.  The files are read once before, so they are in the page cache.

| part | from → to |
| --- | --- |
| command | start of the command → the engine's process exists: imports, options, a look at the checkpoint |
| engine | → the worker's process exists |
| interpreter, imports | of the worker: Python and light modules; PyTorch and the model's code |
| model | weights, packing, KV pool, warm-up |
| ready | start of the command → the line on the terminal; the gateway imports its application meanwhile |
| answer | → the first token of the first request is here |

Memory is the proportional set size (PSS: a page that n processes map counts 1/n for each), which adds up over
processes, beside the sum of weights and KV pool that the worker reports.  Limit of the time: a Python process
that imports torch and reads the weights' files, which nothing that uses PyTorch can avoid.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from _common import Table, machine, print_machine, write_json
from baton.model.checkpoint.hub import resolve_model
from idle import children, engines

_DEADLINE_S = 300.0
STARTED = re.compile(
    r"started in [\d.]+ s: interpreter ([\d.]+), imports ([\d.]+), model and KV pool ([\d.]+)"
)
_SIZES = re.compile(r"weights ([\d.]+) MB.*?KV ([\d.]+) MB")
_PARTS = ("command", "engine", "interpreter", "imports", "model", "ready", "answer")
_READ = """
import sys, torch
buffer = bytearray(1 << 24)
for name in sys.argv[1:]:
    with open(name, "rb", 0) as file:
        while file.readinto(buffer):
            pass
"""


def started_at(pid: int) -> float:
    """When a process was started, on the clock of `boot_clock`; to 10 ms."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def boot_clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def pss_mb(pid: int) -> float:
    """Proportional set size, in MB."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def start_once(model: str | None, flags: list[str]) -> dict[str, Any]:
    """One start: seconds of each part, MB of each process."""
    command = [
        sys.executable,
        "-m",
        "baton",
        "serve",
        *([model] if model else []),
        "--port",
        "0",
        *flags,
    ]
    with tempfile.NamedTemporaryFile(prefix="baton-bench-", suffix=".log") as log:
        began = boot_clock()
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True
        )
        assert server.stdout is not None
        try:
            said = ""
            while not (found := re.search(r"address\s+(http://[0-9.:]+/v1)", said)):
                line = server.stdout.readline()
                if not line or boot_clock() - began > _DEADLINE_S:
                    raise RuntimeError(f"the server did not start:\n{Path(log.name).read_text()}")
                said += line
            ready = boot_clock() - began
            body = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
            request = urllib.request.Request(
                found[1] + "/completions", body, {"content-type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=60).read()
            answer = boot_clock() - began
            (engine,) = engines(server.pid)
            (worker,) = children(engine)
            parts = STARTED.search(Path(log.name).read_text())
            sizes = _SIZES.search(said)
            if parts is None or sizes is None:
                raise RuntimeError(f"the worker did not say how it started:\n{said}")
            memory = {"gateway": pss_mb(server.pid), "engine": pss_mb(engine), "worker": pss_mb(worker)}
            memory["helpers"] = sum(pss_mb(pid) for pid in children(server.pid) if pid != engine)
            seconds = {
                "command": started_at(engine) - began,
                "engine": started_at(worker) - started_at(engine),
                "interpreter": float(parts[1]),
                "imports": float(parts[2]),
                "model": float(parts[3]),
                "ready": ready,
                "answer": answer,
            }
            return {"seconds": seconds, "mb": memory, "weights_mb": float(sizes[1]), "kv_mb": float(sizes[2])}
        finally:
            server.terminate()
            server.wait(60)
            server.stdout.close()


def limit(model: str | None) -> float:
    """Seconds of a process that imports torch and reads the weights."""
    files = [str(path) for path in resolve_model(model).glob("*.safetensors")]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", _READ, *files], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="", help="further flags of `baton serve`, in one argument")
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    models: list[str | None] = [None, *options.models]
    found: dict[str, list[dict[str, Any]]] = {}
    for model in models:
        for path in resolve_model(model).glob("*.safetensors"):
            path.read_bytes()
    for _ in range(options.rounds):
        for model in models:
            one = start_once(model, options.flags.split()) | {"limit": limit(model)}
            found.setdefault(Path(model).name if model else "embedded", []).append(one)
    times = Table(f"seconds of a start, medians of {options.rounds}", ("", *_PARTS, "limit"))
    sizes = Table("memory, MB", ("", "gateway", "engine", "worker", "sum", "weights + KV", "1.3 x + 1000"))
    for name, starts in found.items():
        parts = [statistics.median(one["seconds"][part] for one in starts) for part in _PARTS]
        times.row(
            name, *(f"{part:.2f}" for part in parts), f"{statistics.median(o['limit'] for o in starts):.2f}"
        )
        last = starts[-1]
        held = last["weights_mb"] + last["kv_mb"]
        cells = [*last["mb"].values(), sum(last["mb"].values()), held, 1.3 * held + 1000]
        sizes.row(name, *(f"{cell:,.0f}" for cell in cells))
    times.print()
    sizes.print()
    write_json(options.out, {"benchmark": "startup", "machine": facts, "starts": found})


if __name__ == "__main__":
    main()
