"""Who fills an image, who waits, which images stay."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.launch.instances.image_keeper import Drop, Effect, Grant, Keeper


def grants(effects: Iterable[Effect]) -> list[tuple[int, bool]]:
    return [(effect.worker, effect.fill) for effect in effects if isinstance(effect, Grant)]


def drops(effects: Iterable[Effect]) -> list[str]:
    return [effect.key for effect in effects if isinstance(effect, Drop)]


def test_the_first_fills_and_the_others_wait_and_then_map() -> None:
    keeper = Keeper()
    assert keeper.ask(1, "k", "p") == [Grant(1, "k", fill=True)]
    assert keeper.ask(2, "k", "p") == []
    assert keeper.ask(3, "k", "p") == []
    assert grants(keeper.filled(1)) == [(2, False), (3, False)]
    assert keeper.ask(4, "k", "p") == [Grant(4, "k", fill=False)]


def test_what_a_filler_left_that_went_is_thrown_away_and_the_next_fills() -> None:
    keeper = Keeper()
    keeper.ask(1, "k", "p")
    keeper.ask(2, "k", "p")
    keeper.ask(3, "k", "p")
    assert keeper.gone(1) == [Drop("k"), Grant(2, "k", fill=True)]
    assert keeper.gone(2) == [Drop("k"), Grant(3, "k", fill=True)]
    assert keeper.gone(3) == [Drop("k")]
    assert keeper.keys == []
    assert keeper.ask(4, "k", "p") == [Grant(4, "k", fill=True)]


def test_one_that_waits_and_goes_is_forgotten() -> None:
    keeper = Keeper()
    keeper.ask(1, "k", "p")
    keeper.ask(2, "k", "p")
    assert keeper.gone(2) == []
    assert keeper.filled(1) == []


def test_the_last_image_stays_for_those_who_are_started_again() -> None:
    keeper = Keeper()
    keeper.ask(1, "k", "p")
    keeper.filled(1)
    assert keeper.gone(1) == []
    assert keeper.ask(2, "k", "p") == [Grant(2, "k", fill=False)]


def test_an_image_goes_when_nobody_holds_it_and_another_of_its_place_is_held() -> None:
    keeper = Keeper()
    for worker in (1, 2):
        keeper.ask(worker, "old", "p")
    keeper.filled(1)
    keeper.ask(3, "elsewhere", "q")
    keeper.filled(3)
    keeper.gone(3)
    keeper.ask(4, "new", "p")
    assert keeper.filled(4) == []
    assert keeper.gone(1) == []
    assert keeper.gone(2) == [Drop("old")]
    assert keeper.keys == ["elsewhere", "new"]


def test_a_new_image_that_nobody_took_goes_and_the_old_one_stays() -> None:
    keeper = Keeper()
    keeper.ask(1, "old", "p")
    keeper.filled(1)
    keeper.ask(2, "new", "p")
    keeper.filled(2)
    assert keeper.gone(2) == [Drop("new")]
    assert keeper.gone(1) == []
    assert keeper.keys == ["old"]


def test_of_those_that_nobody_holds_the_last_one_used_stays() -> None:
    keeper = Keeper()
    keeper.ask(1, "old", "p")
    keeper.filled(1)
    keeper.gone(1)
    keeper.ask(2, "new", "p")  # a restarted worker, of files that were written anew
    assert drops(keeper.filled(2)) == ["old"]
    assert keeper.gone(2) == []
    assert keeper.keys == ["new"]


def test_who_says_what_it_may_not_is_refused() -> None:
    keeper = Keeper()
    keeper.ask(1, "k", "p")
    with pytest.raises(ValueError, match="one image"):
        keeper.ask(1, "l", "p")
    with pytest.raises(ValueError, match="to fill no image"):
        keeper.filled(2)
    keeper.filled(1)
    with pytest.raises(ValueError, match="to fill no image"):
        keeper.filled(1)


STEPS = st.lists(st.tuples(st.sampled_from("afg"), st.integers(0, 5), st.sampled_from("xyz")), max_size=40)


@given(STEPS)
def test_whatever_happens_nobody_waits_for_nobody_and_who_holds_an_image_keeps_it(steps) -> None:
    keeper = Keeper()
    asked: dict[int, str] = {}
    filling: dict[str, int] = {}
    holding: dict[int, str] = {}
    there: set[str] = set()

    def do(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Drop):
                assert effect.key in there
                assert effect.key not in holding.values()
                there.remove(effect.key)
            elif effect.fill:
                assert effect.key not in there
                there.add(effect.key)
                filling[effect.key] = effect.worker
            else:
                assert effect.key in there
                assert effect.key not in filling
                holding[effect.worker] = effect.key

    for what, worker, key in steps:
        if what == "a" and worker not in asked:
            asked[worker] = key
            do(keeper.ask(worker, key, "xy" if key in "xy" else "z"))
        elif what == "f" and filling.get(asked.get(worker, "")) == worker:
            del filling[asked[worker]]
            holding[worker] = asked[worker]
            do(keeper.filled(worker))
        elif what == "g" and worker in asked:
            key = asked.pop(worker)
            if filling.get(key) == worker:
                del filling[key]
            holding.pop(worker, None)
            do(keeper.gone(worker))
        waiting = {worker for worker in asked if worker not in holding} - set(filling.values())
        assert all(asked[worker] in filling for worker in waiting)
        assert set(keeper.keys) == there
        idle = there - set(holding.values()) - set(filling)
        for place in ("xy", "z"):
            assert len(idle & set(place)) <= 1
            assert not idle & set(place) or not set(holding.values()) & set(place)
