"""A server as its operator sees it: the status line, the log as JSON, `baton top`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import httpx
import pytest

from baton.cli.top import Away, Refused, ask, screen
from tests.e2e.server import Server, child_pids, is_engine

SIMULATED = ("--executor", "simulated", "--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")
DEADLINE_S = 120.0


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


class Screen:
    """`baton` in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "baton", *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.seen = ""

    def expect(self, pattern: str) -> re.Match[str]:
        """Reads until the pattern shows, and forgets what came up to its end."""
        end = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{pattern!r} did not show: {self.seen[-2000:]!r}"
            self.seen += os.read(self._master, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_serve_keeps_a_status_line_below_its_log() -> None:
    cost = ("--simulated-cost", "0.02", "--speculation", "off")
    screen = Screen("serve", "--port", "0", "--executor", "simulated", *cost, "--log-level", "debug")
    try:
        address = screen.expect(r"address +(http://[0-9.:]+)/v1")[1]
        screen.expect(r"\r\x1b\[Kidle, 0 ended · KV 0.0 % · 1 of 1 instances ready\r")
        httpx.post(
            f"{address}/v1/completions",
            json={"prompt": "Once", "max_tokens": 100, "ignore_eos": True},
            headers={"x-request-id": "mine"},
            timeout=DEADLINE_S,
        ).raise_for_status()
        screen.expect(r"\r\x1b\[K1 running, 0 waiting · [0-9,]+ tokens/s · KV 0")
        screen.expect(r"\r\x1b\[K\d\d:\d\d:\d\d INFO    gateway     mine ")
        screen.expect(r"\r\x1b\[Kidle, 1 ended · ")
        (engine,) = [pid for pid in child_pids(screen.process.pid) if is_engine(pid)]
        os.kill(engine, signal.SIGKILL)
        screen.expect(r"\r\x1b\[K[^\r]*0 of 1 instances ready\r")
        screen.expect(r"\r\x1b\[K[^\r]*1 of 1 instances ready\r")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.process.wait(DEADLINE_S) == 0
    finally:
        screen.close()


def test_serve_starts_several_instances_tidily() -> None:
    """What they have in common is said once, what only who debugs wants to know is not, and nothing is wider
    than the terminal."""
    screen = Screen("serve", "--port", "0", "--prefill", "1", "--decode", "1", "--dtype", "float32")
    try:
        begin = screen.expect(r"loads baton-tiny.*(?=\r\x1b\[Kidle)")[0]
        for name in ("prefill-0", "decode-0"):
            assert re.search(rf"  {name} +ready, [0-9,]+ tokens of KV cache\r\n", begin)
        assert begin.count("  running   torch") == 1
        assert " INFO " not in begin
        lines = re.split(r"\r\n|\r\x1b\[K|\r", begin)
        assert max(map(len, lines)) < 120
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(DEADLINE_S) == 0
    finally:
        screen.close()


def test_top_shows_a_server_and_finds_it_again() -> None:
    with Server(*SIMULATED, "--admin-key", "sesame") as server:
        server.wait_ready()
        address = f"{server.url}/debug/overview"
        with pytest.raises(Refused, match=r"401.*admin key.*--api-key"):
            ask(address, "")
        with pytest.raises(Refused, match="no Baton server"):
            ask(f"{server.url}/docs", "sesame")
        once = subprocess.run(
            [sys.executable, "-m", "baton", "top", server.url],
            env={**os.environ, "BATON_TOP_KEY": "sesame"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        ).stdout
        assert re.search(r"prefill-0 +prefill +ready +0 +0 +0\.0 %", once)
        assert "\x1b" not in once
        screen = Screen("top", server.url, "--api-key", "sesame", "--interval", "0.2")
        screen.expect("decode-0.*decode.*ready")
    try:
        screen.expect("does not answer.*asking again")
        with pytest.raises(Away, match="does not answer"):
            ask(address, "sesame")
        port = server.url.rpartition(":")[2]
        with Server(*SIMULATED, "--admin-key", "sesame", "--port", port):
            screen.expect("asking again.*?prefill-0(?:(?!asking again).)*prefill-0")
        assert screen.process.poll() is None
    finally:
        screen.close()


@pytest.mark.parametrize(
    ("width", "instances", "requests"),
    [
        (
            120,
            "instance label state running waiting KV restarts",
            "request state at seconds prompt generated",
        ),
        (55, "instance label state running waiting KV", "request state at seconds generated"),
        (45, "instance state running waiting KV", "request state seconds generated"),
    ],
)
def test_top_leaves_out_what_matters_least(width: int, instances: str, requests: str) -> None:
    """All of it can be read; the ids of requests are cut before anything else is."""
    from rich.console import Console

    one = {"name": "decode-0", "label": "decode", "state": "ready", "draining": False, "paused": False}
    one |= {
        "drained": False,
        "running": 1234,
        "waiting": 0,
        "num_blocks": 100,
        "free_blocks": 25,
        "restarts": 3,
    }
    now = {
        "model": "m",
        "version": "1",
        "state": "ready",
        "paused": False,
        "leaving": False,
        "now": 8.0,
        "open": 1,
    }
    now |= {"totals": {"generated_tokens": 1, "prompt_tokens": 1, "handed_over": 0, "continued": 0}}
    now |= {"instances": [one], "requests": [("0123456789abcdef" * 2, 6.5, 70, 8, "decode", "decode-0")]}
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(screen(now, None, 5, width))
    lines = [line.split() for line in captured.get().splitlines()]
    head = lines.index(instances.split())
    assert {"decode-0", "ready", "1,234", "75.0"} <= set(lines[head + 1])
    head = lines.index(requests.split())
    assert {"decode", "1.5", "8"} <= set(lines[head + 1])
    assert lines[head + 1][0].startswith("01234567")
    assert max(map(len, captured.get().splitlines())) <= width
    assert re.search(r"KV 75\.0 %(   |$)", captured.get(), re.M)
    assert re.search(r"handed over 0(   |$)", captured.get(), re.M)
