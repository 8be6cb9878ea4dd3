"""Models, health, tokens, metrics, switches; clients that leave; instances that die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from baton import __version__
from baton.gateway.api import answers, states
from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def own(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    """A server whose engine may die."""
    with GatewayServer(byte_level, eos=END, vocab=vocab) as server:
        yield server


def test_codex_finds_a_catalogue_that_says_nothing(server: GatewayServer):
    with server.http() as http:
        plain = http.get("/v1/models").json()
        assert http.get("/v1/models?client_version=0.171.0").json() == {**plain, "models": []}
    assert "models" not in plain


def test_models(server: GatewayServer):
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    model = client.models.retrieve("alias")
    assert (model.object, model.owned_by, model.max_model_len) == ("model", "baton", 256)
    assert Tokenizer.from_directory(model.root).encode("a"), "load generators load the tokenizer from there"


def test_version_and_health(server: GatewayServer):
    with server.http() as http:
        assert http.get("/version").json() == {"version": __version__}
        assert http.get("/health").status_code == 200
        assert http.get("/ready").json() == {"status": "ready"}
        for path in ("/health", "/ready"):
            head = http.head(path)
            assert (head.status_code, head.content) == (200, b"")


def test_what_will_never_serve_again_is_not_alive(own: GatewayServer):
    """As when the last instance that joined is gone, and the server's own ones have been given up."""
    with own.http() as http:
        cluster = own.app.state.gateway.client.cluster
        (name,) = cluster.members
        cluster.failed(name, "it died too often", time.monotonic())
        answer = http.get("/health")
        assert answer.status_code == 503
        assert answer.json()["status"] == "failed"
        assert "it died too often" in answer.json()["reason"]


def test_how_the_server_was_started(server: GatewayServer):
    with server.http() as http:
        info = http.get("/server_info").json()
        assert info["version"] == __version__
        assert info["model"]["names"] == ["tiny", "alias"]
        assert "flags" not in info, "nothing but the launcher knows them"
        server.app.state.gateway.started_with = {"flags": {"port": 1}, "given": {"port": "command line"}}
        msgspec.json.decode(http.get("/server_info").content, type=answers.ServerInfo)
        assert http.get("/server_info").json()["flags"] == {"port": 1}
        server.app.state.gateway.started_with = {}


def test_what_memory_is_used_for(server: GatewayServer, monkeypatch: pytest.MonkeyPatch):
    gateway = server.app.state.gateway
    with server.http() as http:
        monkeypatch.setattr(gateway, "processes", lambda: {"gateway": os.getpid(), "a rank 0": 1 << 30})
        found = msgspec.json.decode(http.get("/debug/memory").content, type=states.MemoryUse)
        (process,) = found.processes
        assert (found.available, process.process, process.pid) == (True, "gateway", os.getpid())
        parts = (process.image_bytes, process.kv_pool_bytes, process.private_bytes)
        assert sum(parts) == process.pss_bytes == found.sum.pss_bytes > 0
        assert found.elsewhere == list(gateway.client.instances)

        def unknown(processes: object) -> None:
            raise FileNotFoundError(2, "No such file or directory", "/proc/1/smaps")

        monkeypatch.setattr("baton.gateway.http.routes.server.memory_of_all", unknown)
        found = msgspec.json.decode(http.get("/debug/memory").content, type=states.MemoryUse)
        assert (found.available, found.processes) == (False, [])
        assert "/proc/1/smaps" in found.reason


def test_switches_reach_the_engine(server: GatewayServer):
    with server.http() as http:
        assert http.get("/debug/ledger").json() == {"what": "ledger"}
        for what in ("reset_prefix_cache", "pause", "resume"):
            assert http.post(f"/{what}").json()["what"] == what
            assert http.get(f"/{what}").status_code == 405


