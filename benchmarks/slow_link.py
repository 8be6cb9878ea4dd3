"""Hand-overs over a slow link: how much of the throughput without delay is left with one.

    python benchmarks/slow_link.py [--delay-ms 50] [--rounds 2] [--requests 96] [--at-once 16] [--out FILE]

Needs root (network namespaces) and nothing outside of this machine.  The prefilling instance, with the server
and the clients, is in one network namespace, the decoding instance in another.  Between them lies a relay: a
TUN device in each namespace, and a thread here that hands every packet to the other side `--delay-ms` later,
in order.
 So everything that passes between the two hosts is delayed as on a real link, connections and
 acknowledgements
included: reservations, pages, leases, and the tokens on their way back.

In turns without and with the delay, `--rounds` times, the same requests: `--at-once` clients, each with one
request after the other, of which every one is handed over.  The executor is simulated, so that a step takes
what the cost model says; a prompt is computed in chunks, each of which is a fetch of its own.

Reported: requests a second of each, their ratio (goal: 0.9), the time to the first token, the longest gap
between two tokens, and what the engines say of fetches.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import fcntl
import json
import os
import random
import secrets
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _clients import Server, long_model, random_prompt, stream
from _common import Table, machine, percentile, print_machine, write_json
from _ideal import Timed
from baton.protocol.rules.cluster_secret import SECRET_BYTES, ClusterSecret

HERE, THERE = "10.99.0.1", "10.99.0.2"
_MTU = 60_000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_START_S = 120.0
COST = "0.02,0.00006,0.0002,0"
"""20 ms a step and 60 us a prompt token: prompts of 1,000 tokens are computed 8 times a second."""
FLAGS = [
    *("--executor", "simulated", "--simulated-cost", COST, "--max-model-len", "4096", "--block-size", "32"),
    *(
        "--max-num-batched-tokens",
        "256",
        "--max-num-seqs",
        "64",
        "--transfer",
        "tcp",
        "--log-level",
        "warning",
    ),
]


class Relay:
    """Two namespaces that reach each other only through this process."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.delay_s = 0.0
        self.names = names
        self.packets = 0
        self._queues: dict[int, deque[tuple[float, bytes]]] = {}
        for name in names:
            _ip("netns", "add", name)
        self._fds = [_tun(name, address) for name, address in zip(names, (HERE, THERE), strict=True)]
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        here, there = self._fds
        other = {here: there, there: here}
        queues: dict[int, deque[tuple[float, bytes]]] = {here: deque(), there: deque()}
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        while not self._stopping:
            heads = [queue[0][0] for queue in queues.values() if queue]
            wait_s = min(heads) - time.monotonic() if heads else 0.2
            ready = poll.poll(max(0, int(wait_s * 1000)))
            now = time.monotonic()
            for fd, _ in ready:
                for _ in range(64):
                    try:
                        packet = os.read(fd, 65536)
                    except BlockingIOError:
                        break
                    queues[other[fd]].append((now + self.delay_s, packet))
            for fd, queue in queues.items():
                while queue and queue[0][0] <= time.monotonic() + 5e-4:
                    self.packets += 1
                    try:
                        os.write(fd, queue.popleft()[1])
                    except OSError:
                        pass  # as any network: a full queue drops

    def close(self) -> None:
        self._stopping = True
        self._thread.join(5)
        for fd in self._fds:
            os.close(fd)
        for name in self.names:
            _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _tun(namespace: str, address: str) -> int:
    """A TUN device in the namespace, up, with this address."""
    libc = ctypes.CDLL(None, use_errno=True)
    ours = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(theirs, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"slow0", _IFF_TUN | _IFF_NO_PI))
    finally:
        libc.setns(ours, _CLONE_NEWNET)
        os.close(ours)
        os.close(theirs)
    inside = ["-n", namespace]
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", "slow0", "mtu", str(_MTU), "txqueuelen", "10000", "up")
    _ip(*inside, "addr", "add", f"{address}/24", "dev", "slow0")
    return fd


