"""Several instances behind one server, as a user runs them: hand-over, loss, joining, labels, leaving."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, child_pids, is_engine

DEADLINE_S = 60.0
PROMPT = "Once upon a time there was a small boat that wanted to see the sea. " * 6
SIMULATED = ("--executor", "simulated", "--simulated-cost", "0.004", "--max-model-len", "2048")


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)
    return value


def instances(server: Server) -> dict[str, dict[str, Any]]:
    answer = server.http.get("/cluster/instances").raise_for_status().json()
    return {entry["name"]: entry for entry in answer["instances"]}


def change(server: Server, name: str, **body: Any) -> dict[str, Any]:
    result: dict[str, Any] = (
        server.http.post(f"/cluster/instances/{name}", json=body).raise_for_status().json()
    )
    return result


def handed_over(server: Server) -> float:
    return server.metric("baton:requests_handed_over_total")


def complete(server: Server, prompt: str = PROMPT, **settings: Any) -> tuple[list[int], str]:
    """One streamed completion: its tokens and how it ended."""
    settings = {"max_tokens": 40, "temperature": 0.0, **settings}
    extra = {"ignore_eos": True, "return_token_ids": True}
    tokens: list[int] = []
    finish = None
    with server.client().completions.create(
        model=server.client().models.list().data[0].id,
        prompt=prompt,
        stream=True,
        extra_body=extra,
        **settings,
    ) as stream:
        for chunk in stream:
            (choice,) = chunk.choices
            tokens += (choice.model_extra or {}).get("token_ids") or []
            finish = choice.finish_reason or finish
    assert finish is not None
    return tokens, finish


def nothing_is_held(server: Server) -> bool:
    ledgers = server.ledger()["instances"].values()
    return all(ledger["held"] == ledger["reserved"] == ledger["exported"] == 0 for ledger in ledgers)


class InBackground:
    """A call in a thread; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.error: BaseException | None = None
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the request did not end"
        if self.error is not None:
            raise self.error
        return self.value


