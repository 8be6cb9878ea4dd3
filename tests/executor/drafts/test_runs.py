"""Which drafts are right: the positions of a step by hand, and the simulated executor's answers with them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.executor.base import StepBatch
from baton.executor.drafts.runs import NOTHING, Places
from baton.executor.simulated.executor import SimulatedExecutor, simulated_tokens
from baton.protocol.config import Speculation
from baton.protocol.params.sampling import Constraint, Sampling, Stopping
from tests.executor.serving import Request, Serving, ints

VOCAB, BLOCK = 37, 4


def places():
    """Three rows: one without drafts, one with two, one piece of a prompt that gives a token."""
    batch = StepBatch(
        1,
        ints(4, 2, 7),
        ints(10, 20, 0),
        ints(1, 3, 5),
        ints(50, 60, 61, 62, 1, 2, 3, 4, 5),
        np.ones(3, bool),
        np.zeros((3, 9), np.int32),
        1,
        drafts=ints(0, 2, 0),
    )
    return Places(batch, np.arange(3))


def test_the_positions_that_are_sampled():
    found = places()
    assert found.tokens.tolist() == [0, 1, 2, 3, 8]
    assert found.positions.tolist() == [11, 21, 22, 23, 5]
    assert found.expected == [NOTHING, 61, 62, NOTHING, NOTHING]


@pytest.mark.parametrize(
    ("sampled", "waves", "runs"),
    [
        ([9, 61, 62, 8, 7], [[0, 1, 4], [2], [3]], [1, 3, 1]),
        ([9, 61, 60, 8, 7], [[0, 1, 4], [2]], [1, 2, 1]),
        ([9, 60, 62, 8, 7], [[0, 1, 4]], [1, 1, 1]),
        ([9, -1, 62, 8, 7], [[0, 1, 4]], [1, 1, 1]),
    ],
)
def test_waves_go_on_where_the_draft_was_right(sampled, waves, runs):
    found, seen = places(), []
    kept = np.full(5, NOTHING, np.int32)
    for wave in found.waves():
        seen.append(wave.places)
        wave.tokens = ints(*sampled)[wave.places]
        kept[wave.places] = wave.tokens
    assert seen == waves
    assert found.runs(kept).tolist() == runs
    assert found.runs_alone(ints(*sampled)) == kept.tolist()


def wishes(chance: random.Random) -> list[Request]:
    made = []
    for _ in range(chance.randrange(1, 9)):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 20))]
        stops = tuple(chance.sample(range(VOCAB), chance.choice((0, 0, 1, 3, 10))))
        most = chance.randrange(1, 25)
        sampling = Sampling(
            chance.randrange(1 << 30),
            chance.choice((0.0, 1.0)),
            logprobs=chance.choice((None, None, 2)),
            constraint=Constraint(f"residues {chance.choice((1, 2))}, late {chance.choice((0, 2))}", 0)
            if chance.random() < 0.4
            else None,
        )
        made.append(Request(prompt, sampling, Stopping(most, min(chance.choice((0, 3)), most), stops)))
    return made


def answers(seed: int, speculation: Speculation | None) -> tuple[list[tuple], Serving]:
    chance = random.Random(seed)
    requests = wishes(chance)
    slots = chance.choice((1, 3, 8))
    executor = SimulatedExecutor(
        num_blocks=100, block_size=BLOCK, max_num_seqs=slots, vocab_size=VOCAB, speculation=speculation
    )
    budget = chance.choice((8, 12, 40))
    serving = Serving(executor, slots=slots, budget=budget, longest=48, seed=seed)
    return serving.run(requests), serving


def test_the_simulated_executor_answers_the_same_with_drafts():
    drafts = right = 0
    for seed in range(120):
        chance = random.Random(seed)
        speculation = Speculation(
            method="planted",
            num_speculative_tokens=chance.choice((1, 3, 8)),
            planted_right=chance.choice((0.0, 0.5, 0.9, 1.0)),
        )
        plain, _ = answers(seed, None)
        drafted, serving = answers(seed, speculation)
        assert drafted == plain, seed
        drafts, right = drafts + serving.drafts, right + serving.right
    assert 0.3 * drafts < right < 0.9 * drafts


def test_fewer_steps_with_drafts_that_are_right():
    executor = SimulatedExecutor(
        num_blocks=100,
        block_size=BLOCK,
        max_num_seqs=1,
        vocab_size=VOCAB,
        speculation=Speculation(method="planted", num_speculative_tokens=4),
    )
    serving = Serving(executor, slots=1, budget=40, longest=60, seed=1, preempts=0.0)
    request = Request([1, 2, 3], Sampling(0, 0.0), Stopping(40))
    serving.run([request])
    assert request.tokens == simulated_tokens([1, 2, 3], 40, VOCAB)
    assert serving.steps < 25