def test_a_paused_instance_is_not_ready(own: GatewayServer):
    with own.http() as http:
        http.post("/pause").raise_for_status()
        response = http.get("/ready")
        assert (response.status_code, response.json()["status"]) == (503, "paused")
        assert "POST /resume" in response.json()["reason"]
        assert "retry-after" in response.headers
        assert http.head("/ready").status_code == 503
        assert http.get("/health").status_code == 200
        http.post("/resume").raise_for_status()
        assert http.get("/ready").json() == {"status": "ready"}
        http.post("/pause").raise_for_status()
        own.lose_engine()
        assert http.get("/ready").json()["status"] == "restarting"
        own.restart_engine()
        assert http.get("/ready").json() == {"status": "ready"}


def test_tokenize(server: GatewayServer, tokenizer: Tokenizer):
    with server.http() as http:
        ids = tokenizer.encode("the cat")
        answer = http.post("/tokenize", json={"prompt": "the cat", "return_token_strs": True}).json()
        assert answer["tokens"] == ids
        assert (answer["count"], answer["max_model_len"]) == (len(ids), 256)
        assert answer["token_strs"][0] == "<|bos|>"
        bare = http.post("/tokenize", json={"prompt": "the cat", "add_special_tokens": False}).json()
        assert bare["tokens"] == ids[1:]
        chat = http.post("/tokenize", json={"model": "tiny", "messages": USER}).json()
        assert tokenizer.decode(chat["tokens"], skip_special_tokens=False) == tokenizer.render_chat(USER)
        assert http.post("/detokenize", json={"tokens": ids[1:]}).json() == {"prompt": "the cat"}
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "x", "messages": USER}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [5, server.served.vocab_size]}),
            ("/detokenize", {"tokens": ["a"]}),
        ):
            assert http.post(path, json=body).status_code == 400
        outside = http.post("/detokenize", json={"tokens": [99_999]}).json()["error"]
        assert outside["param"] == "tokens"
        assert str(server.served.vocab_size - 1) in outside["message"]
        many = http.post("/detokenize", json={"tokens": ids[1:] * 3000}).json()["prompt"]
        assert many == "the cat" * 3000


