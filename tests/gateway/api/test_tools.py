"""Tools and reasoning in /v1/chat/completions, through the real client of OpenAI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.api.test_chat import prompt_of
from tests.gateway.api.test_completions import answer_with
from tests.gateway.harness import GatewayServer

QWEN = (
    "{%- if tools %}<tools>{{ tools | tojson }}</tools> <tool_call></tool_call>{% endif %}"
    "{%- for message in messages %}"
    "{{- '<|start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + call.function.name + call.function.arguments + (call.function.arguments | tojson) }}"
    "{%- endfor %}{{- '<|end|>' }}"
    "{%- endfor %}"
    "{{- '<|start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{%- if opens %}<think>\n{% endif %}"
    "{%- if reasoning_effort %}effort={{ reasoning_effort }}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STRICT_UNKEPT = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "array", "contains": {"type": "string"}}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
USER = [{"role": "user", "content": "hello"}]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris, é😀"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def directory_with(source: Path, target: Path, template: str, special: tuple[str, ...] = ()) -> Path:
    """The same tokenizer with another template, and more special tokens."""
    backend = Backend.from_file(str(source / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.save(str(target / "tokenizer.json"))
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {"chat_template": template, "response_template": {"fields": {"x": {"open": "<x>"}}}}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def calling(byte_level: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """A model whose template shows Hermes' calls and thinks, its markers special tokens."""
    special = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    directory = directory_with(byte_level, tmp_path_factory.mktemp("calling"), QWEN, special)
    with GatewayServer(directory, eos=2, vocab=512, max_model_len=1024) as server:
        yield server


@pytest.fixture
def server(calling: GatewayServer) -> GatewayServer:
    calling.reset()
    return calling


@pytest.fixture
def tokenizer(server: GatewayServer) -> Tokenizer:
    return Tokenizer.from_directory(server.served.tokenizer)


def ask(server: GatewayServer, **fields: Any) -> Any:
    given = {"model": "tiny", "messages": USER, "tools": [WEATHER, TIME], **fields}
    return server.openai().chat.completions.create(**given)


