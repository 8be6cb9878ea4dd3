"""What a request costs altogether: refused before it is built if it is too much, and shared by sequences."""

from __future__ import annotations

from typing import Any

import pytest

from baton.gateway.generation import costs, generator
from baton.gateway.instances import client as cluster_client
from baton.gateway.text.detokenizer import StopStrings, StopTables
from tests.gateway.harness import GatewayServer

COMPLETIONS = "/v1/completions"


def post(server: GatewayServer, **body: Any) -> Any:
    with server.http() as http:
        return http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, **body})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 128, "stop": [f"{i:02d}" * 100 for i in range(64)]}, "stop"),
        ({"prompt": ["x"] * 32, "n": 128, "logit_bias": {str(i): 1 for i in range(300)}}, "logit_bias"),
        ({"prompt": [[5]] * 100, "n": 100, "stop_token_ids": list(range(200))}, "prompt"),
        ({"prompt": [[5]] * 32, "n": 100, "stop_token_ids": list(range(400))}, "stop_token_ids"),
    ],
)
def test_the_total_cost_is_refused_before_anything_is_built(
    server: GatewayServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str
):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(generator, "Sequence", never)
    monkeypatch.setattr(generator, "resolve", never)
    monkeypatch.setattr(generator, "pack_int32", never)
    response = post(server, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert "send several requests" in error["message"]
    assert server.engine.submits == []


def test_the_tokens_of_all_prompts_are_bounded(server: GatewayServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "MAX_PROMPT_TOKENS", 1000)
    assert post(server, prompt=[[5] * 100], n=10).status_code == 200
    error = post(server, prompt=[[5] * 100, [6]], n=10).json()["error"]
    assert "1010 prompt tokens over all 20 sequences are more than 1000" in error["message"]


def test_what_sequences_share_is_made_once(server: GatewayServer, monkeypatch: pytest.MonkeyPatch):
    """However many they are: parameters, packed prompts, stop tables, the measured message."""
    counts: dict[str, int] = {}

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    counted(generator, "resolve")
    counted(generator, "pack_int32")
    counted(generator, "Shared")
    counted(cluster_client.ClusterClient, "check_size")
    response = post(
        server,
        prompt=["the cat", "the hat", "on the mat"],
        n=30,
        stop=["zzz"],
        logit_bias={"5": 1, "6": -1},
        max_tokens=2,
    )
    assert response.status_code == 200
    assert counts == {"resolve": 1, "pack_int32": 3, "Shared": 1, "check_size": 1}
    submits = server.engine.submits
    assert len(submits) == 90
    assert len({submit.prompt for submit in submits}) == 3
    assert len({submit.sampling.seed for submit in submits}) == 90
    assert {tuple(submit.sampling.logit_bias.items()) for submit in submits} == {((5, 1.0), (6, -1.0))}


def test_a_sequence_is_made_when_it_is_sent(server: GatewayServer, monkeypatch: pytest.MonkeyPatch):
    """The engine runs 8 at once, so of 300 only those are there until they end."""
    server.engine.behaviour.mute = True
    gateway = server.app.state.gateway
    prepared: list[str] = []
    real = gateway.client.prepare

    def prepare(*args: Any, **options: Any) -> Any:
        prepared.append(options["name"])
        return real(*args, **options)

    monkeypatch.setattr(gateway.client, "prepare", prepare)

    async def start() -> generator.Generation:
        params = generator.SamplingParams(n=100, stop=("x" * 3000,))
        return gateway.generator.start([[5], [6], [7]], params, request_id="r")

    started = server.call(start())
    assert len(prepared) == 8
    assert sum(sequence.request is not None for sequence in started.sequences) == 8

    async def close() -> None:
        started.close()

    server.call(close())


def test_stop_tables_grow_only_as_far_as_a_text_matches():
    shared = StopTables(["a" * 4096, "ab" * 2048, "x" * 4096])
    finders = [StopStrings(shared) for _ in range(50)]
    for finder in finders:
        finder.push("nothing of them; then ")
        finder.push("ababab")
        assert finder.finish() == "ababab"
    assert {stop[:2]: len(table) for stop, table in zip(shared.stops, shared.tables, strict=True)} == {
        "aa": 1,
        "ab": 5,
        "xx": 1,
    }
