"""Which instance a request is sent to: labels, load, cached prefixes, thresholds."""

from __future__ import annotations

import pytest

from baton.gateway.cluster.digest import EXPECTED_S, PrefixDigest
from baton.protocol.codec import pack_int32, pack_int64
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.params.pooling import Pooling
from baton.protocol.rules.prefix_keys import short_keys
from tests.gateway.fake_cluster import BLOCK, FakeCluster, load, welcome

LONG = tuple(range(10, 10 + 20 * BLOCK))


def keys(prompt) -> list[int]:
    return short_keys(pack_int32(prompt), "", BLOCK)


def cached(world: FakeCluster, name: str, prompt, **more) -> None:
    """The instance reports that it has this prompt's full blocks."""
    world.say(name, load(added=pack_int64(keys(prompt)), **more))


# -- labels


@pytest.mark.parametrize(
    ("labels", "plans"),
    [
        ("mixed", {"a"}),
        ("mixed mixed", {"a", "b"}),
        ("prefill", {"a"}),
        ("decode", {"a"}),
        ("prefill decode", {"a>b"}),
        ("decode prefill", {"b>a"}),
        ("prefill prefill", {"a", "b"}),
        ("decode decode", {"a", "b"}),
        ("prefill mixed", {"a>b", "b"}),
        ("decode mixed", {"b"}),
        ("prefill decode decode", {"a>b,c", "a>c,b"}),
        ("prefill decode decode decode decode", {"a>b,c,d", "a>c,d,e", "a>d,e,b", "a>e,b,c"}),
        ("prefill prefill decode", {"a>c", "b>c"}),
    ],
)
def test_labels_say_who_does_what(labels: str, plans: set[str]):
    names = dict(zip("abcde", labels.split(), strict=False))
    world = FakeCluster(**names)
    seen = {world.plan(world.submit()) for _ in range(12)}
    assert seen <= plans
    firsts = {plan.split(">")[0] for plan in plans}
    assert {plan.split(">")[0] for plan in seen} == firsts, "equal instances take turns"


@pytest.mark.parametrize(
    ("labels", "plans"),
    [
        ("mixed mixed", {"a", "b"}),
        ("prefill decode", {"a"}),
        ("decode prefill prefill", {"b", "c"}),
        ("decode mixed", {"b"}),
        ("decode", {"a"}),
        ("decode decode", {"a", "b"}),
    ],
)
def test_what_generates_nothing_goes_where_prompts_are_computed(labels: str, plans: set[str]):
    world = FakeCluster(**dict(zip("abcde", labels.split(), strict=False)))
    seen = {world.plan(world.submit(max_tokens=1, pooling=Pooling("last"))) for _ in range(12)}
    assert seen == plans


@pytest.mark.parametrize(
    ("labels", "lost", "plan"),
    [
        ("prefill decode", "a", "b"),
        ("prefill decode", "b", "a"),
        ("prefill prefill decode", "a", "b>c"),
        ("prefill decode decode", "b", "a>c"),
        ("prefill mixed decode", "a", "b"),
        ("prefill mixed decode", "c", "b"),
    ],
)
def test_others_do_the_work_of_the_lost(labels: str, lost: str, plan: str):
    world = FakeCluster(**dict(zip("abcde", labels.split(), strict=False)))
    world.lose(lost)
    for name in "abc":
        if name != lost and name in world.sent:
            world.say(name, load(running=8 if name == "a" and lost == "c" else 0))
    assert world.plan(world.submit()) == plan


@pytest.mark.parametrize(
    "changes",
    [
        dict(peer_endpoint=""),
        dict(source=None),
        dict(source=InstanceSource("other tile", BLOCK, [])),
        dict(source=InstanceSource("tile", 8, [])),
    ],
    ids=["no socket", "no pages", "another tile", "another block size"],
)
def test_who_cannot_take_pages_gets_none(changes):
    world = FakeCluster(p="prefill")
    world.add("d", "decode")
    world.start("d", **changes)
    assert world.plan(world.submit()) in ("p", "d")


def test_one_token_is_not_handed_over():
    world = FakeCluster(p="prefill", d="decode")
    assert world.submits(world.submit(max_tokens=1).at)[0].decoders == ()


# -- load


def test_the_shorter_queue_wins():
    world = FakeCluster(a="mixed", b="mixed")
    world.say("a", load(waiting=5, waiting_tokens=5000))
    world.say("b", load(waiting=1, waiting_tokens=100))
    assert [world.submit().at for _ in range(4)] == ["b"] * 4


def test_the_faster_one_may_have_the_longer_queue():
    world = FakeCluster(a="prefill", b="prefill", d="decode")
    world.say("a", load(waiting_tokens=5000, prefill_tokens_per_s=100_000))
    world.say("b", load(waiting_tokens=1000, prefill_tokens_per_s=1_000))
    assert world.submit(LONG).at == "a"


