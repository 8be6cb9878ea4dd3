"""/v1/responses through the real client of OpenAI, whose helpers check the order of events."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from baton.gateway.responses.answers import ResponseEvent, ResponseObject
from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.api.test_chat import prompt_of
from tests.gateway.api.test_completions import answer_with
from tests.gateway.api.test_tools import ONE, TWO
from tests.gateway.harness import GatewayServer

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
TIME = {"type": "function", "name": "time", "strict": False}
ARGUMENTS = '{"city": "Paris, é😀"}'
FULL = "<think>\nhm hm\n</think>\n\nI look.\n" + TWO + "\nSo be it."


def client_of(server: GatewayServer, key: str = "one") -> OpenAI:
    return server.openai(api_key=key)


def ask(server: GatewayServer, **fields: Any) -> Any:
    given = {"model": "tiny", "input": "hello", "tools": [WEATHER, TIME], **fields}
    return client_of(server).responses.create(**given)


def said(items: list[Any]) -> list[tuple[str, ...]]:
    """What the items say, without their ids."""
    found: list[tuple[str, ...]] = []
    for item in items:
        match item.type:
            case "message":
                assert (item.role, [part.type for part in item.content]) == ("assistant", ["output_text"])
                assert item.content[0].annotations == []
                found.append(("message", item.status, item.content[0].text))
            case "reasoning":
                assert item.summary == []
                found.append(("reasoning", item.status, item.content[0].text))
            case "function_call":
                found.append((item.name, item.status, item.arguments))
    return found


def put_together(events: list[Any]) -> list[tuple[str, ...]]:
    """What a client makes of a stream's deltas, checking the order of events."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[Any] = []
    text = ""
    for event in events[2:-1]:
        match event.type.removeprefix("response."):
            case "output_item.added":
                assert event.output_index == len(items)
                assert event.item.status == "in_progress"
                items.append(event.item)
                text = ""
            case "content_part.added":
                assert (event.item_id, event.part.text) == (items[-1].id, "")
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert (event.item_id, event.output_index) == (items[-1].id, len(items) - 1)
                text += event.delta
            case "output_text.done" | "reasoning_text.done":
                assert event.text == text
            case "function_call_arguments.done":
                assert event.arguments == text
            case "content_part.done":
                assert event.part.text == text
            case "output_item.done":
                assert event.item.id == items[-1].id
                items[-1] = event.item
            case other:
                pytest.fail(other)
    return said(items)


