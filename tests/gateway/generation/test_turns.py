"""Answers that are much work are rendered in turns, and what has ended costs a request's end nothing."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from baton.gateway.generation import generation as generations
from baton.gateway.generation.generation import Generation
from baton.gateway.http import streaming
from baton.gateway.rendering import formats
from baton.gateway.rendering.formats import TURN, CompletionLogprobs, Part, chat_logprobs, encode, in_turns
from baton.gateway.rendering.formats import prompt_logprobs as render_prompt_logprobs
from baton.observe.metrics import Metrics
from baton.protocol.codec import pack_int32
from baton.protocol.params.sampling import LISTED_LOGPROBS, TokenLogprobs
from baton.protocol.params.sampling_params import SamplingParams
from tests.gateway.harness import GatewayServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Names:
    """Tokens that are called by their numbers; counts how many were asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.tokenizer = self

    def __call__(self, token: int) -> str:
        self.asked += 1
        return f"t{token}"

    token_text = __call__

    def token_bytes(self, token: int) -> bytes:
        return b"t%d" % token


def logprobs(count: int, num_top: int) -> list[TokenLogprobs]:
    if num_top <= LISTED_LOGPROBS:
        return [
            TokenLogprobs(i, -1.0 - i, 1, [(i + k, -2.0 - k) for k in range(num_top)]) for i in range(count)
        ]
    values = array("f", [-2.0 - k for k in range(num_top)]).tobytes()
    return [
        TokenLogprobs.packed(i, -1.0 - i, 1, pack_int32(range(i + 1, i + 1 + num_top)), values)
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", ["completion", "chat", "prompt"])
@pytest.mark.parametrize(("num_top", "count"), [*product([0, 5, 20], [0, 1, 1000]), (300, 20), (3000, 2)])
def test_log_probabilities_are_the_same_in_one_piece_and_in_many(kind: str, num_top: int, count: int):
    names: Any = Names()
    items = logprobs(count, num_top)

    def parts() -> Iterator[Part]:
        if kind == "chat":
            yield from chat_logprobs(items, names, num_top)
        elif kind == "prompt":
            yield from render_prompt_logprobs(items, names, num_top)
        else:
            found = CompletionLogprobs(names, num_top)
            yield from found.add([(item.token, item) for item in items], iter(range(count)))
            yield 0, found.encoded()

    asked: list[int] = []
    whole = asyncio.run(_answer(parts(), names, asked))
    assert max(asked) <= 2 * TURN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "TURN", 1 << 30)
        assert asyncio.run(in_turns(parts())) == whole
    value = json.loads(whole)
    assert encode(value) == whole, "no comma, space or key is other than a plain encoder's"
    lists = {"chat": lambda: value["content"], "prompt": lambda: value, "completion": lambda: value["tokens"]}
    assert len(lists[kind]()) == count


