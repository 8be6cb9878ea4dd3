"""Two instances of two hosts each hand requests over: four network namespaces, the gateway is here.

Needs root, for the namespaces; without it the module is skipped.  Both instances have two ranks, one a host,
so rank 0 of the decoding one fetches its pages from the prefilling leader's host, and rank 1 from the other
host.  The test sees on the links that it is so.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.nodes import Hosts, JoinedFrom, NodeHost, hosts_or_skip, write_secret
from tests.e2e.server import Server
from tests.e2e.test_cluster import (
    InBackground,
    complete,
    handed_over,
    instances,
    nothing_is_held,
    until,
)
from tests.e2e.test_gateways import free_port

EXACT = ("--dtype", "float32", "--max-model-len", "1024")
"""Two numbers of ranks add in different orders, which in bfloat16 changes tokens."""
FLAGS = (*EXACT, "--num-threads", "1", "--kv-cache-memory-bytes", "64MB", "--transfer", "tcp")
"""(Between namespaces memory could be shared.)"""
START_S = 240.0
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 100},
    {"max_tokens": 100, "temperature": 0.9, "seed": 5},
    {"max_tokens": 100, "prompt": "One day a girl found a small key under a stone. " * 12},
]
PROMPT_BYTES = 3 * 32 * 2 * 4 * 2 * 64 * 4
"""What a rank has of full blocks of `PROMPT`: tokens, keys and values, layers, heads, head size, float32."""
ETH_P_ALL = 3


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(4) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What one rank on one host answers."""
    with Server(*EXACT) as alone:
        return [complete(alone, **asked) for asked in ASKED]


@pytest.fixture(scope="module")
def spread(
    hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, expected: list[Any]
) -> Iterator[tuple[Server, dict[str, NodeHost]]]:
    """The gateway, and the hosts that do not lead."""
    secret = ("--cluster-secret", write_secret(tmp_path_factory.mktemp("secrets") / "ours"))
    port, key = str(free_port()), "boss"
    others = {}
    with ExitStack() as stack:
        for first, label in ((0, "prefill"), (2, "decode")):
            leader = f"{hosts.addresses[first]}:8009"
            of_leader = ("--join", f"{hosts.here}:{port}", "--host", hosts.addresses[first], "--name", label)
            of_leader += ("-tp", "2", "--nodes", "2", "--leader", leader, "--collective-encryption", "off")
            of_leader += ("--label", label)
            other = NodeHost(hosts.names[first + 1], 1, leader, *FLAGS, *secret)
            others[label] = other
            stack.enter_context(other)
            stack.enter_context(JoinedFrom(hosts.names[first], *FLAGS, *secret, *of_leader))
        here = ("--host", hosts.here, "--peer-host", hosts.here, "--port", port, "--admin-key", key)
        server = Server(*EXACT, "--mixed", "0", "--disaggregation-threshold", "0", *secret, *here)
        stack.enter_context(server)
        server.http.headers["Authorization"] = f"Bearer {key}"
        until(lambda: whole(server), "both instances are whole", START_S)
        yield server, others


def whole(server: Server) -> bool:
    return [one["state"] for one in instances(server).values()] == ["ready", "ready"]


class Traffic:
    """Bytes that TCP carries on the links of these hosts, by (source, target), while the context lasts."""

    def __init__(self, *devices: str) -> None:
        self._sockets = []
        for device in devices:
            one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            one.bind((device, 0))
            one.settimeout(0.1)
            self._sockets.append(one)
        self._stopping = threading.Event()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Traffic:
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in self._sockets]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _run(self, one: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                packet = one.recv(1 << 17)
            except TimeoutError:
                continue
            if packet[12:14] == b"\x08\x00" and packet[23] == socket.IPPROTO_TCP:
                start = 14 + 4 * (packet[14] & 15)
                size = int.from_bytes(packet[16:18]) + 14 - start - 4 * (packet[start + 12] >> 4)
                pair = socket.inet_ntoa(packet[26:30]), socket.inet_ntoa(packet[30:34])
                self.bytes[pair] += size


def test_each_rank_fetches_its_pages_from_the_host_that_has_them(
    spread: tuple[Server, dict[str, NodeHost]], hosts: Hosts, expected: list[Any]
) -> None:
    server, _ = spread
    before = handed_over(server)
    with Traffic(hosts.link(3), hosts.link(4)) as traffic:
        assert [complete(server, **asked) for asked in ASKED] == expected
    assert handed_over(server) == before + len(ASKED)
    p0, p1, d0, d1 = hosts.addresses
    assert traffic.bytes[p0, d0] > PROMPT_BYTES
    assert traffic.bytes[p1, d1] > PROMPT_BYTES
    assert traffic.bytes[p0, d1] == traffic.bytes[p1, d0] == 0
    until(lambda: nothing_is_held(server), "every block is free or cached")


@pytest.mark.parametrize("label", ["decode", "prefill"])
def test_a_host_that_is_killed_during_hand_overs_costs_no_answer(
    spread: tuple[Server, dict[str, NodeHost]], expected: list[Any], label: str
) -> None:
    """The relay of one instance's other host; both are whole again afterwards."""
    server, others = spread
    server.http.post("/reset_prefix_cache").raise_for_status()
    first = instances(server)[label]["incarnation"]
    relay = others[label].relay()
    assert relay is not None
    requests = [InBackground(lambda asked=asked: complete(server, **asked)) for asked in ASKED]
    until(lambda: server.metric("baton:num_requests_running") > 0, "they run")
    os.kill(relay, signal.SIGKILL)
    assert [one.result() for one in requests] == expected
    until(
        lambda: whole(server) and instances(server)[label]["incarnation"] != first,
        "it is whole again",
        START_S,
    )
    before = handed_over(server)
    server.http.post("/reset_prefix_cache").raise_for_status()
    assert complete(server, **ASKED[0]) == expected[0]
    assert handed_over(server) == before + 1
    until(lambda: nothing_is_held(server), "every block is free or cached")
