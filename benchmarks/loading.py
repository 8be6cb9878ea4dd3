"""What loading takes: seconds, CPU and peak memory, the first time, the second, and for two instances.

    python benchmarks/loading.py MODEL [--flags "--quantization int4"] [--cache DIR] [--rows first,second]

Starts `baton serve MODEL` three times, waits until it is ready and asks `/debug/memory`:

| row | what it is |
| --- | --- |
| first | the weight cache is empty: files are read, quantized, packed; the image goes into the cache |
| second | the image is mapped from the cache |
| pair | the same with `--prefill 1 --decode 1` |

| column | what it is |
| --- | --- |
| ready | seconds from the command to the line on the terminal |
| interpreter, imports, model | its parts, as the slowest worker says them |
| CPU | of all processes until then, seconds |
| peak | the largest sum of RssAnon and RssShmem of all processes, sampled every 50 ms, MB: what is not page \
cache.  A pair maps images twice, so its peak says little |
| PSS, image, KV | of all processes when it is ready, MB |
| allowed | 1.05 x image + KV + 1,000 |

The cache is a directory that goes at the end, or `--cache`, which stays: so that `--rows second` can be asked
again, and what is in it already makes the first start another second one.  Read the files once before
(`cat MODEL/*.safetensors >/dev/null`) if they fit into the page cache; else the first row has what reading
them takes.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from _common import Table, machine, print_machine, write_json
from baton.observe.memory import child_processes
from idle import cpu_seconds
from startup import STARTED

_DEADLINE_S = 1800.0
_SAMPLED_S = 0.05
_ROWS = {"first": "", "second": "", "pair": "--prefill 1 --decode 1"}


class Peak:
    """Watches a process and all below it, until `stop`."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self.at: dict[str, int] = {}
        self.cpu: dict[int, float] = {}
        """Seconds of each process, when it was last seen."""
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLED_S):
            found = {"RssAnon": 0, "RssShmem": 0}
            for pid in self._tree():
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    self.cpu[pid] = cpu_seconds(pid)
                except OSError:
                    continue
                for name in found:
                    if (line := re.search(rf"^{name}:\s+(\d+) kB", status, re.M)) is not None:
                        found[name] += 1024 * int(line[1])
            if sum(found.values()) > self.bytes:
                self.bytes, self.at = sum(found.values()), found

    def _tree(self) -> list[int]:
        found = [self._pid]
        for pid in found:
            found += child_processes(pid)
        return found


def start(model: str, flags: list[str]) -> dict[str, Any]:
    """One start of a server, which is stopped again."""
    command = [sys.executable, "-m", "baton", "serve", model, "--port", "0", *flags]
    with tempfile.NamedTemporaryFile(prefix="baton-bench-", suffix=".log") as log:
        began = time.monotonic()
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        peak = Peak(server.pid)
        assert server.stdout is not None
        try:
            said = ""
            while not (found := re.search(r"address\s+(http://[0-9.:]+)/v1", said)):
                line = server.stdout.readline()
                if not line or time.monotonic() - began > _DEADLINE_S:
                    raise RuntimeError(f"the server did not start:\n{said}{Path(log.name).read_text()}")
                said += line
            ready = time.monotonic() - began
            peak.stop()
            with urllib.request.urlopen(found[1] + "/debug/memory", timeout=60) as answer:
                memory = json.loads(answer.read())
            parts = [tuple(map(float, one)) for one in STARTED.findall(Path(log.name).read_text())]
            return {
                "ready_s": ready,
                "worker_s": max(parts, key=sum, default=(0.0, 0.0, 0.0)),
                "cpu_s": sum(peak.cpu.values()),
                "peak_bytes": peak.bytes,
                "peak_parts": peak.at,
                "memory": memory,
            }
        finally:
            peak.stop()
            server.terminate()
            server.wait(60)
            server.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--flags", default="--quantization int4 --max-model-len 2048")
    parser.add_argument("--cache", help="a directory for the weight cache; it takes as much as the image")
    parser.add_argument("--rows", default="first,second,pair")
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as gone:
        cache = options.cache or gone
        for row in options.rows.split(","):
            flags = [*shlex.split(f"{options.flags} {_ROWS[row]}"), "--weight-cache", cache]
            found[row] = start(options.model, flags)
    seconds = Table("seconds", ("", "ready", "interpreter", "imports", "model", "CPU"))
    sizes = Table("MB", ("", "peak", "PSS", "image", "KV", "allowed"))
    for row, one in found.items():
        seconds.row(row, *(f"{value:.2f}" for value in (one["ready_s"], *one["worker_s"], one["cpu_s"])))
        total = one["memory"].get("sum") or dict.fromkeys(("pss_bytes", "image_bytes", "kv_pool_bytes"), 0)
        image, pool = total["image_bytes"] / 1e6, total["kv_pool_bytes"] / 1e6
        cells = (one["peak_bytes"] / 1e6, total["pss_bytes"] / 1e6, image, pool, 1.05 * image + pool + 1000)
        sizes.row(row, *(f"{cell:,.0f}" for cell in cells))
    seconds.print()
    sizes.print()
    write_json(options.out, {"benchmark": "loading", "machine": facts, "starts": found})


if __name__ == "__main__":
    main()
