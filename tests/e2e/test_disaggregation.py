"""Prefill here, decode there: the answers are those of one instance, and nothing stays behind.

`BATON_REQUESTS=300` makes it the full set.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.mixed_requests import Ask, compare, learn, make_asks
from tests.e2e.server import Server

COUNT = int(os.environ.get("BATON_REQUESTS", "40"))
CLUSTER = ("--dtype", "float32", "--disaggregation-threshold", "0")


def clean_ledgers(server: Server, deadline_s: float = 60.0) -> dict[str, dict[str, Any]]:
    """The ledger of each instance once nothing is held, reserved or exported anywhere."""
    end = time.monotonic() + deadline_s
    while True:
        ledgers: dict[str, dict[str, Any]] = server.ledger()["instances"]
        dirty = {
            name: ledger
            for name, ledger in ledgers.items()
            if "error" in ledger or ledger["free"] + ledger["cached"] != ledger["total"]
        }
        if not dirty:
            return ledgers
        assert time.monotonic() < end, f"not clean after {deadline_s} s: {dirty}"
        time.sleep(0.05)


def learn_from(server: Server, asks: list[Ask], at_once: int = 1) -> None:
    async def scenario() -> None:
        async with server.async_client() as client:
            await learn(client, asks, at_once)

    asyncio.run(scenario())


def ask_all(server: Server, asks: list[Ask], at_once: int) -> list[str]:
    async def scenario() -> list[str]:
        async with server.async_client() as client:
            return await compare(client, asks, at_once)

    return asyncio.run(scenario())


def stats(server: Server) -> dict[str, dict[str, Any]]:
    """What each engine counts of hand-overs."""
    answers = server.http.get("/stats").raise_for_status().json()["instances"]
    return {name: answer["handovers"] for name, answer in answers.items()}


@pytest.fixture(scope="module")
def asks(server: Server) -> list[Ask]:
    """With the answers of a single mixed instance."""
    asks = make_asks(COUNT, seed=4, longest_prompt=400, longest_output=60)
    learn_from(server, asks)
    return asks


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    with Server("--prefill", "1", "--decode", "2", *CLUSTER) as running:
        yield running


@pytest.mark.slow
def test_the_same_bytes_as_from_one_instance(cluster: Server, asks: list[Ask]) -> None:
    wrong = ask_all(cluster, asks, at_once=24)
    assert not wrong, f"{len(wrong)} of {len(asks)}:\n" + "\n".join(wrong[:5])
    clean_ledgers(cluster)
    counts = stats(cluster)
    arrived = {name: counts[name]["arrived"] for name in ("decode-0", "decode-1")}
    print(f"{len(asks)} requests; arrived at {arrived}; at P {counts['prefill-0']}")
    several = [ask for ask in asks if ask.body["max_tokens"] > 1]
    assert sum(arrived.values()) >= 0.8 * len(several)
    assert min(arrived.values()) > 0
    assert not cluster.warnings(), "\n".join(cluster.warnings()[:10])
