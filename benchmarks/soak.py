"""A long mixed load on a real server: are all answers right, and does any process grow?

    python benchmarks/soak.py --minutes 60 [--prefill 1 --decode 1] [--kills 0] [--out soak.json]
    make soak-server MINUTES=60

One `baton serve` with the embedded model, split into instances that prefill and that decode, and clients of
all kinds at once:

* prompts that many share, prompts that share a beginning, and prompts that nobody asked before (those fill
  the prefix cache, so that blocks are evicted);
* greedy and sampled with a seed, streamed and not, `n` up to 3, `logprobs`, stop strings, completions and
  chats;
* clients that leave in the middle: of a stream after some chunks, of a whole answer after some time.

*Right*: each request is a function of its body, so the same request must get the same answer.  The shared
ones are asked once, one at a time, before the load; of the new ones every third is asked again later.  Texts,
token ids and reasons are compared.  A client that left must have got a beginning.

*Growth*: memory, descriptors and threads of every process are looked at every `--every` seconds, and judged
after a warm-up (`src/baton/bench/memory.py`; the warm-up is a quarter of the time).  What is shared between
processes, the KV pool, is not judged; with a small `--kv-cache-memory-bytes` it is soon touched as a whole.

`--kills N`: N times, at equal intervals, an engine or a worker gets SIGKILL.  A process that was started anew
is judged if it lived for at least half of the time.

A killed instance is ready again after some time, and streams that were running wait for their next chunk: the
median and the worst of both are shown.

In the end nothing may be held in any ledger; and when the server has ended, no process may have any of its
shared memory (weight images, KV pools, rings), and its private directories must be gone.  Exit code 1: an
answer was wrong, something is still held or left behind, or a process grows.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from _clients import Server, serving
from _common import Table, machine, print_machine, write_json
from _kills import kill_some, note_pauses, show_kills
from baton.bench.left_behind import Belongings
from baton.bench.memory import MIB, Growth, Usage, growth, usage

_WORDS = (
    "river stone lamp garden paper window green seven letter music table bread winter "
    "story yellow market cloud silver number quiet"
).split()
_ANSWER_S = 300.0
_AGAIN = 3
"""Of the new prompts every third is asked again, after so many others."""
_LATER = 200
_PAUSE_S = 0.02
"""What is shorter is no pause."""
ALLOWED = {"anonymous": 4.0 * MIB, "descriptors": 3.0, "threads": 1.5}
"""What a process may hold more at the end of the judged time without being called growing."""


# -- what is asked


@dataclass
class Ask:
    """One request.  `leaves`: its client goes away after so many chunks, or tenths of a second."""

    path: str
    body: dict[str, Any]
    leaves: int | None = None
    expected: list[tuple[str, list[int], str | None]] | None = None
    """Of each choice: text, token ids, why it ended."""


def make_ask(rng: random.Random, prompt: str, *, leaves: bool) -> Ask:
    chat = rng.random() < 0.2
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 96),
        "stream": rng.random() < 0.5,
        "return_token_ids": True,
        "ignore_eos": rng.random() < 0.6,
        "temperature": 0.0,
    }
    if rng.random() < 0.5:
        body |= {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(2**31)}
    if rng.random() < 0.2:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        body["stop"] = [" the", " and"]
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    if rng.random() < 0.1:
        body |= {"presence_penalty": 0.6, "repetition_penalty": 1.2}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Ask(path, body, rng.randint(0, 12) if leaves else None)


class Prompts:
    """What the clients ask, one after the other."""

    def __init__(self, rng: random.Random, shared: int) -> None:
        self._rng = rng
        self._beginning = " ".join(rng.choices(_WORDS, k=90))
        self.shared = [make_ask(rng, self._text(rng.random() < 0.4), leaves=False) for _ in range(shared)]
        self._count = 0
        self._again: deque[tuple[int, Ask]] = deque()

    def next(self) -> Ask:
        """A shared one, one that was asked before, or a new one; some clients leave."""
        rng = self._rng
        self._count += 1
        if self._again and self._again[0][0] <= self._count:
            return self._again.popleft()[1]
        leaves = rng.random() < 0.15
        if rng.random() < 0.4:
            ask = rng.choice(self.shared)
            return dataclasses.replace(ask, leaves=rng.randint(0, 12)) if leaves else ask
        return make_ask(rng, self._text(rng.random() < 0.3), leaves=leaves)

    def answered(self, ask: Ask) -> None:
        """A new one got its first answer: some of them are asked again later."""
        if self._rng.randrange(_AGAIN) == 0:
            self._again.append((self._count + _LATER, ask))

    def _text(self, with_beginning: bool) -> str:
        rng = self._rng
        longest = 260 if rng.random() < 0.3 else 40
        words = " ".join(rng.choices(_WORDS, k=rng.randint(1, longest)))
        return f"{self._beginning} {words}" if with_beginning else words


# -- clients


@dataclass
class Load:
    """Clients in a closed loop, and what they got."""

    server: Server
    prompts: Prompts
    rng: random.Random
    answers: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """From when to when a stream waited for a chunk, where that was longer than `_PAUSE_S`."""
    stop: bool = False

    async def learn(self, http: httpx.AsyncClient) -> None:
        for ask in self.prompts.shared:
            ask.expected = await self._whole(http, ask)

    async def client(self, http: httpx.AsyncClient) -> None:
        while not self.stop:
            ask = self.prompts.next()
            try:
                await asyncio.wait_for(self._one(http, ask), _ANSWER_S)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__} {error}; it was {_shown(ask)}")
            await asyncio.sleep(self.rng.expovariate(1 / 0.05))

    async def _one(self, http: httpx.AsyncClient, ask: Ask) -> None:
        if ask.leaves is not None:
            await self._left(http, ask)
            return
        got = await self._whole(http, ask)
        self.answers["streamed" if ask.body["stream"] else "whole"] += 1
        self.tokens += sum(len(ids) for _, ids, _ in got)
        if ask.expected is None:
            ask.expected = got
            self.prompts.answered(ask)
        else:
            self.answers["compared"] += 1
            if got != ask.expected:
                self.wrong.append(f"{got} instead of {ask.expected}; it was {_shown(ask)}")

    async def _left(self, http: httpx.AsyncClient, ask: Ask) -> None:
        """Its client goes away before the end, if the answer is not faster."""
        assert ask.leaves is not None
        self.answers["left"] += 1
        if ask.body["stream"]:
            got = await self._whole(http, ask, ask.leaves)
            for have, whole in zip(got, ask.expected or got, strict=True):
                if not whole[0].startswith(have[0]) or whole[1][: len(have[1])] != have[1]:
                    self.wrong.append(f"{have} is no beginning of {whole}; it was {_shown(ask)}")
            return
        try:
            await asyncio.wait_for(self._whole(http, ask), 0.1 * ask.leaves + 0.02)
        except TimeoutError:
            pass

    async def _whole(
        self, http: httpx.AsyncClient, ask: Ask, leave_after: int | None = None
    ) -> list[tuple[str, list[int], str | None]]:
        """Raises `RuntimeError` for an answer that is none."""
        choices: list[tuple[str, list[int], str | None]] = [("", [], None)] * ask.body.get("n", 1)
        chunks = 0
        async with http.stream("POST", ask.path, json={"model": self.server.model, **ask.body}) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise RuntimeError(f"HTTP {answer.status_code}: {text}")
            if not ask.body["stream"]:
                for choice in json.loads(await answer.aread())["choices"]:
                    _take(choices, choice)
                return choices
            last = time.monotonic()
            async for line in answer.aiter_lines():
                before, last = last, time.monotonic()
                if last - before > _PAUSE_S:
                    self.pauses.append((before, last))
                if line == "data: [DONE]":
                    return choices
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"error in the stream: {event}")
                for choice in event["choices"]:
                    _take(choices, choice)
                chunks += 1
                if leave_after is not None and chunks > leave_after:
                    return choices
        raise RuntimeError("the answer ended without [DONE]")


def _take(choices: list[tuple[str, list[int], str | None]], choice: dict[str, Any]) -> None:
    text, ids, finish = choices[choice["index"]]
    said = choice.get("delta") or choice.get("message")
    new = (said.get("content") if said else choice.get("text")) or ""
    more = choice.get("token_ids") or []
    choices[choice["index"]] = (text + new, ids + more, choice.get("finish_reason") or finish)


def _shown(ask: Ask) -> str:
    return json.dumps(ask.body)[:2000]


# -- processes


def processes(server: Server) -> dict[str, int]:
    """Process ids by what they are: gateway, NAME engine, NAME rank 0, …"""
    found = {"gateway": server.process.pid}
    for pid in _children(server.process.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"baton.launch.instances.processes.instance" not in words:
            continue
        name = json.loads(words[words.index(b"baton.launch.instances.processes.instance") + 1])["config"][
            "name"
        ]
        found[f"{name} engine"] = pid
        found |= {f"{name} rank {rank}": child for rank, child in enumerate(_children(pid))}
    return found


def tree(pid: int) -> list[int]:
    """The process, its children, theirs, …"""
    return [pid, *(one for child in _children(pid) for one in tree(child))]


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


@dataclass
class Watch:
    """Looks at every process, again and again."""

    server: Server
    every_s: float
    began: float = field(default_factory=time.monotonic)
    series: dict[tuple[str, int], list[tuple[float, Usage]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """(what it is, process id) → seconds since the beginning, and what it held."""
    belongings: Belongings = field(default_factory=Belongings)

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(self.every_s)

    def look(self) -> None:
        at = time.monotonic() - self.began
        self.belongings.look(tree(self.server.process.pid))
        for name, pid in processes(self.server).items():
            now = usage(pid)
            if now is not None:
                self.series[name, pid].append((at, now))

    def judge(self, seconds: float) -> dict[tuple[str, int], dict[str, Growth]]:
        """Of each process that lived for at least half of the time."""
        verdicts = {}
        for key, samples in self.series.items():
            judged = [held for at, held in samples if at >= samples[0][0] + seconds / 4]
            if samples[-1][0] - samples[0][0] < seconds / 2:
                continue
            found = {
                name: growth([getattr(held, name) for held in judged], allowed)
                for name, allowed in ALLOWED.items()
            }
            verdicts[key] = {name: one for name, one in found.items() if one is not None}
        return verdicts


# -- the run


async def soak(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    seconds = 60.0 * options.minutes
    rng = random.Random(options.seed)
    load = Load(server, Prompts(rng, options.shared), rng)
    limits = httpx.Limits(max_connections=None)
    # (A connection that is kept may be closed by the server just when the next request is sent.)
    headers = {"connection": "close"}
    url = f"http://{server.host}:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=_ANSWER_S, limits=limits, headers=headers) as http:
        await load.learn(http)
        watch = Watch(server, options.every)
        tasks = [asyncio.create_task(watch.run())]
        clients = [asyncio.create_task(load.client(http)) for _ in range(options.clients)]
        killing = asyncio.create_task(kill_some(server, processes, seconds, options.kills, rng))
        for minute in range(1, int(options.minutes) + 1):
            await asyncio.sleep(max(0.0, watch.began + 60 * minute - time.monotonic()))
            _tell(minute, load, watch)
            if len(load.wrong) > 100:
                break
        await asyncio.sleep(max(0.0, watch.began + seconds - time.monotonic()))
        load.stop = True
        await asyncio.gather(*clients)
        killed = await killing
        note_pauses(killed, load.pauses)
        watch.look()
        for task in tasks:
            task.cancel()
    return {
        "minutes": options.minutes,
        "answers": dict(load.answers),
        "tokens": load.tokens,
        "killed": killed,
        "wrong": load.wrong,
        "held": await asyncio.to_thread(what_is_held, server),
        "watch": watch,
        "verdicts": watch.judge(seconds),
    }


def _tell(minute: int, load: Load, watch: Watch) -> None:
    held = ", ".join(
        f"{name} {samples[-1][1].anonymous / MIB:.0f}" for (name, _), samples in watch.series.items()
    )
    count = sum(load.answers[kind] for kind in ("whole", "streamed", "left"))
    print(
        f"minute {minute}: {count:,} requests, {load.tokens:,} tokens, {len(load.wrong)} wrong; MiB: {held}",
        flush=True,
    )


def what_is_held(server: Server, patience_s: float = 60.0) -> dict[str, Any]:
    """What is in use a while after the last request; {} if nothing is."""
    until = time.monotonic() + patience_s
    while True:
        try:
            ledgers = server.get("/debug/ledger")["instances"]
            held = {
                name: ledger
                for name, ledger in ledgers.items()
                if "error" in ledger or ledger["free"] + ledger["cached"] != ledger["total"]
            }
        except (OSError, KeyError) as error:
            held = {"error": repr(error)}
        if not held or time.monotonic() > until:
            return held
        time.sleep(0.5)


def show(result: dict[str, Any]) -> bool:
    """Prints the tables.  Returns whether all is well."""
    watch: Watch = result["watch"]
    places = [index / 8 for index in range(9)]
    table = Table(
        "Anonymous memory (MiB) over the time",
        ["process", *(f"{place * result['minutes']:.3g} min" for place in places)],
    )
    ends = Table(
        "Growth after the warm-up, and what is held at the end",
        ["process", "anonymous", "resident", "proportional", "descriptors", "threads", "verdict"],
    )
    well = True
    for (name, pid), samples in watch.series.items():
        cells = []
        for place in places:
            wanted = place * result["minutes"] * 60
            at, held = min(samples, key=lambda sample: abs(sample[0] - wanted))
            near = abs(at - wanted) <= 3 * watch.every_s
            cells.append(f"{held.anonymous / MIB:.1f}" if near else "")
        table.row(f"{name} ({pid})", *cells)
        last, found = samples[-1][1], result["verdicts"].get((name, pid))
        grows = sorted(kind for kind, one in (found or {}).items() if one.steady)
        verdict = "too short" if not found else f"GROWS: {', '.join(grows)}" if grows else "steady"
        well = well and not grows

        def change(kind: str, unit: float, of: dict[str, Growth] | None = found) -> str:
            return f" ({of[kind].amount / unit:+.1f})" if of else ""

        ends.row(
            f"{name} ({pid})",
            f"{last.anonymous / MIB:.1f}{change('anonymous', MIB)}",
            f"{last.resident / MIB:.1f}",
            f"{last.proportional / MIB:.1f}",
            f"{last.descriptors}{change('descriptors', 1)}",
            f"{last.threads}{change('threads', 1)}",
            verdict,
        )
    table.print()
    ends.print()
    print(f"answers: {result['answers']}, {result['tokens']:,} tokens, killed: {len(result['killed'])}")
    show_kills(result["killed"])
    print(f"wrong: {len(result['wrong'])}, held at the end: {result['held'] or 'nothing'}")
    images = watch.belongings.images()
    print(f"left behind: {result['left'] or 'nothing'} ({images} weight images were there)")
    for line in result["wrong"][:5]:
        print(f"  {line}")
    return well and not result["wrong"] and not result["held"] and not result["left"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--shared", type=int, default=60, help="requests that many clients ask")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default=None, help="a model that is not the embedded one")
    parser.add_argument("--kv-cache-memory-bytes", default="256MiB")
    parser.add_argument("--out")
    options = parser.parse_args()
    flags = [options.model] if options.model else []
    flags += ["--prefill", str(options.prefill), "--decode", str(options.decode)]
    flags += ["--dtype", "float32", "--disaggregation-threshold", "0"]
    flags += ["--kv-cache-memory-bytes", options.kv_cache_memory_bytes]
    flags += ["--max-restarts", str(100 + options.kills)]
    facts = machine()
    with serving(*flags) as server:
        result = asyncio.run(soak(server, options))
        metrics = server.get_text("/metrics")
    result["left"] = result["watch"].belongings.left()
    print_machine(facts)
    well = show(result)
    watch = result.pop("watch")
    result["killed"] = [dataclasses.asdict(kill) for kill in result["killed"]]
    verdicts = result.pop("verdicts")
    continued = re.findall(r"^baton:requests_continued_total\S* ([0-9.e+]+)", metrics, re.M)
    rows = [
        {
            "process": name,
            "pid": pid,
            "verdict": {k: dataclasses.asdict(v) for k, v in verdicts.get((name, pid), {}).items()},
            "samples": [{"at_s": round(at, 1), **dataclasses.asdict(held)} for at, held in samples],
        }
        for (name, pid), samples in watch.series.items()
    ]
    found = {"benchmark": "soak", "machine": facts, "well": well, **result, "processes": rows}
    write_json(options.out, found | {"continued": sum(map(float, continued))})
    if not well:
        sys.exit(1)


if __name__ == "__main__":
    main()
