"""An instance on two hosts: a network namespace is the other one.

Needs root, for the namespace; without it the module is skipped.  What takes longer (real models, more hosts,
a link that is down for long) is in `benchmarks/nodes.py`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.executor.simulated.executor import simulated_tokens
from tests.e2e.nodes import Hosts, NodeHost, hosts_or_skip, named, write_secret
from tests.e2e.server import Server, alive, child_pids
from tests.e2e.test_cluster import DEADLINE_S, InBackground, instances, until

SIMULATED = ("--executor", "simulated", "--simulated-cost", "0.004", "--max-model-len", "2048")
VOCAB = 1024
IDS = [(7 * place) % 900 + 50 for place in range(300)]
PORT = 8009


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(1) as made:
        yield made


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_secret(tmp_path_factory.mktemp("secrets") / "ours")


@pytest.fixture(scope="module")
def spread(hosts: Hosts, secret: str) -> Iterator[tuple[Server, NodeHost]]:
    """Four ranks on two hosts."""
    flags = (*SIMULATED, "--cluster-secret", secret)
    leader = f"{hosts.here}:{PORT}"
    of_leader = ("-tp", "4", "--nodes", "2", "--leader", leader, "--collective-encryption", "off")
    with (
        NodeHost(hosts.names[0], 1, leader, *flags) as node,
        Server(*flags, *of_leader, "--node-timeout", "6") as server,
    ):
        until(lambda: standing(server)["state"] == "ready", "both hosts are there")
        yield server, node


def standing(server: Server) -> dict[str, Any]:
    return instances(server)["mixed-0"]


def tokens(server: Server, count: int = 40) -> list[int]:
    body = {
        "prompt": IDS,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def link_of(server: Server) -> int:
    (found,) = [
        pid
        for engine in server.children()["engine"]
        for pid in child_pids(engine)
        if named(pid, b"relay.link")
    ]
    return found


def back_again(server: Server, first: str) -> None:
    until(
        lambda: (one := standing(server))["state"] == "ready" and one["incarnation"] != first,
        "the instance is whole again",
    )


def test_ranks_on_two_hosts_give_the_same_tokens_as_one(spread: tuple[Server, NodeHost]) -> None:
    server, node = spread
    assert tokens(server, 200) == simulated_tokens(IDS, 200, VOCAB)
    assert len(node.workers()) == 2
    roles = server.children()
    assert len(roles["worker"]) == 3, "two ranks, and the link"


def test_a_link_that_is_down_for_a_moment_costs_nothing_but_the_moment(
    spread: tuple[Server, NodeHost], hosts: Hosts
) -> None:
    server, _ = spread
    first = standing(server)["incarnation"]
    request = InBackground(lambda: tokens(server, 300))
    time.sleep(0.3)
    hosts.down(1)
    time.sleep(1.0)
    hosts.up(1)
    assert request.result() == simulated_tokens(IDS, 300, VOCAB)
    assert standing(server)["incarnation"] == first


@pytest.mark.parametrize("who", ["relay", "rank", "link"])
def test_a_process_that_is_killed_costs_the_incarnation_and_no_answer(
    spread: tuple[Server, NodeHost], who: str
) -> None:
    server, node = spread
    first = standing(server)["incarnation"]
    relay, ranks = node.relay(), node.workers()
    assert relay is not None
    seen = len(server.log())
    request = InBackground(lambda: tokens(server, 900))  # (seconds: it must be seen while it runs)
    until(lambda: server.metric("baton:num_requests_running") > 0, "it runs")
    victim = {"relay": relay, "rank": ranks[-1], "link": link_of(server)}[who]
    os.kill(victim, signal.SIGKILL)
    assert request.result() == simulated_tokens(IDS, 900, VOCAB)
    back_again(server, first)
    until(lambda: not any(map(alive, [relay, *ranks])), "nothing of the old incarnation is left")
    assert tokens(server) == simulated_tokens(IDS, 40, VOCAB)
    reason = {
        "relay": "node 1 has (ended|closed its connection)",
        "rank": f"node 1: worker rank 3 .process {victim}. was killed by SIGKILL",
        "link": f"process {victim}. was killed by SIGKILL",
    }[who]
    assert re.search(reason, server.log()[seen:]), server.log()[seen:]


def test_nobody_wakes_while_there_is_nothing_to_do(spread: tuple[Server, NodeHost]) -> None:
    """All threads of the link, the relay and its launcher: they say a few times that they are there."""
    server, node = spread
    relay = node.relay()
    assert relay is not None
    processes = [link_of(server), relay, node.process.pid]
    time.sleep(0.5)
    before = [wakeups(pid) for pid in processes]
    time.sleep(3.0)
    told = [wakeups(pid) - was for pid, was in zip(processes, before, strict=True)]
    assert all(many <= 40 for many in told), f"link, relay, launcher: {told} in 3 s"


def wakeups(pid: int) -> int:
    """How often a thread of the process has gone to sleep."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.M)
        total += int(found[1]) if found else 0
    return total


