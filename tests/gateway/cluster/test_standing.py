"""What a gateway makes of an instance's standing, which is the engine's."""

from __future__ import annotations

import pytest

from baton.protocol.standing import Stand, Standing
from tests.gateway.fake_cluster import FakeCluster, welcome


@pytest.fixture
def pd() -> FakeCluster:
    return FakeCluster(p="prefill", d="decode")


def test_what_another_gateway_ordered_holds_here(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    pd.say("d", welcome("d.1", standing=Standing(1, "", True, 5.0)))
    assert pd.cluster.members["d"].draining
    pd.pass_time(4)
    pd.say("d", welcome("d.1", standing=Standing(2, "mixed", True, 5.0)))
    assert pd.cluster.members["d"].label == "mixed"
    pd.pass_time(1.1)
    assert request.at == "p", "the time goes on from when it was ordered"
    pd.say("d", welcome("d.1", standing=Standing(3)))
    assert (pd.cluster.members["d"].label, pd.cluster.members["d"].draining) == ("decode", False)


def test_orders_hold_at_once_and_go_to_the_engine(pd: FakeCluster):
    pd.cluster.set_label("d", "mixed", pd.now)
    pd.cluster.drain("d", pd.now, 3.0)
    pd.pump()
    assert pd.orders("d") == [Stand("order", 0, "mixed"), Stand("order", 0, None, True, 3.0)]
    assert pd.cluster.members["d"].draining
    pd.say("d", welcome("d.1", standing=Standing(2, "prefill", False)))
    assert (pd.cluster.members["d"].label, pd.cluster.members["d"].draining) == ("prefill", False)


def test_a_decision_holds_when_the_engine_has_taken_it(pd: FakeCluster):
    answers = []
    pd.say("d", welcome("d.1", standing=Standing(4)))
    pd.cluster.set_label("d", "mixed", pd.now, 4, answer=answers.append)
    pd.pump()
    assert pd.orders("d") == [Stand("only_if", 4, "mixed")]
    assert pd.cluster.members["d"].label == "decode"
    pd.cluster.set_label("d", "mixed", pd.now, 3, answer=answers.append)
    assert [answer["code"] for answer in answers] == ["stale"]
    pd.say("d", welcome("d.1", standing=Standing(5, "mixed")))
    assert pd.cluster.members["d"].label == "mixed"


def test_a_new_incarnation_is_given_it_back(pd: FakeCluster):
    pd.say("d", welcome("d.1", standing=Standing(4, "mixed", True, 1.0)))
    pd.lose("d")
    pd.start("d")
    assert pd.orders("d") == [Stand("again", 4, "mixed", True, 1.0)]
    assert pd.cluster.members["d"].draining, "meanwhile it holds here"
    pd.lose("d")
    pd.start("d", standing=Standing(9, "prefill"))
    assert len(pd.orders("d")) == 1, "another gateway knew something newer"
    assert pd.cluster.members["d"].label == "prefill"


def test_an_order_for_an_instance_that_is_away_is_noted(pd: FakeCluster):
    pd.say("d", welcome("d.1", standing=Standing(4, "mixed")))
    pd.lose("d")
    answers = []
    pd.cluster.drain("d", pd.now, answer=answers.append)
    assert answers == [{"generation": 5}]
    pd.start("d", standing=Standing(4, "mixed"))
    assert pd.orders("d") == [Stand("again", 5, "mixed", True)]


def test_another_process_of_the_name_does_not_go_on_draining(pd: FakeCluster):
    pd.say("d", welcome("d.1", standing=Standing(4, "mixed", True)))
    pd.lose("d")
    pd.cluster.members["d"].begin_anew(pd.now)
    pd.start("d")
    assert pd.orders("d") == [Stand("again", 4, "mixed", False)]


def test_one_gateway_leads():
    world = FakeCluster(b="mixed", a="mixed")
    assert not world.cluster.leads
    world.say("b", welcome("b.1", first=True))
    assert not world.cluster.leads, "it is first at another one than the smallest name"
    world.say("a", welcome("a.1", first=True))
    assert world.cluster.leads
    world.add("z", joined=True)
    world.start("z")
    assert not world.cluster.leads, "of its own instances it is always the first"
    world.say("z", welcome("z.1", first=True))
    assert world.cluster.leads
    world.lose("z")
    world.lose("a")
    assert world.cluster.leads
