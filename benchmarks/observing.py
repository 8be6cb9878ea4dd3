"""What it costs to be seen: events, traces for OpenTelemetry, a page that watches.

    python benchmarks/observing.py [MODEL] [--work 256x64x64 1x128x128] [--rounds 15] [--out observing.json]

Without MODEL a random checkpoint of `tiny-llama`'s shape is made, for which everything but the model costs
most.  Three servers run side by side, and one at a time has something to do:

* off: `--events-keep 0`: nothing is noted;
* events: as without any flag;
* traces: events, and `--otlp-traces-endpoint` to a receiver on this machine, which reads and throws away;
* all: these, and a subscriber of `/ui/events`, as an open page is.

`RxPxO` is R streamed requests at once of P prompt and O output tokens; a round does as many of them as take
about a second.  The servers take turns, each round begins with another one, and each round is compared with
itself: the median of its ratios is printed, with half of the width between their quartiles ("±").

Throughput on two cores scatters by more than what is asked for.  So the same is told by the kernel's count of
CPU time of all processes of a server for each request (the receiver's and the client's are not in it), which
scatters less, and the first table has what one request costs in isolation.

Limits: events may cost 1 %, all 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

from _clients import Server, random_prompt, serving, stream
from _common import Table, machine, percentile, print_machine, write_json
from baton.engine.workers.step_notes import StepNotes
from baton.observe.events.clocks import Alignment
from baton.observe.events.context import Trace
from baton.observe.events.log import EventLog
from baton.observe.events.spans import spans
from baton.observe.events.steps import StepLog
from baton.observe.events.story import Story
from baton.observe.events.views import timings
from baton.observe.tracing.collector import HTTP, OtlpCollector
from baton.observe.tracing.traced import traced
from baton.protocol.messages.reports import StepReport, StepsRan
from baton.protocol.messages.requests import FROM_ENGINE, Finished, Load, Outputs
from baton.protocol.notes import Note, Notes
from baton.worker.ran import StepTimes
from idle import cpu_seconds

_SENT = 80
"""Requests that are sent together."""
LIMITS = {"events": 0.01, "all": 0.03}
_ROUND_S = 1.0
_NOTES = (
    ("arrived", 64),
    ("admitted", 1),
    ("chunk", 64),
    ("prefilled", 64),
    ("ended", 64),
)


# -- 1. one request, in this process


def _story(number: int) -> Story:
    """As a gateway keeps it of a request that ran where it was sent."""
    story = Story(f"r{number}", 10.0, 10.001, 1.7e9, prompt_tokens=64, max_tokens=64)
    trail = story.trail()
    assert trail is not None
    trail.add(10.001, "sent", number, 64, 0, "instance-0")
    clock = Alignment()
    clock.shared = True
    notes = [Note(10.01 + index / 100, what, count) for index, (what, count) in enumerate(_NOTES)]
    trail.tell(number, "instance-0", notes, clock, 11.0)
    story.first_at, story.ended, story.reasons = 10.5, 11.0, ("length",)
    story.trace = Trace(number + 1, number + 1, None, "text_completion", "cmpl-", True)
    return story


def _microseconds(work: Callable[[int], object], count: int = 2000) -> float:
    """Of CPU time, each; the best of five."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for number in range(count):
            work(number)
        best = min(best, (time.process_time() - began) / count)
    return best * 1e6


