"""How many drafts a step has, against the best number that could have been fixed afterwards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.drafting.choice import choose
from baton.drafting.cost import StepCost, knots_up_to

MOST = 15
CURVES = {
    "reads weights": lambda tokens: 1 + 0.012 * (tokens - 1) + 0.02 * max(tokens - 16, 0),
    "eight bits": lambda tokens: 1 + 0.035 * (tokens - 1) + 0.02 * max(tokens - 16, 0),
    "experts": lambda tokens: 1 + 0.45 * (tokens - 1) if tokens < 8 else 4.15 + 0.12 * (tokens - 8),
    "arithmetic": lambda tokens: 0.2 + 0.8 * tokens,
    "free": lambda tokens: 1 + 0.001 * tokens,
    "four at once": lambda tokens: 1.0 if tokens <= 4 else 2.2 + 0.05 * tokens,
}


def speed(curve, rights, policy, steps, seed, skipped=80, busy=()):
    """Tokens per unit of time, of rows whose drafts are right with these chances; 2 % of steps are
    disturbed, and those that are `busy` take three times as long."""
    random = np.random.default_rng(seed)
    rows = len(rights)
    cost = StepCost(rows * (1 + MOST))
    chances = np.cumprod(np.repeat(np.array(rights, np.float32)[:, None], MOST, 1), 1)
    tokens, time = 0, 0.0
    for step in range(steps):
        counts = np.zeros(rows, int)
        if policy != "auto":
            counts += policy
        elif cost.knows(rows):
            found = choose(chances, rows, cost.table())
            counts = counts if found is None else np.array(found)
        size = rows + int(counts.sum())
        seconds = 0.005 * curve(size) * math.exp(random.normal(0, 0.05))
        seconds *= 2.5 if random.random() < 0.02 else 1
        cost.add(size, 3 * seconds if step in busy else seconds)
        if step >= skipped:
            time += seconds
            came = random.random((rows, MOST)) < np.array(rights)[:, None]
            runs = np.cumprod(came & (np.arange(MOST) < counts[:, None]), 1).sum(1) + 1
            tokens += int(runs.sum())
    return tokens / time


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(
    "rights",
    [[0.9], [0.6], [0.0], [0.9, 0.9, 0.1, 0.1], [0.9] * 16, [0.9] * 64, [0.0] * 64],
    ids=lambda rights: f"{len(rights)} rows {rights[0]}",
)
def test_it_comes_near_the_best_fixed_number(curve, rights):
    found = speed(CURVES[curve], rights, "auto", 700, 1)
    best = max(speed(CURVES[curve], rights, fixed, 500, 2) for fixed in (0, 1, 2, 3, 5, 7, 11, 15))
    assert found > 0.93 * best


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("begin", range(0, 30, 3))
def test_a_busy_moment_while_costs_are_learnt_is_got_over(curve, begin):
    """Then sizes look too dear that are not used again."""
    found = speed(CURVES[curve], [0.95], "auto", 600, 1, skipped=300, busy=range(begin, begin + 5))
    best = max(speed(CURVES[curve], [0.95], fixed, 500, 2) for fixed in (0, 1, 2, 3, 5, 7, 11, 15))
    assert found > 0.9 * best


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("rights", [[0.02], [0.02] * 64])
def test_where_nothing_is_right_next_to_nothing_is_lost(curve, rights):
    """From the first step on."""
    found = speed(CURVES[curve], rights, "auto", 1000, 1, skipped=0)
    assert found > 0.99 * speed(CURVES[curve], rights, 0, 1000, 1, skipped=0)


@given(
    rows=st.integers(1, 5),
    values=st.lists(st.floats(0.03, 1), min_size=15, max_size=15),
    more=st.integers(0, 3),
    prices=st.lists(st.floats(0.001, 1), min_size=24, max_size=24),
)
@settings(max_examples=200, deadline=None)
def test_no_other_number_of_drafts_is_better(rows, values, more, prices):
    """Looked at one by one."""
    chances = np.cumprod(np.array(values[: rows * 3], np.float32).reshape(rows, 3), 1)
    of_step = rows + more
    seconds = np.concatenate(([0.0], 1 + np.cumsum(prices)))
    found = choose(chances, of_step, seconds)
    likely = np.sort(chances[chances > 0.02])[::-1]
    rates = [
        (of_step + float(likely[:size].sum())) / seconds[of_step + size] for size in range(len(likely) + 1)
    ]
    if found is None:
        assert max(rates) <= 1.01 * rates[0] * (1 + 1e-5)
    else:
        assert rates[sum(found)] >= max(rates) * (1 - 1e-5)
        gained = sum(float(chances[row, :count].sum()) for row, count in enumerate(found))
        assert gained == pytest.approx(float(likely[: sum(found)].sum()), rel=1e-4)


def test_a_row_that_is_worth_more_has_more():
    chances = np.cumprod(np.array([[0.9] * 4, [0.2] * 4], np.float32), 1)
    found = choose(chances, 2, 1 + 0.1 * np.arange(20))
    assert found is not None
    assert found[0] > found[1]


def test_knots():
    assert knots_up_to(40) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    assert knots_up_to(1) == [1, 2]


def measured(curve, sizes, rounds=12, most=64):
    cost = StepCost(most)
    for _ in range(rounds):
        for size in sizes:
            cost.add(size, curve(size))
    return cost


def test_costs_are_learnt_and_monotone():
    cost = measured(lambda tokens: 0.004 + 0.001 * tokens, [1, 2, 3, 4, 6, 8])
    for size, seconds in cost.measured().items():
        assert seconds == pytest.approx(0.004 + 0.001 * size, rel=0.05)
    table = cost.table()
    assert (np.diff(table[1:13]) >= 0).all()
    assert np.isinf(table[13:]).all()  # the next knot may be tried, none beyond


def test_one_disturbed_step_changes_little():
    cost = measured(lambda tokens: 0.005, [1, 4])
    cost.add(4, 0.5)
    assert cost.measured()[4] < 0.0065
    assert measured(lambda tokens: 0.005, [1]).knows(1)


def test_the_first_measurement_of_a_size_may_be_a_disturbed_one():
    cost = StepCost(8)
    for seconds in (0.005, 0.05, 0.005):
        cost.add(1, 0.005)
        assert not cost.knows(2)
        cost.add(2, seconds)
    assert cost.measured()[2] == pytest.approx(0.005, rel=0.05)


def test_what_changes_all_steps_changes_the_scale():
    """A context that grows, or other processes: sizes that are not computed now follow."""
    cost = measured(lambda tokens: 0.005 + 0.001 * tokens, [1, 4], rounds=100)
    before = cost.measured()
    for _ in range(100):
        cost.add(4, 2 * (0.005 + 0.001 * 4))
    after = cost.measured()
    assert after[4] == pytest.approx(2 * before[4], rel=0.1)
    assert after[1] == pytest.approx(2 * before[1], rel=0.25)


def test_sizes_between_knots():
    cost = StepCost(64)
    for _ in range(10):
        cost.add(40, 0.02)
    assert cost.knows(40)
    assert not cost.knows(2)
    assert not cost.knows(100)
    cost.add(0, 1.0)
    cost.add(1000, 1.0)  # not reckoned with
    assert cost.steps == 10
