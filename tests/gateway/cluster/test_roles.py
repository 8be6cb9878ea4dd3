"""The cluster and what arranges it: when it looks, what it is told, what becomes of a decision."""

from __future__ import annotations

from baton.gateway.arranging.arranger import Arranger, Rules
from baton.gateway.arranging.slo import Slo
from baton.protocol.messages.requests import QueryReply
from baton.protocol.standing import Standing
from tests.gateway.fake_cluster import FakeCluster, load, welcome


def arranged(bounds: tuple[int, int] | None = None, **labels: str) -> FakeCluster:
    world = FakeCluster(**labels)
    rules = Rules(slo=Slo(1.0, 0.05), looks=2, bounds=bounds, fewer_s=2.0)
    world.cluster.roles.arrange(Arranger(rules), placed=lambda: {"d2"})
    for name in labels:
        world.say(name, welcome(f"{name}.1", first=True))  # no other gateway is there longer
    return world


def obey(world: FakeCluster, *, refuse: bool = False) -> int:
    """The engines read their orders; returns how many there were."""
    count = 0
    for name, member in world.cluster.members.items():
        for query in [query for query in world.queries(name) if query.stand is not None]:
            world.sent[name].remove(query)
            count += 1
            if refuse:
                world.say(name, QueryReply(query.id, {"error": "somebody was faster", "code": "stale"}))
                continue
            number = member.standing.generation + 1
            standing = Standing(number, query.stand.label or "", bool(query.stand.draining))
            world.say(name, welcome(f"{name}.1", first=True, standing=standing))
            world.say(name, QueryReply(query.id, {"generation": number}))
    return count


def press(world: FakeCluster, seconds: int) -> None:
    """Prompts of 60,000 tokens a second, with instances that prefill 10,000."""
    for second in range(seconds):
        world.now += 1.0
        world.cluster.table.traffic.sent(60_000)
        for name in world.cluster.members:
            world.say(name, load(prefill_tokens_per_s=10_000.0, running=second % 2))


def test_labels_follow_the_load():
    world = arranged(p="prefill", d1="decode", d2="decode")
    press(world, 12)
    orders = [*world.orders("d1"), *world.orders("d2")]
    assert [(stand.how, stand.label) for stand in orders] == [("only_if", "prefill")]
    press(world, 30)
    told = world.cluster.roles.describe(world.now)
    assert told["waits_for"].endswith("to be prefill"), "nothing more before the engine has said so"
    assert len(told["changes"]) == 1
    assert obey(world) == 1
    labels = sorted(member.label for member in world.cluster.members.values())
    assert labels == ["decode", "prefill", "prefill"]
    assert told["pressure"]["prefill"] > 1
    assert "prompts press more" in told["changes"][0]["why"]


def test_an_instance_that_never_reported_is_waited_for_once_it_has_work():
    """Its silence counts from when it said that it can serve."""
    world = arranged(p="prefill", d1="decode", d2="decode")
    world.submit(tuple(range(10, 74)), max_tokens=3)
    (silent,) = {request.at for request in world.cluster.table.running.values()}
    for second in range(12):
        world.now += 1.0
        world.cluster.table.traffic.sent(60_000)
        for name in world.cluster.members:
            if name != silent:
                world.say(name, load(prefill_tokens_per_s=10_000.0, running=second % 2))
    assert world.cluster.roles.describe(world.now)["waits_for"] == f"a report of {silent}"
    assert not any(world.orders(name) for name in world.cluster.members)


def test_who_was_not_faster_thinks_again():
    world = arranged(p="prefill", d1="decode", d2="decode")
    press(world, 12)
    assert obey(world, refuse=True) == 1
    assert world.cluster.roles.describe(world.now)["changes"] == []
    press(world, 14)
    assert obey(world) == 1
    assert len(world.cluster.roles.describe(world.now)["changes"]) == 1


def test_an_operator_who_changes_what_was_decided_does_not_stop_the_deciding():
    """The engine had the label; before the next look somebody gave it another one."""
    world = arranged(p="prefill", d1="decode", d2="decode", d3="decode")
    press(world, 12)
    assert obey(world) == 1
    name = world.cluster.roles.describe(world.now)["changes"][0]["name"]
    world.cluster.set_label(name, "decode", world.now)
    press(world, 1)
    assert obey(world) == 1, "the operator's"
    press(world, 12)
    assert obey(world) == 1
    assert len(world.cluster.roles.describe(world.now)["changes"]) == 2


