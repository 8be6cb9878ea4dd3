"""/pause in its modes, /resume, /is_paused: what running and new requests see."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer


@pytest.fixture(scope="module")
def module_server(byte_level, vocab) -> Iterator[GatewayServer]:
    with GatewayServer(byte_level, eos=END, vocab=vocab) as server:
        yield server


@pytest.fixture
def server(module_server: GatewayServer) -> Iterator[GatewayServer]:
    module_server.reset()
    module_server.engine.queries.clear()
    yield module_server
    module_server.reset()
    with module_server.http() as http:
        http.post("/resume").raise_for_status()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def pause(server: GatewayServer, **options: Any) -> httpx.Response:
    with server.http() as http:
        return http.post("/pause", params=options)


def status(server: GatewayServer) -> dict[str, Any]:
    with server.http() as http:
        return http.get("/is_paused").json()


def ask(server: GatewayServer, **more: Any) -> Callable[[], Any]:
    return lambda: server.openai().completions.create(model="tiny", prompt=[50, 51], max_tokens=8, **more)


def started(server: GatewayServer, pool: ThreadPoolExecutor, held: int = 3, **more: Any) -> Future[Any]:
    """A request that has `held` tokens and gets no more."""
    server.engine.behaviour.hold_after = held
    call = pool.submit(ask(server, **more))
    server.engine.wait_held(more.get("n", 1))
    return call


def num_aborted(server: GatewayServer) -> float:
    with server.http() as http:
        found = re.search(r'finished_reason="abort",model_name="tiny"} ([0-9.]+)', http.get("/metrics").text)
    return float(found[1]) if found else 0


def test_abort_ends_what_runs_with_what_it_has(server: GatewayServer, pool, tokenizer: Tokenizer):
    """Whole answers, streams, and sequences of a request that were not submitted yet."""
    half, before = tokenizer.decode([50, 51, 50]), num_aborted(server)
    whole = started(server, pool, n=2)
    stream = server.openai().completions.create(model="tiny", prompt=[50, 51], max_tokens=8, stream=True)
    text = ""
    while text != half:
        text += next(stream).choices[0].text
    answer = pause(server).raise_for_status().json()
    assert (answer["status"], answer["mode"], answer["aborted"]) == ("paused", "abort", 3)
    choices = whole.result(60).choices
    assert [(choice.text, choice.finish_reason) for choice in choices] == [(half, "abort")] * 2
    *_, last = stream
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "abort")
    server.engine.wait_for(lambda: server.engine.num_running == 0, "the cancels")
    queries = server.engine.queries
    assert queries["pause"] == queries["reset_prefix_cache"] == 1
    server.engine.wait_for(lambda: num_aborted(server) == before + 3, "the count of what was aborted")


def test_abort_ends_what_waits_for_its_turn(server: GatewayServer, pool):
    """More sequences than run at once: those that were not submitted yet end too."""
    limits = server.client.limits
    window = limits.max_num_seqs
    call = started(server, pool, n=window)
    more = pool.submit(
        lambda: server.openai().completions.create(
            model="tiny", prompt=[[50, 51]] * (window + 3), max_tokens=8
        )
    )
    server.engine.wait_held(2 * window)
    assert pause(server).json()["aborted"] == 2 * window + 3
    assert {choice.finish_reason for choice in more.result(60).choices} == {"abort"}
    assert len(call.result(60).choices) == window
    assert len(server.engine.submits) == 2 * window


def test_wait_lets_running_requests_end_and_holds_new_ones(server: GatewayServer, pool):
    first = started(server, pool)
    call = pool.submit(pause, server, mode="wait")
    server.engine.wait_for(lambda: status(server)["waiting"], "the wait")
    late = pool.submit(ask(server))
    with server.http() as http:
        held = 'requests_held{model_name="tiny"} 1.0'
        server.engine.wait_for(lambda: held in http.get("/metrics").text, "the second request")
        assert "new ones wait" in http.get("/ready").json()["reason"]
    assert pause(server, mode="keep").status_code == 409
    assert (server.engine.queries["pause"], len(server.engine.submits)) == (0, 1)
    server.engine.behaviour.hold_after = None
    answer = call.result(60).raise_for_status().json()
    assert (answer["mode"], answer["aborted"]) == ("wait", 0)
    assert first.result(60).choices[0].finish_reason == "length"
    assert late.result(60).choices[0].finish_reason == "length", "the engine's queue has it from then on"
    assert server.engine.queries["pause"] == server.engine.queries["reset_prefix_cache"] == 1


def test_waiting_ends_with_its_deadline_or_with_resume(server: GatewayServer, pool):
    first = started(server, pool)
    refusal = pause(server, mode="wait", timeout_s=0.01)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "timeout")
    assert not status(server)["is_paused"]
    call = pool.submit(pause, server, wait_for_inflight_requests=True)
    server.engine.wait_for(lambda: status(server)["waiting"], "the wait")
    late = pool.submit(ask(server))
    with server.http() as http:
        http.post("/resume").raise_for_status()
    refusal = call.result(60)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (409, "resumed")
    server.engine.wait_held(2)
    assert server.engine.queries["pause"] == 0
    server.engine.behaviour.hold_after = None
    assert first.result(60).choices[0].finish_reason == late.result(60).choices[0].finish_reason == "length"


def test_keep_touches_nothing(server: GatewayServer, pool):
    call = started(server, pool)
    answer = pause(server, mode="keep").json()
    assert (answer["mode"], answer["aborted"]) == ("keep", 0)
    assert server.engine.queries == {"pause": 1}
    assert (status(server)["is_paused"], status(server)["mode"]) == (True, "keep")
    pause(server, mode="keep", clear_cache=True).raise_for_status()
    assert server.engine.queries["reset_prefix_cache"] == 1
    with server.http() as http:
        assert http.post("/resume").json()["status"] == "resumed"
    assert status(server) == {
        "is_paused": False,
        "waiting": False,
        "mode": None,
        "paused_for_s": None,
        "resumes_in_s": None,
    }
    server.engine.behaviour.hold_after = None
    assert call.result(60).choices[0].finish_reason == "length"
    assert server.engine.cancels == []


def test_a_pause_may_end_by_itself(server: GatewayServer):
    pause(server, mode="keep", resume_after_s=500).raise_for_status()
    assert 400 < status(server)["resumes_in_s"] <= 500
    with server.http() as http:
        assert "ends by itself in" in http.get("/ready").json()["reason"]
    pause(server, mode="keep", resume_after_s=0.01).raise_for_status()
    server.engine.wait_for(lambda: not status(server)["is_paused"], "what the engine says of its end")
    assert server.engine.queries["resume"] == 0, "the engine ends it, this server may be gone by then"
    with server.http() as http:
        assert http.get("/ready").status_code == 200


def test_a_pause_by_another_gateway_shows(server: GatewayServer):
    server.engine.paused = True
    server.engine.say(server.engine.greeting())
    server.engine.wait_for(lambda: status(server)["is_paused"], "the news of the pause")
    assert status(server)["mode"] is None
    with server.http() as http:
        assert http.get("/ready").json()["reason"] == "paused; POST /resume ends it"
        http.post("/resume").raise_for_status()
    assert not status(server)["is_paused"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mode", "invalid"),
        ("mode", ""),
        ("clear_cache", "perhaps"),
        ("wait_for_inflight_requests", "2"),
        ("timeout_s", "0"),
        ("timeout_s", "nan"),
        ("resume_after_s", "inf"),
        ("resume_after_s", "soon"),
        ("moode", "keep"),
    ],
)
def test_options_are_checked(server: GatewayServer, option, value):
    answer = pause(server, **{option: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, option)
    assert error["message"].startswith(option)
    assert not server.engine.queries
