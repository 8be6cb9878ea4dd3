"""Answers that are kept: who may go on from them, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI

from baton.gateway.access import Access
from baton.gateway.responses.answers import DeletedResponse, ItemList, ResponseObject
from baton.gateway.responses.store import ResponseStore
from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.api.test_chat import prompt_of
from tests.gateway.api.test_completions import answer_with
from tests.gateway.api.test_tools import ONE
from tests.gateway.harness import GatewayServer
from tests.gateway.responses.test_responses import ARGUMENTS, WEATHER


@pytest.fixture
def client(server: GatewayServer) -> OpenAI:
    return server.openai(api_key="one")


def test_a_conversation_goes_on(server: GatewayServer, tokenizer: Tokenizer, client: OpenAI) -> None:
    answer_with(server, tokenizer, "<think>hm</think>I look. " + ONE)
    first = client.responses.create(model="tiny", input="Weather?", tools=[WEATHER], instructions="Old.")
    assert first.store is True  # type: ignore[attr-defined]
    answer_with(server, tokenizer, "Sunny.")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}
    with client.responses.stream(
        model="tiny",
        input=[output],  # type: ignore[list-item]
        tools=[WEATHER],
        previous_response_id=first.id,
        instructions="New.",
    ) as stream:
        second = stream.get_final_response()
    assert second.previous_response_id == first.id
    third = client.responses.create(model="tiny", input="Thanks.", previous_response_id=second.id)
    assert prompt_of(server, tokenizer) == (
        "<|start|>user\nWeather?<|end|>"
        f"<|start|>assistant\nI look.<tool_call>weather{ARGUMENTS}{ARGUMENTS}<|end|><|start|>tool\nsun<|end|>"
        "<|start|>assistant\nSunny.<|end|><|start|>user\nThanks.<|end|><|start|>assistant\n"
    )
    kept = client.responses.retrieve(third.id)
    assert kept.model_dump() == third.model_dump()
    items = list(client.responses.input_items.list(third.id, order="asc"))
    assert [item.type for item in items] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert items[-1].content[0].text == "Thanks."
    page = client.responses.input_items.list(third.id, limit=2)
    assert page.has_more
    assert [item.id for item in page] == [item.id for item in reversed(items)]
    with server.http() as http:
        path, headers = f"/v1/responses/{third.id}", {"authorization": "Bearer one"}
        answer = http.get(f"{path}/input_items", params={"limit": 3, "after": items[-1].id}, headers=headers)
        listed = msgspec.json.decode(answer.content, type=ItemList)
        assert [item["id"] for item in listed.data] == [item.id for item in items[-2:-5:-1]]
        assert http.get(f"{path}/input_items", params={"after": "x"}, headers=headers).status_code == 400
        assert http.get(f"{path}/input_items", params={"limit": 0}, headers=headers).status_code == 400
        assert http.get(path, params={"stream": "true"}, headers=headers).status_code == 400
        msgspec.json.decode(http.get(path, headers=headers).content, type=ResponseObject)
        msgspec.json.decode(http.delete(path, headers=headers).content, type=DeletedResponse)
    reference: Any = {"type": "item_reference", "id": first.output[1].id}
    client.responses.create(model="tiny", input=[reference, {"role": "user", "content": "So?"}])
    assert prompt_of(server, tokenizer).startswith("<|start|>assistant\nI look.<|end|><|start|>user\nSo?")


def test_nobody_else_finds_it(server: GatewayServer, tokenizer: Tokenizer, client: OpenAI) -> None:
    answer_with(server, tokenizer, "My secret.")
    done = client.responses.create(model="tiny", input="Tell me.")
    other = server.openai(api_key="two")
    count = len(server.engine.submits)
    for call in (
        lambda: other.responses.retrieve(done.id),
        lambda: other.responses.delete(done.id),
        lambda: other.responses.input_items.list(done.id),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no answer"):
            call()
    unknown: list[str] = []
    for id in (done.id, "resp_" + "0" * 32):
        with pytest.raises(openai.BadRequestError) as caught:
            other.responses.create(model="tiny", input="More.", previous_response_id=id)
        unknown.append(str(caught.value).replace(id, ""))
    assert unknown[0] == unknown[1]
    reference: Any = {"type": "item_reference", "id": done.output[0].id}
    with pytest.raises(openai.BadRequestError, match="there is no item"):
        other.responses.create(model="tiny", input=[reference])
    assert len(server.engine.submits) == count
    client.responses.delete(done.id)
    with pytest.raises(openai.NotFoundError, match="there is no answer"):
        client.responses.retrieve(done.id)


def test_what_is_not_to_be_kept(server: GatewayServer, tokenizer: Tokenizer, client: OpenAI) -> None:
    answer_with(server, tokenizer, "hello world")
    store = server.app.state.gateway.responses
    before = len(store)
    done = client.responses.create(model="tiny", input="x", store=False)
    assert done.store is False  # type: ignore[attr-defined]
    server.engine.behaviour.hold_after = 2
    stream = client.responses.create(model="tiny", input="x", stream=True)
    next(iter(stream))
    server.engine.wait_held(1)
    stream.close()
    server.engine.wait_for(lambda: server.engine.cancels != [], "a cancellation")
    assert len(store) == before


def test_the_oldest_go_and_the_rest_goes_on(
    server: GatewayServer, tokenizer: Tokenizer, client: OpenAI
) -> None:
    answer_with(server, tokenizer, "ok")
    store = server.app.state.gateway.responses
    evicted = store.evicted
    ids: list[str] = []
    for number in range(store.most + 3):
        previous = {"previous_response_id": ids[-1]} if ids else {}
        ids.append(client.responses.create(model="tiny", input=f"{number}.", **previous).id)  # type: ignore[arg-type]
    assert len(store) == store.most
    assert store.evicted >= evicted + 3
    with pytest.raises(openai.NotFoundError, match="there is no answer"):
        client.responses.retrieve(ids[2])
    items = client.responses.input_items.list(ids[-1], limit=100).data
    assert len(items) == 2 * (store.most + 3) - 1
    with server.http() as http:
        metrics = http.get("/metrics").text
    assert f"baton:responses_kept {float(store.most)}" in metrics


def test_without_a_store_nothing_is_kept(byte_level: Path) -> None:
    with GatewayServer(byte_level, eos=2, vocab=512, access=Access()) as server:
        client = server.openai()
        done = client.responses.create(model="tiny", input="hello", max_output_tokens=3)
        assert done.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError, match="--responses-store N"):
            client.responses.retrieve(done.id)
        with pytest.raises(openai.BadRequestError, match="--responses-store N"):
            client.responses.create(model="tiny", input="hello", previous_response_id=done.id)
        reference: Any = {"type": "item_reference", "id": done.output[0].id}
        with pytest.raises(openai.BadRequestError, match="--responses-store N"):
            client.responses.create(model="tiny", input=[reference])


def items(*ids: str, size: int = 100) -> list[tuple[str, bytes]]:
    return [(id, b"x" * size) for id in ids]


def test_bytes_are_bounded_whatever_is_shared() -> None:
    store = ResponseStore(1000, 100_000)
    before: Any = ()
    for number in range(200):
        assert store.add("a", f"r{number}", b"y" * 500, before, items(f"i{number}"), items(f"o{number}"))
        before = store.get("a", f"r{number}").runs  # type: ignore[union-attr]
        if number % 20 == 19:
            before = ()
        assert store.size <= 100_000
        counted = {id(run): run.size for kept in store._answers.values() for run in kept.runs}
        assert store.size == sum(counted.values()) + sum(kept.size for kept in store._answers.values())
    assert 10 < len(store) < 200
    assert store.evicted == 200 - len(store)
    known = {name for kept in store._answers.values() for run in kept.runs for name, _ in run.items}
    assert {name for _, name in store._items} == known
    assert not store.add("a", "large", b"y" * 100_000, (), [], [])
    assert store.refused == 1
    for kept_id in list(store._answers):
        assert not store.delete("b", kept_id)
        assert store.delete("a", kept_id)
    assert (len(store), store.size, store._items) == (0, 0, {})
