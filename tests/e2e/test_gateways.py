"""Two gateways that share two instances: orders, a gateway that is killed, one that takes its
place, one that is told to leave."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import Server, child_pids
from tests.e2e.test_cluster import (
    DEADLINE_S,
    SIMULATED,
    InBackground,
    Joined,
    change,
    complete,
    instances,
    nothing_is_held,
    until,
)

LONG = 500
"""Tokens: 2 s, if nothing stands still."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Site:
    """Gateways at two addresses, and the instances `one` and `two` that know both."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.ports = [free_port(), free_port()]
        joins = [flag for port in self.ports for flag in ("--join", f"127.0.0.1:{port}")]
        self.joined = {
            name: stack.enter_context(Joined(None, *joins, *SIMULATED, "--name", name))
            for name in ("one", "two")
        }
        self.gateways = [self.start(0), self.start(1)]

    def start(self, number: int) -> Server:
        flags = (
            "--mixed",
            "0",
            "--port",
            str(self.ports[number]),
            "--drain-delay",
            "600",
            "--shutdown-timeout",
            "600",
        )
        return self._stack.enter_context(Server(*SIMULATED, *flags))

    def replace(self, number: int) -> Server:
        """A new gateway at the address of one that is gone."""
        self.gateways[number] = server = self.start(number)
        return server

    def incarnations(self, number: int) -> dict[str, str]:
        """As this gateway knows them, of those that it uses."""
        found = instances(self.gateways[number])
        return {name: one["incarnation"] for name, one in found.items() if one["state"] == "ready"}

    def pids(self) -> dict[str, list[int]]:
        """Of the processes below each instance's own."""
        return {name: sorted(child_pids(one.process.pid)) for name, one in self.joined.items()}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        site = Site(stack)
        for number in (0, 1):
            until(lambda number=number: len(site.incarnations(number)) == 2, "both use both instances")
        yield site


def running(server: Server) -> float:
    """Requests in the engines, whoever's they are."""
    return server.metric("baton:num_requests_running")


def test_both_serve(site: Site) -> None:
    first, second = site.gateways
    assert site.incarnations(0) == site.incarnations(1)
    assert complete(first) == complete(second)
    both = [InBackground(lambda server=server: complete(server, max_tokens=300)) for server in site.gateways]
    assert both[0].result() == both[1].result()


def test_orders_at_one_hold_at_the_other(site: Site) -> None:
    first, second = site.gateways

    def seen(server: Server, **expected: Any) -> None:
        until(lambda: expected.items() <= instances(server)["two"].items(), f"{expected}")

    change(first, "two", label="decode")
    seen(second, label="decode")
    change(second, "two", label="mixed")
    seen(first, label="mixed")
    change(first, "two", state="draining")
    seen(second, draining=True)
    change(second, "two", state="active")
    seen(first, draining=False)
    first.http.post("/pause", params={"mode": "keep"}).raise_for_status()
    until(lambda: second.http.get("/ready").status_code == 503, "the other one cannot serve")
    assert second.http.get("/is_paused").json()["is_paused"] is True
    second.http.post("/resume").raise_for_status()
    until(lambda: first.http.get("/ready").status_code == 200, "it can serve again")


def test_of_a_gateway_that_is_killed_nothing_is_left_and_a_new_one_takes_its_place(site: Site) -> None:
    """The instances stand still meanwhile, so it is not by a token that they find out."""
    first, second = site.gateways
    before, pids = site.incarnations(1), site.pids()
    change(second, "two", label="decode")
    change(second, "two", label="mixed")
    expected = complete(second, max_tokens=LONG)
    lost = [InBackground(lambda: complete(first, max_tokens=LONG)) for _ in range(3)]
    kept = InBackground(lambda: complete(second, max_tokens=LONG))
    until(lambda: running(second) == 4, "all run")
    second.http.post("/pause", params={"mode": "keep"}).raise_for_status()
    first.process.send_signal(signal.SIGKILL)
    for one in lost:
        with pytest.raises((httpx.TransportError, openai.APIConnectionError)):
            one.result()
    until(lambda: running(second) == 1, "nothing of the dead one's is there")
    second.http.post("/resume").raise_for_status()
    assert kept.result() == expected
    until(lambda: nothing_is_held(second), "every block is free or cached")

    third = site.replace(0)
    until(lambda: len(site.incarnations(0)) == 2, "it uses both instances")
    assert site.incarnations(0) == site.incarnations(1) == before
    assert site.pids() == pids
    assert complete(third, max_tokens=LONG) == expected
    assert {entry["restarts"] for entry in instances(second).values()} == {0}


def test_a_gateway_that_is_told_to_leave_serves_until_others_have_noticed(site: Site) -> None:
    first, second = site.gateways
    before, pids = site.incarnations(1), site.pids()
    expected = complete(second, max_tokens=LONG)
    first.process.send_signal(signal.SIGTERM)
    until(lambda: first.http.get("/ready").status_code == 503, "it says that it leaves")
    assert len(complete(first)[0]) == 40, "new connections are served"
    last = InBackground(lambda: complete(first, max_tokens=LONG))
    until(lambda: running(second) == 1, "it runs")
    first.process.send_signal(signal.SIGTERM)  # (the drain delay is over)
    until(lambda: first.http.get("/health").status_code == 503, "new connections are refused")
    assert last.result() == expected
    assert first.process.wait(DEADLINE_S) == 0
    until(lambda: nothing_is_held(second), "every block is free or cached")
    assert complete(second, max_tokens=LONG) == expected
    assert (site.incarnations(1), site.pids()) == (before, pids)
