"""The decision as advice: what a gateway shows says all that is decided from, and nobody need obey."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.gateway.arranging.advising import Advisor
from baton.gateway.arranging.arranger import Change, Rules
from baton.gateway.arranging.described import read_described
from baton.gateway.arranging.slo import Slo
from tests.gateway.cluster.test_roles import arranged, press
from tests.gateway.fake_cluster import FakeCluster, load

SLO = Slo(1.0, 0.05)
RULES = Rules(slo=Slo(), bounds=(1, 4), looks=2, fewer_s=5.0, adding_s=60.0)


def show(world: FakeCluster, **changes: Any) -> dict[str, Any]:
    """As `GET /cluster/instances` does, read from JSON."""
    cluster = world.cluster
    body = {
        "instances": cluster.snapshot(world.now),
        "slo": str(cluster.table.traffic.slo),
        "traffic": cluster.table.traffic.now()._asdict(),
        "arranging": None,
        **changes,
    }
    shown: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(body))
    return shown


def watch(world: FakeCluster, advisor: Advisor, seconds: int, **changes: Any) -> list[Change]:
    """Nobody does what is advised, but who tests."""
    found = [advisor.look(shown) for shown in watched(world, seconds, **changes)]
    return [change for change in found if change is not None]


def watched(world: FakeCluster, seconds: int, **changes: Any) -> Any:
    for _ in range(seconds):
        press(world, 1)
        yield read_described(show(world, **changes), world.now)


def test_what_a_gateway_shows_is_what_it_decides_from():
    world = arranged(p="prefill", d1="decode", d2="decode")
    world.cluster.add("late", "mixed")
    request = world.submit(tuple(range(10, 74)), max_tokens=3)
    world.submit(tuple(range(100, 130)), max_tokens=3)
    press(world, 2)
    world.tokens("d1", request.id, 7)
    world.cluster.drain("d2", world.now)
    world.now += 1.5
    shown = read_described(show(world), world.now)
    seen = world.cluster.roles.snapshot(world.now)
    every = tuple(one._replace(removable=True) for one in seen.instances)
    rounded = [one._replace(age_s=round(one.age_s, 3)) for one in every]
    assert [one._replace(age_s=round(one.age_s, 3)) for one in shown.seen.instances] == rounded
    assert shown.seen.traffic == seen.traffic
    assert [one.decoding for one in every] == [0, 1, 0, 0]
    assert max(one.age_s for one in every) == 1.5
    assert shown.slo == SLO
    assert not shown.changes_labels


@pytest.mark.parametrize("missing", ["instances", "traffic", "slo"])
def test_what_no_gateway_shows(missing):
    body = show(arranged(p="prefill"))
    del body[missing]
    with pytest.raises(ValueError, match=missing):
        read_described(body, 0.0)


def test_one_more_is_advised_once_until_it_has_come():
    world, advisor = arranged(p="prefill", d="decode"), Advisor(RULES)
    (change,) = watch(world, advisor, 30)
    assert (change.kind, change.label) == ("add", "prefill")
    assert "prompts press more" in change.why
    assert advisor.wanted(change) == {"prefill": 2, "decode": 1}
    world.add("whoever", "prefill")
    world.start("whoever")
    assert [change.kind for change in watch(world, advisor, 30)] == ["add"]
    assert advisor.counts == {"prefill": 2, "decode": 1}


def test_one_that_does_not_come_is_advised_again():
    world, advisor = arranged(p="prefill", d="decode"), Advisor(RULES)
    kinds = [change.kind for change in watch(world, advisor, 90)]
    assert kinds == ["add", "add"]


def test_a_label_is_advised_and_again_after_a_while():
    world = arranged(p="prefill", d1="decode", d2="decode")
    advisor = Advisor(Rules(slo=Slo(), bounds=(1, 3), looks=2, answer_s=20.0))
    first, second = watch(world, advisor, 40)
    assert {(one.kind, one.label) for one in (first, second)} == {("label", "prefill")}
    assert advisor.wanted(second) == {"prefill": 2, "decode": 1}


def test_labels_that_the_gateway_changes_itself_are_not_advised():
    world = arranged(p="prefill", d1="decode", d2="decode")
    advisor = Advisor(Rules(slo=Slo(), bounds=(1, 3), looks=2))
    assert watch(world, advisor, 60, arranging={"labels": True, "bounds": None}) == []


def test_one_less_is_advised_again_when_nobody_drains_it():
    world, advisor = arranged(p="prefill", d1="decode", d2="decode"), Advisor(RULES)
    press(world, 2)
    found = []
    for _ in range(30):
        world.now += 1.0
        found.append(advisor.look(read_described(show(world), world.now)))
    drains = [change for change in found if change is not None]
    assert len(drains) >= 2
    assert {change.kind for change in drains} == {"drain"}
    assert sum(advisor.wanted(drains[-1]).values()) == 2


def test_a_gateway_that_was_started_anew_counts_from_the_beginning():
    world, advisor = arranged(p="prefill", d="decode"), Advisor(RULES, SLO)
    press(world, 50)
    watch(world, advisor, 2)
    again = arranged(p="prefill", d="decode")
    again.now = world.now
    watch(again, advisor, 2)
    assert min(advisor.arranger.pressures) >= 0
    assert [change.kind for change in watch(again, advisor, 20)] == ["add"]


@pytest.mark.parametrize(("slo", "counts"), [(None, True), (SLO, True), (Slo(10.0, 0.05), False)])
def test_late_by_another_promise_says_nothing(slo, counts):
    """The gateway counts by 1 s; who asks may promise ten."""
    world, advisor = arranged(p="prefill", d="decode"), Advisor(RULES, slo)
    request = world.submit((1, 2, 3), max_tokens=100)
    world.tokens("d", request.id, 7)
    traffic = world.cluster.table.traffic
    for _ in range(4):
        world.now += 1.0
        traffic.sent(10)
        traffic.began(2.0)
        world.say("d", load(running=1))
        advisor.look(read_described(show(world), world.now))
    assert (advisor.arranger.pressures.prefill >= 1.0) == counts
