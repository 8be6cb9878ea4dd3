"""--otlp-traces-endpoint with a real collector: spans, their parents and their times; and that nothing waits
for one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.killing import engines
from tests.e2e.server import Server
from tests.e2e.test_disaggregation import CLUSTER
from tests.e2e.test_events import PROMPT, complete, logged
from tests.observe.otlp import DEADLINE_S, Collector, Span, plain

SMALL = ("--executor", "simulated", "--num-gpu-blocks-override", "64", "--max-model-len", "256")
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER_KIND, INTERNAL_KIND, ERROR_CODE = 2, 1, 2


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector(grpc=True) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Server]:
    flags = ("--prefill", "1", "--decode", "2", *CLUSTER)
    with Server(*flags, "--otlp-traces-endpoint", collector.url) as running:
        yield running


def check(root: Span, children: list[Span]) -> None:
    """The children leave no gap in the request's span, on the clock of the wall."""
    assert {child.trace_id for child in children} == {root.trace_id}
    assert all(child.kind == INTERNAL_KIND for child in children)
    assert len({child.span_id for child in children}) == len(children)
    assert children[0].start_time_unix_nano == root.start_time_unix_nano
    assert children[-1].end_time_unix_nano == root.end_time_unix_nano
    for child, after in pairwise(children):
        assert child.start_time_unix_nano <= child.end_time_unix_nano == after.start_time_unix_nano


def test_a_handed_over_request_is_told_as_the_log_tells_it(cluster: Server, collector: Collector) -> None:
    before = time.time_ns()
    complete(cluster, "whole", 20)
    after = time.time_ns()
    root, children = collector.request("whole")
    check(root, children)
    assert before < root.start_time_unix_nano < root.end_time_unix_nano < after
    assert (root.name, root.kind, root.parent_span_id) == ("text_completion baton-tiny", SERVER_KIND, b"")
    about = plain(root.attributes)
    assert about["gen_ai.operation.name"] == "text_completion"
    assert about["gen_ai.provider.name"] == "baton"
    assert about["gen_ai.request.model"] == about["gen_ai.response.model"] == "baton-tiny"
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (200, 20)
    assert about["gen_ai.usage.cache_read.input_tokens"] == 0
    assert (about["gen_ai.request.max_tokens"], about["gen_ai.request.seed"]) == (20, 1)
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert about["gen_ai.response.id"] == "cmpl-whole"
    assert about["gen_ai.request.stream"] is False

    found = logged(cluster, "whole")
    (trail,) = found.trails or []
    told = [(child.name, plain(child.attributes)["baton.instance"]) for child in children]
    assert told == [(span.name, span.where) for span in trail.spans]
    for child, span in zip(children, trail.spans, strict=True):
        took_ms = (child.end_time_unix_nano - child.start_time_unix_nano) / 1e6
        assert took_ms == pytest.approx(span.end_ms - span.begin_ms, abs=0.01)
    assert about["gen_ai.latency.time_to_first_token"] == pytest.approx(found.first_token_s, abs=1e-4)
    (handover,) = [plain(child.attributes) for child in children if child.name == "handover"]
    fetched = [event.detail for event in trail.events if event.what == "fetched"]
    assert handover["baton.handover.bytes"] == sum(one["bytes"] for one in fetched) > 0
    assert handover["baton.handover.transport"] == "shared_memory"
    assert handover["baton.handover.fetch_seconds"] > 0
    assert [handover[f"baton.handover.{end}"] for end in ("from", "to")] == found.instances
    assert handover["baton.handover.outcome"] == "taken"
    (resource,) = {tuple(sorted(one.items())) for one in collector.resources}
    assert dict(resource)["service.name"] == "baton"


def ask(server: Server, id: str, path: str = "/v1/completions", **more: Any) -> Any:
    headers = more.pop("headers", {})
    body = {"prompt": PROMPT[:20], "max_tokens": 4, "request_id": id, **more}
    return server.http.post(path, json=body, headers=headers).raise_for_status()


def test_a_request_is_a_child_of_its_clients_span(cluster: Server, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=a"}
    for stream in (False, True):
        answer = ask(cluster, f"child-{stream}", headers=headers, stream=stream)
        root, children = collector.request(f"child-{stream}")
        check(root, children)
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, CALLER)
        assert root.trace_state == "vendor=a"
        assert answer.headers["traceresponse"] == f"00-{TRACE}-{root.span_id.hex()}-01"
        about = plain(root.attributes)
        assert ("gen_ai.response.time_to_first_chunk" in about) == stream


