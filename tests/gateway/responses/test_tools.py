"""Tools that agents send to /v1/responses: those that are offered, namespaces, and those that take a text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.gateway.access import Access
from baton.gateway.api.custom import arguments_of
from baton.gateway.errors import BadRequest
from baton.gateway.responses.store import ResponseStore
from baton.gateway.responses.tools import chat_tools, flat_name
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.codec import unpack_int32
from tests.gateway.api.test_completions import answer_with
from tests.gateway.api.test_tools import QWEN, directory_with, grammar_of
from tests.gateway.harness import GatewayServer
from tests.gateway.parsing.patches import GRAMMAR
from tests.gateway.responses.conftest import KEYS
from tests.gateway.responses.test_responses import TIME, WEATHER, client_of

CLOCK = {
    "type": "namespace",
    "name": "mcp__clock",
    "description": "Tools in the mcp__clock namespace.",
    "tools": [{**TIME, "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": False}],
}
EDIT = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
SEARCH = {"type": "web_search", "external_web_access": True}
OFFERED = [
    *({"type": kind} for kind in ("web_search_2025_08_26", "web_search_preview", "image_generation", "mcp")),
    *({"type": kind} for kind in ("local_shell", "shell", "apply_patch", "tool_search", "file_search")),
    *({"type": kind} for kind in ("code_interpreter", "computer_use_preview", "something_new")),
]
PATCH = '*** Begin Patch\n*** Add File: a\n+said "é" \\o/\n*** End Patch\n'


@pytest.fixture(scope="module")
def roomy(byte_level: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """As `keeping`, with room for what agents send."""
    special = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    directory = directory_with(byte_level, tmp_path_factory.mktemp("roomy"), QWEN, special)
    with GatewayServer(
        directory,
        eos=2,
        vocab=512,
        max_model_len=8192,
        access=Access(api_keys=KEYS),
        responses=ResponseStore(8, 1 << 20),
    ) as server:
        yield server


@pytest.fixture
def server(roomy: GatewayServer) -> GatewayServer:
    roomy.reset()
    return roomy


def prompt_of(server: GatewayServer, number: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(unpack_int32(server.engine.submits[number].prompt), skip_special_tokens=False)


def ask(server: GatewayServer, **fields: Any) -> Any:
    given = {"model": "tiny", "input": "hello", "tools": [WEATHER, CLOCK, EDIT, SEARCH], **fields}
    return client_of(server).responses.create(**given)


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_only_offered_is_left_out_and_named(
    server: GatewayServer, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    answer_with(server, tokenizer, "So be it.")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            raw = client_of(server).responses.with_raw_response.create(
                model="tiny",
                input="hello",
                stream=stream,
                tools=[WEATHER, *OFFERED, *OFFERED],  # type: ignore[call-overload]
            )
            assert raw.headers["x-baton-skipped-tools"] == ", ".join(str(one["type"]) for one in OFFERED)
            if not stream:
                answer = raw.parse()
                assert [tool.type for tool in answer.tools] == ["function"]
            else:
                assert [event.type for event in raw.parse()][-1] == "response.completed"
    assert all("image_generation" not in prompt_of(server, i, tokenizer) for i in range(2))
    said = [one.getMessage() for one in caplog.records if "image_generation" in one.getMessage()]
    assert len(said) <= 1  # (once for a server, whatever was asked before)
    plain = client_of(server).responses.with_raw_response.create(model="tiny", input="x", tools=[WEATHER])  # type: ignore[list-item]
    assert "x-baton-skipped-tools" not in plain.headers


DEMANDED = [
    ({"tools": [SEARCH], "tool_choice": "required"}, "'web_search' is not supported"),
    ({"tool_choice": {"type": "web_search_preview"}}, "'web_search_preview' is not supported"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "'mcp' is not supported"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}},
        "'web_search' is not supported",
    ),
    ({"tool_choice": {"type": "custom", "name": "edit"}}, "there is no tool 'edit'"),
]


@pytest.mark.parametrize(("fields", "words"), DEMANDED, ids=range(len(DEMANDED)))
def test_what_is_demanded_is_refused(server: GatewayServer, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(server, **fields)
    assert caught.value.body["param"] == "tool_choice"  # type: ignore[index]
    assert server.engine.submits == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
def test_a_server_may_refuse_what_it_does_not_have(byte_level: Path, tmp_path: Path, path: str) -> None:
    directory = directory_with(byte_level, tmp_path, QWEN)
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    kind = "web_search_20250305" if path == "/v1/messages" else "web_search"
    if path == "/v1/responses":
        body = {"model": "tiny", "input": "x"}
    body["tools"] = [{"type": kind, "name": "web_search"}]
    with GatewayServer(directory, eos=2, vocab=512, max_model_len=1024, refuse_tools=True) as strict:
        answer = strict.http().post(path, json=body)
    assert answer.status_code == 400
    assert f"tools[0].type: '{kind}'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_a_namespace_is_given_back_under_both_names(
    server: GatewayServer, tokenizer: Tokenizer, stream: bool
) -> None:
    answer_with(server, tokenizer, call_of("mcp__clock__now", "{}"))
    made = ask(server, stream=stream)
    if stream:
        events = list(made)
        added = next(event for event in events if event.type == "response.output_item.added")
        assert (added.item.name, added.item.namespace) == ("now", "mcp__clock")
        made = events[-1].response
    (call,) = made.output
    assert (call.type, call.name, call.namespace, call.arguments) == (
        "function_call",
        "now",
        "mcp__clock",
        "{}",
    )
    assert '"name": "mcp__clock__now"' in prompt_of(server, 0, tokenizer)
    assert made.tools[1].type == "namespace"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    ask(server, input=[{"role": "user", "content": "hello"}, call.model_dump(exclude_none=True), output])
    assert "<tool_call>mcp__clock__now{}" in prompt_of(server, 1, tokenizer)


def test_a_namespaced_tool_may_be_chosen(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, call_of("mcp__clock__now", "{}"))
    choice = {"type": "function", "name": "now", "namespace": "mcp__clock"}
    assert ask(server, tool_choice=choice).output[0].name == "now"
    assert "mcp__clock__now" in grammar_of(server)


def test_long_names_of_tools_stay_apart() -> None:
    first, second = flat_name("n" * 120, "a" * 50), flat_name("n" * 120, "a" * 51)
    assert len(first) == len(second) == 128
    assert first != second


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_gets_its_text(server: GatewayServer, tokenizer: Tokenizer, stream: bool) -> None:
    answer_with(server, tokenizer, "I edit.\n" + call_of("apply_patch", arguments_of(PATCH)))
    made = ask(server, stream=stream)
    if stream:
        events = list(made)
        item = next(one.item for one in events if getattr(getattr(one, "item", None), "input", None) == "")
        assert (item.type, item.name) == ("custom_tool_call", "apply_patch")
        deltas = [one for one in events if one.type == "response.custom_tool_call_input.delta"]
        assert len(deltas) > 3
        assert "".join(one.delta for one in deltas) == PATCH
        (done,) = [one for one in events if one.type == "response.custom_tool_call_input.done"]
        assert (done.input, done.item_id) == (PATCH, item.id)
        made = events[-1].response
    text, call = made.output
    assert text.type == "message"
    assert (call.type, call.input, call.status) == ("custom_tool_call", PATCH, "completed")
    assert made.tools[2].type == "custom"
    output = {
        "type": "custom_tool_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "Done!"}],
    }
    ask(
        server, input=[{"role": "user", "content": "x"}, call.model_dump(exclude_none=True), output], tools=[]
    )
    assert arguments_of(PATCH) in prompt_of(server, 1, tokenizer)
    assert "Done!" in prompt_of(server, 1, tokenizer)


def test_a_custom_call_that_is_cut_is_incomplete(server: GatewayServer, tokenizer: Tokenizer) -> None:
    ids = answer_with(server, tokenizer, call_of("apply_patch", arguments_of(PATCH)))
    made = ask(server, max_output_tokens=len(ids) - 20)
    (call,) = made.output
    assert (made.status, call.status) == ("incomplete", "incomplete")
    assert PATCH.startswith(call.input)
    history = [{"role": "user", "content": "x"}, call.model_dump(exclude_none=True)]
    assert ask(server, input=[*history, {"role": "user", "content": "go on"}]).status in (
        "completed",
        "incomplete",
    )


def test_a_grammar_binds_what_may_be_called(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "So be it.")
    ask(server, tools=[EDIT])
    grammar = grammar_of(server)
    assert "*** Begin Patch" in grammar
    assert "Lark" not in prompt_of(server, 0, tokenizer).split("<|start|>")[1]
    with pytest.raises(openai.BadRequestError, match="there is no nothing"):
        ask(server, tools=[{**EDIT, "format": {**EDIT["format"], "definition": "start: nothing"}}])


def test_kept_answers_have_custom_calls(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, call_of("apply_patch", arguments_of(PATCH)))
    first = ask(server, store=True)
    output = {"type": "custom_tool_call_output", "call_id": first.output[0].call_id, "output": "Done!"}
    answer_with(server, tokenizer, "So be it.")
    second = ask(server, input=[output], previous_response_id=first.id, store=True)
    assert "Done!" in prompt_of(server, 1, tokenizer)
    listed = client_of(server).responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == ["message", "custom_tool_call", "custom_tool_call_output"]


OTHER_ITEMS = [
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    },
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "eA=="},
    {
        "type": "local_shell_call",
        "id": "ls_1",
        "call_id": "c1",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
    {
        "type": "mcp_call",
        "id": "m1",
        "server_label": "s",
        "name": "t",
        "arguments": "{}",
        "output": "found it",
    },
    {"type": "additional_tools", "role": "developer", "tools": [TIME, CLOCK]},
]


def test_items_that_other_servers_gave_are_history(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, call_of("mcp__clock__now", "{}"))
    made = ask(server, input=[{"role": "user", "content": "hello"}, *OTHER_ITEMS], tools=[WEATHER])
    prompt = prompt_of(server, 0, tokenizer)
    for words in ('local_shell{"command":["ls"],"env":{}}', "a.txt", "s__t{}", "found it", '"name": "time"'):
        assert words in prompt
    assert made.output[0].namespace == "mcp__clock"


def test_what_codex_sends_is_answered(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """The fields of Codex 0.171's first request, in words of our own."""
    answer_with(server, tokenizer, "So be it.")
    body = {
        "model": "tiny",
        "stream": True,
        "input": [
            {
                "type": "message",
                "id": "msg_1",
                "role": "developer",
                "content": [{"type": "input_text", "text": "a"}],
            },
            {
                "type": "message",
                "id": "msg_2",
                "role": "user",
                "content": [{"type": "input_text", "text": "b"}],
            },
        ],
        "tools": [WEATHER, CLOCK, EDIT, {"type": "tool_search", "execution": "client"}, SEARCH],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "client_metadata": {"thread_id": "t"},
        "service_tier": "priority",
    }
    answer = server.http().post("/v1/responses", json=body, headers={"authorization": "Bearer one"})
    assert answer.status_code == 200, answer.text
    assert "event: response.completed" in answer.text
    assert answer.headers["x-baton-skipped-tools"] == "tool_search, web_search"


