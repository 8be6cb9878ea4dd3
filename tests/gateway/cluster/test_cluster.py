"""Where requests are, and how they go on when instances are lost, at each point of their way."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton.gateway.cluster import table as requests_table
from baton.gateway.cluster.table import MAX_FRUITLESS, MAX_LOSSES, SUSPECT_AFTER
from baton.gateway.errors import InstanceUnavailable
from baton.protocol.codec import MalformedMessage, unpack_int32
from baton.protocol.messages.reports import PromptLogprobs
from baton.protocol.messages.requests import Finished, Outputs
from baton.protocol.params.sampling import TokenLogprobs
from baton.protocol.rules.fair_queue import Flow
from baton.protocol.rules.silence import LOOKS, MAX_VOIDS
from tests.gateway.fake_cluster import FakeCluster, error_of, load, welcome


@pytest.fixture
def pd() -> FakeCluster:
    return FakeCluster(p="prefill", d="decode")


def test_a_request_carries_its_plan(pd: FakeCluster):
    request = pd.submit()
    (submit,) = pd.submits("p")
    assert (submit.id, request.at, request.plan) == (request.id, "p", ("p", "d"))
    assert [target.incarnation for target in submit.decoders] == ["d.1"]
    assert submit.decoders[0].endpoint == "ipc:///run/d.1.peer"
    assert pd.submits("d") == []


def test_output_from_the_decoder_says_that_it_is_there(pd: FakeCluster):
    request = pd.submit(max_tokens=3)
    pd.tokens("d", request.id, 7, 8)
    assert (request.at, request.plan, pd.cluster.table.num_handed_over) == ("d", ("d",), 1)
    pd.finish("p", request.id, "lost")
    assert request.finished is None
    pd.tokens("d", request.id, 9)
    pd.finish("d", request.id)
    assert request.finished.reason == "length"
    assert pd.received(request) == [7, 8, 9]
    assert len(pd.cluster) == 0
    assert pd.cancels("p") + pd.cancels("d") == []
    pd.check_books()


def test_output_from_the_first_instance_says_that_it_stays(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("p", request.id, 7)
    assert request.plan == ("p",)
    pd.tokens("d", request.id, 66)
    assert pd.received(request) == [7]
    assert pd.cancels("d") == [request.id], "two instances must not stream one request"
    assert pd.cluster.table.num_handed_over == 0


# -- losses


def test_the_prefilling_instance_dies(pd: FakeCluster):
    request = pd.submit()
    old = request.id
    pd.lose("p")
    assert pd.cancels("d") == [old]
    (submit,) = pd.submits("d")
    assert submit.id == request.id != old
    assert (submit.generated, submit.decoders) == (b"", ())
    pd.tokens("d", old, 66)
    assert pd.received(request) == []
    assert pd.cancels("d") == [old, old], "it had not come there yet when it was cancelled first"
    pd.tokens("d", old, 67)
    assert len(pd.cancels("d")) == 2
    pd.tokens("d", request.id, 7)
    assert pd.received(request) == [7]


def test_the_decoding_instance_dies_before_it_was_heard_of(pd: FakeCluster):
    """The other one still has the request, and sees to it."""
    request = pd.submit()
    pd.lose("d")
    assert (request.at, request.losses) == ("p", 0)
    pd.tokens("p", request.id, 7)
    assert pd.received(request) == [7]


def test_the_decoding_instance_dies_after_it_was_heard_of(pd: FakeCluster):
    request = pd.submit(max_tokens=6)
    pd.tokens("d", request.id, 7, 8)
    assert pd.received(request) == [7, 8]
    pd.tokens("d", request.id, 9)
    pd.lose("d")
    submit = pd.submits("p")[-1]
    assert list(unpack_int32(submit.generated)) == [7, 8, 9]
    assert (submit.sampling, submit.stopping.max_tokens) == (request.sampling, 6)
    pd.tokens("p", request.id, 10, 11, 12)
    pd.finish("p", request.id)
    assert pd.received(request) == [7, 8, 9, 10, 11, 12]
    assert request.finished.reason == "length"
    continued = pd.cluster.table.continued
    assert (continued.times, continued.tokens, sum(continued.gaps), continued.failed) == (1, 3, 1, 0)


def test_lost_on_the_way(pd: FakeCluster):
    """Sent by the one, and never heard of from the other."""
    request = pd.submit()
    old = request.id
    pd.finish("p", old, "lost")
    assert request.id != old
    assert pd.cancels("d") == [old]
    assert pd.cluster.table.continued.times == 1
    pd.tokens("d", old, 66)
    assert pd.received(request) == []
    assert pd.cancels("d") == [old, old]


def handed_over(world: FakeCluster, request, incarnation: str) -> None:
    finished = Finished(request.id, "handed_over", message=incarnation)
    world.say("p", Outputs(finished=[finished]))


def test_who_has_it_dies_before_its_first_token_is_read(pd: FakeCluster):
    """The first instance has said that it is there, so nobody else has it."""
    request = pd.submit()
    old = request.id
    handed_over(pd, request, "d.1")
    assert (request.at, request.plan, pd.cluster.table.num_handed_over) == ("d", ("d",), 1)
    pd.lose("p")
    assert request.id == old, "it is not there any more"
    pd.lose("d")
    assert request.losses == 1
    pd.start("p")
    pd.tokens("p", request.id, 7)
    assert pd.received(request) == [7]
    pd.check_books()


@pytest.mark.parametrize("back", ["gone", "another incarnation", "another connection"])
def test_handed_over_to_one_that_was_lost_meanwhile(pd: FakeCluster, back):
    """What it had of this gateway it has dropped, also if it lives."""
    request = pd.submit()
    old = request.id
    pd.lose("d")
    if back != "gone":
        pd.starts["d"] -= back == "another connection"
        pd.start("d")
    handed_over(pd, request, "d.1")
    assert request.id != old
    assert request.losses == 1
    assert pd.cancels("d") == ([] if back == "gone" else [old])
    pd.tokens(request.at, request.id, 7)
    assert pd.received(request) == [7]
    pd.check_books()


def test_handed_over_after_the_first_token_is_no_news(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    handed_over(pd, request, "d.1")
    assert (request.at, pd.cluster.table.num_handed_over) == ("d", 1)
    pd.tokens("d", request.id, 8)
    assert pd.received(request) == [7, 8]


def test_both_die(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    pd.lose("p")
    pd.lose("d")
    assert pd.cluster.parked == (request,)
    with pytest.raises(InstanceUnavailable, match="instance p is restarting: it died"):
        pd.submit()
    pd.pass_time(5)
    pd.start("d")
    assert list(unpack_int32(pd.submits("d")[-1].generated)) == [7]
    pd.tokens("d", request.id, 8)
    assert pd.received(request) == [7, 8]
    pd.pass_time(100)
    assert request.error is None


def test_nobody_comes_back(pd: FakeCluster):
    request = pd.submit()
    pd.lose("p")
    pd.lose("d", "it was killed")
    pd.pass_time(9.9)
    assert request.error is None
    pd.pass_time(0.2)
    assert "p: it died; d: it was killed; it was not back within 10 s" in error_of(request).message
    assert error_of(request).code == "instance_lost"
    assert len(pd.cluster) == 0


def test_no_instance_is_left(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    pd.cluster.failed("p", "too many restarts", pd.now)
    pd.cluster.failed("d", "too many restarts", pd.now)
    assert error_of(request).code == "instance_lost"
    late = pd.request()
    pd.cluster.enqueue(late, pd.now)
    assert error_of(late).code == "instance_failed"
    with pytest.raises(InstanceUnavailable, match="p has failed: too many restarts") as caught:
        pd.cluster.check_ready()
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize(
    ("tokens", "reason"), [((7, 8, 9), "length"), ((7, 2), "stop"), ((7, 8, 2), "stop"), ((2,), "stop")]
)
def test_only_the_end_was_lost(pd: FakeCluster, tokens, reason):
    request = pd.submit(max_tokens=3)
    pd.tokens("d", request.id, *tokens)
    pd.received(request)
    pd.lose("d")
    assert request.finished.reason == reason
    assert len(pd.submits("p")) == 1, "there is nothing to go on with"
    assert pd.received(request) == list(tokens)


def test_a_stop_token_that_came_too_early_is_no_end(pd: FakeCluster):
    request = pd.submit(max_tokens=5)
    request.stopping = msgspec.structs.replace(request.stopping, min_tokens=2)
    pd.tokens("d", request.id, 7, 2)
    pd.lose("d")
    assert request.finished is None
    assert list(unpack_int32(pd.submits("p")[-1].generated)) == [7, 2]


def test_progress_earns_another_chance(pd: FakeCluster):
    request = pd.submit(max_tokens=100)
    for number in range(MAX_LOSSES - 1):
        pd.tokens(request.at, request.id, number + 10)
        at = request.at
        pd.lose(at)
        pd.start(at)
        assert request.error is None
    pd.lose(request.at)
    assert f"{MAX_LOSSES} times" in error_of(request).message


def test_without_progress_it_may_be_the_cause(pd: FakeCluster):
    request = pd.submit()
    for _ in range(MAX_FRUITLESS):
        assert request.error is None
        at = request.at
        pd.lose(at)
        pd.start(at)
    assert error_of(request).code == "instance_lost"
    pd.check_books()


def test_who_was_only_beside_the_cause_gets_away(pd: FakeCluster):
    """Every instance that is sent the bad one dies at once, with all that was sent there as well."""
    bad, *others = (pd.submit() for _ in range(12))
    for _ in range(50):
        if hit := bad.at:
            pd.lose(hit, "it died of it")
            pd.start(hit)
            continue
        for request in list(pd.cluster.requests.values()):
            pd.tokens(request.at, request.id, 7)
        pd.pass_time(0.06)
    assert (bad.losses, error_of(bad).code) == (MAX_FRUITLESS, "instance_lost")
    assert all(request.error is None and pd.received(request) for request in others)
    assert len(pd.cluster.requests) == 11
    pd.check_books()


def test_a_suspect_that_is_cancelled_holds_up_nobody(pd: FakeCluster):
    requests = [pd.submit() for _ in range(3)]
    pd.lose("d")
    for _ in range(SUSPECT_AFTER):
        pd.lose("p")
        pd.start("p")
    (first,) = pd.cluster.requests.values()
    assert len(pd.cluster.parked) == 2
    pd.cancel(first)
    pd.pass_time(0.06)
    (second,) = pd.cluster.requests.values()
    pd.tokens(second.at, second.id, 7)
    pd.pass_time(0.06)
    assert not pd.cluster.parked
    assert {first, *pd.cluster.requests.values()} == set(requests)


def test_prompt_logprobs_stay_and_are_not_asked_for_twice(pd: FakeCluster):
    request = pd.submit(prompt_logprobs=1)
    (submit,) = [*pd.submits("p"), *pd.submits("d")]
    assert submit.decoders == (), "two instances would send parts of one answer, in any order"
    pd.lose(request.at)
    pd.start("p")
    submit = (pd.submits("p") + pd.submits("d"))[-1]
    assert submit.sampling.prompt_logprobs == 1
    pd.tokens(request.at, request.id, 7)
    at = request.at
    pd.lose(at)
    other = "p" if at == "d" else "d"
    assert pd.submits(other)[-1].sampling.prompt_logprobs is None, "they came before the first token"


def test_prompt_logprobs_come_once_over_a_loss(pd: FakeCluster):
    request = pd.submit(range(10, 20), prompt_logprobs=0)
    positions = [TokenLogprobs(token, -0.5, 1) for token in range(11, 20)]

    def say(first: int, last: int) -> None:
        run = PromptLogprobs(0, 0, first, positions[first - 1 : last])
        pd.say(request.at, Outputs(prompt_logprobs=[(request.id, run)]))

    say(1, 4)
    pd.lose(request.at)
    for first, last in ((1, 3), (4, 6), (7, 9)):
        say(first, last)
    runs = request.take().prompt_logprobs
    assert [run.first for run in runs] == [1, 5, 7]
    assert [one for run in runs for one in run.positions] == positions


# -- cancelling


def test_a_cancel_reaches_both_sides(pd: FakeCluster):
    request = pd.submit()
    pd.cancel(request)
    pd.cancel(request)
    assert pd.cancels("p") == pd.cancels("d") == [request.id]
    pd.finish("p", request.id, "aborted")
    pd.tokens("p", request.id, 7)
    assert request.finished is None
    assert pd.received(request) == []
    pd.check_books()


def test_a_cancel_goes_only_where_the_request_is(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    pd.cancel(request)
    pd.tokens("d", request.id, 8)
    assert (pd.cancels("p"), pd.cancels("d")) == ([], [request.id])


def test_a_request_that_waits_can_be_cancelled(pd: FakeCluster):
    request = pd.submit()
    pd.lose("p")
    pd.lose("d")
    pd.cancel(request)
    assert len(pd.cluster) == 0
    pd.start("p")
    assert len(pd.submits("p")) == 1
    assert pd.cluster.next_deadline() is None


# -- refusals


def test_a_full_queue_sends_it_to_the_next(pd: FakeCluster):
    request = pd.submit()
    pd.finish("p", request.id, "rejected", "queue_full")
    assert (request.at, request.finished) == ("d", None)
    pd.finish("d", request.id, "rejected", "queue_full")
    assert request.finished.code == "queue_full"
    other = pd.submit()
    assert other.at in ("p", "d")
    pd.say("p", load())
    assert pd.submit().at == "p", "its load was reported since: it may have room"


def test_of_what_full_queues_said_the_shortest_time_is_told(pd: FakeCluster):
    request = pd.submit()
    pd.finish("p", request.id, "rejected", "queue_full", retry_after_s=7.5)
    pd.finish("d", request.id, "rejected", "queue_full", retry_after_s=40.0)
    assert request.finished.retry_after_s == 7.5
    request = pd.submit()
    pd.finish("p", request.id, "rejected", "queue_full")
    pd.finish("d", request.id, "rejected", "queue_full", retry_after_s=40.0)
    assert request.finished.retry_after_s == 40.0


def test_what_waits_for_an_instance_is_sent_by_rank_and_fairly():
    world = FakeCluster(m="mixed")
    begun = world.submit((9,) * 40, priority=0)
    world.tokens("m", begun.id, 5)
    world.lose("m")
    waiting = {"begun": begun}
    for name, priority, flow in (
        ("low", 1, "a"),
        ("a1", 0, "a"),
        ("a2", 0, "a"),
        ("a3", 0, "a"),
        ("b1", 0, "b"),
        ("best", -1, "a"),
    ):
        waiting[name] = world.request((1,) * 20, priority=priority, flow=Flow(flow))
        world.cluster.enqueue(waiting[name], world.now)
    world.start("m")
    names = {request.id: name for name, request in waiting.items()}
    sent = [names[submit.id] for submit in world.submits("m") if submit.id in names]
    assert sent == ["best", "begun", "a1", "b1", "a2", "a3", "low"]


def test_what_has_begun_waits_for_room(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    pd.lose("d")
    for _ in range(4):
        pd.finish("p", request.id, "rejected", "queue_full")
        assert (pd.cluster.parked, request.finished) == ((request,), None)
        pd.pass_time(0.6)
        assert request.at == "p"
    pd.tokens("p", request.id, 8)
    assert pd.received(request) == [7, 8]


def test_what_has_begun_does_not_wait_for_room_forever(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    pd.lose("d")
    for _ in range(25):
        if request.error is None:
            pd.finish("p", request.id, "rejected", "queue_full")
            pd.pass_time(0.6)
    assert error_of(request).code == "instance_lost"


def test_an_instance_that_shuts_down_passes_it_on(pd: FakeCluster):
    request = pd.submit()
    pd.finish("p", request.id, "rejected", "shutting_down")
    assert request.at == "d"


def test_a_larger_pool_may_hold_it():
    world = FakeCluster(a="mixed", b="mixed")
    request = world.submit()
    first = request.at
    world.finish(first, request.id, "rejected", "never_fits")
    assert request.at not in ("", first)
    world.finish(request.at, request.id, "rejected", "never_fits")
    assert request.finished.code == "never_fits"


def test_an_error_of_the_request_is_its_end(pd: FakeCluster):
    request = pd.submit()
    pd.finish("p", request.id, "error", "internal")
    assert request.finished.code == "internal"
    assert pd.submits("d") == []


# -- draining, labels, joining


def test_draining_lets_run_what_runs(pd: FakeCluster):
    old = pd.submit()
    pd.cluster.drain("p", pd.now)
    new = pd.submit()
    assert new.plan == ("d",)
    assert not pd.cluster.drained("p")
    pd.tokens("d", old.id, 7)
    assert pd.cluster.drained("p"), "what it had is at the other one now"
    pd.cluster.undrain("p", pd.now)
    assert pd.submit().at == "p"


def test_a_decoder_that_drains_waits_for_what_may_come(pd: FakeCluster):
    request = pd.submit()
    pd.cluster.drain("d", pd.now)
    assert not pd.cluster.drained("d")
    pd.tokens("p", request.id, 7)
    assert pd.cluster.drained("d")


def test_what_does_not_end_in_time_is_moved(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    old = request.id
    pd.cluster.drain("d", pd.now, 5)
    pd.pass_time(4.9)
    assert request.at == "d"
    pd.pass_time(0.2)
    assert (request.at, request.losses) == ("p", 0)
    assert pd.cancels("d") == [old]
    assert list(unpack_int32(pd.submits("p")[-1].generated)) == [7]
    assert pd.cluster.drained("d")
    assert pd.cluster.next_deadline() is None


def test_nothing_is_moved_to_nowhere(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    pd.cluster.drain("d", pd.now, 1)
    pd.lose("p")
    pd.pass_time(3)
    assert (request.at, request.error) == ("d", None)
    pd.start("p")
    pd.pass_time(2)
    assert request.at == "p"


def test_all_drain(pd: FakeCluster):
    pd.cluster.drain("p", pd.now)
    pd.cluster.drain("d", pd.now)
    with pytest.raises(InstanceUnavailable, match="instance d is draining") as caught:
        pd.submit()
    assert caught.value.code == "instance_draining"


def test_a_label_changes_what_is_sent(pd: FakeCluster):
    assert pd.plan(pd.submit()) == "p>d"
    pd.cluster.set_label("p", "mixed", pd.now)
    assert pd.plan(pd.submit()) == "p"
    pd.cluster.set_label("d", "prefill", pd.now)
    assert pd.plan(pd.submit()) == "d>p"
    with pytest.raises(ValueError, match="mixed, prefill, decode"):
        pd.cluster.set_label("d", "chief", pd.now)


def test_an_instance_that_joined_must_say_that_it_lives(pd: FakeCluster):
    pd.add("j", joined=True)
    pd.cluster.renew("j", 3, pd.now)
    pd.start("j")
    pd.cluster.set_label("j", "prefill", pd.now)
    pd.cluster.drain("p", pd.now)
    request = pd.submit()
    assert request.at == "j"
    pd.pass_time(2)
    pd.cluster.renew("j", 3, pd.now)
    pd.pass_time(2)
    assert request.at == "j"
    pd.pass_time(1.1)
    assert request.at == "d"
    assert pd.cluster.members["j"].state == "restarting"
    assert pd.cluster.members["j"].failure == "it did not renew its registration in time"
    pd.pass_time(11)
    assert "j" not in pd.cluster.members
    assert pd.cluster.next_deadline() is None


def test_a_gateway_that_was_away_judges_nobody(pd: FakeCluster):
    """It stands still for longer than the time to live; its timer runs before it reads the renewal."""
    pd.add("j", joined=True)
    pd.cluster.renew("j", 3, pd.now)
    pd.start("j")
    for away in (5, 9, 4, 60):
        pd.now += away
        pd.cluster.on_clock(pd.now)
        pd.pass_time(0.1)
        assert pd.cluster.members["j"].state == "ready"
        pd.cluster.renew("j", 3, pd.now)
        pd.pass_time(1)
    pd.pass_time(1.9)
    assert pd.cluster.members["j"].state == "ready"
    pd.pass_time(0.2)
    assert pd.cluster.members["j"].state == "restarting", "now it was silent before the gateway's eyes"


def test_a_gateway_that_is_away_all_the_time_finds_the_dead(pd: FakeCluster):
    pd.add("j", joined=True)
    pd.cluster.renew("j", 3, pd.now)
    pd.start("j")
    looks = 0
    while pd.cluster.members["j"].state == "ready":
        pd.now = pd.cluster.next_deadline() + 5
        pd.cluster.on_clock(pd.now)
        looks += 1
        assert looks <= (MAX_VOIDS + 1) * LOOKS
    while "j" in pd.cluster.members:
        pd.now = pd.cluster.next_deadline() + 50
        pd.cluster.on_clock(pd.now)
        looks += 1
        assert looks <= 2 * (MAX_VOIDS + 1) * LOOKS


def test_while_the_server_stops_nobody_has_to_renew(pd: FakeCluster):
    pd.add("j", joined=True)
    pd.cluster.renew("j", 3, pd.now)
    pd.start("j")
    pd.cluster.renew_no_more()
    pd.pass_time(100)
    assert pd.cluster.members["j"].state == "ready"


def test_an_instance_that_comes_back_is_not_forgotten(pd: FakeCluster):
    pd.add("j", joined=True)
    pd.cluster.renew("j", 3, pd.now)
    pd.start("j")
    pd.pass_time(4)
    pd.cluster.renew("j", 30, pd.now)
    pd.start("j")
    pd.pass_time(20)
    assert pd.cluster.members["j"].state == "ready"
    assert pd.cluster.members["j"].restarts == 1


def test_leaving_moves_everything_at_once(pd: FakeCluster):
    request = pd.submit()
    pd.tokens("d", request.id, 7)
    old = request.id
    pd.cluster.remove("d", pd.now)
    pd.pump()
    assert pd.cancels("d") == [old]
    assert request.at == "p"
    assert "d" not in pd.cluster.members


@pytest.mark.parametrize(
    ("changes", "reason"),
    [(dict(vocab_size=99), "vocabulary of 99"), (dict(max_model_len=64), "context of 64 tokens")],
)
def test_another_model_cannot_join(pd: FakeCluster, changes, reason):
    pd.cluster.requirements = pd.cluster.requirements._replace(max_model_len=4096, vocab_size=512)
    pd.add("j", joined=True)
    pd.start("j", **changes)
    assert pd.cluster.members["j"].state == "failed"
    assert reason in pd.cluster.members["j"].failure
    pd.start("j")
    assert pd.cluster.members["j"].state == "ready"


def test_names_are_taken_once(pd: FakeCluster):
    with pytest.raises(ValueError, match="'p' is there already"):
        pd.cluster.add("p")


def test_settled_after_the_first_start_of_all():
    world = FakeCluster()
    world.add("a")
    world.add("b")
    world.add("j", joined=True)
    world.start("a")
    assert not world.cluster.settled
    world.start("b")
    assert world.cluster.settled
    world.lose("a")
    assert world.cluster.settled


def test_a_snapshot_says_how_it_stands(pd: FakeCluster):
    pd.submit()
    pd.say("d", load(running=3, free_blocks=17))
    p, d = pd.cluster.snapshot(pd.now)
    assert (p["name"], p["label"], p["state"], p["in_flight"]) == ("p", "prefill", "ready", 1)
    assert (d["running"], d["free_blocks"], d["hands_over"]) == (3, 17, True)
    assert p["running"] is None


# -- anything


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_tokens_come_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Random events; the instances follow the protocol: each streams what it has from where that stopped."""
    monkeypatch.setattr(requests_table, "MAX_FRUITLESS", 1000)
    monkeypatch.setattr(requests_table, "MAX_LOSSES", 1000)
    rng = random.Random(seed)
    labels = rng.choice([dict(p="prefill", d="decode"), dict(a="mixed", b="mixed", c="mixed")])
    labels = rng.choice([labels, dict(p="prefill", q="prefill", d="decode", e="decode", m="mixed")])
    world = FakeCluster(retry_wait_s=1000, **labels)
    names = list(labels)
    requests = [world.submit(max_tokens=rng.randint(1, 12)) for _ in range(12)]
    seen = dict.fromkeys(names, 0)
    holders: dict[int, tuple[str, int, tuple[str, ...]]] = {}
    ends: dict[int, int] = {}
    origins: dict[int, str] = {}

    def read() -> None:
        """Instances take in what they were sent."""
        for name in names:
            for message in world.sent[name][seen[name] :]:
                kind = type(message).__name__
                if kind == "Submit":
                    begun = len(message.generated) // 4
                    plan = tuple(target.incarnation.split(".")[0] for target in message.decoders)
                    holders[message.id] = (name, begun, plan)
                    origins[message.id] = name
                    ends[message.id] = message.stopping.max_tokens
                elif kind == "Cancel" and holders.get(message.id, ("",))[0] == name:
                    del holders[message.id]
            seen[name] = len(world.sent[name])

    for _ in range(400):
        read()
        what = rng.random()
        name = rng.choice(names)
        ready = world.cluster.members[name].state == "ready"
        if what < 0.6 and holders:
            number = rng.choice(list(holders))
            at, count, plan = holders[number]
            if plan and rng.random() < 0.7:  # handed over, or lost on the way
                to = rng.choice(plan)
                if world.cluster.members[to].state == "ready":
                    holders[number] = (to, count, ())
                    if rng.random() < 0.5:
                        incarnation = world.cluster.members[to].incarnation
                        end = Finished(number, "handed_over", message=incarnation)
                        world.say(at, Outputs(finished=[end]))
                elif rng.random() < 0.3:
                    del holders[number]
                    world.finish(at, number, "lost")
                continue
            if count < ends[number]:
                holders[number] = (at, count + 1, ())
                world.tokens(at, number, 100 + count)
            else:
                del holders[number]
                world.finish(at, number)
        elif what < 0.7 and ready:
            world.lose(name)
            seen[name] = len(world.sent[name])
            for number in [n for n, holder in holders.items() if holder[0] == name]:
                del holders[number]
                if world.cluster.members[origins[number]].state == "ready":
                    world.finish(origins[number], number, "lost")
        elif what < 0.8 and not ready:
            world.start(name)
        elif what < 0.83:
            world.cluster.drain(name, world.now, rng.choice([None, 0.0, 5.0]))
        elif what < 0.87:
            world.cluster.undrain(name, world.now)
        elif what < 0.9:
            world.cluster.set_label(name, rng.choice(["mixed", "prefill", "decode"]), world.now)
        elif what < 0.93 and ready:
            world.say(name, load(running=rng.randint(0, 8), free_blocks=rng.randint(0, 1000)))
        else:
            world.pass_time(rng.random())
        world.pump()
        world.check_books()
        for request in requests:
            tokens = world.received(request)
            assert tokens == list(range(100, 100 + len(tokens)))
            if request.finished is not None:
                assert len(tokens) == request.stopping.max_tokens
    for name in names:
        world.cluster.undrain(name, world.now)
        if world.cluster.members[name].state != "ready":
            world.start(name)
    world.pump()
    read()
    assert {request.id for request in requests if request.finished is None} == set(holders)
    for number, (at, count, _) in list(holders.items()):
        for index in range(count, ends[number]):
            world.tokens(at, number, 100 + index)
        world.finish(at, number)
    for request in requests:
        assert world.received(request) == list(range(100, 100 + request.stopping.max_tokens))
        assert request.finished is not None
        assert request.error is None
    assert len(world.cluster) == 0
    world.check_books()


def test_garbage_is_refused(pd: FakeCluster):
    with pytest.raises(MalformedMessage):
        pd.say("p", Outputs(b"12345678", b""))
    with pytest.raises(MalformedMessage):
        pd.say("p", load(added=b"123"))
    pd.cluster.receive("p", welcome("another"), pd.now)
    assert pd.cluster.members["p"].incarnation == "p.1"


def test_output_from_an_instance_outside_the_plan_is_nobodys():
    world = FakeCluster(p="prefill", d="decode")
    request = world.submit()
    world.add("m")
    world.start("m")
    world.tokens("m", request.id, 66)
    world.finish("m", request.id, "stop")
    assert world.cancels("m") == [request.id]
    assert (world.received(request), request.finished, request.at) == ([], None, "p")


def test_an_instance_without_a_pool_does_not_take_part(pd: FakeCluster):
    """What an instance says of itself must not end the server: sizes are divided by."""
    pd.add("j", "mixed", joined=True)
    pd.start("j", block_size=0)
    assert pd.cluster.members["j"].state == "failed"
    request = pd.submit()
    assert request.plan == ("p", "d")