def test_a_strangers_relay_is_refused_and_the_instance_goes_on(
    spread: tuple[Server, NodeHost], hosts: Hosts, secret: str, tmp_path: Path
) -> None:
    server, _ = spread
    leader = f"{hosts.here}:{PORT}"
    network = hosts.here.rpartition(".")[0]
    with NodeHost(hosts.names[0], 7, leader, *SIMULATED, "--cluster-secret", secret) as other:
        assert other.process.wait(DEADLINE_S) == 1
        assert "--node 7: the instance has --nodes 2; give 1 to 1" in other.log()
    strange = write_secret(tmp_path / "strange")
    with NodeHost(hosts.names[0], 1, leader, *SIMULATED, "--cluster-secret", strange) as other:
        until(lambda: "waits for the leader" in other.log(), "nobody answers it")
        assert tokens(server) == simulated_tokens(IDS, 40, VOCAB)
        until(lambda: refusals(server, "handshake") > 0, "the link tells the engine, which counts them")
    assert any(f"a connection from {network}." in line and "is refused" in line for line in server.warnings())
    with socket.create_connection((hosts.here, PORT)) as other:
        other.sendall(
            bytes([255, *[0] * 8, 127, 3, 0])
            + b"CURVE"
            + bytes(47)
            + b"\x06"
            + (64 << 20).to_bytes(8, "big")
            + bytes(100_000)
        )
        until(lambda: refusals(server, "half_open") > 0, "who sends too much is ended and counted")
    assert tokens(server) == simulated_tokens(IDS, 40, VOCAB)


def refusals(server: Server, at: str) -> float:
    found = re.findall(
        rf'^baton:cluster_refusals_total{{at="{at}",.*}} (\S+)$', server.http.get("/metrics").text, re.M
    )
    return sum(map(float, found))


def test_the_leader_may_be_killed_and_the_others_wait_for_the_next(
    hosts: Hosts, secret: str, spread: tuple[Server, NodeHost]
) -> None:
    """The last test: another server takes the first one's place, and the node is the one that was there."""
    server, node = spread
    server.process.kill()
    server.process.wait()
    until(lambda: node.relay() is None, "its relay has ended")
    flags = (*SIMULATED, "--cluster-secret", secret)
    of_leader = (
        "-tp",
        "2",
        "--nodes",
        "2",
        "--leader",
        f"{hosts.here}:{PORT}",
        "--collective-encryption",
        "off",
    )
    with Server(*flags, *of_leader) as second:
        until(lambda: standing(second)["state"] == "ready", "the node has found it")
        assert tokens(second) == simulated_tokens(IDS, 40, VOCAB)
        assert len(node.workers()) == 1, "as the new leader says"
        assert node.leave() == 0, node.log()
