"""The drafter with a draft model, around one that sees what lies in its pool.

The model of these tests keeps tokens where a real one keeps KV, reads each row's whole text from there by its
block table, and compares it with the texts of the requests: a block of another text, of an earlier request or
of a wrong draft would be seen at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from baton.drafting.cost import StepCost
from baton.drafting.models.draft_kv import DraftKv, blocks_ahead
from baton.drafting.models.model_drafter import ModelDrafter
from baton.protocol.sampling import Sampling, Stopping

BLOCK, BLOCKS, SLOTS, LONGEST, VOCAB = 4, 60, 4, 96, 50
GREEDY = Sampling(0, 0.0)


def next_of(text: list[int]) -> int:
    return (31 * sum(text[-3:]) + 7 * len(text)) % VOCAB


class TokenModel:
    """Its KV of a position is the token."""

    def __init__(self, most: int, max_len: int = LONGEST, right: float = 1.0) -> None:
        self.max_len = max_len
        self.pool = np.full((BLOCKS + blocks_ahead(SLOTS, most, BLOCK), BLOCK), -1)
        self.texts: list[list[int]] = []
        """What may stand in the pool: each row must be one of them, and drafts behind it."""
        self.right = right
        self.chance = random.Random(3)
        self.calls: list[tuple[int, bool]] = []
        self.now = 0.0

    def compute(self, tokens, starts, counts, tables, wanted):
        assert tokens.dtype == starts.dtype == counts.dtype == tables.dtype == np.int32
        assert counts.min() > 0
        assert (np.diff((counts > 1).astype(int)) >= 0).all()
        self.calls.append((len(tokens), wanted))
        self.now += 0.001 * len(tokens)
        found, first = [], 0
        for start, count, table in zip(starts.tolist(), counts.tolist(), tables, strict=True):
            for position in range(start, start + count):
                self.pool[table[position // BLOCK], position % BLOCK] = tokens[first + position - start]
            first += count
            end = start + count
            assert end <= self.max_len
            row = [int(self.pool[table[p // BLOCK], p % BLOCK]) for p in range(end)]
            assert any(row[: len(text)] == text[:end] for text in self.texts), (row, self.texts)
            likely = next_of(row)
            found.append(likely if self.chance.random() < self.right else (likely + 1) % VOCAB)
        return np.array(found if wanted else [], np.int32)


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
    """Slots, blocks with shared prefixes, preemptions, and steps that take some of the drafts."""

    def __init__(self, drafter: ModelDrafter, model: TokenModel, seed: int) -> None:
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


def make(most: int, by_cost: bool = False, **options) -> tuple[ModelDrafter, TokenModel]:
    model = TokenModel(most, **options)
    kv = DraftKv(num_slots=SLOTS, num_blocks=BLOCKS, block_size=BLOCK, max_model_len=LONGEST, most=most)
    cost = StepCost(SLOTS * (1 + most)) if by_cost else None
    drafter = ModelDrafter(model, kv, num_slots=SLOTS, most=most, cost=cost, clock=lambda: model.now)
    return drafter, model


@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_what_the_model_reads_is_the_text(most: int, by_cost: bool) -> None:
    total = np.zeros(2, int)
    for seed in range(12):
        chance = random.Random(seed)
        drafter, model = make(most, by_cost, right=chance.choice((1.0, 0.8, 0.3)))
        engine = Engine(drafter, model, seed)
        common = [chance.randrange(VOCAB) for _ in range(30)]
        waiting = []
        for _ in range(20):
            prompt = common[: chance.randrange(31)] + [
                chance.randrange(VOCAB) for _ in range(chance.randrange(9))
            ]
            waiting.append(Request(prompt or [1], chance.randrange(1, 40)))
        answers = list(waiting)
        while waiting or engine.on:
            while waiting and len(engine.on) < chance.choice((1, SLOTS)):
                engine.admit(waiting.pop(0))
            engine.step()
            if engine.on and chance.random() < 0.05:
                request = chance.choice(list(engine.on.values()))
                engine.leave(request)
                waiting.append(request)
        for request in answers:
            text = list(request.prompt)
            for _ in range(request.most):
                text.append(next_of(text))
            assert request.text == text
        total += engine.drafts, engine.right
    assert 0 < total[1] < total[0]


def test_blocks_that_another_request_has_computed_are_not_computed_again() -> None:
    drafter, model = make(3)
    engine = Engine(drafter, model, 1)
    engine.misses = 0.0
    prompt = list(range(30))
    for expected in (True, False):
        model.calls.clear()
        engine.admit(Request(prompt, 12))
        while engine.on:
            engine.step()
        caught_up = [tokens for tokens, wanted in model.calls if not wanted]
        assert bool(caught_up) == expected, model.calls


def test_requests_of_another_salt_find_nothing() -> None:
    """Even in the same blocks, with the same tokens."""
    drafter, model = make(3)
    tables = np.arange(10, dtype=np.int32)[None]
    text = np.arange(30, dtype=np.int32)
    model.texts = [[*range(30), 30, 31]]
    slots, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    computed = []
    for salt in (b"a", b"a", b"b", b"b"):
        model.calls.clear()
        drafter.admit(0, text, 30, GREEDY, Stopping(9), salt)
        for token in (30, 31):
            drafter.see(slots, np.array([token], np.int32), tables, int(token == 31))
            drafter.after(slots, one, np.array([token], np.int32))
            drafter.propose(slots)
        drafter.release(0)
        computed.append(sum(tokens for tokens, wanted in model.calls if not wanted))
    assert computed == [31, 0, 31, 0]


def test_a_prompt_is_caught_up_in_pieces_that_others_can_wait_for() -> None:
    drafter, model = make(2)
    engine = Engine(drafter, model, 1)
    engine.admit(Request([3], 60))
    for _ in range(8):
        engine.step()
    model.calls.clear()
    engine.admit(Request(list(range(45)) * 2, 6))
    while any(len(request.tokens) < 2 for request in engine.on.values()):
        engine.step()
    # A step takes 0.1 s and a token of the model 1 ms: a quarter of a step are 25 tokens.
    pieces = [tokens for tokens, wanted in model.calls if not wanted]
    assert max(pieces) <= 64  # (the first, as nothing has been measured)
    assert all(piece <= 25 for piece in pieces[1:])
    assert sum(pieces) <= 96


def test_the_step_that_ends_a_prompt_does_not_wait_for_the_model() -> None:
    drafter, model = make(4)
    engine = Engine(drafter, model, 1)
    request = Request(list(range(10)), 9)
    engine.admit(request)
    while not request.tokens:
        engine.step()
    assert model.calls == []
    engine.step()
    assert model.calls


def test_a_text_beyond_the_context_of_the_model_has_no_drafts() -> None:
    drafter, model = make(4, max_len=16)
    engine = Engine(drafter, model, 1)
    request = Request(list(range(10)), 30)
    engine.admit(request)
    while engine.on:
        engine.step()
        if len(request.text) > 16:
            assert not request.drafts
    assert engine.right > 0


@pytest.mark.parametrize(("right", "drafts"), [(1.0, True), (0.0, False)])
def test_nothing_is_drafted_where_it_does_not_pay(right: float, drafts: bool) -> None:
    """A draft model whose drafts are never right is left alone, but for a hundredth of the time."""
    drafter, model = make(4, by_cost=True, right=right)
    engine = Engine(drafter, model, 1)
    for _ in range(30):
        engine.admit(Request([5, 6, 7], 80))
        while engine.on:
            engine.step()
    model.calls.clear()
    before = model.now
    engine.drafts = engine.right = 0
    for _ in range(10):
        engine.admit(Request([5, 6, 7], 80))
        while engine.on:
            engine.step()
    took = sum(0.001 * tokens for tokens, _ in model.calls)
    if drafts:
        assert engine.right > 500
    else:
        assert took < 0.02 * (model.now - before)
        assert engine.drafts < 80  # (of 800 tokens)
