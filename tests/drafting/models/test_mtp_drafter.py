"""The drafter with a layer of the model itself, around one that sees what lies in its pool.

The layer of these tests keeps, where a real one keeps KV, the hidden state and the token that it was computed
of; a hidden state is the text up to its position.  So it is seen at once if a row reads what is of another
text, of a wrong draft, or of no hidden state of the model.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.drafting.models.draft_kv import blocks_ahead
from baton.drafting.models.mtp_drafter import MtpDrafter
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


class States:
    """Of positions, the texts up to them; None where a layer guessed on.  Valid until `end`, unless kept."""

    def __init__(self, texts: list[tuple[int, ...]], owner: MtpLayer | None, kept: bool) -> None:
        self._texts, self._owner, self._kept = texts, owner, kept

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, which: slice | list[int]) -> States:
        texts = self._texts[which] if isinstance(which, slice) else [self._texts[row] for row in which]
        return States(texts, self._owner, self._kept)

    def texts(self) -> list[tuple[int, ...]]:
        assert self._kept or (self._owner is not None and self._owner.current is self._owner.step)
        return self._texts


class MtpLayer:
    def __init__(self, most: int, right: float = 1.0) -> None:
        self.max_len = LONGEST
        self.pool: list[list] = [[None] * BLOCK for _ in range(BLOCKS + blocks_ahead(SLOTS, most, BLOCK))]
        self.right = right
        self.chance = random.Random(3)
        self.calls: list[tuple[int, int]] = []
        """Positions and guesses of each."""
        self.bases: set[int] = set()
        self.borders = 0
        """Positions at a block's end that were read with another next token, as `draft_kv.py` says."""
        self.now = 0.0
        self.current = self.step = object()

    def keep(self, states: States) -> States:
        return States(states.texts(), self, True)

    def compute(self, tokens, states, starts, counts, tables, wanted):
        assert tokens.dtype == starts.dtype == counts.dtype == tables.dtype == np.int32
        assert counts.min() > 0
        assert (np.diff((counts > 1).astype(int)) >= 0).all()
        inputs = [text for part in states for text in part.texts()]
        assert len(inputs) == len(tokens) == counts.sum()
        self.calls.append((len(tokens), len(wanted)))
        self.now += 0.001 * len(tokens)
        guesses, texts, first = [], [], 0
        for start, count, table in zip(starts.tolist(), counts.tolist(), tables, strict=True):
            for place in range(count):
                position = start + place
                pair = inputs[first + place], int(tokens[first + place])
                self.pool[table[position // BLOCK]][position % BLOCK] = pair
            last, token = inputs[first + count - 1], int(tokens[first + count - 1])
            text = (*last, token)
            base = len(last) - (start + count)
            assert base >= 0
            assert base % BLOCK == 0
            self.bases.add(base)
            for position in range(start + count):
                state, after = self.pool[table[position // BLOCK]][position % BLOCK]
                assert state == text[: base + position + 1], (text, base, position, state)
                if after != text[base + position + 1]:
                    assert position % BLOCK == BLOCK - 1
                    self.borders += 1
            likely = next_of(list(text))
            guesses.append(likely if self.chance.random() < self.right else (likely + 1) % VOCAB)
            texts.append(text)
            first += count
        found = np.array([guesses[row] for row in wanted.tolist()], np.int32)
        return found, States([texts[row] for row in wanted.tolist()], self, True)


class MtpEngine(Engine):
    """Tells the drafter of each step as an executor does.  `away`: the chance that a prefix is there which
    came from elsewhere, so that the layer has not computed it."""

    def __init__(self, drafter: MtpDrafter, layer: MtpLayer, seed: int, away: float = 0.0) -> None:
        super().__init__(drafter, layer, seed)
        self.away = away

    def admit(self, request: Request) -> None:
        super().admit(request)
        text = request.text
        if self.chance.random() < self.away and request.computed == 0 and len(text) > 1:
            request.computed = self.chance.randrange(1, len(text))
            request.blocks = [self.block() for _ in range(-(-request.computed // BLOCK))]

    def computed(self, rows, slots, tables) -> None:
        layer = self.model
        layer.current = layer.step = object()
        texts = []
        for request, count, _ in rows:
            text = request.text + request.drafts
            texts += [tuple(text[: end + 1]) for end in range(request.computed, request.computed + count)]
        starts = np.array([request.computed for request, *_ in rows], np.int32)
        counts = np.array([count for _, count, _ in rows], np.int32)
        self.drafter.read(slots, starts, counts, tables, States(texts, layer, False))

    def stepped(self) -> None:
        self.drafter.done()
        self.model.current = object()


def make(most: int, by_cost: bool = False, right: float = 1.0) -> tuple[MtpDrafter, MtpLayer]:
    layer = MtpLayer(most, right)
    return around(MtpDrafter, layer, most, by_cost), layer


@pytest.mark.parametrize("away", [0.0, 0.4])
@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_what_the_layer_reads_is_of_the_text(most: int, by_cost: bool, away: float) -> None:
    total, bases = np.zeros(2, int), set()
    for seed in range(10):
        chance = random.Random(seed)
        drafter, layer = make(most, by_cost, chance.choice((1.0, 0.8, 0.3)))
        engine = MtpEngine(drafter, layer, seed, away)
        engine.crowd(chance)
        total += engine.drafts, engine.right
        bases |= layer.bases
    assert 0 < total[1] < total[0]
    assert 0 in bases
    assert max(bases) > 0 or not away


def test_a_request_has_drafts_from_its_first_token_on() -> None:
    drafter, layer = make(3)
    engine = MtpEngine(drafter, layer, 1)
    assert engine.run(Request(list(range(30)), 20)) == 1
    assert engine.right > 10
    assert layer.bases == {0}


def test_a_prefix_that_is_found_is_read_where_it_was_computed() -> None:
    drafter, layer = make(3)
    engine = MtpEngine(drafter, layer, 1)
    engine.misses = 0.0
    prompt = list(range(30))
    engine.run(Request(prompt, 12))
    layer.calls.clear()
    assert engine.run(Request(prompt, 12)) == 1
    assert layer.bases == {0}
    assert sum(positions for positions, _ in layer.calls) < 30


def test_what_came_from_elsewhere_is_left_out() -> None:
    """The layer sees the text from the next edge of a block on, where its drafts begin."""
    drafter, layer = make(2)
    engine = MtpEngine(drafter, layer, 1, away=1.0)
    engine.chance.randrange = lambda *span: span[-1] - 1  # type: ignore[method-assign]
    request = Request(list(range(3 * BLOCK + 1)), 24)
    engine.run(request)
    assert layer.bases == {3 * BLOCK}
    assert engine.right > 10


def test_requests_of_another_salt_find_nothing() -> None:
    drafter, layer = make(3)
    tables = np.arange(10, dtype=np.int32)[None]
    text = list(range(4 * BLOCK + 1))
    slots, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    bases = []
    for number, salt in enumerate((b"a", b"a", b"b")):
        drafter.admit(0, np.array(text, np.int32), len(text), GREEDY, Stopping(9), salt)
        start = 4 * BLOCK if number else 0
        layer.bases.clear()
        states = States([tuple(text[: end + 1]) for end in range(start, len(text))], layer, False)
        layer.current = layer.step
        count = np.array([len(text) - start], np.int32)
        drafter.read(slots, np.array([start], np.int32), count, tables, states)
        drafter.after(slots, one, np.array([next_of(text)], np.int32))
        assert drafter.propose(slots)[0][0] == next_of([*text, next_of(text)])
        drafter.done()
        drafter.release(0)
        bases.append(set(layer.bases))
    assert bases == [{0}, {0}, {4 * BLOCK}]
    drafter.weights_changed()
    drafter.admit(0, np.array(text, np.int32), len(text), GREEDY, Stopping(9), b"b")
    layer.bases.clear()
    drafter.read(slots, np.array([4 * BLOCK], np.int32), one, tables, States([tuple(text)], layer, False))
    drafter.after(slots, one, np.array([next_of(text)], np.int32))
    drafter.propose(slots)
    assert layer.bases == {4 * BLOCK}


def test_what_ends_with_its_first_token_is_not_looked_at() -> None:
    """As on an instance that hands requests over."""
    drafter, layer = make(4)
    engine = MtpEngine(drafter, layer, 1)
    engine.run(Request(list(range(20)), 1))
    assert layer.calls == []


@pytest.mark.parametrize(("right", "drafts"), [(1.0, True), (0.0, False)])
def test_nothing_is_drafted_where_it_does_not_pay(right: float, drafts: bool) -> None:
    drafter, layer = make(4, by_cost=True, right=right)
    engine = MtpEngine(drafter, layer, 1)
    engine.repeat(30)
    layer.calls.clear()
    engine.repeat(10)
    if drafts:
        assert engine.right > 500
    else:
        assert engine.drafts < 80  # (of 800 tokens)
        # What the layer must see in any case it sees many tokens at a time.
        assert len(layer.calls) < 160
