"""An engine that plays requests to a drafter with a model: the same for both kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from baton.drafting.cost import StepCost
from baton.drafting.models.draft_kv import DraftKv
from baton.protocol.params.sampling import Sampling, Stopping

D = TypeVar("D")
BLOCK, BLOCKS, SLOTS, LONGEST, VOCAB = 4, 60, 4, 96, 50
GREEDY = Sampling(0, 0.0)


def next_of(text: list[int]) -> int:
    return (31 * sum(text[-3:]) + 7 * len(text)) % VOCAB


@dataclass
class Request:
    prompt: list[int]
    most: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    slot: int = -1

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens


class Engine:
    """Slots, blocks with shared prefixes, preemptions, and steps that take some of the drafts.

    `model`: what the drafter runs; its clock is `now`, and `texts` is what may stand in its pool.
    """

    def __init__(self, drafter: Any, model: Any, seed: int) -> None:
        self.drafter, self.model = drafter, model
        self.chance = random.Random(seed)
        self.free = list(range(BLOCKS))
        self.chance.shuffle(self.free)
        self.index: dict[tuple[int, ...], int] = {}
        """Full prefix → its block, also after its requests are over."""
        self.users: dict[int, int] = {}
        self.on: dict[int, Request] = {}
        self.drafts = self.right = 0
        self.misses = 0.1

    def block(self) -> int:
        number = self.free.pop(self.chance.randrange(len(self.free)))
        self.index = {text: block for text, block in self.index.items() if block != number}
        self.users[number] = 1
        return number

    def admit(self, request: Request) -> None:
        request.slot = next(slot for slot in range(SLOTS) if slot not in self.on)
        text = request.text
        request.blocks, request.computed, request.drafts = [], 0, []
        for end in range(BLOCK, len(text), BLOCK):
            shared = self.index.get(tuple(text[:end]))
            if shared is None or self.chance.random() < self.misses:
                break
            self.users[shared] = self.users.get(shared, 0) + 1
            if shared in self.free:
                self.free.remove(shared)
            request.blocks.append(shared)
            request.computed = end
        self.on[request.slot] = request
        self.drafter.admit(
            request.slot, np.array(text, np.int32), len(request.prompt), GREEDY, Stopping(request.most)
        )

    def leave(self, request: Request) -> None:
        self.drafter.release(request.slot)
        del self.on[request.slot]
        for number in request.blocks:
            self.users[number] -= 1
            if not self.users[number]:
                self.free.append(number)

    def computed(self, rows: list[tuple[Request, int, bool]], slots: np.ndarray, tables: np.ndarray) -> None:
        """A step has computed so many tokens of each of these."""

    def stepped(self) -> None:
        """The step is over."""

    def step(self) -> None:
        decoding, prompts = [], []
        for request in self.on.values():
            (decoding if request.computed == len(request.text) - 1 and request.tokens else prompts).append(
                request
            )
        rows = []
        for request in decoding:
            room = request.most - len(request.tokens) - 1
            request.drafts = request.drafts[: self.chance.choice((room, room, min(room, 1)))]
            rows.append((request, 1 + len(request.drafts), True))
        rows.sort(key=lambda row: row[1])
        for request in prompts:
            missing = len(request.text) - request.computed
            count = min(missing, self.chance.choice((3, 20, 50)))
            rows.append((request, count, count == missing))
        for request, count, _ in rows:
            while len(request.blocks) * BLOCK < request.computed + count:
                request.blocks.append(self.block())
        width = max(len(request.blocks) for request, *_ in rows)
        tables = np.array(
            [[*r.blocks, *self.chance.choices(range(BLOCKS), k=width - len(r.blocks))] for r, *_ in rows],
            np.int32,
        )
        slots = np.array([request.slot for request, *_ in rows], np.int32)
        ends = np.array([request.computed + count for request, count, _ in rows], np.int32)
        self.computed(rows, slots, tables)
        samples = [row for row in rows if row[2]]
        runs, came = [], []
        for request, count, _ in samples:
            text, run = request.text, []
            for draft in [*(request.drafts if request in decoding else []), None]:
                run.append(next_of(text + run))
                if run[-1] != draft:
                    break
            self.drafts, self.right = self.drafts + max(count - 1, 0) * (request in decoding), self.right
            self.right += len(run) - 1
            runs.append(run)
            came += run
        if not samples:
            for request, count, _ in rows:
                request.computed += count
            self.stepped()
            return
        self.model.now += 0.1
        if not prompts:
            self.drafter.took(sum(count for _, count, _ in rows), 0.1)
        self.drafter.see(slots, ends, tables, len(decoding))
        for request, count, sampled in rows:
            if not sampled:
                request.computed += count
        for (request, *_), run in zip(samples, runs, strict=True):
            request.computed = len(request.text) + len(run) - 1
            request.tokens += run
            request.drafts = []
            for end in range(BLOCK, request.computed + 1, BLOCK):
                if len(request.blocks) * BLOCK >= end:
                    self.index.setdefault(tuple(request.text[:end]), request.blocks[end // BLOCK - 1])
        self.model.texts = [request.text for request in self.on.values()]
        sampled_slots = np.array([request.slot for request, *_ in samples], np.int32)
        self.drafter.after(
            sampled_slots,
            np.array([len(run) for run in runs], np.int32),
            np.array(came, np.int32),
        )
        proposed = self.drafter.propose(sampled_slots)
        for slot, found in proposed.items():
            self.on[slot].drafts = found.tolist()
        self.stepped()
        for request in [request for request, *_ in samples]:
            if len(request.tokens) >= request.most:
                self.leave(request)

    def run(self, request: Request) -> int:
        """Until nothing is left to do.  Returns how many tokens its answer had at its first drafts."""
        self.admit(request)
        first = -1
        while self.on:
            self.step()
            if request.drafts and first < 0:
                first = len(request.tokens)
        return first

    def crowd(self, chance: random.Random) -> None:
        """Twenty requests, with prefixes that some share, come and are preempted: each gets its answer."""
        common = [chance.randrange(VOCAB) for _ in range(30)]
        waiting = []
        for _ in range(20):
            prompt = common[: chance.randrange(31)] + [
                chance.randrange(VOCAB) for _ in range(chance.randrange(9))
            ]
            waiting.append(Request(prompt or [1], chance.randrange(1, 40)))
        answers = list(waiting)
        while waiting or self.on:
            while waiting and len(self.on) < chance.choice((1, SLOTS)):
                self.admit(waiting.pop(0))
            self.step()
            if self.on and chance.random() < 0.05:
                request = chance.choice(list(self.on.values()))
                self.leave(request)
                waiting.append(request)
        for request in answers:
            text = list(request.prompt)
            for _ in range(request.most):
                text.append(next_of(text))
            assert request.text == text

    def repeat(self, count: int) -> None:
        """The same short prompt again and again; counts its drafts."""
        self.drafts = self.right = 0
        for _ in range(count):
            self.run(Request([5, 6, 7], 80))


def around(kind: Callable[..., D], model: Any, most: int, by_cost: bool) -> D:
    """A drafter of this kind that runs `model`."""
    kv = DraftKv(num_slots=SLOTS, num_blocks=BLOCKS, block_size=BLOCK, max_model_len=LONGEST, most=most)
    cost = StepCost(SLOTS * (1 + most)) if by_cost else None
    return kind(model, kv, num_slots=SLOTS, most=most, cost=cost, clock=lambda: model.now)
