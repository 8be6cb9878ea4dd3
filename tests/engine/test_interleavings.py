"""The heart of the engine's tests: any interleaving of engine, worker and clients gives the right answers.

Hypothesis chooses the pool, the requests and, step by step, who does something next and how much of what
waits in the two queues it takes.  The world checks the books after every event of the engine; at the end
every request must have exactly one answer, equal to the oracle's, and no block may be held.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from tests.engine.world import World

GATEWAYS = (b"a", b"b")

requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            # A few long common beginnings, so that prefixes are shared, and odd tails.
            lambda family, length, tail: ([family] * length)[: max(length, 1)] + tail,
            st.integers(0, 2),
            st.integers(1, 20),
            st.lists(st.integers(0, 49), max_size=4),
        ),
        "max_tokens": st.one_of(st.integers(1, 24), st.integers(12, 24)),
        "priority": st.sampled_from((0, 0, 0, 1, -1)),
        "salt": st.sampled_from(("", "", "other")),
        "stop": st.sampled_from(((), (), (3, 17, 40))),
        "gateway": st.sampled_from(GATEWAYS),
        "logprobs": st.sampled_from((None, None, None, 1)),
        "prompt_logprobs": st.sampled_from((None, None, None, None, 0)),
    }
)
pools = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(12, 20),
        "block_size": st.sampled_from((4, 4, 8)),
        "max_num_seqs": st.sampled_from((1, 2, 4, 6, 6)),
        "max_num_batched_tokens": st.integers(4, 24),
        "enable_prefix_caching": st.sampled_from((True, True, False)),
        "max_waiting": st.sampled_from((100, 100, 3)),
    }
)
# (who, how much): weights by repetition.
moves = st.tuples(
    st.sampled_from(
        ("submit",) * 4 + ("apply",) * 4 + ("step",) * 9 + ("read",) * 4 + ("cancel", "cancel", "odd")
    ),
    st.integers(0, 1_000_000),
)


def play(pool: dict, asked: list[dict], script: list[tuple[str, int]], *, rash: bool, at_once: int) -> World:
    """Submits `at_once` requests, runs the script, then lets everybody finish."""
    world = World(**pool, admission_headroom=0 if rash else None)
    for gateway in GATEWAYS:
        world.hello(gateway)
    todo = list(reversed(asked))
    script = [("submit", 0)] * at_once + script
    for who, number in script:
        if who == "submit" and todo:
            one = todo.pop()
            if one["gateway"] not in world.gone:
                world.submit(flush=bool(number % 3), **one)
        elif who == "apply":
            world.apply(1 + number % 3)
        elif who == "step":
            for _ in range(1 + number % 4):
                world.step()
        elif who == "read":
            world.read_reports(1 + number % 6)
        elif who == "cancel" and world.clients:
            keys = list(world.clients)
            gateway, _ = key = keys[number % len(keys)]
            if gateway not in world.gone:
                world.cancel(world.clients[key], gateway)
        elif who == "odd":
            odd(world, number)
        world.now += 0.01
    for one in reversed(todo):
        if one["gateway"] not in world.gone:
            world.submit(**one)
    world.query("resume", b"control")
    world.drain()
    world.check_end()
    return world


def odd(world: World, number: int) -> None:
    """Rare events."""
    if number % 8 == 0:
        world.query("pause", b"control")
    elif number % 8 < 3:
        world.query("resume", b"control")
    elif number % 8 < 5:
        world.query("reset_prefix_cache", b"control")
    elif number % 8 == 5 and number % 3 == 0:
        world.lose(b"b")
    else:
        ledger = world.query("ledger", b"control")
        assert sum(ledger["held_by"].values()) >= ledger["held"]


@settings(max_examples=250, deadline=None)
@given(
    pool=pools,
    asked=st.lists(requests, min_size=3, max_size=12),
    script=st.lists(moves, min_size=20, max_size=120),
    rash=st.sampled_from((True, True, False)),
    at_once=st.integers(0, 8),
)
def test_any_interleaving_gives_every_request_its_one_right_answer(pool, asked, script, rash, at_once):
    world = play(pool, asked, script, rash=rash, at_once=at_once)
    target(float(world.core.counters.preemptions))


def random_script(seed: int, length: int) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    kinds = ("submit",) * 3 + ("apply",) * 3 + ("step",) * 6 + ("read",) * 3
    return [(rng.choice(kinds), rng.randrange(1_000_000)) for _ in range(length)]


def crowd(seed: int, count: int) -> list[dict]:
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(3)] * rng.randrange(1, 12) + [rng.randrange(50)],
            "max_tokens": rng.randrange(12, 30),
            "priority": rng.choice((0, 0, 1)),
            "gateway": rng.choice(GATEWAYS),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_in_a_tiny_pool_is_preempted_often_and_answered_rightly(seed):
    pool = {"num_blocks": 14, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    preemptions = 0
    for turn in range(4):
        preemptions += play_greedily(pool, crowd(10 * seed + turn, 24), random_script(seed + turn, 200))
    assert preemptions >= 20


def play_greedily(pool: dict, asked: list[dict], script: list[tuple[str, int]]) -> int:
    """As `play`, with no headroom, and with nothing but work."""
    world = World(**pool, admission_headroom=0)
    for gateway in GATEWAYS:
        world.hello(gateway)
    todo = list(reversed(asked))
    for who, number in script:
        if who == "submit" and todo:
            world.submit(**todo.pop())
        elif who == "apply":
            world.apply(1 + number % 3)
        elif who == "step":
            world.step()
        else:
            world.read_reports(1 + number % 3)
    for one in reversed(todo):
        world.submit(**one)
    world.drain()
    world.check_end()
    assert all(client.finished.reason == "length" for client in world.clients.values())
    assert sum(client.finished.num_preemptions for client in world.clients.values()) == (
        world.core.counters.preemptions
    )
    return world.core.counters.preemptions
