"""Numbers, room and silence of one end of a connection."""

from __future__ import annotations

import pytest

from baton.relay.lane import Lane, LaneBroken

WINDOW = 1000


def pair() -> tuple[Lane, Lane]:
    return Lane(8.0, WINDOW, 0.0), Lane(8.0, WINDOW, 0.0)


def test_what_is_on_the_way_is_bounded_until_it_is_in_the_rings_of_the_other_side() -> None:
    here, there = pair()
    number, ack = here.stamp(700, 0.0)
    there.take(number, ack, 700, 0.0)
    assert here.room == 300
    here.take(*there.stamp(0, 0.0), 0, 0.0)
    assert here.room == 300, "received, and not in a ring yet"
    there.done()
    here.take(*there.stamp(0, 0.0), 0, 0.0)
    assert here.room == WINDOW


def test_room_is_told_before_half_of_it_is_used_up_though_there_is_nothing_to_say() -> None:
    here, there = pair()
    there.take(*here.stamp(WINDOW // 2 - 1, 0.0), WINDOW // 2 - 1, 0.0)
    there.done()
    assert not there.due(0.0)
    there.take(*here.stamp(1, 0.0), 1, 0.0)
    assert not there.due(0.0), "not in the rings yet"
    there.done()
    assert there.due(0.0)
    here.take(*there.stamp(0, 0.0), 0, 0.0)
    assert not there.due(0.0)
    assert here.room == WINDOW


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_frame_out_of_order_breaks_it(number: int) -> None:
    here, _ = pair()
    here.take(1, 0, 0, 0.0)
    with pytest.raises(LaneBroken, match="the connection lost some"):
        here.take(number, 0, 0, 0.0)


@pytest.mark.parametrize("ack", [-1, 1])
def test_what_was_never_sent_cannot_be_done(ack: int) -> None:
    here, _ = pair()
    with pytest.raises(LaneBroken, match="is said to be done"):
        here.take(1, ack, 0, 0.0)


def test_each_side_says_that_it_lives_and_hears_it() -> None:
    here, there = pair()
    now, frames = 0.0, 0
    while now < 100.0:
        now = min(here.deadline, there.deadline)
        for one, other in ((here, there), (there, here)):
            if one.due(now):
                other.take(*one.stamp(0, now), 0, now)
                frames += 1
            assert not one.silent(now)
    assert frames <= 2 * 100 / (8.0 / 4) + 2, "four in its patience, and no more"


def test_who_says_nothing_is_given_up_after_the_patience_and_not_before() -> None:
    here, _ = pair()
    now = 0.0
    while not here.silent(now):
        if here.due(now):
            here.stamp(0, now)
        now = max(now, here.deadline)
    assert 8.0 <= now < 8.5