def test_a_text(server: GatewayServer, tokenizer: Tokenizer) -> None:
    ids = answer_with(server, tokenizer, "hello world 😀")
    server.engine.behaviour.num_cached = 3
    done = ask(server, tools=[], instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert (done.status, done.output_text, done.object) == ("completed", "hello world 😀", "response")
    assert said(done.output) == [("message", "completed", "hello world 😀")]
    assert (done.instructions, done.metadata, done.temperature, done.top_p) == (
        "Be kind.",
        {"a": "b"},
        0.5,
        1,
    )
    assert (done.error, done.incomplete_details, done.parallel_tool_calls) == (None, None, True)
    assert (done.tools, done.tool_choice, done.truncation, done.user) == ([], "auto", "disabled", "me")
    assert done.text.format.type == "text"
    assert done.id.startswith("resp_")
    assert done.output[0].id.startswith("msg_")
    usage = done.usage
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (len(ids) + 1, 3)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    prompt = prompt_of(server, tokenizer)
    assert prompt == "<|start|>system\nBe kind.<|end|><|start|>user\nhello<|end|><|start|>assistant\n"
    assert server.engine.submits[-1].sampling.temperature == 0.5


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_a_stream_is_the_whole_in_pieces(server: GatewayServer, tokenizer: Tokenizer, tokens: int) -> None:
    answer_with(server, tokenizer, FULL)
    server.engine.behaviour.tokens_per_message = tokens
    whole = ask(server)
    events = list(ask(server, stream=True))
    expected = [
        ("reasoning", "completed", "hm hm"),
        ("message", "completed", "I look."),
        ("weather", "completed", ARGUMENTS),
        ("time", "completed", "{}"),
        ("message", "completed", "\nSo be it."),
    ]
    assert said(whole.output) == put_together(events) == said(events[-1].response.output) == expected
    assert events[-1].type == "response.completed"
    assert events[-1].response.usage == whole.usage
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert len({item.id for item in whole.output}) == 5
    if tokens == 1:
        assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 8


def test_events_and_answers_have_the_documented_shape(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, FULL)
    fields = {"model": "tiny", "input": "hello", "tools": [WEATHER, TIME]}
    headers = {"authorization": "Bearer one"}
    with server.http() as http:
        answer = http.post("/v1/responses", json=fields, headers=headers)
        msgspec.json.decode(answer.content, type=ResponseObject)
        stream = http.post("/v1/responses", json={**fields, "stream": True}, headers=headers).text
    assert stream.endswith("\n\n")
    for block in stream.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = msgspec.json.decode(data.removeprefix("data: "), type=ResponseEvent)
        assert name == f"event: {event.type}"


def test_the_clients_own_stream_helper(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, FULL)
    with client_of(server).responses.stream(model="tiny", input="hello", tools=[WEATHER, TIME]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "I look." in snapshots
    assert final.output_text == "I look.\nSo be it."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("weather", ARGUMENTS), ("time", "{}")]


class Person(BaseModel):
    name: str
    age: int


def test_parse_gives_the_model_of_pydantic(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, '{"name": "Ann", "age": 5}')
    client = client_of(server)
    done = client.responses.parse(model="tiny", input="who?", text_format=Person)
    assert done.output_parsed == Person(name="Ann", age=5)
    assert done.text.format.name == "Person"
    assert server.engine.submits[-1].sampling.constraint is not None
    with client.responses.stream(model="tiny", input="who?", text_format=Person) as stream:
        parsed = [event.parsed for event in stream if event.type == "response.output_text.done"]
    assert parsed == [Person(name="Ann", age=5)]
    answer_with(server, tokenizer, ONE)
    tool = openai.pydantic_function_tool(Person, name="weather")["function"]
    done = client.responses.parse(model="tiny", input="who?", tools=[{"type": "function", **tool}])
    assert done.output[0].name == "weather"
    assert done.tools[0].strict is True


def test_an_agents_turns(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """All that was said goes back with each request, as Codex does it."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    for turn in range(3):
        answer_with(server, tokenizer, f"<think>\nhm {turn}\n</think>\n\nI look.\n" + ONE)
        events = list(
            ask(
                server,
                input=items,
                instructions="Work.",
                stream=True,
                store=False,
                include=["reasoning.encrypted_content"],
                reasoning={"effort": "low", "summary": "auto"},
                prompt_cache_key="x",
                tool_choice="auto",
                parallel_tool_calls=False,
            )
        )
        done = events[-1].response
        assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
        for item in done.output:
            data = item.model_dump(exclude_none=True)
            if item.type == "reasoning":
                assert data.pop("encrypted_content")
            items.append(data)
        call = done.output[-1]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"sunny {turn}"})
    answer_with(server, tokenizer, "It is sunny.")
    done = ask(server, input=items, instructions="Work.")
    assert done.output_text == "It is sunny."
    turns = "".join(
        f"<|start|>assistant\nI look.<tool_call>weather{ARGUMENTS}{ARGUMENTS}<|end|>"
        f"<|start|>tool\nsunny {turn}<|end|>"
        for turn in range(3)
    )
    prompt = prompt_of(server, tokenizer)
    assert prompt.endswith("<|start|>user\nWeather?<|end|>" + turns + "<|start|>assistant\n")


def test_an_answer_that_is_cut_off(server: GatewayServer, tokenizer: Tokenizer) -> None:
    ids = answer_with(server, tokenizer, "<think>hm</think>I look. " + ONE, end=None)
    for count in (1, 2, 4, 6, 9, 20, len(ids) - 1, len(ids)):
        done = ask(server, max_output_tokens=count)
        events = list(ask(server, max_output_tokens=count, stream=True))
        assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert said(done.output) == put_together(events) == said(events[-1].response.output)
        assert events[-1].type == "response.incomplete"
        assert done.output[-1].status == "incomplete"
        assert all(item.status == "completed" for item in done.output[:-1])


@pytest.mark.parametrize("tokens", [1, 4, 100])
def test_log_probabilities_are_those_of_the_text(
    server: GatewayServer, tokenizer: Tokenizer, tokens: int
) -> None:
    answer_with(server, tokenizer, "<think>hm</think>I look. " + ONE + "So.")
    server.engine.behaviour.tokens_per_message = tokens
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    done = ask(server, **fields)
    texts = [item.content[0] for item in done.output if item.type == "message"]
    assert [text.text for text in texts] == ["I look.", " So."]
    for text in texts:
        assert (
            "".join(one.token for one in text.logprobs).removesuffix("<|end|>").strip() == text.text.strip()
        )
        assert all(len(one.top_logprobs) == 2 for one in text.logprobs)
    events = list(ask(server, **fields, stream=True))
    for index, text in zip((1, 3), texts, strict=True):
        deltas = [e for e in events if e.type == "response.output_text.delta" and e.output_index == index]
        assert [one.token for delta in deltas for one in delta.logprobs] == [o.token for o in text.logprobs]
    plain = ask(server, **fields, tools=[], tool_choice="none")
    assert plain.output[-1].content[0].logprobs


def test_choices_of_tools(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, ONE)
    done = ask(server, tool_choice={"type": "function", "name": "weather"})
    assert done.tool_choice.name == "weather"
    assert server.engine.submits[-1].sampling.constraint is not None
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    done = ask(server, tool_choice=allowed)
    assert done.tool_choice.mode == "required"
    assert len(done.tools) == 2
    prompt = prompt_of(server, tokenizer)
    assert '"time"' in prompt
    assert '"weather"' not in prompt
    ask(server, tool_choice="none")
    assert "<tools>" not in prompt_of(server, tokenizer)
    ask(server)
    assert server.engine.submits[-1].sampling.constraint is None


def test_functions_are_bound_unless_they_say_otherwise(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, ONE)
    ask(server, tools=[{**WEATHER, "strict": None}])
    assert "city" in server.engine.submits[-1].sampling.constraint.grammar
    unkept = {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "string"}}}}
    ask(server, tools=[{**WEATHER, "strict": None, "parameters": unkept}])
    assert "contains" not in server.engine.submits[-1].sampling.constraint.grammar
    with pytest.raises(openai.BadRequestError, match="contains"):
        ask(server, tools=[{**WEATHER, "strict": True, "parameters": unkept}])


def test_tokens_are_counted(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "x")
    fields: dict[str, Any] = {"input": "hello you", "instructions": "Be kind.", "tools": [WEATHER]}
    used = ask(server, **fields).usage.input_tokens
    assert client_of(server).responses.input_tokens.count(model="tiny", **fields).input_tokens == used


REFUSED = [
    ({"input": None}, "input", "input: it is missing"),
    ({"input": [{"type": "telegram"}]}, "input", r"input\[0\].type: 'telegram'"),
    ({"input": [{"role": "tool", "content": ""}]}, "input", r"input\[0\].role: 'tool'"),
    (
        {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
        "input",
        "no function_call before it",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "x", "arguments": "{"}]},
        "input",
        r"input\[0\].name: it is missing",
    ),
    ({"input": [{"role": "user", "content": "x" * 5000}]}, "input", "maximum context length"),
    (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
        "tool_choice.type: 'web_search' is not supported: the server has no search engine",
    ),
    (
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "yaml"}}]},
        "tools",
        "custom.format: must",
    ),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools", "is for /v1/chat/completions"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "'a b'"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no tool 'x'"),
    (
        {"reasoning": {"effort": "hugest"}},
        "reasoning.effort",
        "reasoning.effort: 'hugest' must be one of none,",
    ),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", "no files"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "it is missing"),
    (
        {
            "text": {
                "format": {"type": "json_schema", "name": "x", "schema": {"contains": {"type": "string"}}},
            }
        },
        "text.format.schema",
        "text.format.schema: .*contains",
    ),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "'loud' must be one of low"),
    ({"background": True}, "background", "background: an answer comes on the connection"),
    ({"conversation": "x"}, "conversation", "conversation: "),
    ({"extra_body": {"prompt": {"id": "x"}}}, "prompt", "prompt: templates of prompts"),
    ({"extra_body": {"max_tokens": 5}}, "max_tokens", "give max_output_tokens"),
    ({"include": ["x"]}, "include", "include: 'x'"),
    ({"top_logprobs": 2}, "top_logprobs", "give include"),
    ({"truncation": "x"}, "truncation", "truncation: 'x'"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens may be at most"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
    ({"metadata": {"k" * 65: "x"}}, "metadata", "metadata: a key must be of at most 64 characters"),
    ({"model": "other"}, "model", "is not served here"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "there is no answer 'resp_x'"),
    ({"input": [{"id": "msg_x"}]}, "input", "there is no item 'msg_x'"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input", "there is no item 'msg_x'"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(server: GatewayServer, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        ask(server, **fields)
    assert caught.value.body["param"] == param  # type: ignore[index]
    assert caught.value.status_code in (400, 404)
    assert server.engine.submits == []


def test_a_stream_goes_on_after_a_loss(keeping: GatewayServer, tokenizer: Tokenizer) -> None:
    keeping.reset()
    ids = answer_with(keeping, tokenizer, FULL)
    prompt_size: list[int] = []
    script = [*ids, 2]

    def answer(prompt: list[int]) -> Any:
        prompt_size.append(len(prompt))
        return lambda i: script[i + len(prompt) - prompt_size[0]]

    keeping.engine.behaviour.answer = answer
    keeping.engine.behaviour.hold_after = len(ids) // 2
    stream = iter(ask(keeping, stream=True))
    events = [next(stream)]
    keeping.engine.wait_held(1)
    keeping.lose_engine()
    keeping.restart_engine(answer=answer)
    events += stream
    assert [text for *_, text in put_together(events)] == ["hm hm", "I look.", ARGUMENTS, "{}", "\nSo be it."]


def test_a_stream_that_fails_says_so(byte_level: Path) -> None:
    with GatewayServer(byte_level, eos=2, vocab=512, retry_wait_s=0.05) as server:
        server.engine.behaviour.hold_after = 3
        stream = iter(ask(server, stream=True, tools=[]))
        events = [next(stream)]
        server.engine.wait_held(1)
        server.lose_engine()
        events += stream
    last = events[-1]
    assert (last.type, last.response.status, last.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert put_together(events)[0][:2] == ("message", "incomplete")


def test_who_leaves_costs_nothing_more(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "hello world")
    server.engine.behaviour.hold_after = 2
    stream = ask(server, stream=True)
    next(iter(stream))
    server.engine.wait_held(1)
    stream.close()
    server.engine.wait_for(lambda: server.engine.cancels != [], "a cancellation")


def test_nothing_is_said(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "")
    assert said(ask(server).output) == [("message", "completed", "")]
    assert put_together(list(ask(server, stream=True))) == [("message", "completed", "")]


def test_bytes_that_are_no_json_are_refused(server: GatewayServer) -> None:
    headers = {"authorization": "Bearer one"}
    with server.http() as http:
        for body in (b"\0\0\0\0{}", b"\xff" * 8, b"[]", json.dumps({"input": 5}).encode()):
            assert http.post("/v1/responses", content=body, headers=headers).status_code == 400


def test_the_oldest_messages_are_left_out(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """As few as possible; the instructions and the last message stay, and no result without its call."""
    answer_with(server, tokenizer, "ok")
    turns: list[Any] = []
    for number in range(40):
        call = {"type": "function_call", "call_id": f"c{number}", "name": "time", "arguments": "{}"}
        turns += [
            {"role": "user", "content": f"{number}? " + "the fox " * 8},
            call,
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"<{number}>"},
        ]
    fields = {"input": [*turns, {"role": "user", "content": "So?"}], "instructions": "Be kind."}
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(server, **fields)
    done = ask(server, **fields, truncation="auto", max_output_tokens=100)
    assert done.truncation == "auto"
    assert 1024 - 100 - 80 < done.usage.input_tokens <= 1024 - 100
    prompt = prompt_of(server, tokenizer)
    assert re.search(
        r"<tools>.*</tool_call><\|start\|>system\nBe kind\.<\|end\|><\|start\|>(user|assist)", prompt
    )
    assert prompt.endswith("<39><|end|><|start|>user\nSo?<|end|><|start|>assistant\n")
    short = {**fields, "input": "hello"}
    whole = ask(server, **short).usage.input_tokens
    assert ask(server, **short, truncation="auto").usage.input_tokens == whole
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(server, input="x" * 5000, truncation="auto")


def test_the_program_of_the_document(
    server: GatewayServer, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    document = (Path(__file__).parents[3] / "docs" / "responses.md").read_text()
    program = document.partition("```python\n")[2].partition("```")[0]
    program = program.replace("http://127.0.0.1:8000", server.url).replace("MODEL", "tiny")
    call = [*tokenizer.encode(ONE, add_special_tokens=False), 2]
    text = [*tokenizer.encode("Sunny.", add_special_tokens=False), 2]
    scripts = iter([call, text])

    def answer(_: list[int]) -> Any:
        script = next(scripts)
        return lambda i: script[i]

    server.engine.behaviour.answer = answer
    exec(program.replace('"none"', '"one"'), {})
    assert capsys.readouterr().out == "Sunny."
    assert "Sunny in Paris, é😀." in prompt_of(server, tokenizer)