def test_metrics(own: GatewayServer):
    own.engine.behaviour.stats = {
        "running": 2,
        "waiting": 1,
        "blocks": {"total": 10, "free": 3, "cached": 2, "held": 5},
        "preemptions": 7,
        "prefix_query_tokens": 100,
        "prefix_hit_tokens": 40,
    }
    own.openai().completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4, n=2)
    own.openai().completions.create(model="tiny", prompt=[END], max_tokens=9)
    with pytest.raises(openai.BadRequestError):
        own.openai().completions.create(model="tiny", prompt="x", n=0)
    with own.http() as http:
        http.get("/nowhere/1")
        while "num_requests_running" not in (text := http.get("/metrics").text):
            pass  # the engine has a second to answer, and a machine may pause for longer

        def value(name: str, **labels: str) -> float:
            wanted = {f'{key}="{label}"' for key, label in labels.items()}
            for found in re.finditer(rf"^baton:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
                if wanted <= set(found[1].split(",")):
                    return float(found[2])
            raise AssertionError(f"{name} {labels} is not in\n{text}")

        assert value("num_requests_running", model_name="tiny") == 2
        assert value("num_requests_waiting") == 1
        assert value("kv_cache_usage_perc") == 0.5
        assert value("num_preemptions_total") == 7
        assert value("prefix_cache_queries_total") == 100
        assert value("prefix_cache_hits_total") == 40
        assert value("prompt_tokens_total") == 7
        assert value("generation_tokens_total") == 9
        assert value("request_success_total", finished_reason="length") == 2
        assert value("request_success_total", finished_reason="stop") == 1
        assert value("time_to_first_token_seconds_count") == 3
        assert value("e2e_request_latency_seconds_count") == 3
        assert value("request_queue_time_seconds_sum") == pytest.approx(0.003)
        assert value("request_prompt_tokens_sum") == 7
        assert value("request_generation_tokens_sum") == 9
        assert value("instance_restarts_total") == 0
        assert value("http_requests_total", route="/v1/completions", status="200") == 2
        assert value("http_requests_total", route="/v1/completions", status="400") == 1
        assert value("http_requests_total", route="unmatched", status="404") == 1

        own.engine.behaviour.answer_queries = False
        asked = own.engine.queries["stats"]
        text = http.get("/metrics").text
        assert own.engine.queries["stats"] == asked + 1, "the engine was asked, and its answer not waited for"
        assert "num_requests_running" not in text
        assert value("generation_tokens_total") == 9


def test_one_line_a_request(server: GatewayServer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "baton"):
        server.engine.behaviour.num_cached = 2
        server.openai().completions.create(
            model="tiny", prompt=[5, 6, 7], max_tokens=4, extra_headers={"X-Request-Id": "r-5"}
        )
    (line,) = [message for message in caplog.messages if "r-5" in message]
    line = line.partition(" (")[0]  # (others are of tests before: how many lines were too many to be written)
    assert re.fullmatch(r"r-5 prompt=3 generated=4 cached=2 ttft=\d+\.\d+ total=\d+\.\d+ length", line)


def test_not_ready_yet(byte_level: Path, vocab: int):
    """HTTP answers from the first moment; requests get a 503 that says why."""
    with GatewayServer(byte_level, eos=END, vocab=vocab, attach=False) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        response = http.get("/ready")
        assert (response.status_code, response.json()["status"]) == (503, "starting")
        assert "retry-after" in response.headers
        assert http.get("/v1/models").status_code == 200
        assert http.get("/debug/ledger").status_code == 503
        assert http.get("/metrics").status_code == 200
        response = http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "instance_starting"
        assert "retry-after" in response.headers
        server.attach()
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_who_leaves_is_cancelled(server: GatewayServer, stream, begun):
    """All choices, at once, whether or not anything was sent."""
    server.engine.behaviour.mute = not begun
    server.engine.behaviour.hold_after = 2
    body = {"prompt": "the cat", "n": 3, "max_tokens": 200, "stream": stream, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        while len(server.engine.submits) < 3:
            await asyncio.sleep(0.005)
        if begun:
            server.engine.wait_held(3)
        await asyncio.sleep(0.05)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
    server.engine.wait_for(lambda: len(server.engine.cancels) == 3, "the cancel of all choices")
    assert server.engine.num_running == 0


async def test_who_stops_reading_is_cancelled(server: GatewayServer):
    server.engine.behaviour.hold_after = 9
    async with server.async_openai() as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=USER, stream=True, n=2, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
    server.engine.wait_for(lambda: len(server.engine.cancels) == 2, "the cancel")


def test_a_slow_reader_gets_everything(server: GatewayServer):
    """What it has not read coalesces; nobody else waits for it."""
    server.engine.behaviour.tokens_per_message = 10
    body = {"prompt": [50, 60, 70], "max_tokens": 250, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        other = server.openai().completions.create(model="tiny", prompt="x", max_tokens=2)
        assert other.usage.completion_tokens == 2
        time.sleep(0.1)
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    with server.http() as http:
        whole = http.post("/v1/completions", json=body | {"stream": False}).json()["choices"][0]["text"]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == whole


def in_thread(work):
    """Starts `work`; the returned function waits for its result or exception."""
    box = []

    def run():
        try:
            box.append((work(), None))
        except Exception as error:
            box.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(60)
        value, error = box[0]
        if error:
            raise error
        return value

    return result


def test_a_whole_answer_survives_the_instance(own: GatewayServer, tokenizer: Tokenizer):
    """The next incarnation goes on where the lost one stopped, with the same seeds."""
    own.engine.behaviour.hold_after = 3
    ids = tokenizer.encode("the cat")
    answer = in_thread(
        lambda: own.openai().completions.create(model="tiny", prompt="the cat", max_tokens=12, n=2, seed=9)
    )
    own.engine.wait_held(2)
    first = own.engine.submits
    running = own.client.cluster.table.running
    own.engine.wait_for(lambda: all(r.num_generated for r in list(running.values())), "the first tokens")
    own.lose_engine()
    with own.http() as http:
        response = http.get("/ready")
        assert response.json()["status"] == "restarting"
        assert "killed by a test" in response.json()["reason"]
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    own.restart_engine()
    done = answer()
    assert [choice.text for choice in done.choices] == [tokenizer.decode((ids * 12)[:12])] * 2
    assert done.usage.completion_tokens == 24
    second = own.engine.submits
    assert [s.sampling.seed for s in first] == [s.sampling.seed for s in second]
    assert not {s.id for s in first} & {s.id for s in second}
    assert all(s.generated for s in second)
    with own.http() as http:
        text = http.get("/metrics").text
    assert 'instance_restarts_total{instance="instance-0",model_name="tiny"} 1.0' in text
    assert 'requests_continued_total{model_name="tiny"} 2.0' in text


def test_a_stream_that_has_not_begun_survives_the_instance(own: GatewayServer):
    own.engine.behaviour.mute = True
    answer = in_thread(
        lambda: list(own.openai().completions.create(model="tiny", prompt=[50], max_tokens=3, stream=True))
    )
    own.engine.wait_for(lambda: len(own.engine.submits) == 1, "the submit")
    own.lose_engine()
    own.restart_engine()
    assert [chunk.choices[0].finish_reason for chunk in answer()][-1] == "length"


def test_a_stream_that_has_begun_goes_on(own: GatewayServer, tokenizer: Tokenizer):
    """Neither a death nor a failure that was told leaves a seam: no token is missing, none comes twice."""
    prompt = tokenizer.encode("the cat sat on the mat")
    running = own.client.cluster.table.running

    def arrived(count: int) -> None:
        """The engine is held there, so the stream is in its middle when the engine is lost."""
        own.engine.wait_for(
            lambda: [request.num_generated for request in list(running.values())] == [count], f"token {count}"
        )

    own.engine.behaviour.hold_after = 10
    stream = own.openai().completions.create(
        model="tiny", prompt=prompt, max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    pieces = [next(stream).choices[0].text]
    arrived(10)
    own.lose_engine()
    own.restart_engine(hold_after=30)
    arrived(30)
    own.engine.fail("worker 0 was killed")
    own.restart_engine()
    rest = list(stream)
    usage = rest.pop().usage
    pieces += [chunk.choices[0].text for chunk in rest]
    assert "".join(pieces) == tokenizer.decode((prompt * 60)[:60])
    assert rest[-1].choices[0].finish_reason == "length"
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 60)


def test_a_stream_ends_with_an_error_if_nothing_comes_back(byte_level: Path, vocab: int):
    """One error event, then the end."""
    with GatewayServer(byte_level, eos=END, vocab=vocab, retry_wait_s=0.2) as server:
        server.engine.behaviour.hold_after = 5
        body = {"prompt": [50], "max_tokens": 200, "stream": True}
        with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert "choices" in next(lines)
            server.engine.fail("worker 0 was killed")
            rest = [line for line in lines if line]
        assert '"code":"instance_lost"' in rest[-1]
        assert "worker 0 was killed" in rest[-1]
        assert "not back within" in rest[-1]
        assert sum("error" in line for line in rest) == 1


def test_an_instance_that_does_not_come_back(byte_level: Path, vocab: int):
    with GatewayServer(byte_level, eos=END, vocab=vocab, retry_wait_s=0.2) as server:
        server.engine.behaviour.mute = True
        answer = in_thread(lambda: server.openai().completions.create(model="tiny", prompt="x"))
        server.engine.wait_for(lambda: len(server.engine.submits) == 1, "the submit")
        server.lose_engine()
        with pytest.raises(openai.InternalServerError, match="not back within") as caught:
            answer()
        assert (caught.value.status_code, caught.value.code) == (503, "instance_lost")
