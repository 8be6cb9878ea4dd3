"""What encryption costs a message between hosts: CURVE beside plain TCP and a unix socket.

    python benchmarks/curve.py [--rounds 5] [--messages 2000] [--out curve.json]

Two processes on this machine, a socket each, as gateway and engine have them (DEALER to ROUTER), by loopback:

1. engine to engine: a message of 300 bytes (`Renew`) and one of 6 KiB (`Reserve` of 1,280 tokens), there and
   back;
2. gateway to engine, a stream: messages of 100, 1,000 and 8,000 bytes (`Outputs`), one after the other in one
   direction, as many as pass.

The kinds take turns, round by round; medians of the rounds.  Besides the time, the processor time that both
processes take for a message, which depends less on what else runs.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from _common import Table, machine, print_machine, write_json
from baton.ipc.sockets.curve import Doorkeeper, Encryption, protect
from baton.ipc.sockets.zeromq import terminate
from baton.protocol.rules.cluster_secret import ClusterSecret, Secrets

KINDS = ("unix", "tcp", "curve")
SECRETS = Secrets((ClusterSecret.make(bytes(32)),))
ROUND_TRIPS = (300, 6 << 10)
STREAMS = (100, 1_000, 8_000)


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(kind: str, path: str) -> None:
    """The other process: answers what begins with `?`, counts the rest, tells its processor time on `!`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = Doorkeeper(context, Encryption(SECRETS) if kind == "curve" else None)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVHWM, 0)
    address = f"ipc://{path}" if kind == "unix" else "tcp://127.0.0.1:*"
    if kind == "curve":
        door.guard(router)
    router.bind(address)
    bound = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    print(door.announced(bound.rstrip(b"\0").decode()), flush=True)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    for descriptor in door.descriptors():
        poller.register(descriptor, zmq.POLLIN)
    while True:
        if not door.busy():
            poller.poll()
        door.turn()
        while int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # type: ignore[arg-type]
            sender, data = router.recv_multipart()
            if data[:1] == b"?":
                router.send_multipart((sender, data))
            elif data[:1] == b"!":
                router.send_multipart((sender, repr(processor_s()).encode()))


class Connection:
    def __init__(self, kind: str, path: str) -> None:
        argv = [sys.executable, __file__, "--serve", kind, "--path", path]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        endpoint = self._process.stdout.readline().strip()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        encryption = Encryption(SECRETS) if kind == "curve" else None
        self._socket.connect(protect(self._socket, endpoint, encryption))
        self.processor_s()

    def processor_s(self) -> float:
        """Of both processes, when all that was sent has been read."""
        self._socket.send(b"!")
        return float(self._socket.recv()) + processor_s()

    def round_trips(self, size: int, count: int) -> tuple[float, float]:
        """(microseconds, of them on processors) of one."""
        message = b"?" * size
        before, begin = self.processor_s(), time.perf_counter()
        for _ in range(count):
            self._socket.send(message)
            self._socket.recv()
        seconds = time.perf_counter() - begin
        return seconds / count * 1e6, (self.processor_s() - before) / count * 1e6

    def stream(self, size: int, count: int) -> tuple[float, float]:
        """The same, of one message."""
        message = b"." * size
        before, begin = self.processor_s(), time.perf_counter()
        for _ in range(count):
            self._socket.send(message)
        after = self.processor_s()
        return (time.perf_counter() - begin) / count * 1e6, (after - before) / count * 1e6

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        terminate(self._context, 2.0)


def measure(rounds: int, messages: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        connections = {kind: Connection(kind, str(Path(directory) / "socket")) for kind in KINDS}
        try:
            for number in range(rounds + 1):  # the first one warms up
                for kind, connection in connections.items():
                    results = {
                        f"{size:,} B there and back": connection.round_trips(size, messages)
                        for size in ROUND_TRIPS
                    }
                    results |= {
                        f"{size:,} B in a stream": connection.stream(size, 5 * messages) for size in STREAMS
                    }
                    for what, result in results.items():
                        if number:
                            found.setdefault(what, {}).setdefault(kind, []).append(result)
        finally:
            for connection in connections.values():
                connection.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--out")
    for hidden in ("--serve", "--path"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.path)
        return
    facts = machine()
    print_machine(facts)
    found = measure(options.rounds, options.messages)
    columns = [f"{kind}, us" for kind in KINDS] + ["processors: tcp, us", "curve, us", "more by CURVE, us"]
    table = Table(f"medians of {options.rounds} rounds", ["message", *columns])
    medians: dict[str, Any] = {}
    for what, kinds in found.items():
        times = {kind: statistics.median(one for one, _ in kinds[kind]) for kind in KINDS}
        used = {kind: statistics.median(one for _, one in kinds[kind]) for kind in KINDS}
        pairs = zip(kinds["curve"], kinds["tcp"], strict=True)
        more = statistics.median(curve[1] - plain[1] for curve, plain in pairs)
        table.row(
            what,
            *(f"{times[kind]:.1f}" for kind in KINDS),
            *(f"{used[kind]:.1f}" for kind in ("tcp", "curve")),
            f"{more:+.1f}",
        )
        medians[what] = {"time_us": times, "processor_us": used, "more_processor_us": more}
    table.print()
    write_json(options.out, {"machine": facts, "messages": medians})


if __name__ == "__main__":
    main()
