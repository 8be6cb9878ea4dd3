"""`--auto-labels` on a real server: labels follow the load, and an operator's order holds.

The steps of the instances take a known time (`--simulated-cost`), so that it is known which load presses:
long prompts one instance that prefills, many streams one that decodes.  Each load lasts until the labels
have followed it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from baton.gateway.arranging.pressure import pools
from tests.conftest import GENEROUS_S
from tests.e2e.server import Server
from tests.e2e.test_cluster import change, instances, until

COST = "0.002,0.001,0.02"  # 400 tokens of a prompt take 0.4 s; 17 streams at one instance are 0.36 s a token
FLAGS = ("--executor", "simulated", "--simulated-cost", COST, "--max-model-len", "1024")
# (with drafts a step would give several tokens of each stream, as chance will have it)
CLUSTER = (
    "--speculation",
    "off",
    "--prefill",
    "1",
    "--decode",
    "2",
    "--auto-labels",
    "--slo",
    "ttft:2000 itl:400",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*FLAGS, *CLUSTER) as server:
        server.wait_ready()
        yield server


def complete(server: Server, random: Random, prompt: int, tokens: int) -> None:
    body = {
        "prompt": [random.randrange(10, 250) for _ in range(prompt)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == tokens


@contextmanager
def load(server: Server, clients: int, prompt: int, tokens: int) -> Iterator[None]:
    """So many clients, each of which asks again when it was answered.  None may fail."""
    over, failures = threading.Event(), []

    def client(number: int) -> None:
        random = Random(number)
        try:
            while not over.is_set():
                complete(server, random, prompt, tokens)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures


def arranging(server: Server) -> dict[str, Any]:
    told: dict[str, Any] = server.http.get("/cluster/instances").raise_for_status().json()["arranging"]
    return told


def can(server: Server) -> tuple[float, float]:
    """How many instances prefill, and how many decode."""
    return pools([entry["label"] for entry in instances(server).values()])


def test_labels_follow_the_load_and_an_operator_s_order_holds(server):
    assert can(server) == (1, 2)
    with load(server, clients=12, prompt=400, tokens=1):
        until(lambda: can(server)[0] > 1, "prompts press for an instance more", 3 * GENEROUS_S)
    first = arranging(server)["changes"][-1]
    assert (first["what"], first["from"]) == ("label", "decode")
    assert "prompts press more than streams" in first["why"]
    before = can(server)[1]
    assert f"{first['name']} becomes {first['to']}" in server.log()

    with load(server, clients=36, prompt=8, tokens=10):
        until(lambda: can(server)[1] > before, "streams press for an instance more", 3 * GENEROUS_S)

    random = Random(-1)

    def is_calm() -> bool:
        """A little load, after which it is known that nothing presses."""
        complete(server, random, 8, 4)
        return max(arranging(server)["pressure"].values()) < 0.5

    until(is_calm, "little load presses little", 3 * GENEROUS_S)
    changes = len(arranging(server)["changes"])
    labels = {name: entry["label"] for name, entry in instances(server).items()}
    name = next((name for name, label in labels.items() if label != "mixed"), "decode-0")
    ordered = "decode" if labels[name] == "mixed" else "mixed"
    change(server, name, label=ordered)
    for _ in range(20):
        complete(server, random, 8, 4)
    assert instances(server)[name]["label"] == ordered
    assert len(arranging(server)["changes"]) == changes
