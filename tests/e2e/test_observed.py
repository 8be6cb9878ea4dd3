"""What a server of a mixture, prefilled here and decoded there, tells of itself."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import GENEROUS_S
from tests.e2e.server import Server
from tests.e2e.test_mixtures import random_mixture
from tests.observe.prometheus import DASHBOARD, ROOT, RULES, names, program, queries


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory, _ = random_mixture("ernie4_5-moe", tmp_path_factory)
    flags = ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")
    with Server("--dtype", "float32", *flags, model=str(directory)) as server:
        server.wait_ready()
        load(server)
        yield server


def load(server: Server) -> None:
    """Some of each: streams, answers in one piece, choices, a shared beginning, a bad request."""

    def ask(number: int) -> None:
        body = {
            "prompt": "the same beginning of all " * 8 + str(number),
            "max_tokens": 12,
            "temperature": 1.0,
        }
        body |= {"stream": True} if number % 2 else {"n": 2}
        server.http.post("/v1/completions", json=body | {"ignore_eos": True}).raise_for_status()

    with ThreadPoolExecutor(8) as at_once:
        list(at_once.map(ask, range(16)))
    assert server.http.post("/v1/completions", json={"prompt": ""}).status_code == 400


def families(text: str) -> set[str]:
    """The names of samples."""
    return set(re.findall(r"^([a-z_:0-9]+)[{ ]", text, re.M))


def test_all_metrics_of_dashboard_and_alerts_exist(watched: Server) -> None:
    there = families(watched.http.get("/metrics").text)
    for file in (DASHBOARD, RULES):
        assert names(file.read_text(encoding="utf-8")) - there == set(), file.name


def test_the_document_lists_all_metrics(watched: Server) -> None:
    text = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.DOTALL)
    listed = set(re.findall(r"[a-z][a-z0-9_]+", " ".join(re.findall(r"`([^`]+)`", text))))
    families_ = re.findall(r"^# TYPE (\S+) (\S+)$", watched.http.get("/metrics").text, re.M)
    known = {name.removeprefix("baton:") for name, _ in families_}

    missing = {
        name
        for name in known - listed
        if not name.startswith(("http_connections", "http_body", "responses_kept"))
    }
    assert missing == set()


def test_what_hand_overs_cost_is_told(watched: Server) -> None:
    assert watched.metric("baton:handover_bytes_total") > 0
    text = watched.http.get("/metrics").text
    taken = re.search(r'baton:handovers_total\{instance="prefill-0",[^}]*outcome="taken"\} (\S+)', text)
    assert taken is not None
    assert float(taken[1]) > 0
    assert re.search(r'baton:handover_seconds_count\{instance="prefill-0",[^}]*\} [1-9]', text)
    assert re.search(r'baton:process_memory_bytes\{[^}]*owner="decode-0",part="kv_pool"\} [1-9]', text)


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_each_query_of_the_dashboard_finds_series(watched: Server, tmp_path: Path) -> None:
    """A real Prometheus scrapes the server and evaluates every query through its API."""
    address = watched.url.removeprefix("http://")
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{RULES}]\nscrape_configs: "
        f"[{{job_name: baton, honor_labels: true, static_configs: [{{targets: ['{address}']}}]}}]\n"
    )
    log = (tmp_path / "log").open("wb")
    command = [program("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{free.getsockname()[1]}"
    command += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={here}"]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + GENEROUS_S
        with httpx.Client(base_url=f"http://{here}", timeout=30) as http:
            while not _answers(http):
                assert process.poll() is None, (tmp_path / "log").read_text(errors="replace")
                assert time.monotonic() < deadline
                time.sleep(0.1)

            def ask(query: str) -> list[dict]:
                answer = http.get("/api/v1/query", params={"query": query}).json()
                assert answer["status"] == "success", (query, answer)
                return answer["data"]["result"]

            scrapes = "count_over_time(baton:requests_held[1m])"
            while not any(int(one["value"][1]) >= 2 for one in ask(scrapes)):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            load(watched)
            seen = watched.metric("baton:request_success_total")
            while sum(float(one["value"][1]) for one in ask("sum(baton:request_success_total)")) < seen:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            empty = {name: query for name, query in queries().items() if not ask(query)}
            assert empty == {}
            (group,) = http.get("/api/v1/rules").json()["data"]["groups"]
            assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
            assert [rule["lastError"] for rule in group["rules"] if rule.get("lastError")] == []
            rates = {
                one["metric"]["transport"]: float(one["value"][1])
                for one in ask("sum by (transport) (rate(baton:handover_bytes_total[1m]))")
            }
            assert rates["shared_memory"] > 0
    finally:
        process.terminate()
        process.wait()
        log.close()
