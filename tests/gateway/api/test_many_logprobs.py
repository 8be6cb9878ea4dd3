"""Log-probabilities of a whole vocabulary: where `--max-logprobs` allows them, and what bounds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.gateway.generation import costs
from baton.gateway.http import context
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.params.sampling import LISTED_LOGPROBS
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def open_server(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    assert vocab > LISTED_LOGPROBS
    with GatewayServer(byte_level, eos=END, vocab=vocab, max_logprobs=-1) as server:
        yield server


def ask(server: GatewayServer, path: str, **body: Any) -> dict[str, Any]:
    with server.http() as http:
        answer = http.post(path, json={"max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"messages": USER, "prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_the_server_says_how_many(
    server: GatewayServer, path: str, fields: dict[str, Any], named: str
) -> None:
    with server.http() as http:
        answer = http.post(path, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, named)
    assert "more than the 20 that this server gives" in error["message"]
    assert "--max-logprobs" in error["message"]


def test_all_of_the_vocabulary(open_server: GatewayServer, tokenizer: Tokenizer, vocab: int) -> None:
    """Of answers and prompts, with the same values as of few."""
    fields = {"prompt": "the cat", "return_tokens_as_token_ids": True}
    many = ask(open_server, COMPLETIONS, **fields, logprobs=-1, prompt_logprobs=-1)["choices"][0]
    few = ask(open_server, COMPLETIONS, **fields, logprobs=20, prompt_logprobs=20)["choices"][0]
    assert many["text"] == few["text"]
    for whole, some in zip(many["logprobs"]["top_logprobs"], few["logprobs"]["top_logprobs"], strict=True):
        assert whole.keys() == {f"token_id:{token}" for token in range(vocab)}
        assert some.items() <= whole.items()
    assert many["prompt_logprobs"][0] is None
    for whole, some in zip(many["prompt_logprobs"][1:], few["prompt_logprobs"][1:], strict=True):
        assert whole.keys() == {str(token) for token in range(vocab)}
        assert some.items() <= whole.items()
    submit = open_server.engine.submits[-2]
    assert (submit.sampling.logprobs, submit.sampling.prompt_logprobs) == (vocab, vocab)


def test_in_chats_and_streams(open_server: GatewayServer, tokenizer: Tokenizer, vocab: int) -> None:
    fields: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": -1, "seed": 1}
    whole = ask(open_server, CHAT, **fields)["choices"][0]["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in whole] == [vocab] * 2
    for one in whole:
        top = one["top_logprobs"]
        assert [entry["logprob"] for entry in top] == sorted((e["logprob"] for e in top), reverse=True)
        assert one == {**top[1], "top_logprobs": top}  # (the second one is what the engine chose)
    streamed: list[Any] = []
    with (
        open_server.http() as http,
        http.stream("POST", CHAT, json={**fields, "max_tokens": 2, "stream": True}) as events,
    ):
        for line in events.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed += (choice["logprobs"] or {}).get("content") or []
    assert streamed == whole


def test_what_they_may_come_to_is_bounded(
    open_server: GatewayServer, monkeypatch: pytest.MonkeyPatch, vocab: int
) -> None:
    monkeypatch.setattr(costs, "MAX_LOGPROB_ENTRIES", 4 * vocab)
    ask(open_server, COMPLETIONS, prompt=[5, 6], max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    for more, named in (
        ({"max_tokens": 3, "prompt_logprobs": -1}, "logprobs"),
        ({"n": 3}, "logprobs"),
        ({"logprobs": None, "prompt": [5] * 5, "prompt_logprobs": -1}, "prompt_logprobs"),
    ):
        with open_server.http() as http:
            answer = http.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 2, "logprobs": -1, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
        assert f"more than {4 * vocab}" in answer.json()["error"]["message"]


def test_permits_come_back(open_server: GatewayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that end, that are refused, and whose clients go away."""
    taken: list[int] = []
    real = context.Permits.take

    async def take(self: context.Permits, what: str) -> None:
        await real(self, what)
        taken.append(self._free)

    monkeypatch.setattr(context.Permits, "take", take)
    for _ in range(3):
        ask(open_server, COMPLETIONS, prompt="a", logprobs=-1)
        with open_server.http() as http:
            assert http.post(
                COMPLETIONS, json={"prompt": [5] * 250, "max_tokens": 9, "logprobs": -1}
            ).is_error
            body = {"prompt": "a", "max_tokens": 200, "logprobs": -1, "stream": True, "ignore_eos": True}
            with http.stream("POST", COMPLETIONS, json=body) as events:
                next(events.iter_lines())
        open_server.engine.wait_for(lambda: open_server.engine.num_running == 0, "the cancel")
    ask(open_server, COMPLETIONS, prompt="a", logprobs=5)
    assert len(taken) == 6
    ask(open_server, COMPLETIONS, prompt="a", logprobs=-1)
    assert taken[-1] == 1, "all others are free again"
