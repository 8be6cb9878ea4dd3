"""Several instances behind one server, over HTTP: joining, leaving, labels, draining, losses, orders."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from baton.gateway.access import Access
from baton.gateway.instances import weights
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.messages.requests import QueryReply
from baton.protocol.weights import Weights
from tests.conftest import GENEROUS_S
from tests.gateway.conftest import END
from tests.gateway.echo_engine import EchoEngine
from tests.gateway.harness import GatewayServer
from tests.gateway.site import PATH, Site


def names(site: Site) -> list[str]:
    return [entry["name"] for entry in site.http.get(PATH).json()["instances"]]


def test_an_instance_joins_serves_and_leaves(site: Site):
    joined = site.join("far", label="decode")
    assert names(site) == ["instance-0", "far"]
    entry = site.see("far")
    assert (entry["label"], entry["joined"], entry["incarnation"]) == ("decode", True, "far.1")
    assert 25 < entry["expires_in_s"] <= 30
    assert site.put("far", label="prefill").json()["label"] == "decode", "a renewal changes no label"
    assert site.post("instance-0", state="draining").json()["drained"]
    answer = site.server.openai().completions.create(model="tiny", prompt=[50, 51], max_tokens=3)
    assert answer.usage.completion_tokens == 3
    assert len(joined.submits) == 1
    assert joined.hellos == 1, "a renewal is no new connection"
    site.post("instance-0", state="active").raise_for_status()
    assert site.http.delete(f"{PATH}/far").json() == {"name": "far", "state": "gone"}
    assert names(site) == ["instance-0"]
    assert site.http.get(f"{PATH}/far").status_code == 404
    assert site.http.delete(f"{PATH}/far").json()["error"]["code"] == "instance_not_found"


def test_a_stream_goes_on_elsewhere(site: Site, tokenizer: Tokenizer):
    """The instance is killed, then another one leaves, then the next one does not register again."""
    prompt = tokenizer.encode("the cat sat on the mat")
    site.server.engine.behaviour.step_s = 0.01
    site.server.engine.behaviour.hold_after = 60  # (so the stream cannot end before what is to happen)
    stream = site.server.openai().completions.create(
        model="tiny", prompt=prompt, max_tokens=120, stream=True, seed=4
    )
    text = "".join(next(stream).choices[0].text for _ in range(3))
    for name, hold_after in (("b", 80), ("c", 100), ("d", None)):
        behaviour = site.join(name, ttl_s=600).behaviour
        behaviour.step_s, behaviour.hold_after = 0.01, hold_after
    site.post("d", state="draining")
    site.post("c", state="draining")
    site.server.lose_engine()
    text += "".join(next(stream).choices[0].text for _ in range(3))
    assert site.see("b")["in_flight"] == 1
    site.post("c", state="active")
    site.http.delete(f"{PATH}/b").raise_for_status()
    site.joined["b"].wait_for(lambda: len(site.joined["b"].cancels) == 1, "the cancel")
    text += "".join(next(stream).choices[0].text for _ in range(3))
    assert site.see("c")["in_flight"] == 1
    site.post("d", state="active")
    site.put("c", ttl_s=1)  # its last registration, from here on
    site.until(lambda: site.see("d")["in_flight"] == 1)
    assert "renew" in site.see("c")["failure"]
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == tokenizer.decode((prompt * 120)[:120])
    seeds = {engine.submits[0].sampling.seed for engine in site.joined.values()}
    assert len(seeds) == 1
    metrics = site.http.get("/metrics").text
    assert 'baton:requests_continued_total{model_name="tiny"} 3.0' in metrics


def test_draining_moves_what_is_slow(site: Site):
    site.join("b")
    site.post("b", state="draining")
    site.server.engine.behaviour.mute = True
    answer = site.pool.submit(site.server.openai().completions.create, model="tiny", prompt=[9], max_tokens=2)
    site.until(lambda: site.see("instance-0")["in_flight"] == 1)
    entry = site.post("instance-0", state="draining", move_after_s=0.2).json()
    assert (entry["draining"], entry["drained"]) == (True, False)
    time.sleep(0.3)
    assert site.see("instance-0")["in_flight"] == 1, "there is no other one"
    site.post("b", state="active")
    assert answer.result(GENEROUS_S).usage.completion_tokens == 2
    assert site.see("instance-0")["drained"]


def test_nothing_serves_while_all_drain(site: Site):
    site.post("instance-0", state="draining")
    with pytest.raises(openai.InternalServerError, match="draining") as caught:
        site.server.openai().completions.create(model="tiny", prompt=[9], max_tokens=2)
    assert caught.value.status_code == 503
    assert site.http.get("/ready").status_code == 503


def test_a_full_instance_is_passed_over(site: Site):
    other = site.join("b")
    for engine in (site.server.engine, other):
        engine.behaviour.room = 0
    with pytest.raises(openai.RateLimitError, match="no room") as caught:
        site.server.openai().completions.create(model="tiny", prompt=[9], max_tokens=2)
    assert caught.value.response.headers["retry-after"]
    assert len(other.submits) == len(site.server.engine.submits) == 1
    other.behaviour.room = None
    for _ in range(4):
        site.server.openai().completions.create(model="tiny", prompt=[9], max_tokens=2)


def test_a_new_incarnation_replaces_the_old_one(site: Site):
    site.join("b").die()
    site.until(lambda: site.see("b")["state"] == "restarting")
    new = EchoEngine(incarnation="b.2", vocab=site.server.engine.vocab)
    site.joined["b"] = new
    site.put("b").raise_for_status()
    site.until(lambda: site.see("b")["state"] == "ready")
    assert (site.see("b")["incarnation"], site.see("b")["restarts"]) == ("b.2", 1)


def test_a_name_belongs_to_who_has_it(site: Site):
    site.join("b", process="one").die()
    site.until(lambda: site.see("b")["state"] == "restarting")
    site.joined["b"] = EchoEngine(incarnation="b.2", vocab=site.server.engine.vocab)
    site.join("b", process="one")
    thief = site.engine("b2")
    taken = site.http.put(
        f"{PATH}/b",
        json={
            "incarnation": "x",
            "endpoint": thief.endpoint,
            "label": "mixed",
            "ttl_s": 30,
            "process": "two",
            "secret": thief.secret,
        },
    )
    assert taken.status_code == 409
    assert "'b' is there already" in taken.json()["error"]["message"]
    assert (site.see("b")["incarnation"], thief.hellos) == ("b.2", 0)
    site.joined["b"].die()
    site.until(lambda: site.see("b")["state"] == "restarting")
    site.joined["b"] = EchoEngine(incarnation="y", vocab=site.server.engine.vocab)
    site.join("b", process="two")


def test_another_checkpoint_is_refused(site: Site):
    gateway, cluster = site.server.app.state.gateway, site.server.client.cluster
    site.engine("b")
    gateway.served = replace(gateway.served, checkpoint="aaaa")
    refusal = site.put("b", checkpoint="bbbb")
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "checkpoint")
    assert site.http.get(f"{PATH}/b").status_code == 404
    gateway.served = replace(gateway.served, checkpoint="aaaa", angles="short")
    refusal = site.put("b", checkpoint="aaaa", angles="long")
    assert refusal.status_code == 400
    assert "LongRoPE's 'long' angles" in refusal.json()["error"]["message"]
    site.join("b", checkpoint="aaaa", angles="short")
    cluster.weights = Weights(1, "cccc", "/c")  # (by /update_weights, also at "b")
    assert site.put("b", checkpoint="aaaa").status_code == 200, "a renewal"
    assert site.put("b", incarnation="b.2", checkpoint="aaaa").status_code == 400


def test_another_model_is_refused_with_the_reason(site: Site):
    site.engine("b", vocab=site.server.engine.vocab + 1)
    site.put("b").raise_for_status()
    site.until(lambda: site.see("b")["state"] == "failed")
    refusal = site.put("b")
    assert refusal.status_code == 400
    assert "vocabulary" in refusal.json()["error"]["message"]
    refusal = site.put("b", model="gpt-9")
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "model")
    assert "'tiny', 'alias'" in refusal.json()["error"]["message"]
    assert site.http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"incarnation": None}, "incarnation"),
        ({"incarnation": "a b"}, "incarnation"),
        ({"endpoint": "http://far:80"}, "endpoint"),
        ({"endpoint": "tcp://*:80"}, "endpoint"),
        ({"label": "chief"}, "label"),
        ({"ttl_s": 0.1}, "ttl_s"),
        ({"ttl_s": None}, "ttl_s"),
    ],
)
def test_a_wrong_registration_is_refused(site: Site, changes, param):
    site.engine("b")
    answer = site.put("b", **changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert names(site) == ["instance-0"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "label"),
        ({"label": "chief"}, "label"),
        ({"state": "dead"}, "state"),
        ({"move_after_s": 3}, "label"),
        ({"state": "active", "move_after_s": 3}, "move_after_s"),
        ({"state": "draining", "move_after_s": -1}, "move_after_s"),
    ],
)
def test_a_wrong_change_is_refused(site: Site, body, param):
    answer = site.post("instance-0", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert site.see("instance-0")["label"] == "mixed"


def test_own_instances_are_not_for_others(site: Site):
    site.engine("b")
    site.joined["instance-0"] = site.joined["b"]
    assert site.put("instance-0").status_code == 409
    del site.joined["instance-0"]
    assert site.http.delete(f"{PATH}/instance-0").status_code == 409
    assert site.http.put(f"{PATH}/a%20b", json={}).status_code == 400
    assert site.post("nobody", label="mixed").status_code == 404


def test_orders_go_to_everybody(site: Site):
    other = site.join("b")
    answer = site.http.post("/pause").json()
    assert set(answer["instances"]) == {"instance-0", "b"}
    assert site.http.get("/ready").json()["status"] == "paused"
    site.http.post("/resume").raise_for_status()
    assert site.http.get("/ready").status_code == 200
    assert set(site.http.get("/debug/ledger").json()["instances"]) == {"instance-0", "b"}
    assert site.http.get("/debug/ledger", params={"instance": "b"}).json() == {"what": "ledger"}
    other.behaviour.stats = {"running": 3}
    assert site.http.get("/stats").json()["instances"]["b"] == {"running": 3}
    assert site.http.get("/stats", params={"instance": "x"}).status_code == 404
    other.die()
    site.until(lambda: site.see("b")["state"] == "restarting")
    assert site.http.post("/pause").status_code == 200


def test_new_weights_are_for_all_instances_or_for_none(site: Site):
    own, other = site.server.engine, site.join("b")
    told: list[Weights] = []
    site.server.client.on_weights = told.append

    def update(path: str = "/weights") -> httpx.Response:
        return site.http.post("/update_weights", json={"path": path})

    for reply, status, reason in (
        ({"error": "no such directory", "code": "refused"}, 400, "b: no such directory; no instance"),
        ({"error": "a profile starts", "code": "busy"}, 409, "b: a profile starts; no instance"),
        ({"weights": "another"}, 400, "different checkpoints at '/weights' (instance-0: w:/weights, b: an"),
    ):
        other.behaviour.replies["check_weights"] = reply
        refusal = update()
        assert refusal.status_code == status
        assert reason in refusal.json()["error"]["message"]
        own.wait_for(lambda: own.queries["release_weights"] == own.queries["check_weights"], "the release")
    assert own.orders == other.orders == told == []
    del other.behaviour.replies["check_weights"]
    answer = update().json()
    assert answer["instances"]["b"]["weights"] == "w:/weights"
    assert own.orders == other.orders == told == [Weights(1, "w:/weights", "/weights")]
    for name in ("instance-0", "b"):
        expected = {"generation": 1, "name": "w:/weights", "path": "/weights"}
        assert site.see(name)["weights"] == expected
    assert site.put("b").json()["decided_weights"] == expected
    # One that is restarting cannot be asked; it says itself what it has when it is there again.
    other.die()
    site.until(lambda: site.see("b")["state"] == "restarting")
    refusal = update("/more")
    assert (refusal.status_code, "instance b is restarting" in refusal.text) == (503, True)
    site.joined["b"] = again = EchoEngine(incarnation="b.2", vocab=own.vocab)
    site.join("b")
    again.wait_for(lambda: again.orders == told, "the order")
    site.until(lambda: site.see("b")["weights"]["generation"] == 1)


def test_one_that_fails_while_it_loads_is_lost_and_the_others_have_the_new_weights(site: Site):
    own, other = site.server.engine, site.join("b")
    other.behaviour.answer_orders = False
    answer = site.pool.submit(site.http.post, "/update_weights", json={"path": "/weights"})
    other.wait_for(lambda: bool(other.orders), "the order")
    second = site.server.http()
    assert second.post("/update_weights", json={"path": "/other"}).json()["error"]["code"] == "busy"
    second.close()
    assert not answer.done()
    other.fail("it does not fit")
    body = answer.result(60).json()
    assert body["instances"]["instance-0"]["weights"] == "w:/weights"
    assert body["instances"]["b"] == {"error": "it does not fit", "code": "instance_restarting"}
    assert own.weights.generation == 1


def test_an_instance_that_dies_while_all_check_changes_nothing(site: Site):
    own, other = site.server.engine, site.join("b")
    other.behaviour.answer_queries = False
    answer = site.pool.submit(site.http.post, "/update_weights", json={"path": "/weights"})
    other.wait_for(lambda: other.queries["check_weights"] == 1, "the question")
    site.http.delete(f"{PATH}/b").raise_for_status()
    assert (answer.result(60).status_code, own.orders) == (503, [])
    assert site.http.post("/update_weights", json={"path": "/weights"}).status_code == 200


def test_who_is_ready_for_new_weights_is_asked_again_while_another_one_is_not(site: Site, monkeypatch):
    """So its lock lasts, and what it has prepared stays."""
    monkeypatch.setattr(weights, "_AGAIN_S", 0.02)
    own, other = site.server.engine, site.join("b")
    other.behaviour.answer_queries = False
    answer = site.pool.submit(site.http.post, "/update_weights", json={"path": "/weights"})
    own.wait_for(lambda: own.queries["check_weights"] >= 4, "it is asked again")
    assert (other.queries["check_weights"], own.orders, answer.done()) == (1, [], False)
    other.behaviour.answer_queries = True
    (question,) = (query for query in other.unanswered if query.what == "check_weights")
    other.say(QueryReply(question.id, {"path": "/weights", "weights": "w:/weights"}))
    assert answer.result(60).status_code == 200
    assert own.orders == other.orders == [Weights(1, "w:/weights", "/weights")]


def test_metrics_tell_instances_apart(site: Site):
    site.join("b", label="decode").behaviour.stats = {"running": 2}
    site.server.engine.behaviour.stats = {"running": 1}
    text = site.http.get("/metrics").text
    for name, running in (("instance-0", 1), ("b", 2)):
        labels = f'instance="{name}",model_name="tiny"'
        assert f"baton:num_requests_running{{{labels}}} {running}.0" in text
        assert f"baton:instance_up{{{labels}}} 1.0" in text
    assert 'baton:instance_label{instance="b",label="decode",model_name="tiny"} 1.0' in text


def test_the_cluster_needs_the_key(byte_level: Path, vocab: int):
    with (
        GatewayServer(byte_level, eos=END, vocab=vocab, access=Access(("user",), ("secret",))) as server,
        server.http() as http,
    ):
        assert http.get(PATH).status_code == 401
        assert http.get(PATH, headers={"authorization": "Bearer user"}).status_code == 403
        assert http.put(f"{PATH}/b", json={}).status_code == 401
        assert http.get(PATH, headers={"authorization": "Bearer secret"}).status_code == 200


def test_ready_when_all_own_instances_were(byte_level: Path, vocab: int):
    with GatewayServer(byte_level, eos=END, vocab=vocab) as server, server.http() as http:

        async def add() -> None:
            server.client.add("second", "decode")

        server.call(add())
        answer = http.get("/ready")
        assert (answer.status_code, "second" in answer.json()["reason"]) == (503, True)
        engine = EchoEngine(incarnation="s.1", vocab=vocab)
        server.call(server.client.instances["second"].attach(engine.endpoint, "s.1"))
        assert http.get("/ready").status_code == 200
        server.lose_engine()
        assert http.get("/ready").status_code == 200, "the other one serves"
        engine.die()
