"""Parts of a soak: the requests of a section asked of a server that drafts, under one kind of trouble each.

A section is a model, a form of its numbers and a number of ranks; its requests are a function of (seed,
section).  What is right it learns from a server of the same kind with `--speculation off`, which meets no
trouble.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from baton.model.checkpoint.hub import resolve_model
from tests.e2e.killing import engines
from tests.e2e.server import Server, child_pids
from tests.e2e.speculating.answers import Answer, ask, difference
from tests.e2e.speculating.requests import Request, draw, ending_within
from tests.model.checkpoints import make_checkpoint
from tests.model.mtp_checkpoints import make_agreeing

VOCAB = 1000
"""Token ids that requests name are below; all tokenizers here have more."""
CONTEXT = 640
_ANSWER_S = 240.0
_READY_S = 120.0
FORMS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--dtype", "bfloat16", "--quantization", "int8"),
}
MODELS = {
    "embedded": "",
    "groups": "llama3",
    "windows": "gemma3",
    "mixture": "gpt-oss",
    "mtp": "ernie4_5-moe",
}
"""Random ones by their shape in `tests/model/checkpoints.py`; gpt-oss has windows and sinks as well.  `mtp`:
a mixture with a layer that guesses the model's likeliest token; drawn and bound answers are often others."""
NGRAM = ("--speculation", "ngram")
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')


@dataclass(frozen=True)
class Section:
    model: str
    form: str
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.model} {self.form} {self.ranks}"

    @property
    def flags(self) -> tuple[str, ...]:
        common = ("--max-model-len", str(CONTEXT), "--block-size", "16", "--convert", "embed")
        sizes = ("--num-threads", "1", "--tensor-parallel-size", str(self.ranks))
        return (*FORMS[self.form], *common, *sizes, "--runner", "generate")

    def drafts(self, by_cost: bool) -> tuple[str, ...]:
        """Flags: as many as there are, or as many as pay."""
        if self.model == "mtp":
            return ("--speculation", "mtp") if by_cost else MTP
        return ("--speculation", "auto") if by_cost else NGRAM


@dataclass(frozen=True)
class Part:
    """`at_once`: one request after the other among so many. `met`: how much of its trouble its server met."""

    name: str
    flags: tuple[str, ...]
    at_once: tuple[int, ...]
    kills: int = 0
    fillers: int = 0
    """Clients beside, whose answers are as long as the context: no two of them have room in a small pool."""
    met: Callable[[Server], float] = lambda server: 1.0
    sure: bool = True
    """That drafts are made, and that trouble is met, is no matter of how fast the machine is."""
    by_cost: bool = False
    """As many drafts as pay."""


def _arrived(server: Server) -> float:
    return float(sum(one["handovers"]["arrived"] for one in stats(server).values()))


SPLIT = ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0", "--max-restarts", "1000")
TIGHT = ("--num-gpu-blocks-override", str(CONTEXT // 16 + 2), "--admission-headroom", "0")
ROOM = ("--kv-cache-memory-bytes", "32MiB")
PARTS = (
    Part("all drafts", ROOM, (1, 8, 32, 32, 32)),
    Part("by cost", ROOM, (1, 8, 32, 32, 32), sure=False, by_cost=True),
    Part(
        "preempted",
        TIGHT,
        (16, 32),
        fillers=2,
        met=lambda of: of.metric("baton:num_preemptions_total"),
    ),
    Part("handed over", (*SPLIT, *ROOM), (8, 32), met=_arrived),
    Part(
        "killed",
        (*SPLIT, *ROOM),
        (12, 24),
        kills=4,
        met=lambda server: server.metric("baton:requests_continued_total"),
        sure=False,
    ),
)


@dataclass
class Outcome:
    """What one part came to."""

    asked: int = 0
    drafted: int = 0
    right: int = 0
    met: float = 0.0
    wrong: list[str] = field(default_factory=list)
    runs: Counter[int] = field(default_factory=Counter)
    """Tokens of the chunks of streams."""

    def line(self) -> str:
        longest = max(self.runs, default=0)
        return (
            f"{self.asked} requests, {len(self.wrong)} differences; {self.drafted} drafts, {self.right} of "
            f"them right; met {self.met:.0f}; chunks of 1 to {longest} tokens"
        )


@contextmanager
def model_of(section: Section, folder: Path) -> Iterator[str | None]:
    """The checkpoint's directory; None: the embedded model."""
    shape = MODELS[section.model]
    if not shape:
        yield None
        return
    directory = folder / section.model
    if not directory.exists():
        embedded = resolve_model(None)
        sizes = {"vocab_size": 1024, "max_position_embeddings": CONTEXT}
        if section.model == "mtp":
            make_agreeing(directory, **sizes)
        else:
            make_checkpoint(directory, shape, **sizes)
        for path in embedded.glob("tokenizer*"):
            shutil.copy(path, directory)
    yield str(directory)


def stats(server: Server) -> dict[str, dict[str, Any]]:
    """Of each instance, by name."""
    answer = server.http.get("/stats").raise_for_status().json()
    found: dict[str, dict[str, Any]] = answer.get("instances", {"": answer})
    return {name: one for name, one in found.items() if "error" not in one}


async def _ask_all(
    server: Server, requests: list[Request], at_once: int, on_answer: Callable[[int, Answer], None]
) -> None:
    left = iter(enumerate(requests))
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=server.url, timeout=_ANSWER_S, limits=limits) as http:

        async def work() -> None:
            for number, request in left:
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        # (A gateway that is short of cores may refuse costly requests for a moment.)
                        while (answer := await ask(http, request)).status == 429:
                            await asyncio.sleep(0.2)
                except (httpx.HTTPError, ValueError, TimeoutError) as error:
                    answer = Answer(0, {"error": f"{type(error).__name__}: {error}"})
                on_answer(number, answer)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())


