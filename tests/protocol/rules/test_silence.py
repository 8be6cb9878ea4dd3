"""Who judges, and who only was away: `protocol/rules/silence.py` with clocks that are made up."""

import random

import pytest

from baton.protocol.rules.silence import LOOKS, MAX_VOIDS, Silence


def silence_of(patience_s: float = 8.0) -> Silence:
    return Silence(patience_s, 100.0)


def test_silence_before_a_watcher_that_is_awake_is_due_in_time():
    silence = silence_of()
    times = []
    while not silence.look(silence.deadline):
        times.append(silence.deadline)
    assert silence.deadline == silence.until == 108.0
    assert len(times) == LOOKS - 1
    assert silence.look(silence.deadline), "asked again, it says the same"


def test_who_is_heard_of_starts_anew():
    silence = silence_of()
    for _ in range(LOOKS - 1):
        assert not silence.look(silence.deadline)
    silence.heard(107.5)
    assert (silence.since, silence.until) == (107.5, 115.5)
    assert not silence.look(silence.deadline)


def test_a_look_before_its_time_changes_nothing():
    silence = silence_of()
    for _ in range(100):
        assert not silence.look(104.9)
    assert (silence.deadline, silence.until) == (105.0, 108.0)


def test_a_watcher_that_was_away_judges_nobody():
    """It stood still over all looks at once, or until just before the last one."""
    silence = silence_of()
    assert not silence.look(180.0)
    assert silence.until == 184.0, "a fresh chance: half of the time"
    silence = silence_of()
    for _ in range(LOOKS - 1):
        assert not silence.look(silence.deadline)
    assert not silence.look(silence.deadline + 0.6)
    assert silence.until > silence.deadline, "one late look makes the others void too"


@pytest.mark.parametrize("seed", range(20))
def test_nobody_who_renews_in_time_is_lost_and_the_dead_are_found(seed: int):
    """A watcher stands still at random, now and then for longer than the time allowed.  When it goes on, its
    timer runs first, and the sockets are read right after it."""
    rng = random.Random(seed)
    now, silence = 100.0, silence_of(1.0)
    for _ in range(300):
        awake = rng.uniform(0.01, 0.3)
        end = now + awake
        while silence.deadline <= end:
            assert not silence.look(max(silence.deadline, now))
        now = end + rng.choice((0.0, 0.2, 0.9, 3.0)) * rng.random()
        if silence.deadline <= now:
            assert not silence.look(now)
        silence.heard(now)  # (a renewal each 0.3 s at the latest is in the socket by now)


def test_the_dead_are_found_by_a_watcher_that_stands_still_again_and_again():
    silence, looks = silence_of(1.0), 0
    while not silence.look(silence.deadline + 10.0):
        looks += 1
        assert looks <= (MAX_VOIDS + 1) * LOOKS
    silence, looks, rng = silence_of(1.0), 0, random.Random(3)
    while not silence.look(silence.deadline + rng.choice((0.0, 2.0))):
        looks += 1
        assert looks <= (MAX_VOIDS + 1) * LOOKS