def put_together(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {
        "content": "",
        "reasoning": "",
        "reasoning_content": "",
        "calls": [],
        "end": [],
    }
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            message["content"] += choice.delta.content or ""
            for name in ("reasoning", "reasoning_content"):
                message[name] += getattr(choice.delta, name, None) or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(message["calls"]):
                    assert (bool(call.id), call.type) == (True, "function")
                    assert call.function.name
                    message["calls"].append([call.id, call.function.name, ""])
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                message["calls"][call.index][2] += call.function.arguments
            message["end"] += [choice.finish_reason] if choice.finish_reason else []
    return message


def test_a_call(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "I look.\n" + ONE)
    choice = ask(server).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert call.function.arguments == '{"city": "Paris, é😀"}'
    assert call.id.startswith("call_")
    prompt = prompt_of(server, tokenizer)
    assert f"<tools>{json.dumps([WEATHER, TIME])}</tools>" in prompt


def test_the_checkpoints_response_template_is_read(tokenizer: Tokenizer) -> None:
    assert json.loads(tokenizer.response_template) == {"fields": {"x": {"open": "<x>"}}}


def test_nothing_but_calls_is_no_content(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, TWO)
    message = ask(server).choices[0].message
    assert message.content is None
    assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
    assert len({call.id for call in message.tool_calls}) == 2
    answer_with(server, tokenizer, TWO)
    message = ask(server, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_a_stream_has_the_name_first_and_all_in_it(
    server: GatewayServer, tokenizer: Tokenizer, tokens: int
) -> None:
    answer_with(server, tokenizer, "<think>\nhm\n</think>\n\nI look.\n" + TWO)
    server.engine.behaviour.tokens_per_message = tokens
    whole = ask(server, n=2)
    chunks = list(ask(server, n=2, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        found = put_together(chunks, choice.index)
        assert (found["content"], found["reasoning"]) == ("I look.", "hm")
        assert (
            found["reasoning_content"] == "hm" == choice.message.reasoning == choice.message.reasoning_content
        )
        assert choice.message.content == "I look."
        assert found["end"] == ["tool_calls"] == [choice.finish_reason]
        calls = [["weather", '{"city": "Paris, é😀"}'], ["time", "{}"]]
        assert [call[1:] for call in found["calls"]] == calls
        assert [[c.function.name, c.function.arguments] for c in choice.message.tool_calls] == calls
    assert chunks[-1].usage == whole.usage
    if tokens == 1:
        pieces = sum(bool(chunk.choices and chunk.choices[0].delta.tool_calls) for chunk in chunks)
        assert pieces > 8


def test_the_clients_own_stream_helper(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "I look.\n" + TWO)
    with server.openai().chat.completions.stream(
        model="tiny", messages=USER, tools=[WEATHER, TIME]
    ) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert names == ["weather", "time"]
    message = final.choices[0].message
    assert message.content == "I look."
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris, é😀"}
    assert final.choices[0].finish_reason == "tool_calls"


def test_an_agents_turns(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """What the model called goes back to it with the result: as an object and as a text, as it wants it."""
    answer_with(server, tokenizer, ONE)
    first = ask(server).choices[0].message
    answer_with(server, tokenizer, "Sunny.")
    messages = [
        *USER,
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"},
    ]
    assert ask(server, messages=messages).choices[0].message.content == "Sunny."
    arguments = '{"city": "Paris, é😀"}'
    prompt = prompt_of(server, tokenizer)
    assert f"<tool_call>weather{arguments}{arguments}<|end|><|start|>tool\nsunny<|end|>" in prompt


def test_reasoning_tokens_are_counted(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """Whatever comes in one message."""
    answer_with(server, tokenizer, "<think>\nhm hm\n</think>\n\nYes.")
    count = len(tokenizer.encode("\nhm hm\n", add_special_tokens=False))
    for tokens in (1, 4, 100):
        server.engine.behaviour.tokens_per_message = tokens
        done = ask(server)
        assert done.usage.completion_tokens_details.reasoning_tokens == count
        *_, last = ask(server, stream=True, stream_options={"include_usage": True})
        assert last.usage.completion_tokens_details.reasoning_tokens == count


def test_markers_of_many_tokens_are_no_reasoning(byte_level: Path, tmp_path: Path) -> None:
    with GatewayServer(
        directory_with(byte_level, tmp_path, QWEN), eos=2, vocab=512, max_model_len=1024
    ) as one:
        tokenizer = Tokenizer.from_directory(one.served.tokenizer)
        count = len(tokenizer.encode("hm<", add_special_tokens=False))
        for text in ("<think>hm<</think>Yes.", "<think>hm<"):
            answer_with(one, tokenizer, text)
            found = ask(one).usage.completion_tokens_details.reasoning_tokens
            # (The first token of the text may hold the end of the marker.)
            assert found in (count - 1, count, count + 1), text


def test_reasoning_may_be_left_out(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "<think>\nhm hm\n</think>\n\nYes.")
    message = ask(server, extra_body={"include_reasoning": False}).choices[0].message
    assert (message.content, message.reasoning) == ("Yes.", None)
    found = put_together(list(ask(server, stream=True, extra_body={"include_reasoning": False})))
    assert (found["content"], found["reasoning"]) == ("Yes.", "")


def test_a_prompt_that_opens_or_closes_the_region(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, "hm hm</think>Yes.")
    message = ask(server, extra_body={"chat_template_kwargs": {"opens": True}}).choices[0].message
    assert (message.content, message.reasoning) == ("Yes.", "hm hm")
    answer_with(server, tokenizer, "Yes.")
    message = ask(server, reasoning_effort="none").choices[0].message
    assert (message.content, message.reasoning) == ("Yes.", None)
    assert prompt_of(server, tokenizer).endswith("<think>\n\n</think>\n\neffort=none")
    ask(server, reasoning_effort="low")
    assert prompt_of(server, tokenizer).endswith("assistant\neffort=low")


def test_an_answer_that_is_cut_off(server: GatewayServer, tokenizer: Tokenizer) -> None:
    ids = answer_with(server, tokenizer, ONE, end=None)
    for count in (1, 2, 4, 7, 12, 20, len(ids) - 1, len(ids)):
        choice = ask(server, max_tokens=count).choices[0]
        found = put_together(list(ask(server, max_tokens=count, stream=True)))
        assert choice.finish_reason == "length"
        calls = choice.message.tool_calls or []
        assert [[c.function.name, c.function.arguments] for c in calls] == [c[1:] for c in found["calls"]]
        assert (choice.message.content or "") == found["content"]


def test_what_is_no_call_is_text(server: GatewayServer, tokenizer: Tokenizer) -> None:
    for text in (
        "<tool_call>\n{nothing}\n</tool_call>",
        "<tool_call>",
        '<tool_call>{"name": 5}</tool_call> x',
    ):
        answer_with(server, tokenizer, text)
        choice = ask(server).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, "stop")


def test_stop_strings_and_log_probabilities_stay(server: GatewayServer, tokenizer: Tokenizer) -> None:
    ids = answer_with(server, tokenizer, "<think>a</think>Well. " + ONE)
    choice = ask(server, stop=["Paris"], logprobs=True).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "Well.")
    assert choice.message.tool_calls[0].function.arguments == '{"city": "'
    done = ask(server, logprobs=True)
    assert len(done.choices[0].logprobs.content) == len(ids) + 1
    chunks = list(ask(server, stream=True, logprobs=True, extra_body={"return_token_ids": True}))
    tokens = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or ()]
    assert tokens[:-1] == ids
    given = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert sum(len(one.content) for one in given) == len(ids) + 1


def test_none_hides_the_tools(server: GatewayServer, tokenizer: Tokenizer) -> None:
    answer_with(server, tokenizer, ONE)
    choice = ask(server, tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (ONE, "stop")
    assert "<tools>" not in prompt_of(server, tokenizer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice: there is no tool 'oth",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools: must be",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "any", "tools": [{"type": "function", "name": "time"}]},
                }
            },
            "tool_choice.allowed_tools: must be",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "x"}],
                }
            },
            r"tool_choice.allowed_tools.tools\[0\]: there is no tool 'x'",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["time"]}},
            r"tool_choice.allowed_tools.tools\[0\]: must be {'type': 'function'",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice: must be 'none'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\].function.name: 'a b'"),
        ({"tools": [STRICT_UNKEPT]}, "contains"),
        ({"tools": [WEATHER, WEATHER]}, "'weather' is there more than once"),
    ],
)
def test_what_is_refused(server: GatewayServer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, **fields)