def test_who_is_not_traced_is_not_told_of(cluster: Server, collector: Collector) -> None:
    """`parentbased_always_on`, the default: a client that does not record decides it for all below."""
    quiet = ask(cluster, "quiet", headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
    assert "traceresponse" not in quiet.headers
    wrong = ask(cluster, "wrong", headers={"traceparent": f"00-{'0' * 32}-{CALLER}-01"})
    root, _ = collector.request("wrong")  # (it ended later, so the other one would be there)
    assert root.parent_span_id == b""
    assert wrong.headers["traceresponse"].split("-")[1] == root.trace_id.hex()
    assert "quiet" not in {plain(span.attributes).get("baton.request.id") for span in collector.spans}


def test_each_of_several_sequences_and_each_api_is_told(cluster: Server, collector: Collector) -> None:
    ask(cluster, "two", n=2, seed=(1 << 63) + 1)
    root, children = collector.request("two")
    assert plain(root.attributes)["gen_ai.request.choice.count"] == 2
    for index in range(2):
        check(root, [one for one in children if plain(one.attributes)["baton.sequence"] == index])
    messages = {"prompt": None, "messages": [{"role": "user", "content": "Hi"}]}
    ask(cluster, "chat", "/v1/chat/completions", **messages)
    root, _ = collector.request("chat")
    assert root.name == "chat baton-tiny"
    assert plain(root.attributes)["gen_ai.response.id"] == "chatcmpl-chat"


@pytest.mark.slow
def test_a_continuation_is_an_event(cluster: Server, collector: Collector) -> None:
    (model,) = cluster.http.get("/v1/models").json()["data"]
    most = model["max_model_len"] - len(PROMPT)
    body = {"prompt": PROMPT, "max_tokens": most, "ignore_eos": True, "request_id": "killed", "stream": True}
    with cluster.http.stream("POST", "/v1/completions", json=body, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        os.kill(engines(cluster)[logged(cluster, "killed").instances[-1]], signal.SIGKILL)
        assert '"finish_reason":"length"' in list(lines)[-1]
    root, children = collector.request("killed")
    check(root, children)
    assert [child.name for child in children].count("decode") == 2
    (lost,) = [child for child in children if child.name == "lost"]
    (event,) = root.events
    about = plain(event.attributes)
    assert event.name == "baton.continued"
    assert event.time_unix_nano == pytest.approx(lost.end_time_unix_nano, abs=1000)
    assert 0 < about["baton.tokens_kept"] < most
    again = plain(children[children.index(lost) + 1].attributes)
    assert [about[name] == again[name] for name in ("baton.instance", "baton.attempt")] == [True, True]
    assert root.status.code != ERROR_CODE


def counter(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"baton:{name}"))


def test_the_environment_says_how_and_the_end_sends_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector(grpc=False) as collector:
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
        with Server(*SMALL, "--otlp-traces-endpoint", collector.url) as server:
            ask(server, "last")
            assert collector.spans == []
        root, children = collector.request("last")
        check(root, children)
        assert {one["service.name"] for one in collector.resources} == {"mine"}
        assert collector.headers[0]["x-token"] == "secret"
        assert collector.headers[0]["path"] == "/v1/traces"


def test_samplers_of_the_environment_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with (
        Collector(grpc=False) as collector,
        Server(*SMALL, "--otlp-traces-endpoint", collector.url) as server,
    ):
        assert "traceresponse" not in ask(server, "none").headers
        ask(server, "told", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
        collector.request("told")
        assert len({span.trace_id for span in collector.spans}) == 1


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_nobody_waits_for_a_collector_that_says_nothing(
    kill: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections, and that is all."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        with Server(*SMALL, "--otlp-traces-endpoint", url) as server:
            for number in range(5):
                ask(server, f"r{number}")
            children = list(engines(server).values())
            server.process.send_signal(kill)
            server.process.wait(DEADLINE_S)  # (5 s for what is left, and the rest of the end)
            end = time.monotonic() + DEADLINE_S
            for pid in children:
                while Path(f"/proc/{pid}").exists():
                    assert time.monotonic() < end
                    time.sleep(0.05)


def test_what_a_collector_does_not_take_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with Server(*SMALL, "--otlp-traces-endpoint", url) as server:
        ask(server, "lost")
        end = time.monotonic() + DEADLINE_S
        while not counter(server, 'traces_dropped_total{model_name="baton-tiny",reason="not_sent"}'):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert counter(server, "traces_sent_total") == 0
        assert "the collector does not take spans" in server.log()


def test_without_the_extra_the_flag_says_what_to_install(tmp_path: Path) -> None:
    hidden = tmp_path / "opentelemetry"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("")
    command = [
        sys.executable,
        "-m",
        "baton",
        "serve",
        "--otlp-traces-endpoint",
        "http://127.0.0.1:1",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode != 0
    assert "pip install 'baton-llm[otel]'" in done.stderr
    assert "--otlp-traces-endpoint" in done.stderr
    assert "Traceback" not in done.stderr