class Joined:
    """`baton serve --instance --join`, as a context manager.  `server` None: it joins none."""

    def __init__(self, server: Server | None, *flags: str) -> None:
        handle, self._log_path = tempfile.mkstemp(prefix="baton-test-", suffix=".log")
        self._log = os.fdopen(handle, "wb")
        serve = [sys.executable, "-m", "baton", "serve", "--instance"]
        joined = [] if server is None else ["--join", server.url.removeprefix("http://")]
        self.process = subprocess.Popen(
            [*self.prefix(), *serve, *joined, *flags],
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )

    def prefix(self) -> list[str]:
        """Of the command."""
        return []

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()
        os.unlink(self._log_path)

    def log(self) -> str:
        return Path(self._log_path).read_text()

    def leave(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


# -- the embedded model, one instance of each label


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--disaggregation-threshold", "0")
    with Server("--prefill", "1", "--decode", "1", *flags) as server:
        yield server


def test_flags_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config file, the environment and the command line start a server, which says so."""
    path = tmp_path / "serve.yaml"
    path.write_text("max_num_seqs: 9\nmax-waiting: 9\nserved-model-name: [from-file]\napi-key: [user-key]\n")
    monkeypatch.setenv("BATON_MAX_WAITING", "8")
    monkeypatch.setenv("BATON_ADMIN_KEY", "boss-key")
    with Server(*SIMULATED, "--config", str(path), "--max-num-seqs", "7") as server:
        assert (
            server.http.get("/server_info", headers={"Authorization": "Bearer user-key"}).status_code == 403
        )
        answer = server.http.get("/server_info", headers={"Authorization": "Bearer boss-key"})
        info, flags = answer.json(), answer.json()["flags"]
        assert (flags["max_num_seqs"], flags["max_waiting"], flags["prefill"]) == (7, 8, 0)
        assert (info["instance"]["max_num_seqs"], info["instance"]["max_waiting"]) == (7, 8)
        assert info["model"]["names"] == ["from-file"]
        assert info["given"]["api_key"] == f"config file (api-key in {path})"
        assert info["given"]["admin_key"] == "environment (BATON_ADMIN_KEY)"
        assert info["given"]["max_num_seqs"] == "command line"
        assert "user-key" not in answer.text
        assert "boss-key" not in answer.text
        children = child_pids(server.process.pid)
        assert children
        for pid in children:
            for name in ("environ", "cmdline"):
                seen = Path(f"/proc/{pid}/{name}").read_bytes()
                assert b"boss-key" not in seen
                assert b"user-key" not in seen


def test_a_server_says_what_it_runs(pair: Server) -> None:
    assert {name: entry["label"] for name, entry in instances(pair).items()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }
    for name in ("prefill-0", "decode-0"):
        assert f"  {name}" in pair.banner
    assert len(pair.children()["engine"]) == len(pair.children()["worker"]) == 2


def test_a_server_says_what_its_memory_is_used_for(pair: Server) -> None:
    found = pair.http.get("/debug/memory").json()
    rows = {row["process"]: row for row in found["processes"]}
    ours = {"gateway", "fork server", *(f"{n} {p}" for n in instances(pair) for p in ("engine", "rank 0"))}
    assert ours <= set(rows)
    assert all(name.startswith("helper ") for name in set(rows) - ours)
    assert [rows[f"{name} rank 0"]["kv_pool_bytes"] > 0 for name in instances(pair)] == [True, True]
    assert found["sum"]["pss_bytes"] == sum(row["pss_bytes"] for row in rows.values())
    assert re.search(r"memory    \d+ MB: image \d+, KV \d+, private \d+", pair.banner)
    assert "  decode-0: " in pair.banner


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 11}])
def test_handed_over_or_not_the_answer_is_the_same(pair: Server, settings: dict[str, Any]) -> None:
    pair.http.post("/reset_prefix_cache").raise_for_status()
    before = handed_over(pair)
    there = complete(pair, **settings)
    assert handed_over(pair) == before + 1
    pair.http.post("/reset_prefix_cache").raise_for_status()
    for name in ("prefill-0", "decode-0"):  # a label is all that makes them different
        change(pair, name, label="mixed")
    try:
        change(pair, "decode-0", state="draining")
        assert complete(pair, **settings) == there
        assert handed_over(pair) == before + 1
    finally:
        change(pair, "decode-0", state="active")
        for name in ("prefill-0", "decode-0"):
            change(pair, name, label=name.removesuffix("-0"))
    until(lambda: nothing_is_held(pair), "every block is free or cached")


def test_a_client_sees_no_seam_when_the_decoding_instance_is_killed(pair: Server) -> None:
    tokens = 850  # (half a second)
    expected = complete(pair, max_tokens=tokens)
    continued = pair.metric("baton:requests_continued_total")
    workers = {pid: child_pids(pid) for pid in child_pids(pair.process.pid)}
    victim = next(pid for pid in workers if '"name":"decode-0"' in Path(f"/proc/{pid}/cmdline").read_text())
    request = InBackground(lambda: complete(pair, max_tokens=tokens))
    until(lambda: instances(pair)["decode-0"]["in_flight"] == 1, "it decodes")
    os.kill(victim, signal.SIGKILL)
    assert request.result() == expected
    assert pair.metric("baton:requests_continued_total") == continued + 1
    assert instances(pair)["prefill-0"]["state"] == "ready"
    until(lambda: instances(pair)["decode-0"]["restarts"] == 1, "it is started again")
    assert instances(pair)["decode-0"]["state"] == "ready"
    assert instances(pair)["prefill-0"]["restarts"] == 0
    before = handed_over(pair)
    assert complete(pair, max_tokens=tokens) == expected
    assert handed_over(pair) == before + 1
    until(lambda: nothing_is_held(pair), "every block is free or cached", 2.0)


# -- joining, with simulated executors, which start fast


@pytest.fixture(scope="module")
def gateway() -> Iterator[Server]:
    """A server whose own instance prefills only."""
    keys = ("--api-key", "none", "--admin-key", "boss")
    with Server(*SIMULATED, "--prefill", "1", "--disaggregation-threshold", "0", *keys) as server:
        server.http.headers["Authorization"] = "Bearer boss"
        yield server


def join(server: Server, *flags: str) -> Joined:
    return Joined(server, *SIMULATED, "--admin-key", "boss", *flags)


def test_an_instance_joins_is_handed_requests_and_leaves(gateway: Server) -> None:
    alone = complete(gateway, max_tokens=100)
    assert handed_over(gateway) == 0
    with join(gateway, "--label", "decode", "--name", "guest", "--shutdown-timeout", "0.5") as guest:
        until(lambda: instances(gateway).get("guest", {}).get("state") == "ready", "it joins")
        assert instances(gateway)["guest"]["label"] == "decode"
        assert complete(gateway, max_tokens=100) == alone
        assert handed_over(gateway) == 1
        until(lambda: nothing_is_held(gateway), "every block is free or cached", 2.0)
        long = InBackground(lambda: complete(gateway, max_tokens=1200))
        until(lambda: instances(gateway)["guest"]["in_flight"] == 1, "it decodes")
        assert guest.leave() == 0, guest.log()
        assert "guest" not in instances(gateway)
        tokens, finish = long.result()
    assert (len(tokens), finish) == (1200, "length")
    assert tokens[:100] == alone[0]
    until(lambda: gateway.ledger()["held"] == 0, "every block is free or cached")


def test_an_instance_that_joined_is_restarted_and_joins_again(gateway: Server) -> None:
    with join(gateway, "--label", "decode", "--name", "guest") as guest:
        first = until(lambda: instances(gateway).get("guest", {}).get("incarnation"), "it joins")
        until(lambda: instances(gateway)["guest"]["state"] == "ready", "it is ready")
        (engine,) = filter(is_engine, child_pids(guest.process.pid))
        long = InBackground(lambda: complete(gateway, max_tokens=800))
        until(lambda: instances(gateway)["guest"]["in_flight"] == 1, "it decodes")
        os.kill(engine, signal.SIGKILL)
        assert len(long.result()[0]) == 800
        until(lambda: instances(gateway)["guest"]["state"] == "ready", "it is back")
        assert instances(gateway)["guest"]["incarnation"] != first
        assert guest.leave() == 0, guest.log()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--served-model-name", "another"), "'another' is not served here"),
        (("--max-model-len", "1024"), "its context of 1024 tokens is shorter than the 2048"),
        (("--name", "prefill-0"), "'prefill-0' is there already"),
        (("--admin-key", "wrong"), "the admin key is missing or wrong"),
        (("--admin-key", "none"), "this is a user's key"),
    ],
)
def test_an_instance_that_does_not_fit_is_told_why(
    gateway: Server, flags: tuple[str, ...], words: str
) -> None:
    keys = () if "--admin-key" in flags else ("--admin-key", "boss")
    with Joined(gateway, *SIMULATED, *keys, *flags) as stranger:
        assert stranger.process.wait(DEADLINE_S) == 1
        line = stranger.log().strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert words in line


def test_a_server_that_comes_later_is_joined(tmp_path: Path) -> None:
    """A gateway without instances of its own, and an instance that was there before it."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    class Address:
        url = f"http://127.0.0.1:{port}"

    with Joined(Address(), *SIMULATED, "--name", "early") as early:  # type: ignore[arg-type]
        until(lambda: "does not answer" in early.log(), "it says that nobody is there")
        with Server(*SIMULATED, "--mixed", "0", "--port", str(port)) as server:
            assert len(complete(server)[0]) == 40
            assert list(instances(server)) == ["early"]
            assert early.leave() == 0
            until(lambda: server.http.get("/ready").status_code == 503, "nothing can serve")