def test_a_stream_goes_on_after_a_loss(calling: GatewayServer, tokenizer: Tokenizer) -> None:
    """The next incarnation goes on behind the tokens that the client has, and so does the parser."""
    ids = answer_with(calling, tokenizer, "I look.\n" + TWO)
    prompt_size: list[int] = []
    script = [*ids, 2]

    def answer(prompt: list[int]) -> Any:
        prompt_size.append(len(prompt))
        return lambda i: script[i + len(prompt) - prompt_size[0]]

    calling.engine.behaviour.answer = answer
    calling.engine.behaviour.hold_after = len(ids) // 2
    stream = iter(ask(calling, stream=True))
    chunks = [next(stream)]
    calling.engine.wait_held(1)
    calling.lose_engine()
    calling.restart_engine(answer=answer)
    found = put_together([*chunks, *stream])
    assert found["content"] == "I look."
    assert [call[1:] for call in found["calls"]] == [["weather", '{"city": "Paris, é😀"}'], ["time", "{}"]]
    assert found["end"] == ["tool_calls"]


def test_the_program_of_the_document(
    server: GatewayServer, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    asked: list[str] = []

    def answer(prompt: list[int]) -> Any:
        asked.append(tokenizer.decode(prompt, skip_special_tokens=False))
        call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
        ids = tokenizer.encode("It is sunny." if len(asked) > 1 else call, add_special_tokens=False)
        return lambda i: [*ids, 2][i]

    server.engine.behaviour.answer = answer
    exec(program.replace("http://127.0.0.1:8000", server.url).replace("MODEL", "tiny"), {})
    assert capsys.readouterr().out == "It is sunny.\n"
    assert "<|start|>tool\nSunny in Paris.<|end|>" in asked[1]


def grammar_of(server: GatewayServer) -> str:
    """What bound the last request's answer."""
    constraint = server.engine.submits[-1].sampling.constraint
    return "" if constraint is None else constraint.grammar


def test_demanded_and_strict_calls_are_bound(server: GatewayServer) -> None:
    ask(server, max_tokens=1)
    assert grammar_of(server) == ""
    ask(server, max_tokens=1, tool_choice="required")
    assert "weather" in grammar_of(server)
    assert "time" in grammar_of(server)
    ask(server, max_tokens=1, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert "weather" in grammar_of(server)
    assert "time" not in grammar_of(server)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    ask(server, max_tokens=1, tools=[strict])
    assert "weather" in grammar_of(server)
    ask(server, max_tokens=1, tools=[strict], tool_choice="none")
    assert grammar_of(server) == ""


def test_a_choice_among_some_tools(server: GatewayServer, tokenizer: Tokenizer) -> None:
    """`allowed_tools`: the model knows of these alone; and the forms of the Responses API."""
    for allowed in (
        {
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "time"}}],
            }
        },
        {"mode": "required", "tools": [{"type": "function", "name": "time"}]},
    ):
        ask(server, max_tokens=1, tool_choice={"type": "allowed_tools", **allowed})
        assert "time" in grammar_of(server)
        assert "weather" not in grammar_of(server) + prompt_of(server, tokenizer)
    free: Any = {"mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    ask(server, max_tokens=1, tool_choice={"type": "allowed_tools", "allowed_tools": free})
    assert grammar_of(server) == ""
    assert "weather" not in prompt_of(server, tokenizer)
    ask(server, max_tokens=1, tool_choice={"type": "function", "name": "time"})
    assert "time" in grammar_of(server)
    assert "weather" not in grammar_of(server)


def test_a_schema_that_cannot_be_kept_binds_where_it_must(server: GatewayServer) -> None:
    """A call is demanded all the same, of any object; strict schemas are refused instead."""
    loose = {"type": "function", "function": {**STRICT_UNKEPT["function"], "strict": False}}
    ask(server, max_tokens=1, tools=[loose], tool_choice="required")
    assert "arguments" in grammar_of(server)
    assert "contains" not in grammar_of(server)


def test_a_form_of_the_answer_beside_tools_and_thoughts(server: GatewayServer) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ask(server, max_tokens=1, response_format=form)
    assert all(word in grammar_of(server) for word in ("weather", "answer"))
    ask(server, max_tokens=1, response_format=form, tools=openai.omit)
    assert "weather" not in grammar_of(server)
    assert "answer" in grammar_of(server)


def test_a_budget_of_reasoning(server: GatewayServer) -> None:
    ask(server, max_tokens=1, extra_body={"thinking_token_budget": 7})
    assert "max_tokens=7" in grammar_of(server)
    ask(server, max_tokens=1, extra_body={"thinking_token_budget": -1})
    assert grammar_of(server) == ""


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_schemas_without_end_are_an_error_and_no_crash(server: GatewayServer, choice: str) -> None:
    """Nested deeper than anybody reads, and long."""
    deep = '{"a":' * 600 + "{}" + "}" * 600
    long = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60_000)}})
    with server.http() as http:
        for schema in (deep, '{"$ref": "#"}', '{"type": ["string", 1e999]}', "1", long):
            body = (
                '{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], '
                f'"tool_choice": "{choice}", '
                f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]}}'
            )
            answer = http.post("/v1/chat/completions", content=body.encode())
            assert answer.status_code in (200, 400), (schema[:50], answer.text[:300])
            if answer.status_code == 400:
                assert len(answer.json()["error"]["message"]) < 1000
        assert http.get("/health").status_code == 200
    assert ask(server, max_tokens=1).choices
