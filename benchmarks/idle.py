"""CPU time of every process of an idle server over some seconds.

    python benchmarks/idle.py [--seconds 10] [--tensor-parallel-size 1] [--out idle.json]

Starts `baton serve` with the embedded model, lets it answer one request so that everything is warm, waits
two seconds, then reads each process's CPU time from /proc before and after the pause.  Goal: less than 1 %
of a core for each process.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from _common import Table, machine, print_machine, write_json

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads, at a nanosecond's grain where the kernel has it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) * TICK_S
    return total / 1e9


def switches(pid: int) -> int:
    """Voluntary context switches of all threads: how often the process woke up."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engines(server: int) -> list[int]:
    """The process ids of a server's instances."""
    return [
        pid
        for pid in children(server)
        if b"baton.launch.instances.processes.instance"
        in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--out")
    options = parser.parse_args()
    command = [sys.executable, "-m", "baton", "serve", "--port", "0"]
    command += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = ""
        while "address" not in address:
            address = server.stdout.readline() or sys.exit("the server did not start")
        url = address.split()[1]
        body = b'{"model": "baton-tiny", "prompt": "Hello", "max_tokens": 32}'
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url + "/completions", body, headers)
        urllib.request.urlopen(request, timeout=60).read()
        time.sleep(2.0)
        (engine,) = engines(server.pid)
        processes = {"gateway": server.pid, "engine": engine}
        helpers = [pid for pid in children(server.pid) if pid != engine]
        processes |= {f"helpers {number}": pid for number, pid in enumerate(helpers)}
        processes |= {f"worker {rank}": pid for rank, pid in enumerate(children(engine))}
        before = {name: (cpu_seconds(pid), switches(pid)) for name, pid in processes.items()}
        time.sleep(options.seconds)
        rows = []
        for name, pid in processes.items():
            cpu, woken = cpu_seconds(pid) - before[name][0], switches(pid) - before[name][1]
            rows.append(
                {
                    "process": name,
                    "cpu_percent_of_a_core": 100 * cpu / options.seconds,
                    "wakeups_per_s": woken / options.seconds,
                }
            )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    facts = machine()
    print_machine(facts)
    table = Table(f"CPU over {options.seconds:.0f} s idle", ("process", "% of a core", "wake-ups/s"))
    for row in rows:
        table.row(row["process"], f"{row['cpu_percent_of_a_core']:.3f}", f"{row['wakeups_per_s']:.1f}")
    table.print()
    write_json(options.out, {"benchmark": "idle", "machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
