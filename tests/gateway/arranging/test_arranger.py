"""When a label changes, when an instance comes or goes, and when nothing does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from baton.gateway.arranging.arranger import Arranger, Change, Rules
from baton.gateway.arranging.measured import InstanceView, Snapshot, Traffic
from baton.gateway.arranging.pressure import Load, StepFit, pools
from baton.gateway.arranging.slo import Slo

RULES = Rules(slo=Slo(2.0, 0.05), look_s=1.0, looks=3, cool_down_s=10.0, stale_s=5.0, fewer_s=5.0)
RATE = 10_000.0


class Life:
    """Instances and their load, looked at once a second."""

    def __init__(self, labels: str, rules: Rules = RULES) -> None:
        self.arranger = Arranger(rules)
        self.views = {
            f"i{number}": InstanceView(
                f"i{number}",
                label,
                slots=256,
                num_blocks=10_000,
                free_blocks=9_000,
                prefill_tokens_per_s=RATE,
                decode_step_s=0.02,
                removable=True,
            )
            for number, label in enumerate(labels.split())
        }
        self.now, self.traffic = 100.0, Traffic()
        self.coming: tuple[str, ...] = ()
        self.changes: list[Change] = []

    def set(self, name: str, **fields) -> None:
        self.views[name] = self.views[name]._replace(**fields)

    def live(self, seconds: int, *, prompts: float = 0.0, decoding: int = 0, late: int = 0) -> None:
        """`prompts`: tokens a second, in prompts of 1,000; `decoding`: sequences of each that decodes."""
        for _ in range(seconds):
            self.now += 1.0
            requests = max(round(prompts / 1000), 1)
            old = self.traffic
            self.traffic = old._replace(
                requests=old.requests + requests,
                prompt_tokens=old.prompt_tokens + round(prompts),
                first=old.first + requests,
                late=old.late + late,
            )
            for name, view in self.views.items():
                here = decoding if view.label != "prefill" else 0
                step = 0.015 + 0.0005 * here if here else 0.0
                self.set(name, decoding=here, reported=here, in_flight=here, decode_step_s=step)
            seen = Snapshot(self.now, tuple(self.views.values()), self.traffic, self.coming)
            change = self.arranger.look(seen)
            if change is not None:
                self.changes.append(change)
                if change.kind == "label":
                    self.set(change.name, label=change.label)
                elif change.kind == "drain":
                    self.set(change.name, serves=False)

    @property
    def labels(self) -> list[str]:
        return sorted(view.label for view in self.views.values())


def test_prompts_that_press_get_an_instance():
    life = Life("prefill decode decode")
    life.live(12, prompts=12_000, decoding=5)
    (change,) = life.changes
    assert (change.kind, change.label) == ("label", "prefill")
    assert "prompts press more than streams" in change.why
    assert life.labels == ["decode", "prefill", "prefill"]
    (told,) = life.arranger.describe(life.now)["changes"]
    assert (told["from"], told["to"], told["why"]) == ("decode", "prefill", change.why)


def test_streams_that_press_get_one():
    life = Life("prefill prefill decode")
    life.live(12, prompts=1_000, decoding=80)
    (change,) = life.changes
    assert change.label in ("decode", "mixed")
    assert "streams press more than prompts" in change.why


def test_what_is_well_stays_as_it_is():
    life = Life("prefill prefill decode decode")
    life.live(200, prompts=8_000, decoding=20)
    assert life.changes == []
    assert life.arranger.pressures.worst < RULES.calm


def test_what_presses_as_much_either_way_stays():
    """Nothing is gained, so nothing is done, however much there is to do."""
    life = Life("prefill decode")
    life.live(200, prompts=14_000, decoding=120)
    assert life.changes == []
    assert min(life.arranger.pressures) > 1.0


def test_it_must_last():
    life = Life("prefill decode decode")
    life.live(10, prompts=1_000, decoding=5)
    for _ in range(10):
        life.live(RULES.looks - 1, prompts=60_000, decoding=5)  # a burst of two looks
        life.arranger._window.clear()
        life.live(2, prompts=1_000, decoding=5)
    assert life.changes == []


def test_back_and_forth_takes_longer_each_time():
    """A load that turns again and again: each change that takes the last one back waits twice as long."""
    random, life = Random(5), Life("prefill decode decode")
    labels, times, long = [life.labels], [life.now], False
    for turn in range(1500):
        long = not long if turn % random.choice((12, 16, 20)) == 0 else long
        known = len(life.changes)
        life.live(1, prompts=14_000 if long else 500, decoding=2 if long else 100)
        if len(life.changes) > known:
            labels.append(life.labels)
            times.append(life.now)
    reverts = longest = 0
    for at in range(2, len(times)):
        reverts = reverts + 1 if labels[at] == labels[at - 2] else 0
        longest = max(longest, reverts)
        least = RULES.cool_down_s * 2 ** max(reverts - 1, 0)
        assert times[at] - times[at - 1] >= min(least, RULES.longest_cool_down_s)
    assert longest >= 2


def test_a_change_that_was_refused_does_not_make_the_next_one_sooner():
    """Twice there and back; then an instance is away, and what is decided without it is not done."""
    life = Life("prefill decode decode")
    prompts, streams = {"prompts": 14_000, "decoding": 2}, {"prompts": 500, "decoding": 100}
    for known, load in enumerate((prompts, streams, prompts, streams)):
        while len(life.changes) == known:
            life.live(1, **load)
    life.set("i0", serves=False)
    while len(life.changes) == 4:
        life.live(1, **prompts)
    refused, decided_at = life.changes[4], life.now
    life.arranger.refused(refused)
    life.set(refused.name, label="decode")
    life.set("i0", serves=True)
    while len(life.changes) == 5:
        life.live(1, **prompts)
    assert life.labels == ["decode", "prefill", "prefill"], "it takes the fourth back"
    assert life.now - decided_at >= 8 * RULES.cool_down_s


@pytest.mark.parametrize("labels", ["prefill decode", "prefill prefill decode", "mixed", "mixed mixed"])
def test_somebody_is_left_for_both(labels):
    life = Life(labels)
    for prompts, decoding in ((90_000, 1), (100, 250), (90_000, 250)):
        life.live(60, prompts=prompts, decoding=decoding)
        assert any(label != "decode" for label in life.labels), life.changes
        assert any(label != "prefill" for label in life.labels), life.changes


def test_an_instance_that_says_nothing_stops_decisions():
    life = Life("prefill decode decode")
    life.set("i1", age_s=6.0)
    life.live(30, prompts=30_000, decoding=5)
    assert life.changes == []
    assert life.arranger.waits_for == "a report of i1"
    life.set("i1", age_s=0.1)
    life.live(5, prompts=30_000, decoding=5)
    assert len(life.changes) == 1


def test_a_look_too_early_changes_nothing():
    life = Life("prefill decode decode")
    life.live(5, prompts=1_000, decoding=5)
    seen = Snapshot(life.now + 0.5, (), life.traffic)
    before = life.arranger.describe(life.now)
    assert life.arranger.look(seen) is None
    assert life.arranger.describe(life.now) == before


def test_a_pause_is_no_load():
    """After an hour without a look, the mean over the hour says nothing of now."""
    life = Life("prefill decode decode")
    life.live(5, prompts=1_000, decoding=5)
    life.now += 3600
    life.live(6, prompts=30_000, decoding=5)
    assert len(life.changes) == 1


# -- how many


def scaled(least: int, most: int) -> Rules:
    return replace(RULES, bounds=(least, most))


def test_one_more_when_no_label_helps():
    life = Life("prefill decode", scaled(2, 4))
    life.live(6, prompts=13_500, decoding=40)
    (change,) = life.changes
    assert (change.kind, change.label) == ("add", "prefill")
    life.arranger.named("i2")
    life.live(60, prompts=13_500, decoding=40)
    assert len(life.changes) == 1, "one at a time: the first is not there yet"
    assert life.arranger.waits_for == "i2 to come"
    life.views["i2"] = life.views["i0"]._replace(name="i2")
    life.live(30, prompts=13_500, decoding=40)
    assert len(life.changes) == 1, life.changes


def test_never_more_than_the_most():
    life = Life("prefill decode", scaled(1, 2))
    life.live(100, prompts=40_000, decoding=200)
    assert life.changes == []


def test_one_less_when_few_would_do():
    life = Life("prefill prefill decode decode", scaled(2, 4))
    life.live(8, prompts=100, decoding=1)
    (change,) = life.changes
    assert change.kind == "drain"
    life.live(40, prompts=100, decoding=1)
    assert len(life.changes) == 1, "it is not gone yet"
    del life.views[change.name]
    life.live(60, prompts=100, decoding=1)
    assert len(life.changes) == 2
    del life.views[life.changes[1].name]
    life.live(100, prompts=100, decoding=1)
    assert len(life.changes) == 2, "two are the fewest"
    assert life.labels not in (["prefill"] * 2, ["decode"] * 2)


def test_what_is_not_its_own_is_not_drained():
    life = Life("prefill decode mixed", scaled(1, 4))
    for name in life.views:
        life.set(name, removable=False)
    life.live(60, prompts=100, decoding=1)
    assert life.changes == []


def test_fewer_than_the_least_is_too_few():
    life = Life("mixed", scaled(2, 4))
    life.live(10, prompts=100, decoding=1)
    assert [change.kind for change in life.changes] == ["add"]


def test_none_is_added_while_one_is_to_come():
    """A new one, or one that was lost; labels follow the load meanwhile."""
    life = Life("prefill decode", scaled(2, 8))
    life.live(10, prompts=40_000, decoding=5)
    assert [change.kind for change in life.changes] == ["add"]
    life.arranger.named("new")
    life.coming = ("new",)
    life.live(100, prompts=40_000, decoding=5)
    assert [change.kind for change in life.changes] == ["add", "label"]
    assert life.arranger.describe(life.now)["waits_for"] == "new to come"
    life.views["new"] = life.views["i0"]._replace(name="new")
    life.coming = ()
    life.live(30, prompts=40_000, decoding=5)
    assert [change.kind for change in life.changes] == ["add", "label", "add"]


def test_one_that_comes_back_is_not_too_few():
    life = Life("prefill decode", scaled(3, 8))
    life.coming = ("lost",)
    life.live(30, prompts=100, decoding=1)
    assert life.changes == []
    life.coming = ()
    life.live(30, prompts=100, decoding=1)
    assert [change.kind for change in life.changes] == ["add"]


def test_labels_follow_while_one_is_to_come():
    life = Life("prefill decode decode", scaled(3, 8))
    life.coming = ("new",)
    life.live(12, prompts=12_000, decoding=5)
    assert [change.kind for change in life.changes] == ["label"]


# -- what it rests on


def test_the_cost_of_a_step_is_learnt():
    fit = StepFit()
    assert fit.line() is None
    for sequences in (10, 40, 90, 20, 60):
        fit.add(sequences, 0.015 + 0.0005 * sequences)
    a, b = fit.line()
    assert (a, b) == (pytest.approx(0.015, rel=1e-6), pytest.approx(0.0005, rel=1e-6))


def test_a_step_that_never_varied_is_a_guess():
    fit = StepFit()
    for _ in range(5):
        fit.add(8, 0.02)
    assert fit.line() == (pytest.approx(0.016), pytest.approx(0.0005))


def test_pressure_with_another_number():
    load = Load(
        demand=8_000, rate=RATE, busy=0.8, backlog=0, patience_s=1.0,
        tokens_per_s=2_000, idle_s=0.015, each_s=0.0005, most=60,
    )  # fmt: skip
    assert load.pressures(1, 2).prefill == pytest.approx(1.0)
    assert load.pressures(2, 2).prefill == pytest.approx(0.5)
    assert load.pressures(1, 2).decode == pytest.approx(2_000 * 0.015 / (2 - 1) / 60)
    assert load.pressures(1, 1).decode == 100.0, "one can never decode so much"
    assert load.pressures(0, 2).prefill == 100.0


def test_mixed_ones_count_for_both():
    assert pools(["prefill", "mixed", "decode", "mixed"]) == (2.0, 2.0)


def pressed() -> tuple[Life, Change]:
    """A cluster whose first change has just been decided."""
    life = Life("prefill decode decode decode")
    while not life.changes:
        life.live(1, prompts=12_000, decoding=5)
    return life, life.changes[0]


def test_what_an_operator_changes_after_a_decision_stops_nothing():
    """The engine had the label, somebody changed it before the next look: that look decides again."""
    life, first = pressed()
    life.arranger.done(first)
    life.set(first.name, label="decode")
    life.live(int(RULES.cool_down_s) + 1, prompts=12_000, decoding=5)
    assert len(life.changes) == 2
    assert life.labels.count("prefill") == 2


def test_an_engine_that_never_answers_stops_nothing_for_long():
    life, first = pressed()
    life.set(first.name, label="decode")
    life.live(int(RULES.answer_s), prompts=12_000, decoding=5)
    assert len(life.changes) == 1
    assert life.arranger.waits_for == f"{first.name} to be prefill"
    life.live(20, prompts=12_000, decoding=5)
    assert len(life.changes) == 2


def test_an_instance_whose_draining_an_operator_ended_is_not_waited_for():
    life = Life("mixed mixed mixed", scaled(1, 4))
    while not life.changes:
        life.live(1, prompts=100, decoding=1)
    (first,) = life.changes
    assert first.kind == "drain"
    life.live(30, prompts=100, decoding=1)
    assert len(life.changes) == 1
    life.set(first.name, serves=True)
    life.live(30, prompts=100, decoding=1)
    assert len(life.changes) == 2
