"""Fields that change what comes: forbidden words and tokens, ends by repetition, cut prompts, documents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from baton.gateway.text.tokenizer import Tokenizer
from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server

TEXT = "Once upon a time"
LONG = {"prompt": TEXT, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """Of the embedded model: one prefills, the other decodes, and has little room."""
    flags = ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "1")
    with Server("--dtype", "float32", "--num-gpu-blocks-override", "12", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(resolve_model(None))


def ask(server: Server, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = server.http.post(path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [one["token_ids"] for one in answer["choices"]]


def test_bad_words_and_allowed_tokens_hold_wherever_it_runs(
    server: Server, pair: Server, tokenizer: Tokenizer
) -> None:
    """With n, seeds and penalties, streamed; preempted and handed over the same."""
    free = ids_of(ask(server, **LONG, n=4, seed=3))
    words, sequences = [], []
    for two in (one[i : i + 2] for one in free for i in range(0, 58, 6)):
        text = tokenizer.decode(two)
        if text.strip() and two in (tokens := _as_tokens(text.lstrip(), tokenizer)):
            words.append(text.lstrip())
            sequences += tokens
    bound = {**LONG, "n": 4, "seed": 3, "bad_words": words, "frequency_penalty": 0.3}
    found = ids_of(ask(server, **bound))
    assert any(_has(one, word) for one in free for word in sequences), "else the test shows nothing"
    assert not any(_has(one, word) for one in found for word in sequences)
    assert ids_of(ask(pair, **bound)) == found
    assert ids_of(ask(server, **{**bound, "n": 1}))[0] == found[0]
    allowed = sorted({token for one in free for token in one})[::2]
    few = {**LONG, "n": 4, "seed": 3, "allowed_token_ids": allowed, "presence_penalty": 0.5}
    found = ids_of(ask(server, **few))
    assert {token for one in found for token in one} <= set(allowed)
    assert ids_of(ask(pair, **few)) == found
    streamed: list[list[int]] = [[], [], [], []]
    with server.http.stream("POST", "/v1/completions", json={**few, "stream": True}) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                for one in json.loads(line[6:])["choices"]:
                    streamed[one["index"]] += one["token_ids"] or []
    assert streamed == found


def _as_tokens(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]


def _has(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


def test_where_no_token_is_left_the_request_fails_alone(server: Server, tokenizer: Tokenizer) -> None:
    body = {
        "prompt": TEXT,
        "max_tokens": 4,
        "allowed_token_ids": [5, 6],
        "structured_outputs": {"regex": "[0-9]+"},
    }
    answer = server.http.post("/v1/completions", json=body, timeout=120)
    assert answer.status_code == 400
    assert "they leave no token that may follow" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "allowed_token_ids"
    digit = tokenizer.encode("7", add_special_tokens=False)
    if len(digit) == 1:
        body |= {"allowed_token_ids": digit, "max_tokens": 2}
        assert ask(server, **body)["choices"][0]["text"] == "77"


def test_an_answer_that_repeats_itself_ends(server: Server, tokenizer: Tokenizer) -> None:
    token = ids_of(ask(server, **{**LONG, "max_tokens": 1, "temperature": 0}))[0][0]
    pattern = {"max_pattern_size": 3, "min_count": 5}
    body = {**LONG, "allowed_token_ids": [token], "temperature": 0, "repetition_detection": pattern}
    (choice,) = ask(server, **body)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert choice["token_ids"] == [token] * 5
    assert choice["text"] == tokenizer.decode([token] * 5)
    (choice,) = ask(server, **{**body, "min_tokens": 9})["choices"]
    assert choice["token_ids"] == [token] * 9
    (choice,) = ask(server, **{**body, "max_tokens": 5})["choices"]
    assert choice["finish_reason"] == "length"


def test_log_probabilities_of_asked_tokens(server: Server) -> None:
    body = {**LONG, "max_tokens": 3, "temperature": 0, "logprobs": 3}
    every = ask(server, **body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["top_logprobs"]
    ids = [int(name.split(":")[1]) for name in every[0]]
    some = ask(server, **body, return_tokens_as_token_ids=True, logprob_token_ids=ids[1:])
    found = some["choices"][0]["logprobs"]["top_logprobs"]
    assert [found[0][f"token_id:{token}"] for token in ids[1:]] == [
        every[0][f"token_id:{token}"] for token in ids[1:]
    ]
    chat = ask(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
        logprobs=True,
        logprob_token_ids=[7, 8, 9],
        return_tokens_as_token_ids=True,
    )
    for position in chat["choices"][0]["logprobs"]["content"]:
        assert {one["token"] for one in position["top_logprobs"]} == {f"token_id:{i}" for i in (7, 8, 9)}


def test_log_probabilities_of_all_tokens(server: Server, tokenizer: Tokenizer) -> None:
    """They are a distribution, have the few most likely ones in front, and are the same however the server is
    asked; another server gives them only where it was told to."""
    body = {**LONG, "prompt": "Once upon a time, a cat sat", "max_tokens": 3, "temperature": 0}
    body["return_tokens_as_token_ids"] = True
    assert server.http.post("/v1/completions", json={**body, "logprobs": -1}).status_code == 400
    (few,) = ask(server, **body, logprobs=20, prompt_logprobs=20)["choices"]
    with Server("--dtype", "float32", "--max-logprobs", "-1") as open_server:
        (many,) = ask(open_server, **body, logprobs=-1, prompt_logprobs=-1)["choices"]
        (echoed,) = ask(open_server, **body, logprobs=-1, echo=True)["choices"]
    assert many["token_ids"] == few["token_ids"]
    for whole, some in zip(many["logprobs"]["top_logprobs"], few["logprobs"]["top_logprobs"], strict=True):
        assert math.fsum(map(math.exp, whole.values())) == pytest.approx(1, abs=1e-4)
        assert list(whole.items())[:20] == list(some.items())[:20]
    for whole, some in zip(many["prompt_logprobs"][1:], few["prompt_logprobs"][1:], strict=True):
        assert math.fsum(math.exp(one["logprob"]) for one in whole.values()) == pytest.approx(1, abs=1e-4)
        assert {token: whole[token] for token in some} == some
    top = echoed["logprobs"]["top_logprobs"]
    assert top[len(many["prompt_logprobs"]) :] == many["logprobs"]["top_logprobs"]
    for listed, by_id in zip(top[1:], many["prompt_logprobs"][1:], strict=False):
        assert listed == {f"token_id:{token}": one["logprob"] for token, one in by_id.items()}


def test_a_long_prompt_is_cut(server: Server, tokenizer: Tokenizer) -> None:
    text = "one two three four five six seven eight nine ten " * 400
    ids = tokenizer.encode(text)
    assert len(ids) > 2048
    short = {"prompt": text, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    assert server.http.post("/v1/completions", json=short).status_code == 400
    for fields, expected in (
        ({"truncate_prompt_tokens": 20}, ids[-20:]),
        ({"truncate_prompt_tokens": 20, "truncation_side": "right"}, ids[:20]),
        ({"truncate_prompt_tokens": -1}, ids[-2047:]),
    ):
        (choice,) = ask(server, **short, **fields)["choices"]
        assert choice["prompt_token_ids"] == expected
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "return_token_ids": True}
    found = ask(server, "/v1/chat/completions", **chat, truncate_prompt_tokens=30)
    assert len(found["prompt_token_ids"]) == 30


def test_an_echo_of_the_message_that_is_continued(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 6,
        "temperature": 0,
    }
    plain = ask(server, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    echoed = ask(server, "/v1/chat/completions", **body, echo=True)["choices"][0]["message"]["content"]
    assert echoed == "Well, " + plain
    pieces = []
    url = "/v1/chat/completions"
    with server.http.stream("POST", url, json={**body, "echo": True, "stream": True}) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                pieces += [one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == echoed
