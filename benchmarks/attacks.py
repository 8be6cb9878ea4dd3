"""What 16 streams notice of attacks on their server: time between tokens, quiet and during each attack.

    python benchmarks/attacks.py [--seconds 1.6] [--rounds 3] [--only stop] [--baseline DIR] [--out FILE]

Starts `baton serve` with the embedded model and keeps `--streams` streamed completions running.  A round goes
through all attacks of `_attacks/`, each with a quiet window just before it.  The attack runs in a process of
its own, of the lowest priority: it gets what the others leave of the cores, as an attacker's work is not the
server's.  The client of the streams shares the cores with the server, at the same priority,
in quiet windows as under attack.  A gap that has not ended when the attack's seconds are over counts as long
as it is by then.  The model's chat template has switches (`loops`, `size`) with which a request makes it cost
much.

What is judged is p99 under attack over p99 of the quiet window before it: the median of the rounds' ratios,
so neither a slow minute of the machine nor one bad window decides.  "Others" is what the rest of the machine
computed in quiet windows, in cores.  The rows that begin with `control` are no attacks: a process that
computes beside the server, and ordinary requests.

Some attacks ask, in one request, for work that a server accepts and does for anybody: prompts are computed in
the steps of the streams.  "x control" compares them with what the same work costs the streams when as many
ordinary requests ask for it: p99 under attack over p99 under that control, of the same round.  About 1 says
that the attack gains nothing by its form; how much work of others a step may bring is a matter of
`--max-num-batched-tokens`.  Other attacks bring bytes or work for a helper: their controls send the same
bytes to a process that drops them, or compute with a helper's priority.  About 1 says there that the streams
share their cores, and not that the server lets them wait.

`--baseline DIR` does the same, once, with another checkout of Baton (its `.venv` if it has one).  A server
that does not answer within seconds after an attack is replaced, and that attack is left out from then on; its
row says `stopped`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import uvloop

from _attacks import attacks, controls
from _attacks.hostile import TEMPLATE
from _clients import Server, serving
from _common import Table, machine, percentile, print_machine, write_json
from baton.model.checkpoint.hub import resolve_model

_SETTLE_S = 0.3
_QUIET_S = 0.8
_START_S = 5.0
"""More than the attack's process takes to be stopped."""
_LOST_S = 5.0
"""After an attack the server must answer within so many seconds; else a new one is started."""
_FLOW_S = 10.0
"""So long the streams may take to begin, after the last attack."""
_LOST_STREAM_S = 1000.0
_GOAL, _AS_CONTROL = 2.0, 1.2
"""Times the p99 of the quiet window, and of the control."""
_TICKS = os.sysconf("SC_CLK_TCK")
_HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
)


class _Stream(asyncio.Protocol):
    """One stream after the other over one connection; notes how long each piece let itself be waited for."""

    def __init__(self, request: bytes) -> None:
        self.gaps: list[float] = []
        self.at: float | None = None
        """When the last piece of the present answer came."""
        self.lost = False
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.at is not None:
            self.gaps.append(now - self.at)
        self.at = now
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._tail, self.at = b"", None
            self.transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True


@dataclasses.dataclass
class _Window:
    """Some seconds of all streams."""

    gaps: list[float]
    """Seconds between tokens; `_LOST_STREAM_S` besides if a stream was lost, or none flowed."""
    others: float
    """Cores that processes used which are none of this benchmark's."""

    @property
    def p99(self) -> float:
        return percentile(self.gaps, 99)


@dataclasses.dataclass
class _Round:
    quiet: _Window
    attack: _Window


