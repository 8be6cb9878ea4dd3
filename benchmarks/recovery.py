"""How long an instance is away after `kill -9`, and what running streams notice of it.

    python benchmarks/recovery.py [MODEL ...] [--kills 20] [--streams 4] [--victim engine] [--out FILE]

Starts `baton serve --prefill 1 --decode 2`, kills an instance's engine (or `--victim worker`) with SIGKILL,
waits until the instance is ready again, and goes on with the next one.  First while nothing runs, then while
`--streams` clients read long answers.  A server serves twelve kills, so that no instance has died often
enough to be kept waiting (`launch/instances/supervisor.py`).

| column | what it is |
| --- | --- |
| ready again | from the signal to the moment when the gateway sends requests to the next incarnation |
| longest pause | between two chunks of a stream that ran at the signal, the longest of all streams |
| wrong | streams that do not end with the text that they have when nobody is killed |

The goals, on a quiet machine: ready again in 0.7 s (embedded model), 1 s (0.3 B); no pause beyond 1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from _clients import Server, serving
from _common import Table, machine, percentile, print_machine, write_json
from disaggregation import engine_pid
from idle import children

INSTANCES = ("decode-0", "prefill-0", "decode-1")
KILLS_OF_A_SERVER = 12
DEADLINE_S = 120.0
LOOK_S = 0.005
TOKENS = 160


@dataclass
class Kill:
    instance: str
    streams: int
    at: float
    """On the monotonic clock, as `ready`."""
    ready_s: float = 0.0
    pause_s: float = 0.0


@dataclass
class Streams:
    """Clients that read answers, one after another."""

    server: Server
    texts: dict[int, str] = field(default_factory=dict)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    stop: bool = False

    async def read(self, http: httpx.AsyncClient, number: int) -> str:
        body = {
            "model": self.server.model,
            "prompt": f"{number} " * 24,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text, last = "", time.monotonic()
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    now = time.monotonic()
                    self.pauses.append((last, now))
                    last = now
                    if "error" in event:
                        raise RuntimeError(str(event))
                    text += event["choices"][0]["text"]
        return text

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        while not self.stop:
            try:
                text = await self.read(http, number)
            except (httpx.HTTPError, RuntimeError) as error:
                text = f"{type(error).__name__}: {error}"
            self.answers += 1
            if text != self.texts[number]:
                self.wrong.append(f"{number}: {text[:200]!r}, not {self.texts[number][:200]!r}")


async def _state(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    found = (await http.get("/cluster/instances")).json()["instances"]
    state: dict[str, Any] = next(one for one in found if one["name"] == name)
    return state


async def kill(server: Server, http: httpx.AsyncClient, name: str, victim: str, streams: int) -> Kill:
    before = (await _state(http, name))["incarnation"]
    pid = engine_pid(server, name)
    done = Kill(name, streams, time.monotonic())
    os.kill(pid if victim == "engine" else children(pid)[0], signal.SIGKILL)
    while time.monotonic() < done.at + DEADLINE_S:
        state = await _state(http, name)
        if state["state"] == "ready" and state["incarnation"] != before:
            done.ready_s = time.monotonic() - done.at
            return done
        await asyncio.sleep(LOOK_S)
    raise TimeoutError(f"{name} was not ready again within {DEADLINE_S:g} s")


async def run(server: Server, kills: int, streams: int, victim: str) -> tuple[list[Kill], Streams]:
    """`kills` while nothing runs, then as many beside the streams."""
    found: list[Kill] = []
    reading = Streams(server)
    url = f"http://{server.host}:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        for number in range(streams):
            reading.texts[number] = await reading.read(http, number)
        for count in range(kills):
            await asyncio.sleep(0.3)
            found.append(await kill(server, http, INSTANCES[count % len(INSTANCES)], victim, 0))
        clients = [asyncio.create_task(reading.client(http, number)) for number in range(streams)]
        for count in range(kills if streams else 0):
            await asyncio.sleep(0.7)
            found.append(await kill(server, http, INSTANCES[count % len(INSTANCES)], victim, streams))
        await asyncio.sleep(0.5)
        reading.stop = True
        await asyncio.gather(*clients)
    for one in found:
        one.pause_s = max((b - a for a, b in reading.pauses if a <= one.at <= b), default=0.0)
    return found, reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--kills", type=int, default=20, help="of each kind of instance")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--victim", choices=("engine", "worker"), default="engine")
    parser.add_argument("--flags", default="", help="further flags of `baton serve`, in one argument")
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    columns = ("", "kills", "ready again: median", "worst", "longest pause: median", "worst", "wrong")
    table = Table("seconds after kill -9", columns)
    results: dict[str, Any] = {}
    for model in [None, *options.models] if not options.models else options.models:
        kills: list[Kill] = []
        wrong: list[str] = []
        answers = 0
        while sum(one.instance.startswith("prefill") for one in kills if not one.streams) < options.kills:
            flags = [*([model] if model else []), "--prefill", "1", "--decode", "2"]
            flags += ["--max-restarts", "1000", "--log-level", "critical", *options.flags.split()]
            with serving(*flags) as server:
                work = run(server, KILLS_OF_A_SERVER // 2, options.streams, options.victim)
                found, reading = asyncio.run(work)
            kills += found
            wrong += reading.wrong
            answers += reading.answers
        name = Path(model).name if model else "embedded"
        for streams in sorted({one.streams for one in kills}):
            for role in ("decode", "prefill"):
                rows = [one for one in kills if one.streams == streams and one.instance.startswith(role)]
                ready, pauses = [one.ready_s for one in rows], [one.pause_s for one in rows]
                cells = [f"{name}, {role}, {streams} streams", len(rows)]
                cells += [f"{percentile(ready, 50):.2f}", f"{max(ready):.2f}"]
                cells += [f"{percentile(pauses, 50):.2f}", f"{max(pauses):.2f}"] if streams else ["", ""]
                table.row(*cells, f"{len(wrong)} of {answers}" if streams else "")
        results[name] = {"kills": [asdict(one) for one in kills], "wrong": wrong, "answers": answers}
    table.print()
    for result in results.values():
        for text in result["wrong"][:5]:
            print("WRONG", text)
    write_json(options.out, {"benchmark": "recovery", "machine": facts, "results": results})


if __name__ == "__main__":
    main()
