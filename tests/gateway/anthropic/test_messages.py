"""/v1/messages and its errors over HTTP, in front of a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from baton.gateway.access import Access
from baton.gateway.anthropic.conversations import conversation_of
from baton.gateway.http.alive import SignsOfLife
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.messages.requests import Finished
from tests.gateway.anthropic.events import events_of, put_together, same, settled
from tests.gateway.api.test_chat import prompt_of
from tests.gateway.api.test_completions import answer_with
from tests.gateway.api.test_tools import ONE, QWEN, TWO, directory_with, grammar_of
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hello"}]
WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "time", "input_schema": {"type": "object"}}
THOUGHT = "<think>\nhm\n</think>\n\nI look.\n"


@pytest.fixture(scope="module")
def thinking(byte_level: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """A model that calls and thinks, its markers special tokens, and keys."""
    special = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    begin = "{{- '<|start|>assistant\\n' }}"
    template = QWEN.replace(begin, "{%- if add_generation_prompt %}" + begin + "{% endif %}")
    directory = directory_with(byte_level, tmp_path_factory.mktemp("thinking"), template, special)
    access = Access(api_keys=("key",), admin_keys=("admin",))
    with GatewayServer(directory, eos=END, vocab=512, max_model_len=1024, access=access) as server:
        yield server


@pytest.fixture
def server(thinking: GatewayServer) -> GatewayServer:
    thinking.reset()
    return thinking


@pytest.fixture
def tokenizer(server: GatewayServer) -> Tokenizer:
    return Tokenizer.from_directory(server.served.tokenizer)


def post(server: GatewayServer, path: str = PATH, **body: Any) -> httpx.Response:
    given = {"model": "tiny", "max_tokens": 400, "messages": USER, "tools": [WEATHER, TIME], **body}
    if path == COUNT:
        del given["max_tokens"]
    with server.http() as http:
        return http.post(path, json=given, headers={"x-api-key": "key"})


def ask(server: GatewayServer, **body: Any) -> dict[str, Any]:
    response = post(server, **body)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    if body.get("stream"):
        return put_together(events_of(response.text))
    message: dict[str, Any] = response.json()
    assert message["id"] == f"msg_{response.headers['request-id']}"
    return message


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    error = response.json()
    assert (set(error), error["type"]) == ({"type", "error", "request_id"}, "error")
    assert (set(error["error"]), error["error"]["type"]) == ({"type", "message"}, kind)
    assert error["request_id"] == response.headers["request-id"]
    message: str = error["error"]["message"]
    return message


def test_blocks_in_their_order(server: GatewayServer, tokenizer: Tokenizer) -> None:
    ids = answer_with(server, tokenizer, THOUGHT + TWO)
    server.engine.behaviour.num_cached = 5
    message = ask(server, system="Be brief.")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    thought, text, weather, time = message["content"]
    assert (thought["type"], thought["thinking"], bool(thought["signature"])) == ("thinking", "hm", True)
    assert text == {"type": "text", "text": "I look."}
    assert (weather["type"], weather["name"], weather["input"]) == (
        "tool_use",
        "weather",
        {"city": "Paris, é😀"},
    )
    assert (time["name"], time["input"]) == ("time", {})
    assert weather["id"].startswith("toolu_")
    assert weather["id"] != time["id"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    prompt = prompt_of(server, tokenizer)
    size = len(tokenizer.encode(prompt, add_special_tokens=False))
    assert message["usage"] == {
        "input_tokens": size - 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": len(ids) + 1,
        "output_tokens_details": {
            "thinking_tokens": len(tokenizer.encode("\nhm\n", add_special_tokens=False))
        },
    }
    assert "<|start|>system\nBe brief.<|end|><|start|>user\nhello<|end|><|start|>assistant\n" in prompt
    assert json.dumps(WEATHER["input_schema"]) in prompt


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_a_stream_is_the_same_message(server: GatewayServer, tokenizer: Tokenizer, tokens: int) -> None:
    answer_with(server, tokenizer, THOUGHT + TWO)
    server.engine.behaviour.tokens_per_message = tokens
    server.engine.behaviour.num_cached = 3
    assert settled(ask(server, stream=True)) == settled(ask(server))


def test_a_stream_of_text_alone(server: GatewayServer, tokenizer: Tokenizer, byte_level: Path) -> None:
    """Of a model that neither thinks nor calls: nothing takes its text apart."""
    with GatewayServer(byte_level, eos=END, vocab=512) as plain:
        answer_with(plain, tokenizer, "One, two é😀.")
        message = ask(plain, tools=[], stream=True)
        assert message["content"] == [{"type": "text", "text": "One, two é😀."}]
        assert settled(message) == settled(
            ask(plain, tools=[], thinking={"type": "enabled", "budget_tokens": 9})
        )


def test_why_an_answer_ends(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "One two three.")

    def ends(**body: Any) -> tuple[str, str | None]:
        whole, streamed = ask(server, **body), ask(server, **body, stream=True)
        assert same(settled(streamed), settled(whole))
        return whole["stop_reason"], whole["stop_sequence"]

    assert ends() == ("end_turn", None)
    assert ends(max_tokens=2) == ("max_tokens", None)
    assert ends(stop_sequences=["x", " thr"]) == ("stop_sequence", " thr")
    answer_with(server, tokenizer, ONE)
    assert ends() == ("tool_use", None)
    assert ends(stop_sequences=["Par"]) == ("stop_sequence", "Par")
    answer_with(server, tokenizer, "on and on", end=None)
    assert ends(max_tokens=1_000_000) == ("model_context_window_exceeded", None)


def test_an_answer_is_no_longer_than_the_pool(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """Clients always ask for many tokens, and mean no demand by it."""
    answer_with(server, tokenizer, "on and on", end=None)

    async def resize(blocks: int) -> int:
        welcome = server.instance.welcome
        server.instance.member.welcome = msgspec.structs.replace(welcome, num_blocks=blocks)
        return welcome.num_blocks

    before = server.call(resize(512 // server.instance.welcome.block_size))
    try:
        message = ask(server, max_tokens=32_000)
    finally:
        server.call(resize(before))
    counts = message["usage"]
    assert counts["input_tokens"] + counts["output_tokens"] == 513
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_no_tokens_fill_the_cache(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "One two three.")
    for stream in (False, True):
        message = ask(server, max_tokens=0, stream=stream)
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert message["usage"]["output_tokens"] == 0
    assert server.engine.submits[-1].stopping.max_tokens == 1


def test_an_answer_that_is_cut_off(server: GatewayServer, tokenizer: Tokenizer) -> None:
    ids = answer_with(server, tokenizer, THOUGHT + ONE, end=None)
    for count in (1, 3, 6, 12, 20, 40, len(ids) - 2, len(ids)):
        whole, streamed = (
            settled(ask(server, max_tokens=count)),
            settled(ask(server, max_tokens=count, stream=True)),
        )
        assert whole["stop_reason"] == "max_tokens"
        assert same(streamed, whole)
        inputs = [block["input"] for block in whole["content"] if "input" in block]
        assert inputs in ([], [{}], [{"city": "Paris, é😀"}])


def test_an_agents_turns(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "<think>hm</think>" + ONE)
    first = ask(server)
    answer_with(server, tokenizer, "Sunny.")
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "sunny"}
    turns = [*USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    assert ask(server, messages=turns)["content"] == [{"type": "text", "text": "Sunny."}]
    arguments = '{"city": "Paris, é😀"}'
    prompt = prompt_of(server, tokenizer)
    assert f"<tool_call>weather{arguments}{arguments}<|end|><|start|>tool\nsunny<|end|>" in prompt
    orphan = [*USER, {"role": "user", "content": [result]}]
    message = check_error(post(server, messages=orphan), 400, "invalid_request_error")
    assert message.startswith("messages[1].content[0].tool_use_id: no tool_use before it")


def test_a_prefill_is_continued(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "B)")
    begun = [*USER, {"role": "assistant", "content": "It is ("}]
    assert ask(server, messages=begun)["content"] == [{"type": "text", "text": "B)"}]
    assert prompt_of(server, tokenizer).endswith("<|start|>user\nhello<|end|><|start|>assistant\nIt is (")


def test_thinking_is_switched(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "<think>hm é</think>Yes.")
    off = ask(server, thinking={"type": "disabled"})
    assert off["content"] == [{"type": "text", "text": "Yes."}]
    assert off == {**ask(server, thinking={"type": "disabled"}, stream=True), "id": off["id"]}
    assert prompt_of(server, tokenizer).endswith("<think>\n\n</think>\n\n")
    for kind in ("enabled", "adaptive"):
        on = ask(server, thinking={"type": kind})
        assert [block["type"] for block in on["content"]] == ["thinking", "text"]
        assert prompt_of(server, tokenizer).endswith("assistant\n")
    assert grammar_of(server) == ""
    ask(server, thinking={"type": "enabled", "budget_tokens": 7})
    assert "max_tokens=7" in grammar_of(server)
    ask(server, thinking={"type": "enabled", "budget_tokens": 7}, max_tokens=7)
    assert grammar_of(server) == "", "the answer ends before that"
    ask(server, thinking={"type": "between_tools"})
    assert prompt_of(server, tokenizer).endswith("<think>\n\n</think>\n\n")
    ask(server, output_config={"effort": "low"})
    assert prompt_of(server, tokenizer).endswith("effort=low")


def test_thoughts_that_are_not_shown_come_back(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """In the signature: the template gets them all the same."""
    answer_with(server, tokenizer, "<think>hm é</think>Yes.")
    wanted = {"type": "adaptive", "display": "omitted"}
    whole, streamed = ask(server, thinking=wanted), ask(server, thinking=wanted, stream=True)
    assert settled(whole) == settled(streamed)
    thought, _ = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "")
    turns = [*USER, {"role": "assistant", "content": whole["content"]}, *USER]
    assert conversation_of(None, turns).messages[1]["reasoning"] == "hm é"


def test_calls_are_demanded(server: GatewayServer) -> None:
    ask(server, max_tokens=1)
    assert grammar_of(server) == ""
    ask(server, max_tokens=1, tool_choice={"type": "any"})
    assert all(name in grammar_of(server) for name in ("weather", "time"))
    ask(server, max_tokens=1, tool_choice={"type": "tool", "name": "weather"})
    assert "weather" in grammar_of(server)
    assert "time" not in grammar_of(server)
    several = grammar_of(server)
    ask(server, max_tokens=1, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert grammar_of(server) != several
    ask(server, max_tokens=1, tools=[{**WEATHER, "strict": True}])
    assert "weather" in grammar_of(server)


def test_one_call_alone(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, TWO)
    one = ask(server, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["name"] for block in one["content"]] == ["weather"]
    none = ask(server, tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]
    assert "<tools>" not in prompt_of(server, tokenizer)


@pytest.mark.parametrize("old", [False, True])
def test_a_form_of_the_answer(server: GatewayServer, old: bool) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"answer": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    ask(server, max_tokens=1, **({"output_format": form} if old else {"output_config": {"format": form}}))
    assert "answer" in grammar_of(server)
    schema["properties"]["answer"] = {"type": "array", "contains": {"type": "string"}}
    refused = post(server, output_config={"format": form})
    message = check_error(refused, 400, "invalid_request_error")
    assert message.startswith("output_config.format")
    assert "contains" in message


def test_tokens_are_counted_as_they_will_be(server: GatewayServer, tokenizer: Tokenizer) -> None:
    for body in ({}, {"system": "Be brief.", "tools": []}, {"thinking": {"type": "disabled"}}):
        counted = post(server, COUNT, **body)
        assert counted.status_code == 200
        assert counted.json() == {"input_tokens": ask(server, **body, max_tokens=1)["usage"]["input_tokens"]}


def test_fields_that_change_nothing_are_accepted(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "Yes.")
    cached = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    message = ask(
        server,
        messages=[{"role": "user", "content": [cached]}],
        cache_control={"type": "ephemeral"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "somebody"},
        service_tier="auto",
        speed="fast",
        inference_geo="eu",
        mcp_servers=[],
        container=None,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
    )
    assert message["content"] == [{"type": "text", "text": "Yes."}]
    sampling = server.engine.submits[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": None}, "messages: it is missing"),
        ({"messages": []}, "messages: must be of at least 1 items"),
        ({"max_tokens": None}, "max_tokens: it is missing"),
        ({"max_tokens": -1}, "max_tokens: must be at least 0"),
        ({"temperature": "warm"}, "temperature: "),
        ({"stop_sequences": [""]}, "stop_sequences[0]: must be of at least 1 characters"),
        ({"system": 5}, "system: "),
        ({"container": "c"}, "container: no code runs on this server"),
        (
            {"tools": [], "mcp_servers": [{"url": "x"}], "tool_choice": {"type": "any"}},
            "tool_choice: this server has no mcp_servers",
        ),
        ({"stop": ["a"]}, "stop: is for /v1/chat/completions; give stop_sequences"),
        ({"thinking": {}}, "thinking.type: 'None' must be 'enabled'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: must be at least 1"),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display: 'x' must be"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}], "tool_choice": {"type": "any"}},
            "tool_choice: this server has no web_search_20250305",
        ),
        (
            {
                "tools": [TIME, {"type": "computer_20250124", "name": "c"}],
                "tool_choice": {"type": "tool", "name": "c"},
            },
            "tool_choice.name: there is no tool 'c'",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "a b"}]}, "tools[0].name: 'a b' must be of letters"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: 'a b' must be of letters"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name: it is missing"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: must be a JSON schema"),
        ({"tools": [{**TIME, "strict": 1}]}, "tools[0].strict: must be true or false"),
        ({"tools": [{**TIME, "description": 1}]}, "tools[0].description: must be a text"),
        ({"tools": [TIME, TIME]}, "tools: 'time' is there more than once"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: there is no tool 'x'"),
        ({"tool_choice": {"type": "any"}, "tools": None}, "tool_choice: 'any' needs tools"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type: 'required' must be 'auto'"),
        ({"output_config": {"effort": "hugest"}}, "output_config.effort: 'hugest' must be one of none,"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type: 'text' must be"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema: must be a JSON sch",
        ),
    ],
)
def test_what_is_refused_is_named(server: GatewayServer, body: dict[str, Any], words: str) -> None:
    assert check_error(post(server, **body), 400, "invalid_request_error").startswith(words)
    assert server.engine.submits == []


def test_a_prompt_that_is_too_long(server: GatewayServer) -> None:
    """Clients know by the first words that they should shorten it."""
    for words in ("a b c " * 400, "a" * 400_000):
        refused = post(server, messages=[{"role": "user", "content": words}])
        message = check_error(refused, 400, "invalid_request_error")
        assert message.startswith("prompt is too long")
    assert "> 1024 maximum" in check_error(
        post(server, messages=[{"role": "user", "content": "a b c " * 400}]), 400, "invalid_request_error"
    )


def test_errors_of_the_door_have_the_same_shape(server: GatewayServer) -> None:
    body: dict[str, Any] = {"json": {"max_tokens": 1, "messages": USER}}
    with server.http() as http:
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            refused = http.post(PATH, **body, headers=headers)
            assert "x-api-key: KEY" in check_error(refused, 401, "authentication_error")
        for headers in ({"authorization": "Bearer key"}, {"x-api-key": "key", "authorization": "Bearer x"}):
            assert http.post(PATH, **body, headers={**headers, "anthropic-beta": "x"}).status_code == 200
        key = {"x-api-key": "key"}
        check_error(http.get(PATH, headers=key), 405, "invalid_request_error")
        check_error(http.post(f"{PATH}/batches", **body, headers=key), 404, "not_found_error")
        check_error(http.post(PATH, content=b"{", headers=key), 400, "invalid_request_error")
        plain = {**key, "content-type": "text/plain"}
        check_error(http.post(PATH, content=b"{}", headers=plain), 415, "invalid_request_error")
        check_error(http.post(PATH, content=b" " * (5 << 20), headers=key), 413, "request_too_large")
        # (All others keep OpenAI's.)
        assert "type" not in http.post("/v1/chat/completions", **body).json()
        assert "request-id" not in http.get("/v1/models", headers=key).headers
    check_error(post(server, model="other"), 404, "not_found_error")


def test_a_foreign_page_is_refused_in_the_same_shape(byte_level: Path) -> None:
    with GatewayServer(byte_level, eos=END, vocab=512) as open_one, open_one.http() as http:
        refused = http.post(PATH, json={}, headers={"origin": "https://elsewhere.example"})
        check_error(refused, 403, "permission_error")


def test_a_full_queue_and_no_instance(byte_level: Path) -> None:
    with GatewayServer(byte_level, eos=END, vocab=512) as one:
        one.engine.behaviour.reject = Finished(0, "rejected", "queue_full", "there is no room")
        for stream in (False, True):
            full = post(one, tools=[], stream=stream)
            check_error(full, 429, "rate_limit_error")
            assert int(full.headers["retry-after"]) >= 1
        one.engine.behaviour.reject = Finished(0, "rejected", "shutting_down", "it stops")
        check_error(post(one, tools=[]), 503, "overloaded_error")
        one.engine.behaviour.reject = Finished(0, "error", "internal", "it failed")
        check_error(post(one, tools=[]), 500, "api_error")
    with GatewayServer(byte_level, eos=END, vocab=512, attach=False, retry_wait_s=0.0) as none:
        check_error(post(none, tools=[]), 503, "overloaded_error")


def test_a_stream_that_breaks_ends_with_an_error(byte_level: Path, tokenizer: Tokenizer) -> None:
    with GatewayServer(byte_level, eos=END, vocab=512, retry_wait_s=0.0) as one:
        answer_with(one, tokenizer, "One two three four.")
        one.engine.behaviour.hold_after = 4
        body = {"max_tokens": 50, "messages": USER, "stream": True}
        with one.http() as http, http.stream("POST", PATH, json=body) as response:
            one.engine.wait_held(1)
            one.lose_engine()
            text = response.read().decode()
            *events, last = events_of(text)
            assert last["type"] == "error"
            assert last["error"]["type"] in ("overloaded_error", "api_error")
            assert last["request_id"] == response.headers["request-id"]
    message = put_together(events, complete=False)
    assert [block["type"] for block in message["content"]] == ["text"]


def test_a_stream_goes_on_after_a_loss(byte_level: Path, tokenizer: Tokenizer) -> None:
    with GatewayServer(byte_level, eos=END, vocab=512) as one:
        script = [*answer_with(one, tokenizer, "One two three four five six."), END]
        size: list[int] = []

        def answer(prompt: list[int]) -> Any:
            size.append(len(prompt))
            return lambda i: script[i + len(prompt) - size[0]]

        one.engine.behaviour.answer = answer
        one.engine.behaviour.hold_after = len(script) // 2
        body = {"max_tokens": 50, "messages": USER, "stream": True}
        with one.http() as http, http.stream("POST", PATH, json=body) as response:
            one.engine.wait_held(1)
            one.lose_engine()
            one.restart_engine(answer=answer)
            message = put_together(events_of(response.read().decode()))
    assert message["content"] == [{"type": "text", "text": "One two three four five six."}]
    assert message["stop_reason"] == "end_turn"


def test_who_leaves_frees_the_request(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "on and on", end=None)
    server.engine.behaviour.hold_after = 5
    body = {"max_tokens": 500, "messages": USER, "stream": True}
    with server.http() as http, http.stream("POST", PATH, json=body, headers={"x-api-key": "key"}):
        server.engine.wait_held(1)
    server.engine.wait_for(lambda: server.engine.num_running == 0, "the end of the request")
    assert len(server.engine.cancels) == 1


def test_a_pause_ends_a_turn_that_the_client_may_continue(
    server: GatewayServer, tokenizer: Tokenizer
) -> None:
    answer_with(server, tokenizer, "on and on", end=None)
    server.engine.behaviour.hold_after = 5
    body = {"max_tokens": 500, "messages": USER, "stream": True}
    key = {"x-api-key": "key"}
    with server.http() as http, http.stream("POST", PATH, json=body, headers=key) as response:
        server.engine.wait_held(1)

        async def abort() -> None:
            for generation in server.app.state.gateway.generator.open:
                generation.abort()

        server.call(abort())
        message = put_together(events_of(response.read().decode()))
    assert message["stop_reason"] == "pause_turn"


def test_silence_is_filled_with_pings(byte_level: Path, tokenizer: Tokenizer) -> None:
    with GatewayServer(byte_level, eos=END, vocab=512) as one:
        one.app.signs = SignsOfLife(0.02)
        ids = answer_with(one, tokenizer, "One two.")
        one.engine.behaviour.hold_after = 1
        body = {"max_tokens": 50, "messages": USER, "stream": True}
        with one.http() as http, http.stream("POST", PATH, json=body) as response:
            text = ""
            for piece in response.iter_text():
                text += piece
                if "event: ping" in text:
                    one.engine.behaviour.hold_after = None
        assert len(ids) > 1
    assert put_together(events_of(text))["content"] == [{"type": "text", "text": "One two."}]


def test_models_for_anthropics_clients(server: GatewayServer) -> None:
    headers = {"x-api-key": "key", "anthropic-version": "2023-06-01"}
    with server.http() as http:
        page = http.get("/v1/models", headers=headers).json()
        one = http.get("/v1/models/alias", headers=headers).json()
        other = http.get("/v1/models/alias", headers={"x-api-key": "key"}).json()
    assert [model["id"] for model in page["data"]] == ["tiny", "alias"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("tiny", "alias", False)
    assert page["data"][1] == one
    assert (one["type"], one["max_input_tokens"], one["created_at"][-1]) == ("model", 1024, "Z")
    assert other["object"] == "model"