@pytest.mark.parametrize("empty", ["", []])
def test_a_probe_without_input_is_answered(server: GatewayServer, empty: Any) -> None:
    assert ask(server, input=empty, max_output_tokens=1).usage.output_tokens == 1


def test_a_conversation_is_compacted_and_goes_on(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "<think>\nhm\n</think>\n\nFile a was written.")
    client = client_of(server)
    history = [
        {"role": "user", "content": "write a"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"role": "user", "content": "thanks"},
    ]
    made = client.responses.compact(model="tiny", input=history, instructions="Be brief.")  # type: ignore[arg-type]
    assert made.object == "response.compaction"
    assert made.usage.output_tokens > 0
    *kept, last = made.output
    assert [item.content[0].text for item in kept] == ["write a", "thanks"]  # type: ignore[union-attr]
    assert last.type == "compaction"
    prompt = prompt_of(server, 0, tokenizer)
    assert "Be brief." in prompt
    assert "Write a summary" in prompt
    items = [item.model_dump(exclude_none=True) for item in made.output]
    ask(server, input=[*items, {"role": "user", "content": "go on"}])
    later = prompt_of(server, 1, tokenizer)
    assert "File a was written." in later
    assert "write a" in later
    assert "hm\n" not in later
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].encrypted_content: was not made by"):
        ask(server, input=[foreign])


