"""What is learnt of steps from their seconds."""

import random

import pytest

from baton.engine.workers.step_cost import StepCosts
from baton.protocol.messages.commands import Pace

TRUE = Pace(
    base=0.003, token=0.0006, pair=1e-7, row=0.001, read=1e-6, alone=0.010, alone_row=0.0006, shortest=0.0106
)


def feed(costs, seed=1, steps=400, noise=0.0, slow=0.0, pace=TRUE, chunks=(16, 64, 128, 300, 512)):
    """Steps as a server has them; a part of them takes 10 times as long.  Returns how often it was told."""
    draw = random.Random(seed)
    told = 0
    for _ in range(steps):
        rows = draw.choice((0, 1, 4, 12, 16))
        context = rows * draw.randint(50, 2000)
        tokens = draw.choice((0, *chunks)) if rows else draw.choice(chunks)
        start = draw.choice((0, 0, 512, 1500))
        seconds = (
            pace.with_prompts(tokens, start, rows, context) if tokens else pace.decoding(rows, context)
        ) * draw.uniform(1 - noise, 1 + noise)
        if draw.random() < slow:
            seconds *= 10
        costs.add(tokens, tokens * (start + tokens // 2), rows, context, seconds)
        told += costs.take() is not None
    return told


def close(found, wanted, tolerance):
    for tokens, start, rows, context in ((64, 0, 0, 0), (128, 0, 8, 2000), (512, 512, 4, 800)):
        one, two = (pace.with_prompts(tokens, start, rows, context) for pace in (found, wanted))
        assert one == pytest.approx(two, rel=tolerance)
    for rows, context in ((1, 100), (16, 8000)):
        assert found.decoding(rows, context) == pytest.approx(wanted.decoding(rows, context), rel=tolerance)
    assert found.shortest == pytest.approx(wanted.shortest, rel=2 * tolerance)


def test_what_a_step_takes_is_learnt():
    costs = StepCosts()
    feed(costs)
    close(costs.pace, TRUE, 0.05)


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_were_slow_for_another_reason_count_little(seed):
    costs = StepCosts()
    feed(costs, seed, noise=0.2, slow=0.05)
    close(costs.pace, TRUE, 0.5)


def test_a_first_step_that_took_long_is_forgotten():
    costs = StepCosts()
    costs.add(128, 128 * 64, 0, 0, 5.0)
    costs.add(0, 0, 4, 800, 3.0)
    feed(costs)
    close(costs.pace, TRUE, 0.1)


def test_a_machine_that_becomes_slower_is_noticed():
    slower = Pace(*(2 * getattr(TRUE, name) for name in TRUE.__struct_fields__))
    costs = StepCosts()
    feed(costs)
    feed(costs, steps=2000, pace=slower)
    close(costs.pace, slower, 0.1)


def test_the_shortest_step_is_one_that_comes_still():
    """When only large batches come, on a machine that has become slower, the steps of before say nothing."""
    costs = StepCosts()
    feed(costs)
    for _ in range(100):
        costs.add(0, 0, 16, 3200, 0.08)
        costs.add(128, 128 * 64, 16, 3200, 0.4)
        costs.take()
    assert costs.pace.shortest == pytest.approx(0.08, rel=0.2)


def test_prompts_of_one_size_are_enough():
    """The base cannot be told from the tokens: a guess divides them, and the sum is right."""
    costs = StepCosts()
    feed(costs, chunks=(128,))
    found = costs.pace.with_prompts(128, 0, 4, 2000)
    assert found == pytest.approx(TRUE.with_prompts(128, 0, 4, 2000), rel=0.1)
    assert 0.0 <= costs.pace.base < costs.pace.decoding(1, 0)


def test_nothing_is_said_before_both_kinds_of_steps_were_seen():
    costs = StepCosts()
    costs.add(128, 128 * 64, 0, 0, 0.1)
    assert costs.take() is None
    assert costs.snapshot() == {}
    costs.add(0, 0, 1, 128, 0.01)
    assert costs.take() is not None
    assert set(costs.snapshot()) == set(Pace.__struct_fields__)


def test_the_worker_is_told_only_what_differs():
    costs = StepCosts()
    assert feed(costs) < 12
    assert feed(costs, seed=2, noise=0.02) <= 3


def test_short_steps_do_not_pay_for_many_fits(monkeypatch):
    """One in a second of steps, besides those of the beginning."""
    costs, fits = StepCosts(), []
    fit = costs._fit
    monkeypatch.setattr(costs, "_fit", lambda: fits.append(1) or fit())
    for _ in range(4000):
        costs.add(64, 64 * 32, 4, 400, 0.0005)
        costs.add(0, 0, 4, 400, 0.0005)
        costs.take()
    assert len(fits) <= 4 + 13


def test_steps_without_a_measured_time_teach_nothing():
    costs = StepCosts()
    for _ in range(50):
        costs.add(128, 128 * 64, 0, 0, 0.0)
        costs.add(0, 0, 1, 128, 0.0)
    assert costs.take() is None
