"""Everything of a cluster restarted under load, one after the other: does any request notice?

    python benchmarks/rolling_restart.py [--instances 3] [--gateways 2] [--streams 8] [--rounds 2]

Starts gateways without instances of their own (`--mixed 0`), instances that join all of them, and a small
TCP balancer that looks at `/ready` of the gateways each 0.1 s (`_balancer.py`).  `--streams` clients read
answers through it, one after the other, each over a connection of its own; with `--keep-alive` each client
keeps its connection as OpenAI's client does, and thinks for up to 0.3 s before it asks again.  A connection
that is kept stays with one gateway, whatever a balancer of TCP wants: the gateway says with an answer that it
is the connection's last.  Nobody asks again.

Then each instance gets SIGTERM, ends, and is started anew; the next one's turn comes when all gateways use
it.  Then the same with each gateway: SIGTERM, `--drain-delay` in which the balancer hears of it, its streams
end, it exits, and another one is started at its address, which is ready when the instances have registered.

| column | what it is |
| --- | --- |
| answers | that began while this went on |
| failures | answers other than 200, connections that broke, streams that ended with an error; the goal is 0 |
| seams | streams whose text is not what it is when nothing is restarted; the goal is 0 |
| longest pause | between two chunks of a stream |
| longest wait | from the request to its first chunk |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from random import Random
from typing import IO, Any

import httpx

from _balancer import Balancer
from _common import Table, machine, print_machine, write_json

DEADLINE_S = 180.0
TOKENS = 160
_THINKING_S = 0.3
SERVE = (sys.executable, "-m", "baton", "serve")


@dataclass
class Phase:
    """What one kind of process was restarted in."""

    name: str
    began: float = 0.0
    """On the monotonic clock, as `ended`."""
    ended: float = 0.0
    restarts: int = 0


@dataclass
class Answer:
    began: float
    pause_s: float = 0.0
    wait_s: float = 0.0
    failure: str = ""
    seam: str = ""


@dataclass
class Process:
    """A gateway or an instance, which can be started again with the same command."""

    name: str
    command: tuple[str, ...]
    log: IO[bytes]
    running: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        self.running = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log
        )

    async def ended(self) -> None:
        """Raises `RuntimeError` unless it ends well, `TimeoutError` if it does not end."""
        code = await asyncio.to_thread(self.running.wait, DEADLINE_S)
        if code != 0:
            raise RuntimeError(f"{self.name} exited with status {code}")

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Site:
    """All processes of a run."""

    def __init__(
        self, flags: Sequence[str], gateways: int, instances: int, drain_delay_s: float, stack: ExitStack
    ) -> None:
        self._stack = stack
        self.ports = free_ports(gateways)
        joins = [word for port in self.ports for word in ("--join", f"127.0.0.1:{port}")]
        ends = ("--drain-delay", f"{drain_delay_s:g}", "--shutdown-timeout", "120")
        self.gateways = [
            self._process(f"gateway-{port}", *flags, "--mixed", "0", "--port", str(port), *ends)
            for port in self.ports
        ]
        names = [f"instance-{number}" for number in range(instances)]
        self.instances = [
            self._process(name, *flags, "--instance", *joins, "--name", name, "--shutdown-timeout", "5")
            for name in names
        ]
        for process in (*self.gateways, *self.instances):
            process.start()
            stack.callback(process.kill)

    def _process(self, name: str, *words: str) -> Process:
        file = tempfile.NamedTemporaryFile(prefix=name)  # noqa: SIM115  (the stack closes it)
        log = self._stack.enter_context(file)
        return Process(name, (*SERVE, *words, "--log-level", "warning"), log)

    async def used(self, name: str, not_incarnation: str = "") -> str:
        """Waits until each gateway sends requests to another incarnation of the instance; returns it."""
        found = ""
        for port in self.ports:
            deadline = time.monotonic() + DEADLINE_S
            while True:
                one = (await asyncio.to_thread(_instances, port)).get(name, {})
                if one.get("state") == "ready" and one["incarnation"] != not_incarnation:
                    found = one["incarnation"]
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the gateway at {port} does not use {name}: {one}")
                await asyncio.sleep(0.05)
        return found


def _instances(port: int) -> dict[str, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/cluster/instances", timeout=10) as answer:
            return {one["name"]: one for one in json.load(answer)["instances"]}
    except OSError:
        return {}


class Load:
    """Clients that ask one answer after the other, through the balancer."""

    def __init__(self, port: int, streams: int, tokens: int, *, keep_alive: bool = False) -> None:
        self._keep_alive = keep_alive
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._tokens = tokens
        self._texts: dict[int, str] = {}
        self._streams = streams
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self.answers: list[Answer] = []

    async def begin(self) -> None:
        """What each answer is, while nothing is restarted; then they go on until `end`."""
        async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
            for number in range(self._streams):
                answer, self._texts[number] = await self._ask(number, http)
                if answer.failure:
                    raise RuntimeError(f"before anything is restarted: {answer.failure}")
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._streams)]

    async def end(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        random = Random(number)
        async with httpx.AsyncClient(timeout=DEADLINE_S) as kept:
            while not self._stop:
                if self._keep_alive:
                    await self._one(number, kept)
                    await asyncio.sleep(random.uniform(0, _THINKING_S))
                else:
                    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
                        await self._one(number, http)

    async def _one(self, number: int, http: httpx.AsyncClient) -> None:
        answer, text = await self._ask(number, http)
        if not answer.failure and text != self._texts[number]:
            answer.seam = f"{number}: {text!r}, not {self._texts[number]!r}"
        self.answers.append(answer)

    async def _ask(self, number: int, http: httpx.AsyncClient) -> tuple[Answer, str]:
        body = {
            "model": "",
            "prompt": f"{number} " * 24,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        answer, text, done = Answer(time.monotonic()), "", False
        last = answer.began
        try:
            async with http.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    answer.failure = f"{response.status_code}: {(await response.aread())[:200]!r}"
                async for line in response.aiter_lines():
                    done = done or line == "data: [DONE]"
                    if not line.startswith("data: {"):
                        continue
                    event, now = json.loads(line[6:]), time.monotonic()
                    if "error" in event:
                        answer.failure = str(event["error"])
                        break
                    if text:
                        answer.pause_s = max(answer.pause_s, now - last)
                    else:
                        answer.wait_s = now - answer.began
                    last = now
                    text += event["choices"][0]["text"]
        except httpx.HTTPError as error:
            answer.failure = f"{type(error).__name__}: {error}"
        if not (done or answer.failure):
            answer.failure = "the stream ended without [DONE]"
        return answer, text


async def restart_all(site: Site, balancer: Balancer, rounds: int, *, at_once: bool = False) -> list[Phase]:
    """Restarts instances, then gateways, one after the other.  `at_once`: the drain delay is ended, by a
    second signal, when the balancer has heard of it and what it has passed on before is being answered."""
    phases = []
    for number in range(rounds):
        phase = Phase(f"instances, round {number + 1}", time.monotonic())
        for process in site.instances:
            before = await site.used(process.name)
            process.running.send_signal(signal.SIGTERM)
            await process.ended()
            process.start()
            await site.used(process.name, before)
            phase.restarts += 1
        phase.ended = time.monotonic()
        phases.append(phase)
        phase = Phase(f"gateways, round {number + 1}", time.monotonic())
        for process, backend in zip(site.gateways, balancer.backends, strict=True):
            process.running.send_signal(signal.SIGTERM)
            await backend.until(ready=False, deadline_s=DEADLINE_S)
            if at_once:
                process.running.send_signal(signal.SIGTERM)
            await process.ended()
            process.start()
            await backend.until(ready=True, deadline_s=DEADLINE_S)
            for instance in site.instances:
                await site.used(instance.name)
            phase.restarts += 1
        phase.ended = time.monotonic()
        phases.append(phase)
    return phases


async def run(
    flags: Sequence[str],
    *,
    gateways: int,
    instances: int,
    streams: int,
    rounds: int,
    drain_delay_s: float,
    tokens: int = TOKENS,
    at_once: bool = False,
    keep_alive: bool = False,
) -> tuple[list[Phase], list[Answer]]:
    with ExitStack() as stack:
        site = Site(flags, gateways, instances, drain_delay_s, stack)
        async with Balancer(site.ports) as balancer:
            for backend in balancer.backends:
                await backend.until(ready=True, deadline_s=DEADLINE_S)
            for instance in site.instances:
                await site.used(instance.name)
            load = Load(balancer.port, streams, tokens, keep_alive=keep_alive)
            await load.begin()
            phases = await restart_all(site, balancer, rounds, at_once=at_once)
            await load.end()
        return phases, load.answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--drain-delay", type=float, default=2.0)
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="end the drain delay, by a second SIGTERM, when the balancer has heard of it",
    )
    parser.add_argument("--keep-alive", action="store_true", help="each client keeps its connection")
    parser.add_argument("--flags", default="", help="further flags of `baton serve`, in one argument")
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    work = run(
        [*([options.model] if options.model else []), *options.flags.split()],
        gateways=options.gateways,
        instances=options.instances,
        streams=options.streams,
        rounds=options.rounds,
        drain_delay_s=options.drain_delay,
        at_once=options.at_once,
        keep_alive=options.keep_alive,
    )
    phases, answers = asyncio.run(work)
    columns = ("", "restarts", "seconds", "answers", "failures", "seams", "longest pause", "longest wait")
    table = Table(f"everything restarted beside {options.streams} streams", columns)
    whole = Phase("all", phases[0].began, phases[-1].ended, sum(phase.restarts for phase in phases))
    for phase in (*phases, whole):
        seen = [one for one in answers if phase.began <= one.began <= phase.ended]
        failures, seams = sum(bool(one.failure) for one in seen), sum(bool(one.seam) for one in seen)
        cells = [phase.name, phase.restarts, f"{phase.ended - phase.began:.0f}", len(seen), failures, seams]
        pause, wait = (max((getattr(one, of) for one in seen), default=0.0) for of in ("pause_s", "wait_s"))
        table.row(*cells, f"{pause:.2f}", f"{wait:.2f}")
    table.print()
    for one in answers:
        if one.failure or one.seam:
            print("FAILED" if one.failure else "SEAM", one.failure or one.seam)
    result = {"phases": [asdict(one) for one in phases], "answers": [asdict(one) for one in answers]}
    write_json(options.out, {"benchmark": "rolling_restart", "machine": facts, **result})


if __name__ == "__main__":
    main()
