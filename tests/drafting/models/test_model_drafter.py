"""The drafter with a draft model, around one that sees what lies in its pool.

The model of these tests keeps tokens where a real one keeps KV, reads each row's whole text from there by its
block table, and compares it with the texts of the requests: a block of another text, of an earlier request or
of a wrong draft would be seen at once.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.drafting.models.draft_kv import blocks_ahead
from baton.drafting.models.model_drafter import ModelDrafter
from baton.protocol.params.sampling import Stopping
from tests.drafting.models.engine import (
    BLOCK,
    BLOCKS,
    GREEDY,
    LONGEST,
    SLOTS,
    VOCAB,
    Engine,
    Request,
    around,
    next_of,
)


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


def make(most: int, by_cost: bool = False, **options) -> tuple[ModelDrafter, TokenModel]:
    model = TokenModel(most, **options)
    return around(ModelDrafter, model, most, by_cost), model


@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_what_the_model_reads_is_the_text(most: int, by_cost: bool) -> None:
    total = np.zeros(2, int)
    for seed in range(12):
        chance = random.Random(seed)
        drafter, model = make(most, by_cost, right=chance.choice((1.0, 0.8, 0.3)))
        engine = Engine(drafter, model, seed)
        engine.crowd(chance)
        total += engine.drafts, engine.right
    assert 0 < total[1] < total[0]


def test_blocks_that_another_request_has_computed_are_not_computed_again() -> None:
    drafter, model = make(3)
    engine = Engine(drafter, model, 1)
    engine.misses = 0.0
    prompt = list(range(30))
    for expected in (True, False):
        model.calls.clear()
        engine.run(Request(prompt, 12))
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
    engine.repeat(30)
    model.calls.clear()
    before = model.now
    engine.repeat(10)
    took = sum(0.001 * tokens for tokens, _ in model.calls)
    if drafts:
        assert engine.right > 500
    else:
        assert took < 0.02 * (model.now - before)
        assert engine.drafts < 80  # (of 800 tokens)