def test_a_summary_is_bounded_and_what_does_not_fit_is_left_out(server: GatewayServer) -> None:
    history = [{"role": "user", "content": f"{i} " + "word " * 500} for i in range(20)]
    made = client_of(server).responses.compact(model="tiny", input=history)  # type: ignore[arg-type]
    assert made.usage.output_tokens <= 2048
    assert made.usage.input_tokens <= 8192 - 2048  # (of some 15,000 that were sent)
    *kept, last = made.output
    assert last.type == "compaction"
    texts = [item.content[0].text for item in kept]  # type: ignore[union-attr]
    assert texts[-1] == history[-1]["content"]
    assert texts[0].endswith(" […]")
    assert texts[0][:-4] in history[-len(texts)]["content"]


@pytest.mark.parametrize("text", ["é" * 30_000, "word " * 10_000, "\U0001f600" * 9_000])
def test_what_was_compacted_fits(server: GatewayServer, text: str) -> None:
    """However long what users said is, and however many tokens a character of it has."""
    client = client_of(server)
    for history in ([text], ["hello", text], [text, "hello"], ["hello " * 9] * 400):
        items = [{"role": "user", "content": one} for one in history]
        made = client.responses.compact(model="tiny", input=items)  # type: ignore[arg-type]
        assert ask(
            server, input=[item.model_dump(exclude_none=True) for item in made.output], max_output_tokens=1
        )
        (first, *_) = made.output
        assert first.type == "message"


