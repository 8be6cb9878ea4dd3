"""Tools of chats that take a text, and those that the server does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.gateway.api.custom import arguments_of
from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.api.test_chat import prompt_of
from tests.gateway.api.test_completions import answer_with
from tests.gateway.api.test_tools import QWEN, TIME, directory_with, grammar_of
from tests.gateway.harness import GatewayServer

SQL = {
    "type": "custom",
    "custom": {
        "name": "query",
        "description": "Asks a database.",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "regex", "definition": r'SELECT "[^"\n]+"\n?'},
        },
    },
}
NOTE = {"type": "custom", "custom": {"name": "note"}}
TEXT = 'SELECT "a\\é"\n'


@pytest.fixture(scope="module")
def roomy(byte_level: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    special = ("<tool_call>", "</tool_call>")
    directory = directory_with(byte_level, tmp_path_factory.mktemp("custom"), QWEN, special)
    with GatewayServer(directory, eos=2, vocab=512, max_model_len=4096) as server:
        yield server


@pytest.fixture
def server(roomy: GatewayServer) -> GatewayServer:
    roomy.reset()
    return roomy


@pytest.fixture
def tokenizer(server: GatewayServer) -> Tokenizer:
    return Tokenizer.from_directory(server.served.tokenizer)


def ask(server: GatewayServer, **fields: Any) -> Any:
    user = [{"role": "user", "content": "hello"}]
    given = {"model": "tiny", "messages": user, "tools": [TIME, SQL, NOTE], **fields}
    return server.openai().chat.completions.create(**given)


def written(name: str, text: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments_of(text)}}}\n</tool_call>'


def test_a_custom_call_is_given_and_taken_back(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, written("query", TEXT) + "\n" + written("note", "") + "\n")
    choice = ask(server).choices[0]
    assert choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls
    assert (first.type, first.custom.name, first.custom.input) == ("custom", "query", TEXT)
    assert (second.type, second.custom.name, second.custom.input) == ("custom", "note", "")
    history = [
        {"role": "user", "content": "hello"},
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.id, "content": "rows"},
    ]
    ask(server, messages=history)
    assert f"<tool_call>query{arguments_of(TEXT)}" in prompt_of(server, tokenizer)
    assert "rows" in prompt_of(server, tokenizer)


def test_a_custom_call_is_streamed(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """Of two choices, whose calls do not mix."""
    answer_with(server, tokenizer, written("query", TEXT) + "\n" + '<tool_call>{"name": "time"}</tool_call>')
    inputs: dict[int, str] = {0: "", 1: ""}
    named: list[Any] = []
    for chunk in ask(server, stream=True, n=2):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    named.append((choice.index, call.index, call.type))
                if call.index == 0:
                    assert call.function is None
                    inputs[choice.index] += call.custom["input"]
                else:
                    assert call.function.arguments == "{}"
    assert inputs == {0: TEXT, 1: TEXT}
    assert sorted(named) == [(0, 0, "custom"), (0, 1, "function"), (1, 0, "custom"), (1, 1, "function")]


def test_a_custom_tool_may_be_demanded(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, written("query", TEXT))
    for choice in (
        {"type": "custom", "custom": {"name": "query"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "query"}}]},
        },
    ):
        assert ask(server, tool_choice=choice).choices[0].message.tool_calls[0].custom.input == TEXT
        assert "SELECT" in grammar_of(server)
        assert "time" not in grammar_of(server)


def test_what_is_only_offered_is_left_out(server: GatewayServer, tokenizer: Tokenizer) -> None:
    user = [{"role": "user", "content": "x"}]
    search = {"type": "web_search"}
    for more in ({"tools": [TIME, search]}, {"tools": [TIME], "web_search_options": {}}, {"tools": [search]}):
        body = {"model": "tiny", "messages": user, "max_tokens": 3, **more}
        answer = server.http().post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-skipped-tools"] == "web_search"
        assert "web_search" not in prompt_of(server, tokenizer)
        rendered = server.http().post("/v1/chat/completions/render", json=body)
        assert rendered.status_code == 200
    with pytest.raises(openai.BadRequestError, match="tool_choice: this server has no web_search"):
        ask(server, tools=[search], tool_choice="required")


def test_what_is_left_out_may_be_allowed(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """As in the Responses API."""
    search = {"type": "web_search"}
    time = {"type": "function", "function": {"name": "time"}}
    for mode, listed, shown in (("auto", [time, search], True), ("auto", [search], False)):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
        ask(server, tools=[TIME, search], tool_choice=choice, max_tokens=3)
        assert ('"name": "time"' in prompt_of(server, tokenizer)) == shown
        server.reset()
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [search]}}
    with pytest.raises(openai.BadRequestError, match="tool_choice: this server has no web_search"):
        ask(server, tools=[TIME, search], tool_choice=choice)


def test_tools_are_bounded_with_those_that_are_left_out(server: GatewayServer) -> None:
    with pytest.raises(openai.BadRequestError, match="tools: at most 1024"):
        ask(server, tools=[{"type": f"kind_{i}"} for i in range(1025)])


def test_errors_name_the_place_that_was_sent(server: GatewayServer) -> None:
    wrong = {"type": "function", "function": {"name": "a b"}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\].function.name: 'a b'"):
        ask(server, tools=[{"type": "web_search"}, wrong])


def test_a_tool_without_a_type_is_a_function(server: GatewayServer, tokenizer: Tokenizer) -> None:
    ask(server, tools=[{**TIME, "type": None}], max_tokens=3)
    assert '"name": "time"' in prompt_of(server, tokenizer)


REFUSED = [
    ({"name": "a b"}, r"tools\[0\].custom.name: 'a b'"),
    ({}, r"tools\[0\].custom.name: it is missing"),
    (None, r"tools\[0\].custom: give an object"),
    ({"name": "a", "description": 1}, "custom.description: must be a text"),
    ({"name": "a", "format": {"type": "x"}}, "custom.format: must be"),
    ({"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "x"}}}, "format.syntax: 'x' must be"),
    (
        {"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}},
        "definition: it is missing",
    ),
    (
        {"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a(?=b)"}}},
        "not supported in an expression",
    ),
    (
        {
            "name": "a",
            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x" * 65537}},
        },
        "at most 65536 characters",
    ),
]


@pytest.mark.parametrize(("custom", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_is_named(server: GatewayServer, custom: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(server, tools=[{"type": "custom", "custom": custom}])
    assert caught.value.body["param"] == "tools"  # type: ignore[index]
    assert server.engine.submits == []
