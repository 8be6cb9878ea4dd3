"""What 16 streams notice of attacks on their server: time between tokens, quiet and during each attack.

    python benchmarks/attacks.py [--seconds 4] [--rounds 3] [--only stop] [--baseline DIR] [--out FILE]

Starts `baton serve` with the embedded model and keeps `--streams` streamed completions running.  For each
attack of `_attacks/` quiet seconds and seconds under attack alternate; the attack runs in a process of its
own, at a lower priority, as an attacker's work is not the server's.  A gap that has not ended when the
attack's seconds are over counts as long as it is by then.  The model's chat template has switches (`loops`,
`size`) with which a request makes it cost much.

`--baseline DIR` does the same with another checkout of Baton (its `.venv` if it has one), turn by turn.  The
percentiles are medians over the rounds.

On few cores the attack's own process takes time from the server too, so read a table beside the quiet column.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import uvloop

from _attacks import attacks
from _clients import Server, serving
from _common import Table, machine, percentile, print_machine, write_json
from baton.model.hub import resolve_model

_SETTLE_S = 1.0
_START_S = 5.0
"""More than the attack's process takes to be stopped."""
_LOST_S = 20.0
"""After an attack the server must answer within so many seconds; else a new one is started."""
_TEMPLATE = """\
{%- if loops is defined %}
{%- for i in range(loops) %}{% for j in range(10000) %}{% endfor %}{% endfor %}{% endif %}
{%- if size is defined %}{{ 'x' * size }}{% endif %}
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"""
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


async def _watch(
    server: Server, streams: int, windows: list[str | None], seconds: float
) -> list[list[float]]:
    """The gaps of each window, quiet (None) or under an attack."""
    loop = asyncio.get_running_loop()
    found: list[list[float]] = []
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
    try:
        for attack in windows:
            await asyncio.sleep(_SETTLE_S)
            process: subprocess.Popen[bytes] | None = None
            if attack is not None:
                command = [sys.executable, __file__, "--attack", attack, server.host, str(server.port)]
                command = ["nice", "-n", "10", *command, str(seconds + _START_S)]
                process = subprocess.Popen(command, stdout=subprocess.PIPE)
                assert process.stdout is not None
                await loop.run_in_executor(None, process.stdout.readline)  # it has begun
            for protocol in protocols:
                protocol.gaps.clear()
            await asyncio.sleep(seconds)
            now = time.perf_counter()
            found.append([gap for protocol in protocols for gap in protocol.gaps])
            found[-1] += [now - protocol.at for protocol in protocols if protocol.at is not None]
            if process is not None:
                process.kill()
                process.communicate()
            if any(protocol.lost for protocol in protocols):
                found[-1].append(math.inf)
                break
    finally:
        for protocol in protocols:
            protocol.transport.abort()
    return found


@contextlib.contextmanager
def _model() -> Iterator[str]:
    """A copy of the embedded model with the template above."""
    with tempfile.TemporaryDirectory(prefix="baton-attacks-") as directory:
        for file in resolve_model(None).iterdir():
            (Path(directory) / file.name).write_bytes(file.read_bytes())
        (Path(directory) / "chat_template.jinja").write_text(_TEMPLATE)
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
        if self._server is not None and not _answers(self._server):
            print(f"{self.name}: the server does not answer; starting another one", file=sys.stderr)
            self._server.process.kill()
            self.close()
        if self._server is None:
            python, env = sys.executable, None
            if self._checkout is not None:
                own = self._checkout / ".venv" / "bin" / "python"
                python = str(own) if own.exists() else python
                env = {**os.environ, "PYTHONPATH": str(self._checkout / "src")}
            self._server = self._stack.enter_context(serving(self._model, python=python, env=env))
        return self._server

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


def measure(options: argparse.Namespace) -> dict[str, dict[str, dict[str, list[list[float]]]]]:
    """attack → side → `quiet` and `attack` → gaps in seconds of each round."""
    found: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    names = [name for name in attacks() if not options.only or any(part in name for part in options.only)]
    with _model() as model:
        sides = [_Side("this", None, model)]
        if options.baseline:
            sides.insert(0, _Side("baseline", Path(options.baseline).resolve(), model))
        try:
            for name in names:
                for _ in range(options.rounds):
                    for side in sides:
                        windows = uvloop.run(
                            _watch(side.server(), options.streams, [None, name], options.seconds)
                        )
                        gaps = found.setdefault(name, {}).setdefault(side.name, {"quiet": [], "attack": []})
                        for kind, window in zip(("quiet", "attack"), windows, strict=False):
                            gaps[kind].append(window)
                print(f"done: {name}", file=sys.stderr)
        finally:
            for side in sides:
                side.close()
    return found


def _median(rounds: list[list[float]], q: float) -> float:
    """Of the rounds' percentiles: a round in which the machine did something else counts once."""
    return statistics.median(percentile(gaps, q) for gaps in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="attacks with one of these words in their names")
    parser.add_argument("--baseline", metavar="DIR", help="another checkout of Baton")
    parser.add_argument("--out")
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack is not None:
        name, host, port, seconds = options.attack
        print("begun", flush=True)
        attacks()[name](host, int(port), float(seconds))
        return
    facts = machine()
    print_machine(facts)
    found = measure(options)
    columns = ("attack", "", "quiet p50", "p99", "attack p50", "p99", "max", "p99 / quiet")
    table = Table(f"ms between tokens of {options.streams} streams", columns)
    rows: list[dict[str, Any]] = []
    for name, sides in found.items():
        for side, gaps in sides.items():
            row = {
                "attack": name,
                "side": side,
                "quiet_p50": _median(gaps["quiet"], 50),
                "quiet_p99": _median(gaps["quiet"], 99),
                "p50": _median(gaps["attack"], 50),
                "p99": _median(gaps["attack"], 99),
                "max": _median(gaps["attack"], 100),
            }
            rows.append(row)
            numbers = [f"{row[key] * 1e3:.1f}" for key in ("quiet_p50", "quiet_p99", "p50", "p99", "max")]
            table.row(name, side, *numbers, f"{row['p99'] / row['quiet_p99']:.1f}")
    table.print()
    write_json(options.out, {"benchmark": "attacks", "machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