@contextmanager
def process(namespace: str, python: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """`baton serve` in a namespace; the end of its log is shown if something fails."""
    with tempfile.NamedTemporaryFile(prefix="baton-bench-", suffix=".log") as log:
        argv = ["ip", "netns", "exec", namespace, python, "-m", "baton", "serve", *flags]
        started = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield started
        except BaseException:
            print("".join(Path(log.name).read_text(errors="replace").splitlines(True)[-20:]), file=sys.stderr)
            raise
        finally:
            started.terminate()
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def client(options: argparse.Namespace) -> None:
    """In the namespace of the server: one run, as JSON."""
    server = Server(None, HERE, options.port, options.model)  # type: ignore[arg-type]
    rng = random.Random(3)
    sizes = [(rng.randint(900, 1100), 24) for _ in range(options.requests)]
    if options.warm:
        asyncio.run(stream_one(server))
        return
    begin = time.monotonic()
    done = asyncio.run(closed_loop(server, sizes, options))
    seconds = time.monotonic() - begin
    gaps = [b - a for one in done for a, b in zip(one.times, one.times[1:], strict=False)]
    first = [one.first_token_s for one in done]
    result = {
        "requests_per_s": len(done) / seconds,
        "ttft_p50_s": percentile(first, 50),
        "ttft_p99_s": percentile(first, 99),
        "gap_p99_s": percentile(gaps, 99),
        "gap_max_s": max(gaps),
    }
    print(json.dumps(result))


async def closed_loop(
    server: Server, sizes: list[tuple[int, int]], options: argparse.Namespace
) -> list[Timed]:
    """Prompts of a run of their own: nothing of them is in a prefix cache."""
    rng = random.Random(f"run {options.run}")
    prompts = [random_prompt(size[0], rng) for size in sizes]
    left = iter(range(len(sizes)))
    done: list[Timed] = []

    async def one_client() -> None:
        for number in left:
            timed = await stream(server, prompts[number], sizes[number][1])
            done.append(timed)

    await asyncio.gather(*(one_client() for _ in range(options.at_once)))
    return done


async def stream_one(server: Server) -> None:
    await stream(server, random_prompt(1000, random.Random(1)), 4)


def in_namespace(namespace: str, *words: str) -> str:
    argv = ["ip", "netns", "exec", namespace, sys.executable, __file__, *words]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


def ask(namespace: str, port: int, path: str, key: str) -> Any:
    code = (
        "import sys,urllib.request as u;"
        "r=u.Request(sys.argv[1],headers={'Authorization':'Bearer '+sys.argv[2]});"
        "print(u.urlopen(r,timeout=30).read().decode())"
    )
    url = f"http://{HERE}:{port}{path}"
    argv = ["ip", "netns", "exec", namespace, sys.executable, "-c", code, url, key]
    quiet = subprocess.DEVNULL
    return json.loads(
        subprocess.run(argv, check=True, stdout=subprocess.PIPE, stderr=quiet, text=True).stdout
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tag, key, port = f"{os.getpid():x}", secrets.token_hex(8), 8123
    with ExitStack() as stack:
        relay = Relay((f"baton-p-{tag}", f"baton-d-{tag}"))
        stack.callback(relay.close)
        model = stack.enter_context(long_model(4096))
        near, far = relay.names
        common = [*FLAGS, *([] if options.no_key else ["--admin-key", key])]
        if not options.no_secret:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="baton-secret-"))
            file.write(ClusterSecret.make(secrets.token_bytes(SECRET_BYTES)).file())
            file.flush()
            common += ["--cluster-secret", file.name]
        server = ["--port", str(port), "--host", HERE, "--peer-host", HERE, "--prefill", "1", *common]
        server += ["--disaggregation-threshold", "0"]
        stack.enter_context(process(near, options.python, model, *server))
        joined = ["--instance", "--join", f"{HERE}:{port}", "--label", "decode", "--host", THERE, *common]
        stack.enter_context(process(far, options.python, model, *joined))
        end = time.monotonic() + _START_S
        while True:
            try:
                instances = ask(near, port, "/cluster/instances", key)["instances"]
                if len(instances) == 2 and all(one["state"] == "ready" for one in instances):
                    break
            except subprocess.CalledProcessError:
                pass
            if time.monotonic() > end:
                raise TimeoutError("the instances are not ready")
            time.sleep(0.5)
        name = ask(near, port, "/v1/models", key)["data"][0]["id"]
        words = ["--client", "--port", str(port), "--model", name, "--at-once", str(options.at_once)]
        words += ["--requests", str(options.requests)]
        in_namespace(near, *words, "--warm")
        runs: dict[str, list[dict[str, float]]] = {"none": [], "delay": []}
        for number in range(options.rounds):
            for kind, delay_s in (("none", 0.0), ("delay", options.delay_ms / 1000)):
                relay.delay_s = delay_s
                time.sleep(1.0)
                runs[kind].append(json.loads(in_namespace(near, *words, "--run", f"{kind}{number}")))
                print(kind, runs[kind][-1], file=sys.stderr)
        stats = {
            one: answer["handovers"] for one, answer in ask(near, port, "/stats", key)["instances"].items()
        }
        relay.delay_s = 0.0
    return {"runs": runs, "handovers": stats, "packets": relay.packets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="each way")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--python", default=sys.executable, help="of another checkout, to compare with")
    parser.add_argument("--out")
    parser.add_argument("--no-key", action="store_true", help="for a checkout that knows no --admin-key")
    parser.add_argument("--no-secret", action="store_true", help="for one that knows no --cluster-secret")
    for hidden in ("--port", "--model", "--run"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        options.port = int(options.port)
        client(options)
        return
    facts = machine()
    print_machine(facts)
    result = measure(options)
    runs = result["runs"]
    table = Table(
        f"1P1D, {options.at_once} at once, medians of {options.rounds} rounds",
        ["delay each way", "requests/s", "TTFT p50", "TTFT p99", "gap p99", "gap max"],
    )
    for kind, label in (("none", "0 ms"), ("delay", f"{options.delay_ms:g} ms")):
        median = {key: statistics.median(run[key] for run in runs[kind]) for key in runs[kind][0]}
        rest = [
            f"{1000 * median[key]:.0f} ms" for key in ("ttft_p50_s", "ttft_p99_s", "gap_p99_s", "gap_max_s")
        ]
        table.row(label, f"{median['requests_per_s']:.2f}", *rest)
    table.print()
    rates = [statistics.median(run["requests_per_s"] for run in runs[kind]) for kind in ("none", "delay")]
    result["ratio"] = rates[1] / rates[0]
    print(f"with the delay: {result['ratio']:.2f} of the throughput without (goal: 0.9)")
    write_json(options.out, {"machine": facts, **result})


if __name__ == "__main__":
    main()
