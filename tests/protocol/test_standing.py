"""Label and draining of an instance: the engine owns them, and all gateways end with what it took last."""

from __future__ import annotations

import random

import pytest

from baton.protocol.standing import Stale, Stand, Standing, changed, give_back


def test_an_order_changes_what_it_names():
    standing = changed(Standing(), Stand(label="decode"))
    assert standing == Standing(1, "decode")
    standing = changed(standing, Stand(generation=1, draining=True, move_after_s=3.0))
    assert standing == Standing(2, "decode", True, 3.0)
    assert changed(standing, Stand(generation=2, label="mixed")) == Standing(3, "mixed", True, 3.0)
    assert changed(standing, Stand(generation=2, draining=False)) == Standing(3, "decode", False, None)


def test_an_order_that_changes_nothing_has_no_number():
    standing = Standing(4, "decode", True, 3.0)
    assert changed(standing, Stand(generation=3, label="decode", draining=True, move_after_s=3.0)) is standing


def test_a_new_incarnation_is_told_what_was_ordered_before():
    known = Standing(7, "prefill", True, 1.0)
    assert changed(Standing(), give_back(known)) == known
    assert changed(Standing(8, "mixed"), give_back(known)) == Standing(8, "mixed")
    assert changed(Standing(7, "mixed"), give_back(known)) == Standing(7, "mixed"), (
        "what the engine says holds"
    )


def test_an_order_is_not_undone_by_what_is_given_back_later():
    ordered = changed(Standing(), Stand(generation=7, label="mixed"))
    assert ordered.generation == 8
    assert changed(ordered, give_back(Standing(7, "prefill"))) == ordered


def test_who_decided_on_an_older_standing_is_refused():
    standing = Standing(2, "decode")
    assert changed(standing, Stand("only_if", 2, "mixed")) == Standing(3, "mixed")
    for generation in (0, 1, 3):
        with pytest.raises(Stale, match="somebody else has changed it"):
            changed(standing, Stand("only_if", generation, "mixed"))


def test_gateways_that_order_at_once_end_with_the_same():
    """Any orders of three gateways that hear late, over restarts of the engine."""
    rng = random.Random(1)
    for _ in range(300):
        engine = Standing()
        known = [Standing()] * 3
        for _ in range(12):
            who = rng.randrange(3)
            event = rng.random()
            if event < 0.1:  # another incarnation; every gateway gives back what it knows when it greets
                engine = Standing()
                for one in rng.sample(range(3), 3):
                    if engine.generation >= known[one].generation:
                        known[one] = engine
                    else:
                        engine = changed(engine, give_back(known[one]))
            elif event < 0.5:
                known[who] = engine
            else:
                label = rng.choice(("mixed", "prefill", "decode"))
                engine = changed(engine, Stand(generation=known[who].generation, label=label))
                assert engine.label == label, "an order that is taken holds"
        assert all(one.generation <= engine.generation for one in known)
        assert all(one == engine for one in known if one.generation == engine.generation)