def test_what_was_just_sent_counts():
    """Its report comes later."""
    world = FakeCluster(a="prefill", b="prefill", d="decode")
    assert sorted(world.submit(LONG[i:]).at for i in range(6)) == ["a"] * 3 + ["b"] * 3
    busy = world.submit((5,) * 4000).at
    assert [world.submit((7 + i,) * 100).at for i in range(3)].count(busy) == 0
    world.pass_time(0.05)
    world.say(busy, load(waiting_tokens=0))
    assert world.submit((9,) * 100).at == busy, "the report says that it is through"


def test_decoders_are_chosen_by_occupancy():
    world = FakeCluster(p="prefill", d="decode", e="decode", f="decode")
    world.say("d", load(running=6))
    world.say("e", load(running=1))
    world.say("f", load(running=1, free_blocks=3))
    assert world.plan(world.submit(LONG)) == "p>e,d,f"
    for _ in range(5):
        world.submit(LONG)
    assert world.plan(world.submit(LONG)).startswith("p>d"), "what is on its way counts as well"


def test_who_refused_lately_comes_last():
    world = FakeCluster(p="prefill", q="prefill", d="decode")
    first = world.submit()
    refuser = first.at
    world.finish(refuser, first.id, "rejected", "queue_full")
    other = "q" if refuser == "p" else "p"
    assert first.at == other
    assert {world.submit().at for _ in range(3)} == {other}


def test_who_is_paused_comes_last():
    world = FakeCluster(a="mixed", b="mixed")
    world.say("a", welcome("a.1", paused=True))
    assert {world.submit().at for _ in range(3)} == {"b"}
    world.lose("b")
    assert world.submit().at == "a", "what is accepted waits there"


# -- prefixes


def test_a_conversation_returns_to_its_prefix():
    world = FakeCluster(a="mixed", b="mixed", c="mixed")
    cached(world, "b", LONG)
    assert [world.submit((*LONG, 5)).at for _ in range(2)] == ["b"] * 2
    world.say("b", load(waiting_tokens=100_000))
    assert world.submit((*LONG, 5)).at in ("a", "c"), "computing it again is sooner done"


def test_an_evicted_prefix_attracts_nobody():
    world = FakeCluster(a="mixed", b="mixed")
    cached(world, "b", LONG)
    world.say("b", load(removed=pack_int64(keys(LONG))))
    assert {world.submit((i, *LONG)).at for i in range(3, 7)} == {"a", "b"}


def test_another_salt_is_another_prefix():
    assert not set(short_keys(pack_int32(LONG), "x", BLOCK)) & set(keys(LONG))


def test_equal_prompts_follow_each_other_before_they_are_indexed():
    world = FakeCluster(a="prefill", b="prefill", d="decode")
    for name in "abd":
        world.say(name, load())
    first = world.submit(LONG).at
    world.pass_time(1)
    for name in "abd":
        world.say(name, load())
    assert [world.submit(LONG).at for _ in range(2)] == [first] * 2


# -- conditional disaggregation


def test_a_short_prompt_stays_where_it_decodes():
    world = FakeCluster(threshold=40, p="prefill", d="decode")
    assert world.plan(world.submit(LONG[:39])) == "d"
    assert world.plan(world.submit(LONG[1:41])) == "p>d"
    cached(world, "d", LONG)
    assert world.plan(world.submit((*LONG, 1, 2, 3))) == "d", "only what is not cached counts"


def test_without_a_threshold_measured_cost_decides():
    world = FakeCluster(threshold=None, p="prefill", d="decode")
    world.say("d", load(prefill_tokens_per_s=5_000.0, decode_step_s=0.01))
    assert world.plan(world.submit((5,) * 50)) == "d", "as long as one decode step"
    assert world.plan(world.submit((6,) * 51)) == "p>d"


def test_a_short_prompt_does_not_squeeze_into_a_full_decoder():
    world = FakeCluster(threshold=40, p="prefill", d="decode", e="decode")
    world.say("d", load(running=8))
    cached(world, "d", LONG, running=8)
    world.say("e", load(running=7))
    assert world.plan(world.submit((*LONG, 1))) != "d"


# -- the digest


def test_the_digest_follows_the_reports():
    digest = PrefixDigest()
    prompt = keys(LONG)
    digest.update(load(added=pack_int64(prompt[:5])))
    assert digest.match(prompt, 0.0) == 5
    digest.expect(prompt[:8], 0.0)
    assert digest.match(prompt, EXPECTED_S - 1) == 8
    assert digest.match(prompt, EXPECTED_S) == 5
    digest.update(load(removed=pack_int64(prompt[2:3])))
    assert digest.match(prompt, EXPECTED_S) == 2
    digest.update(load(reset=True, added=pack_int64(prompt[:1])))
    assert digest.match(prompt, 0.0) == 1
    assert len(digest) == 1