def one_request() -> dict[str, float]:
    """Microseconds of CPU time that each part costs a request."""
    notes, log = Notes(), EventLog(1000)
    stories = [_story(number) for number in range(2000)]
    told = [Note(1.0, what, count) for what, count in _NOTES]
    plain, noted = (Outputs(finished=[Finished(7, "length", notes=some)]) for some in ([], told))

    def add(_: int) -> None:
        if len(notes.entries) >= 20:
            notes.entries.clear()
        notes.add(1.0, "chunk", 64, 64, 1)

    def message(outputs: Outputs) -> float:
        return _microseconds(lambda _: FROM_ENGINE.decode(FROM_ENGINE.encode(outputs)))

    found = {
        "a note": _microseconds(add),
        "the engine's notes in its message, written and read": message(noted) - message(plain),
        "the gateway's story: made, told, kept": _microseconds(lambda number: log.add(_story(number), 11.0)),
        "timings of an answer that asks": _microseconds(lambda number: timings(stories[number], 11.0)),
        "its spans": _microseconds(lambda number: spans(stories[number], stories[number].trails[0], 11.0)),
    }
    found |= one_step()
    with _receiving() as url:
        collector = OtlpCollector(url, HTTP)

        def make(number: int) -> list[Any]:
            story = stories[number]
            trace = story.trace
            assert trace is not None
            root, children = traced(story, "tiny", 11.0)
            return collector.spans(root, children, trace, range(1, len(children) + 1))

        found["its spans for OpenTelemetry"] = _microseconds(make, 500)
        made = [span for number in range(_SENT) for span in make(number)]
        found["the same, sent in batches"] = _microseconds(lambda _: collector.send(made), 10) / _SENT
        collector.close()
    return found


_TOLD = 25
"""Steps that are told together: 500 a second."""


def one_step() -> dict[str, float]:
    """Microseconds of CPU time that each part costs a step, whatever its tokens."""
    rows = bytes(4 * 64)
    report = StepReport(7, 1, rows, rows, rows, seconds=0.002, context=9000, began=5000.0)
    empty, clock, log = Load(1, 1, 1, 1), Alignment(), StepLog()
    clock.shared = True
    notes = StepNotes(wanted=True, ranks_per_host=2)

    def noted() -> bytes:
        for _ in range(_TOLD):
            notes.leader(report, 5000.0, 0, 0)
        return notes.take()

    def message(load: Load) -> float:
        return _microseconds(lambda _: FROM_ENGINE.decode(FROM_ENGINE.encode(load)), 400)

    def ran(times: StepTimes) -> None:
        for step in range(_TOLD):
            times.add(step, 5000.0 + step / 500, 0.002)
        told = times.take(5001.0)
        assert isinstance(told, StepsRan)
        notes.ran(1, told, 5001.0)
        notes.take()

    told = noted()
    costs = {
        "a step, noted by its engine": _microseconds(lambda _: noted(), 400),
        "the same in a message, written and read": message(Load(1, 1, 1, 1, steps=told)) - message(empty),
        "the same, kept by the gateway": _microseconds(lambda _: log.add("i", told, clock, 5.0), 400),
        "the same step of another rank, noted and told": _microseconds(lambda _: ran(StepTimes()), 400),
    }
    return {name: cost / _TOLD for name, cost in costs.items()}


# -- 2. a server


