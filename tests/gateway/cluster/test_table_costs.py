"""What the table of requests costs: counted in operations, which do not grow with what waits there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from baton.gateway.cluster import table as requests_table
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import InstanceUnavailable
from baton.gateway.instances.inbox import Inbox
from baton.protocol.rules.prefix_keys import short_keys
from tests.gateway.fake_cluster import FakeCluster, error_of


def lines_of(work: Callable[[], Any]) -> int:
    """Lines of the table's module that are run."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != requests_table.__file__:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


class Counting(EngineRequest):
    """Knows how often a list compared it with something else."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counting.compared += 1
        return self is other

    def __hash__(self) -> int:
        return id(self)


def parked(count: int) -> tuple[FakeCluster, list[EngineRequest]]:
    """A cluster whose only instance is restarting, and what waits for it."""
    cluster = FakeCluster(p="mixed")
    cluster.lose("p")
    requests = []
    for _ in range(count):
        template = cluster.request()
        fields = [getattr(template, name) for name in ("name", "prompt", "sampling", "stopping", "priority")]
        requests.append(Counting(*fields, "", Inbox()))
        cluster.cluster.enqueue(requests[-1], cluster.now)
    return cluster, requests


def test_the_next_deadline_costs_the_same_however_many_are_parked():
    few, many = parked(3)[0].cluster, parked(3000)[0].cluster
    assert few.next_deadline() == many.next_deadline() is not None
    assert lines_of(few.next_deadline) == lines_of(many.next_deadline)


def test_a_cancel_costs_the_same_however_many_are_parked():
    costs = []
    for count in (10, 3000):
        cluster, requests = parked(count)
        Counting.compared = 0
        costs.append(lines_of(lambda c=cluster, r=requests: c.cancel(r[-5])))
        assert Counting.compared == 0
    assert costs[0] == costs[1]
    cluster.cluster.cancel_all(InstanceUnavailable("over", code="over"))
    assert Counting.compared == 0
    assert all(request.error is not None for request in requests if request is not requests[-5])
    assert cluster.cluster.next_deadline() is None


def test_the_deadlines_of_parked_requests_are_kept_through_all_that_happens():
    """Some are cancelled, some are placed and come back, and each one waits exactly as long as it may."""
    cluster, requests = parked(6)
    cluster.cancel(requests[0])
    cluster.pass_time(4)
    late = cluster.request()
    cluster.cluster.enqueue(late, cluster.now)
    cluster.start("p")
    assert not cluster.cluster.parked
    cluster.lose("p")
    assert len(cluster.cluster.parked) == 6
    cluster.pass_time(9.9)
    assert len(cluster.cluster.parked) == 6
    cluster.pass_time(0.2)
    assert not cluster.cluster.parked
    assert {error_of(request).code for request in (*requests[1:], late)} == {"instance_lost"}
    assert cluster.cluster.next_deadline() is None


def test_a_gateway_that_was_away_gives_nobody_up_for_that():
    """Its timer runs before it reads that the instance is there again."""
    cluster, _ = parked(2)
    cluster.now += 60
    cluster.cluster.on_clock(cluster.now)
    assert len(cluster.cluster.parked) == 2
    cluster.start("p")
    assert [len(cluster.submits("p")), cluster.cluster.parked] == [2, ()]


def test_the_keys_of_a_prompt_are_made_once(monkeypatch: pytest.MonkeyPatch):
    """Over losses, for every instance of one block size, and for all sequences of a request."""
    made: list[int] = []

    def counted(tokens: bytes, salt: str, block_size: int) -> list[int]:
        made.append(block_size)
        return short_keys(tokens, salt, block_size)

    monkeypatch.setattr(requests_table, "short_keys", counted)
    cluster = FakeCluster(a="mixed", b="mixed", c="mixed")
    first = cluster.submit(prompt=range(100))
    for _ in range(3):
        cluster.lose(first.at)
    cluster.start("a")
    assert made == [16]
    second = cluster.request(prompt=range(100))
    second.keys = first.keys  # (as `ClusterClient.prepare` is given them)
    cluster.cluster.submit(second, cluster.now)
    assert made == [16]
    assert list(first.keys[16]) == short_keys(first.prompt, "", 16)