async def _watch(server: Server, streams: int, attack: str, seconds: float) -> _Round:
    """A quiet window, and one under attack."""
    loop = asyncio.get_running_loop()
    protocols: list[_Stream] = []
    for number in range(streams):
        body = json.dumps(
            {
                "model": server.model,
                "prompt": f"Once upon a time {number}",
                "max_tokens": 400,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        )
        request = f"{_HEAD}{len(body)}\r\n\r\n{body}".encode()
        _, protocol = await loop.create_connection(lambda r=request: _Stream(r), server.host, server.port)
        protocols.append(protocol)

    async def window(length: float) -> _Window:
        for protocol in protocols:
            protocol.gaps.clear()
        busy, ours, began = _busy_s(), _cpu_s(server.process.pid), time.perf_counter()
        await asyncio.sleep(length)
        now = time.perf_counter()
        gaps = [gap for protocol in protocols for gap in protocol.gaps]
        gaps += [now - protocol.at for protocol in protocols if protocol.at is not None]
        if not gaps or any(protocol.lost for protocol in protocols):
            gaps.append(_LOST_STREAM_S)
        used = _busy_s() - busy - (_cpu_s(server.process.pid) - ours)
        return _Window(gaps, max(0.0, used / (now - began)))

    try:
        end = time.monotonic() + _FLOW_S
        while not all(protocol.gaps for protocol in protocols) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await asyncio.sleep(_SETTLE_S)
        quiet = await window(_QUIET_S)
        arguments = [attack, server.host, str(server.port), str(seconds + _START_S)]
        process = subprocess.Popen(
            [sys.executable, "-m", "_attacks", *arguments],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            await loop.run_in_executor(None, process.stdout.readline)
            process.stdin.write(b"begin\n")
            process.stdin.flush()
            await asyncio.sleep(_SETTLE_S)
            return _Round(quiet, await window(seconds))
        finally:
            process.kill()
            process.communicate()
    finally:
        for protocol in protocols:
            protocol.transport.abort()


def _busy_s() -> float:
    """Seconds of all cores that were not idle, since the start of the machine."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + soft) / _TICKS


def _cpu_s(pid: int) -> float:
    """CPU time of this process, and of that one with its descendants that live."""
    children: dict[int, list[int]] = {}
    spent: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
            spent[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    total, found = spent.get(os.getpid(), 0), [pid]
    while found:
        one = found.pop()
        total += spent.get(one, 0)
        found += children.get(one, [])
    return total / _TICKS


@contextlib.contextmanager
def _model() -> Iterator[str]:
    """A copy of the embedded model with the template above."""
    with tempfile.TemporaryDirectory(prefix="baton-attacks-") as directory:
        for file in resolve_model(None).iterdir():
            (Path(directory) / file.name).write_bytes(file.read_bytes())
        (Path(directory) / "chat_template.jinja").write_text(TEMPLATE)
        yield directory


class _Side:
    """A checkout's server, started again after an attack that it does not get over."""

    def __init__(self, name: str, checkout: Path | None, model: str) -> None:
        self.name = name
        self._checkout = checkout
        self._model = model
        self._stack = contextlib.ExitStack()
        self._server: Server | None = None

    def server(self) -> Server:
        """The one that runs; another one if the last attack stopped it."""
        if self._server is None:
            python, env = sys.executable, None
            if self._checkout is not None:
                own = self._checkout / ".venv" / "bin" / "python"
                python = str(own) if own.exists() else python
                env = {**os.environ, "PYTHONPATH": str(self._checkout / "src")}
            self._server = self._stack.enter_context(serving(self._model, python=python, env=env))
        return self._server

    def answers(self) -> bool:
        """Whether the server has got over the attack; ends it if not."""
        if self._server is None or _answers(self._server):
            return True
        print(f"{self.name}: the server does not answer; another one will be started", file=sys.stderr)
        self._server.process.kill()
        self.close()
        return False

    def close(self) -> None:
        self._stack.close()
        self._server = None


def _answers(server: Server) -> bool:
    end = time.monotonic() + _LOST_S
    while time.monotonic() < end:
        try:
            server.get("/version", timeout_s=end - time.monotonic())
            return True
        except (OSError, ValueError):
            time.sleep(0.2)
    return False


Found = dict[str, dict[str, list[_Round]]]
"""attack → side → rounds."""


def measure(options: argparse.Namespace) -> tuple[Found, set[tuple[str, str]]]:
    """What was found, and which (attack, side) stopped the server."""
    chosen = {name for name in attacks() if not options.only or any(part in name for part in options.only)}
    chosen |= {controls()[name] for name in chosen if name in controls()}
    names = [name for name in attacks() if name in chosen]
    found: Found = {name: {} for name in names}
    stopped: set[tuple[str, str]] = set()
    with _model() as model, contextlib.ExitStack() as stack:
        sides = [(_Side("this", None, model), options.rounds)]
        if options.baseline:
            sides.insert(0, (_Side("baseline", Path(options.baseline).resolve(), model), 1))
        for side, _ in sides:
            stack.callback(side.close)
        for number in range(options.rounds):
            for name in names:
                for side, rounds in sides:
                    if number >= rounds or (name, side.name) in stopped:
                        continue
                    watched = _watch(side.server(), options.streams, name, options.seconds)
                    found[name].setdefault(side.name, []).append(uvloop.run(watched))
                    if not side.answers():
                        stopped.add((name, side.name))
                print(f"round {number + 1}: {name}", file=sys.stderr)
    return found, stopped


def _row(name: str, side: str, rounds: list[_Round], control: list[_Round]) -> dict[str, Any]:
    """Times in seconds: medians over the rounds; `ratio`, `of_control`: those of the rounds' ratios."""

    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    return {
        "attack": name,
        "side": side,
        "quiet_p50": median(percentile(one.quiet.gaps, 50) for one in rounds),
        "quiet_p99": median(one.quiet.p99 for one in rounds),
        "p50": median(percentile(one.attack.gaps, 50) for one in rounds),
        "p99": median(one.attack.p99 for one in rounds),
        "max": median(max(one.attack.gaps) for one in rounds),
        "ratio": median(one.attack.p99 / one.quiet.p99 for one in rounds),
        "of_control": median(
            one.attack.p99 / its.attack.p99 for one, its in zip(rounds, control, strict=False)
        )
        if control
        else None,
        "others": median(one.quiet.others for one in rounds),
        "rounds": [
            {"quiet_p99": one.quiet.p99, "p99": one.attack.p99, "others": one.quiet.others} for one in rounds
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.6, help="under each attack")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="attacks with one of these words in their names")
    parser.add_argument("--baseline", metavar="DIR", help="another checkout of Baton, for one round")
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    began, busy = time.perf_counter(), _busy_s()
    found, stopped = measure(options)
    took = time.perf_counter() - began
    facts["busy_cores"] = (_busy_s() - busy) / took
    facts["load_average_after"] = os.getloadavg()
    columns = ("attack", "", "quiet p50", "p99", "attack p50", "p99", "max", "x quiet", "x control", "others")
    table = Table(f"ms between tokens of {options.streams} streams, medians of {options.rounds}", columns)
    rows: list[dict[str, Any]] = []
    for name, sides in found.items():
        for side, rounds in sides.items():
            control = found.get(controls().get(name, ""), {}).get(side, [])
            row = _row(name, side, rounds, control) | {"stopped": (name, side) in stopped}
            rows.append(row)
            numbers = [f"{row[key] * 1e3:.1f}" for key in ("quiet_p50", "quiet_p99", "p50", "p99", "max")]
            ratio = "stopped" if row["stopped"] else f"{row['ratio']:.1f}"
            of_control = "" if row["of_control"] is None else f"{row['of_control']:.1f}"
            table.row(name, side, *numbers, ratio, of_control, f"{row['others']:.1f}")
    table.print()
    ours = [row for row in rows if row["side"] == "this" and not row["attack"].startswith("control")]
    beyond = [row for row in ours if row["ratio"] > _GOAL or row["stopped"]]
    neither = [
        row["attack"]
        for row in beyond
        if row["stopped"] or row["of_control"] is None or row["of_control"] > _AS_CONTROL
    ]
    print(
        f"within {_GOAL:g} x of quiet at p99: {len(ours) - len(beyond)} of {len(ours)} attacks; of the "
        f"others {len(beyond) - len(neither)} within {_AS_CONTROL:g} x of their controls; neither: "
        f"{', '.join(neither) or 'none'}; {took:.0f} s, on average {facts['busy_cores']:.1f} cores busy, "
        f"load {os.getloadavg()[0]:.1f} at the end"
    )
    write_json(options.out, {"benchmark": "attacks", "machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
