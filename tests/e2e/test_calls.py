"""The embedded model calls functions and thinks, through the real server: nothing but the model makes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.server import Server

ROOT = Path(__file__).parents[2]


def tool(name: str, about: str, **kinds: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}
    function = {"name": name, "description": about, "parameters": {**schema, "required": list(kinds)}}
    return {"type": "function", "function": function}


WEATHER = tool("weather", "Tells the weather of a city.", city="string")
TIME = tool("time", "Tells the time in a city.", city="string")
ADD = tool("add", "Adds two numbers.", a="integer", b="integer")
TOOLS = [TIME, WEATHER, ADD]
ASKED = {"role": "user", "content": "How is the weather in Paris?"}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, *messages: dict[str, Any], **fields: Any) -> Any:
    fields = {"tools": TOOLS, "temperature": 0, "max_tokens": 120, **fields}
    return client.chat.completions.create(model="baton-tiny", messages=messages or [ASKED], **fields)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or []]


def put_together(chunks: list[Any]) -> tuple[str, str, list[list[str]], str]:
    """Content, reasoning, calls and the end of a stream."""
    content = reasoning = end = ""
    calls: list[list[str]] = []
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        end = choice.finish_reason or end
        for one in choice.delta.tool_calls or ():
            if one.index == len(calls):
                calls.append([one.function.name, ""])
            calls[one.index][1] += one.function.arguments or ""
    return content, reasoning, calls, end


@pytest.mark.parametrize("thinking", [False, True])
def test_a_function_is_called_and_its_result_is_told(client: OpenAI, thinking: bool) -> None:
    extra = THINKING if thinking else {}
    choice = ask(client, extra_body=extra).choices[0]
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", None)
    assert calls_of(message) == [("weather", {"city": "Paris"})]
    assert bool(getattr(message, "reasoning_content", None)) is thinking
    told = [
        ASKED,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 21 degrees"},
    ]
    answer = ask(client, *told, extra_body=extra).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls or []) == ("stop", [])
    assert "sunny, 21 degrees" in answer.message.content
    assert bool(getattr(answer.message, "reasoning_content", None)) is thinking
    assert "think" not in answer.message.content


@pytest.mark.parametrize("extra", [{}, THINKING])
def test_a_stream_says_the_same(client: OpenAI, extra: dict[str, Any]) -> None:
    for content in (ASKED["content"], "What is 7 + 5?"):
        asked = {"role": "user", "content": content}
        whole = ask(client, asked, extra_body=extra).choices[0]
        found = put_together(list(ask(client, asked, extra_body=extra, stream=True)))
        calls = [[one.function.name, one.function.arguments] for one in whole.message.tool_calls or []]
        reasoning = getattr(whole.message, "reasoning_content", None) or ""
        assert found == (whole.message.content or "", reasoning, calls, whole.finish_reason)


def test_the_function_that_fits_is_chosen_or_none(client: OpenAI) -> None:
    for text, expected in (
        ("What is the time in Rome?", ("time", {"city": "Rome"})),
        ("Add 12 and 30.", ("add", {"a": 12, "b": 30})),
    ):
        assert calls_of(ask(client, {"role": "user", "content": text}).choices[0].message) == [expected]
    hello = ask(client, {"role": "user", "content": "Hello!"}).choices[0].message
    assert (hello.content, hello.tool_calls or []) == ("Hello! How can I help you?", [])
    none = ask(client, tool_choice="none").choices[0].message
    assert (bool(none.content), none.tool_calls or []) == (True, [])


def test_demanded_calls_hold(client: OpenAI) -> None:
    hello = {"role": "user", "content": "Hello!"}
    for choice in ("required", {"type": "function", "function": {"name": "time"}}):
        answer = ask(client, hello, tool_choice=choice, parallel_tool_calls=False).choices[0]
        if answer.finish_reason == "tool_calls":  # (else it came to max_tokens)
            ((name, arguments),) = calls_of(answer.message)
            assert name == "time" or choice == "required"
            assert set(arguments) == ({"a", "b"} if name == "add" else {"city"})
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    strict["function"]["parameters"] = {**strict["function"]["parameters"], "additionalProperties": False}
    assert calls_of(ask(client, tools=[strict]).choices[0].message) == [("weather", {"city": "Paris"})]
    required = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    assert calls_of(required) == [("weather", {"city": "Paris"})]


def test_thoughts_are_bounded_and_only_where_they_are_asked_for(client: OpenAI) -> None:
    asked = {"role": "user", "content": "What is 7 + 5?"}
    plain = ask(client, asked, tools=None).choices[0].message
    assert (plain.content, getattr(plain, "reasoning_content", None)) == ("7 + 5 = 12.", None)
    by_effort = ask(client, asked, tools=None, reasoning_effort="low").choices[0].message
    assert by_effort.reasoning_content
    thought = ask(client, asked, tools=None, extra_body=THINKING)
    assert thought.choices[0].message.content == "7 + 5 = 12."
    count = thought.usage.completion_tokens_details.reasoning_tokens
    assert count > 2
    for budget in (0, 2):
        short = ask(client, asked, tools=None, extra_body={**THINKING, "thinking_token_budget": budget})
        assert short.usage.completion_tokens_details.reasoning_tokens <= budget
        assert "12" in short.choices[0].message.content


def test_a_schema_binds_the_answer_with_thoughts_and_without(client: OpenAI) -> None:
    """Where the template does not open the region of thoughts, the schema binds the first token.  Where it
    does, the model ends its thoughts when it likes: by a token that is not "special"."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for extra in ({}, THINKING):
        answer = ask(client, tools=None, response_format=form, extra_body=extra).choices[0]
        assert answer.message.content.startswith("{")
        if answer.finish_reason == "stop":  # (else it came to max_tokens, maybe by spaces)
            assert json.loads(answer.message.content)["city"] in ("Paris", "Rome")
        reasoning = getattr(answer.message, "reasoning_content", None) or ""
        assert reasoning.count(".") == (2 if extra else 0), reasoning


def test_what_the_readme_shows(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The program prints what stands in its comments."""
    page = (ROOT / "README.md").read_text()
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "tools" in text)
    exec(program.replace("http://127.0.0.1:8000", server.url), {})
    shown = "".join(f"{line}\n" for line in re.findall(r"# prints: (.*)", program))
    assert capsys.readouterr().out == shown != ""