def test_what_is_kept_is_compacted_by_its_names(server: GatewayServer) -> None:
    """The answer before alone, and a message by its id."""
    client = client_of(server)
    answer = ask(server, input="hello there", tools=[], max_output_tokens=2)
    (item,) = client.responses.input_items.list(answer.id).data
    for named in (
        {"previous_response_id": answer.id},
        {"input": [{"type": "item_reference", "id": item.id}]},
    ):
        made = client.responses.compact(model="tiny", **named)  # type: ignore[arg-type]
        message, last = made.output
        assert message.content[0].text == "hello there"  # type: ignore[union-attr]
        assert last.type == "compaction"


def test_what_has_no_effect_on_a_summary_is_read(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """A body of /v1/responses may be sent as it is; what is wrong there is wrong here."""
    http, keys = server.http(), {"authorization": "Bearer one"}
    body = {
        "model": "tiny",
        "input": "hello",
        "tools": [WEATHER, SEARCH],
        "tool_choice": "required",
        "stream": True,
        "text": {"format": {"type": "json_object"}},
        "include": ["message.output_text.logprobs"],
    }
    answer = http.post("/v1/responses/compact", json=body, headers=keys)
    assert answer.status_code == 200, answer.text
    assert "weather" not in prompt_of(server, 0, tokenizer)
    for wrong in (
        {"tools": [{"type": "function"}]},
        {"tools": [{**WEATHER, "parameters": 5}]},
        {"tool_choice": "nope"},
        {"include": ["nope"]},
        {"truncation": "nope"},
        {"text": {"format": {"type": "nope"}}},
    ):
        answer = http.post("/v1/responses/compact", json={**body, **wrong}, headers=keys)
        assert answer.status_code == 400, wrong
        assert answer.json()["error"]["param"].startswith(next(iter(wrong)))


def test_tools_that_earlier_items_brought_stay(server: GatewayServer, tokenizer: Tokenizer) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [TIME]}
    answer = ask(server, input=[more, {"role": "user", "content": "hello"}], tools=[], max_output_tokens=2)
    ask(server, previous_response_id=answer.id, input="and now?", tools=[], max_output_tokens=2)
    assert '"name": "time"' in prompt_of(server, 0, tokenizer)
    assert '"name": "time"' in prompt_of(server, 1, tokenizer)


def test_tools_are_bounded_with_those_that_are_left_out() -> None:
    """Before anything is done with each of them."""
    many = [{"type": f"kind_{i}"} for i in range(1025)]
    space = {**CLOCK, "tools": many}
    for tools, more in ((many, ()), ([space], ()), (None, many), (None, [space])):
        with pytest.raises(BadRequest, match="tools: at most 1024"):
            chat_tools(tools, None, more=more)


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([SEARCH, {**TIME, "name": "a b"}], None, r"tools\[1\].name: 'a b' must be of letters"),
        ([SEARCH, {**CLOCK, "name": "my clock"}], None, r"tools\[1\].tools\[0\].name: 'my clock__now'"),
        ([CLOCK], "any", r"\{'type': 'function', 'name': …\}"),
        (
            [CLOCK],
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "nope"}]},
            r"tool_choice.tools\[0\]: there is no namespace 'nope'",
        ),
    ],
)
def test_errors_name_the_place_that_was_sent(
    server: GatewayServer, tools: list[Any], choice: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, tools=tools, **({} if choice is None else {"tool_choice": choice}))


@pytest.mark.parametrize("kind", [{}, [], 5, True])
def test_kinds_that_are_no_texts_are_refused(server: GatewayServer, kind: Any) -> None:
    for field in ("input", "tools", "tool_choice"):
        one = {"type": kind}
        body = {"model": "tiny", "input": "x", field: one if field == "tool_choice" else [one]}
        for path in ("", "/input_tokens", "/compact") if field == "input" else ("",):
            answer = server.http().post(
                "/v1/responses" + path, json=body, headers={"authorization": "Bearer one"}
            )
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == field