def learn(server: Server, section: Section, count: int, seed: str) -> list[tuple[Request, Answer]]:
    """Requests with their answers: a third of them drawn, the others such that end within the answers of
    these."""
    rng = random.Random(f"{seed} {section}")
    some = -(-count // 3)
    drawn = [draw(rng, f"seed {seed}, {section}, request {number}", VOCAB) for number in range(some)]
    answers: dict[int, Answer] = {}
    asyncio.run(_ask_all(server, drawn, 16, answers.__setitem__))
    known = [(request, answers[number]) for number, request in enumerate(drawn)]
    more: list[Request] = []
    for number, (request, answer) in enumerate(known):
        for variant in "ab":
            name = f"seed {seed}, {section}, request {number}{variant}"
            if answer.choices and (found := ending_within(rng, request, name, rng.choice(answer.choices))):
                more.append(found)
    more = more[: count - len(drawn)]
    answers.clear()
    asyncio.run(_ask_all(server, more, 16, answers.__setitem__))
    return known + [(request, answers[number]) for number, request in enumerate(more)]


@dataclass
class Running:
    """One part, asked of its server."""

    server: Server
    part: Part
    known: list[tuple[Request, Answer]]
    rng: random.Random
    outcome: Outcome = field(default_factory=Outcome)
    _reached: dict[int, asyncio.Event] = field(default_factory=dict)
    """By so many answers."""
    _over: bool = False

    def run(self) -> Outcome:
        asyncio.run(self._run())
        self._count(stats(self.server).values())
        self.outcome.met = self.part.met(self.server)
        return self.outcome

    async def _run(self) -> None:
        order = self.rng.sample(self.known, len(self.known))
        share = -(-len(order) // len(self.part.at_once))
        parts = self.part.kills + 1
        places = [max(1, len(order) * number // parts) for number in range(1, parts)]
        self._reached = {place: asyncio.Event() for place in places}
        killing = asyncio.create_task(self._kill(places))
        filling = [asyncio.create_task(self._fill(number)) for number in range(self.part.fillers)]
        for number, at_once in enumerate(self.part.at_once):
            some = order[number * share : (number + 1) * share]
            await _ask_all(self.server, [request for request, _ in some], at_once, self._compare(some))
        self._over = True
        await asyncio.gather(killing, *filling)
        if places:
            await self._wait_ready()

    def _compare(self, some: list[tuple[Request, Answer]]) -> Callable[[int, Answer], None]:
        def compare(number: int, answer: Answer) -> None:
            request, expected = some[number]
            self.outcome.asked += 1
            if event := self._reached.get(self.outcome.asked):
                event.set()
            self.outcome.runs.update(answer.runs)
            if what := difference(expected, answer):
                self.outcome.wrong.append(f"{self.part.name}: {what}; it was {request}")

        return compare

    async def _kill(self, places: list[int]) -> None:
        """When so many answers are there the engine or a worker of one instance gets SIGKILL: of the one that
        decodes and the one that prefills in turn."""
        names = sorted(engines(self.server)) if places else []
        for number, place in enumerate(places):
            await self._reached[place].wait()
            await self._wait_ready()
            name = names[number % len(names)]
            self._count([stats(self.server).get(name, {})])
            engine = engines(self.server)[name]
            os.kill(self.rng.choice([engine, *child_pids(engine)]), signal.SIGKILL)

    async def _fill(self, number: int) -> None:
        """Until all others have their answers, and once at least."""
        body = {"prompt": [5, 6, 7], "max_tokens": CONTEXT - 40, "ignore_eos": True, "seed": number}
        body |= {"temperature": 1.0, "allowed_token_ids": [10, 11, 12, 13]}
        async with httpx.AsyncClient(base_url=self.server.url, timeout=_ANSWER_S) as http:
            once = False
            while not self._over or not once:
                (await http.post("/v1/completions", json=body)).raise_for_status()
                once = True

    async def _wait_ready(self) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=30) as http, asyncio.timeout(_READY_S):
            while True:
                instances = (await http.get("/cluster/instances")).json()["instances"]
                if all(one["state"] == "ready" for one in instances):
                    return
                await asyncio.sleep(0.05)

    def _count(self, counted: Any) -> None:
        for one in counted:
            self.outcome.drafted += one.get("draft_tokens", 0)
            self.outcome.right += one.get("accepted_tokens", 0)