def receive() -> None:
    """Reads what comes on a free port, whose number it prints, and throws it away."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def _receiving() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, __file__, "--receive"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _watching(server: Server) -> Iterator[None]:
    """An open page: reads its events, in a process of its own."""
    code = "import socket, sys\ns = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
    code += (
        "s.sendall(b'GET /ui/events HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n')\nwhile s.recv(65536): pass"
    )
    process = subprocess.Popen([sys.executable, "-c", code, server.host, str(server.port)])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _tree(int(child))
    return found


def _cpu(server: Server) -> tuple[float, float]:
    """Seconds of (the gateway's process, all processes of the server)."""
    pid = server.process.pid
    return cpu_seconds(pid), sum(map(cpu_seconds, _tree(pid)))


async def _load(server: Server, work: tuple[int, int, int], times: int, rng: Random) -> None:
    together, prompt, output = work
    for _ in range(times):
        await asyncio.gather(*(stream(server, random_prompt(prompt, rng), output) for _ in range(together)))


def _round(server: Server, work: tuple[int, int, int], times: int, rng: Random) -> dict[str, float]:
    requests = work[0] * times
    before = _cpu(server)
    began = time.perf_counter()
    asyncio.run(_load(server, work, times, rng))
    took = time.perf_counter() - began
    time.sleep(1.5)  # (what is sent to a collector is sent now)
    after = _cpu(server)
    return {
        "tokens_per_s": requests * work[2] / took,
        "gateway_us": (after[0] - before[0]) / requests * 1e6,
        "server_us": (after[1] - before[1]) / requests * 1e6,
    }


def measure(
    servers: dict[str, Server], work: tuple[int, int, int], rounds: int, rng: Random
) -> dict[str, list[dict[str, float]]]:
    """The rounds of each server."""
    times = 1
    for server in servers.values():
        asyncio.run(_load(server, work, 2, rng))
        began = time.perf_counter()
        asyncio.run(_load(server, work, 1, rng))
        times = max(times, round(_ROUND_S / (time.perf_counter() - began)))
    names = list(servers)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for index in range(len(names)):
            name = names[(number + index) % len(names)]
            found[name].append(_round(servers[name], work, times, rng))
    return found


def _compared(found: dict[str, list[dict[str, float]]], name: str, what: str) -> tuple[float, float]:
    """(how much more than with nothing, the scatter): of rounds that followed each other."""
    pairs = zip(found[name], found["off"], strict=True)
    ratios = [one[what] / other[what] - 1 for one, other in pairs]
    if what == "tokens_per_s":
        ratios = [-ratio for ratio in ratios]
    return statistics.median(ratios), (percentile(ratios, 75) - percentile(ratios, 25)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--work", nargs="+", default=["256x64x64", "1x128x128"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive()
        return
    facts = machine()
    print_machine(facts)
    single = one_request()
    table = Table("What one request costs, in one process", ["part", "CPU us"])
    for name, cost in single.items():
        table.row(name, f"{cost:.2f}")
    table.print()
    results: dict[str, Any] = {"machine": facts, "one_request_us": single, "work": {}}
    with ExitStack() as stack:
        model = options.model or _tiny(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        url = stack.enter_context(_receiving())
        servers = {
            name: stack.enter_context(serving(model, "--speculation", "off", *flags))
            for name, flags in (
                ("off", ("--events-keep", "0")),
                ("events", ()),
                ("traces", ("--otlp-traces-endpoint", url)),
                ("all", ("--otlp-traces-endpoint", url)),
            )
        }
        stack.enter_context(_watching(servers["all"]))
        for text in options.work:
            requests, prompt, output = map(int, text.split("x"))
            found = measure(servers, (requests, prompt, output), options.rounds, Random(text))
            results["work"][text] = found
            _print(text, found, options.rounds)
    write_json(options.out, results)


def _print(text: str, found: dict[str, list[dict[str, float]]], rounds: int) -> None:
    table = Table(
        f"{text}, {rounds} rounds each, medians",
        ["server", "tok/s", "cost", "gateway us/request", "server us/request", "cost in CPU time", "limit"],
    )
    for name, rows in found.items():
        medians = {what: statistics.median(row[what] for row in rows) for what in rows[0]}
        costs = [_compared(found, name, what) for what in ("tokens_per_s", "server_us")]
        shown = ["–" if name == "off" else f"{cost:+.1%} ± {half:.1%}" for cost, half in costs]
        table.row(
            name,
            f"{medians['tokens_per_s']:,.0f}",
            shown[0],
            f"{medians['gateway_us']:,.0f}",
            f"{medians['server_us']:,.0f}",
            shown[1],
            f"{LIMITS[name]:.0%}" if name in LIMITS else "",
        )
    table.print()


def _tiny(directory: Path) -> str:
    tool = Path(__file__).parents[1] / "tools" / "make_checkpoint.py"
    command = [sys.executable, str(tool), "--shape", "tiny-llama", "--out", str(directory / "tiny")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(directory / "tiny")


if __name__ == "__main__":
    main()
