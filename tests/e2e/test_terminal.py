"""`baton serve` as its operator sees it: the log as JSON."""

from __future__ import annotations

import json

from tests.e2e.server import Server

SIMULATED = ("--executor", "simulated", "--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")


def test_every_process_logs_json() -> None:
    with Server(*SIMULATED, "--log-format", "json", "--log-level", "debug") as server:
        server.wait_ready()
        body = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
        server.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"}).raise_for_status()
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert all(set(line) >= {"time", "level", "logger", "process", "pid", "message"} for line in lines)
    said_by = {line["process"] for line in lines}
    assert said_by >= {"gateway", "prefill-0/0", "decode-0/0"}
    assert len({line["pid"] for line in lines}) == len(said_by)
    (end,) = [line for line in lines if line.get("request_id") == "mine" and "total=" in line["message"]]
    assert end["process"] == "gateway"