def test_a_connection_that_breaks_before_the_answer_does_not_stop_the_deciding():
    """It is there again before anybody looks."""
    world = arranged(p="prefill", d1="decode", d2="decode")
    press(world, 12)
    (name,) = [name for name in world.cluster.members if world.orders(name)]
    world.cluster.lost(name, "the connection to the instance broke", world.now)
    world.sent[name].clear()
    world.cluster.attach(name, f"{name}.1", world.now)
    world.say(name, welcome(f"{name}.1", first=True))
    press(world, 14)
    assert obey(world) == 1


def test_of_several_gateways_one_decides():
    world = arranged(p="prefill", d1="decode", d2="decode")
    for name in world.cluster.members:
        world.say(name, welcome(f"{name}.1", first=False))
    press(world, 30)
    assert obey(world) == 0
    assert "another gateway" in world.cluster.roles.describe(world.now)["waits_for"]
    for name in world.cluster.members:
        world.say(name, welcome(f"{name}.1", first=True))  # the other one has left
    press(world, 8)
    assert obey(world) == 0, "the other one may have changed something just now"
    press(world, 8)
    assert obey(world) == 1


def test_it_looks_once_a_second_and_only_when_somebody_reports(monkeypatch):
    world = arranged(p="prefill", d1="decode", d2="decode")
    looks = []
    snapshot = world.cluster.roles.snapshot
    monkeypatch.setattr(world.cluster.roles, "snapshot", lambda now: looks.append(now) or snapshot(now))
    assert world.cluster.next_deadline() is None, "an idle cluster has no timer"
    for _ in range(100):
        world.now += 0.05
        world.say("p", load(running=1))
    assert 5 <= len(looks) <= 6
    world.now += 1000
    world.cluster.on_clock(world.now)
    assert len(looks) <= 6
    assert world.cluster.next_deadline() is None


def test_one_that_may_be_smaller_is_looked_at_until_it_is():
    world = arranged(bounds=(2, 4), p="prefill", d1="decode", d2="decode")
    press(world, 1)
    for _ in range(10):
        due = world.cluster.next_deadline()
        if due is None:
            break
        world.now = due
        world.cluster.on_clock(due)
    assert world.cluster.members["d2"].draining
    (wanted,) = world.cluster.roles.take_wanted()
    assert (wanted.kind, wanted.name) == ("drain", "d2")
    assert world.cluster.roles.take_wanted() == []
    assert world.cluster.roles.next_deadline() is None, "it is as small as it may be: no timer any more"


def test_one_that_the_shell_starts_has_a_name_and_is_awaited():
    world = arranged(bounds=(1, 4), p="prefill", d="decode")
    placed = {"p", "d"}
    world.cluster.roles.arrange(world.cluster.roles.arranger, placed=lambda: placed)
    press(world, 12)
    assert world.cluster.roles.wants
    (wanted,) = world.cluster.roles.take_wanted()
    assert (wanted.kind, wanted.label) == ("add", "prefill")
    placed.add("prefill-1")
    world.cluster.roles.named(wanted, "prefill-1")
    press(world, 2)
    told = world.cluster.roles.describe(world.now)
    assert told["changes"][0]["name"] == "prefill-1"
    assert world.cluster.roles.snapshot(world.now).coming == ("prefill-1",)
    world.add("prefill-1", "prefill", joined=True)
    world.start("prefill-1")
    assert world.cluster.roles.snapshot(world.now).coming == ()


def test_what_drains_is_not_to_come_back():
    world = arranged(bounds=(1, 4), p="prefill", d="decode")
    world.cluster.roles.arrange(world.cluster.roles.arranger, placed=lambda: {"p", "d"})
    world.cluster.drain("d", world.now)
    assert world.cluster.roles.snapshot(world.now).coming == ()
    world.cluster.lost("p", "its node is gone", world.now)
    assert world.cluster.roles.snapshot(world.now).coming == ("p",)


def test_what_is_counted_of_a_request():
    world = arranged(p="prefill", d1="decode")
    traffic = world.cluster.table.traffic
    prompt = tuple(range(10, 74))
    request = world.submit(prompt, max_tokens=3)
    assert (traffic.requests, traffic.prompt_tokens) == (1, len(prompt))
    world.now += 2.0  # later than promised
    world.tokens("d1", request.id, 7)
    world.now += 0.2  # two more tokens, 0.1 s each
    world.tokens("d1", request.id, 8, 9)
    world.finish("d1", request.id)
    now = traffic.now()
    assert (now.first, now.late, now.ended, now.slow) == (1, 1, 1, 1)