async def _answer(parts: Iterator[Part], names: Names, asked: list[int]) -> bytes:
    """Notes what was looked up between two turns of somebody else."""

    async def somebody_else() -> None:
        while True:
            asked.append(names.asked)
            names.asked = 0
            await asyncio.sleep(0)

    other = asyncio.create_task(somebody_else())
    try:
        return await in_turns(parts)
    finally:
        asked.append(names.asked)
        other.cancel()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_of_many_log_probabilities_gives_turns(
    server: GatewayServer, monkeypatch: pytest.MonkeyPatch, path: str
):
    pauses: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(seconds)

    body: dict[str, Any] = {"prompt": "the cat", "logprobs": 5}
    if path == CHAT:
        message = {"role": "user", "content": "the cat"}
        body = {"messages": [message], "logprobs": True, "top_logprobs": 5}
    monkeypatch.setattr(formats.asyncio, "sleep", sleep)
    with server.http() as http:
        answer = http.post(path, json={**body, "max_tokens": 200, "ignore_eos": True, "n": 4})
    assert answer.status_code == 200, answer.text
    assert pauses.count(0) >= 4 * 200 * 6 // (2 * TURN)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_has_much_to_render_goes_on(
    server: GatewayServer, monkeypatch: pytest.MonkeyPatch, path: str
):
    """As if each message brought more log-probabilities than a stream renders without its task."""
    body: dict[str, Any] = {"prompt": "the cat", "logprobs": 2, "echo": True}
    if path == CHAT:
        message = {"role": "user", "content": "the cat"}
        body = {"messages": [message], "logprobs": True, "top_logprobs": 2}
    body |= {"max_tokens": 40, "ignore_eos": True, "n": 2, "stream": True, "seed": 3}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    found = []
    for many in (streaming._MANY_LOGPROBS, 0):
        monkeypatch.setattr(streaming, "_MANY_LOGPROBS", many)
        with server.http() as http:
            lines = http.post(path, json={**body, "stream_options": usage}).text.split("\n\n")
        assert lines[-2] == "data: [DONE]"
        choices: dict[int, list[Any]] = {}
        for line in lines[:-2]:
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                given = choice.get("text") or choice.get("delta", {}).get("content") or ""
                entries = choices.setdefault(choice["index"], ["", []])
                entries[0] += given
                for name, values in (choice["logprobs"] or {}).items():
                    entries[1] += [(name, encode(value)) for value in values or ()]
        found.append(
            ({index: (text, sorted(all_)) for index, (text, all_) in choices.items()}, event["usage"])
        )
    assert found[0] == found[1]
    assert found[0][1]["completion_tokens"] == 80


def test_what_has_ended_is_counted_as_it_ends(server: GatewayServer, monkeypatch: pytest.MonkeyPatch):
    """Of 300 sequences, at most those that run are left for the end of the request."""
    counted: list[str] = []
    at_close: list[int] = []
    real_close = Generation.close

    def finished(self: Metrics, reason: str, **_: Any) -> None:
        counted.append(reason)

    def close(self: Generation) -> None:
        before = len(counted)
        real_close(self)
        at_close.append(len(counted) - before)
        assert all(sequence.request is None for sequence in self.sequences)

    monkeypatch.setattr(Metrics, "finished", finished)
    monkeypatch.setattr(Generation, "close", close)
    with server.http() as http:
        body = {"prompt": ["a", "b", "c"], "n": 100, "max_tokens": 2, "ignore_eos": True}
        assert len(http.post(COMPLETIONS, json=body).json()["choices"]) == 300
    assert counted == ["length"] * 300
    assert at_close[0] == 0


def test_what_never_ran_is_counted_together(server: GatewayServer):
    """8 of 300 sequences run when the client goes away."""
    server.engine.behaviour.mute = True
    gateway = server.app.state.gateway
    calls: list[tuple[str, int]] = []

    async def start_and_close() -> None:
        params = SamplingParams(n=100)
        gateway.generator.start([[5], [6, 6], [7, 7]], params, request_id="r").close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gateway.metrics,
            "finished",
            lambda reason, count=1, **_: calls.append((reason, count)),
        )
        server.call(start_and_close())
    assert calls == [("abort", 1)] * 8 + [("abort", 92), ("abort", 200)]


def test_many_sequences_are_submitted_in_turns(server: GatewayServer, monkeypatch: pytest.MonkeyPatch):
    """Of the 8 that run at once; those that follow when they end, too."""
    beats = [0]
    submitted: list[int] = []
    client = server.app.state.gateway.client
    real = client.enqueue

    def enqueue(request: Any) -> None:
        submitted.append(beats[0])
        real(request)

    async def start() -> list[Any]:
        async def beat() -> None:
            while True:
                beats[0] += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        params = SamplingParams(n=10, max_tokens=1, ignore_eos=True)
        generation = server.app.state.gateway.generator.start([[5], [6], [7]], params, request_id="r")
        assert len(submitted) == 3
        try:
            return list(await generation.collect())
        finally:
            beating.cancel()

    monkeypatch.setattr(generations, "SUBMITTED_AT_ONCE", 3)
    monkeypatch.setattr(client, "enqueue", enqueue)
    completions = server.call(start())
    assert [completion.finish_reason for completion in completions] == ["length"] * 30
    assert len(submitted) == 30
    assert max(Counter(submitted).values()) <= 2 * 3, "when some end in the turn in which others follow"
