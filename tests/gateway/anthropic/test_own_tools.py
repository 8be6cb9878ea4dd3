"""Tools whose types are Anthropic's: some are answered by who asks, the others are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.gateway.anthropic.schemas import CountTokensRequest
from baton.gateway.anthropic.tools import tool_of
from baton.gateway.anthropic.translation import chat_of
from baton.gateway.errors import BadRequest
from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.anthropic.test_messages import TIME, post
from tests.gateway.api.test_chat import prompt_of
from tests.gateway.api.test_completions import answer_with
from tests.gateway.api.test_tools import QWEN, directory_with
from tests.gateway.harness import GatewayServer


@pytest.fixture(scope="module")
def server(byte_level: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    special = ("<tool_call>", "</tool_call>")
    directory = directory_with(byte_level, tmp_path_factory.mktemp("own"), QWEN, special)
    with GatewayServer(directory, eos=2, vocab=512, max_model_len=2048) as running:
        yield running


@pytest.fixture
def tokenizer(server: GatewayServer) -> Tokenizer:
    server.reset()
    return Tokenizer.from_directory(server.served.tokenizer)


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305",
        "web_fetch_20260318",
        "code_execution_20250825",
        "computer_20250124",
        "mcp_toolset",
    ],
)
def test_what_is_only_offered_is_left_out(server: GatewayServer, tokenizer: Tokenizer, kind: str) -> None:
    answer = post(server, tools=[TIME, {"type": kind, "name": "w"}])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-skipped-tools"] == kind
    assert '"name": "w"' not in prompt_of(server, tokenizer)
    assert post(server, tools=[{"type": kind, "name": "w"}]).status_code == 200


def test_servers_that_are_only_offered_are_left_out(server: GatewayServer, tokenizer: Tokenizer) -> None:
    servers = [{"type": "url", "url": "https://example.com", "name": "x"}]
    answer = post(server, tools=[TIME, {"type": "mcp_toolset", "mcp_server_name": "x"}], mcp_servers=servers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-skipped-tools"] == "mcp_toolset, mcp_servers"
    assert "example.com" not in prompt_of(server, tokenizer)
    body = CountTokensRequest(messages=[{"role": "user", "content": "hello"}], mcp_servers=servers)
    with pytest.raises(BadRequest, match="mcp_servers: this server calls no others"):
        chat_of(body, refuse_tools=True)


def test_a_function_in_a_chats_form_is_not_left_out(server: GatewayServer) -> None:
    for tool in ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}):
        answer = post(server, tools=[TIME, tool])
        assert answer.status_code == 400
        assert "tools[1].type: 'function' is of /v1/chat/completions" in answer.json()["error"]["message"]


def test_tools_are_bounded_with_those_that_are_left_out(server: GatewayServer) -> None:
    answer = post(server, tools=[{"type": f"kind_{i}"} for i in range(1025)])
    assert answer.status_code == 400
    assert "tools: at most 1024" in answer.json()["error"]["message"]


def test_a_shell_is_called_by_its_schema(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>')
    answer = post(server, tools=[{"type": "bash_20250124", "name": "bash"}])
    assert "x-baton-skipped-tools" not in answer.headers
    (block,) = answer.json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "bash", {"command": "ls"})
    assert '"restart"' in prompt_of(server, tokenizer)


@pytest.mark.parametrize(
    ("kind", "commands", "inserted"),
    [
        ("text_editor_20241022", ["view", "create", "str_replace", "insert", "undo_edit"], "new_str"),
        ("text_editor_20250429", ["view", "create", "str_replace", "insert"], "new_str"),
        ("text_editor_20250728", ["view", "create", "str_replace", "insert"], "insert_text"),
        ("memory_20250818", ["view", "create", "str_replace", "insert", "delete", "rename"], "insert_text"),
    ],
)
def test_editors_have_the_commands_of_their_date(kind: str, commands: list[str], inserted: str) -> None:
    made = tool_of({"type": kind, "name": "edit"}, "tools[0]", refuse=True)
    assert made is not None
    schema = made["function"]["parameters"]
    assert schema["properties"]["command"]["enum"] == commands
    assert inserted in schema["properties"]
    assert ("insert_text" in schema["properties"]) == (inserted == "insert_text")
    assert json.dumps(schema)
