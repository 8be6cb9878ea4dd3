"""OpenAI's SDK: calls, its stream helper, tools made of pydantic models, an agent's turns."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel


class Unit(Enum):
    C = "C"
    F = "F"


class Weather(BaseModel):
    """Tells the weather."""

    days: Literal[1, 2, 3]
    unit: Unit
    exact: bool


TOOL = openai.pydantic_function_tool(Weather, name="weather")
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "max_tokens": 200,
    "seed": 5,
    "parallel_tool_calls": False,
}


@pytest.fixture
def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)


def test_demanded_calls_keep_their_schema(client: OpenAI) -> None:
    done = client.chat.completions.create(**ASK, n=8)
    finished = [choice for choice in done.choices if choice.finish_reason == "tool_calls"]
    assert finished
    for choice in finished:
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        Weather.model_validate_json(call.function.arguments)
    named = {**ASK, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    (call,) = client.chat.completions.create(**named).choices[0].message.tool_calls
    assert call.function.name == "weather"


def test_a_stream_says_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASK).choices[0]
    with client.chat.completions.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    ours, theirs = whole.message.tool_calls[0], final.message.tool_calls[0]
    assert theirs.function.arguments == ours.function.arguments
    assert isinstance(theirs.function.parsed_arguments, Weather)


def test_parse_gives_the_model_of_pydantic(client: OpenAI) -> None:
    message = client.chat.completions.parse(**ASK).choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)


def test_an_agents_turns(client: OpenAI) -> None:
    first = client.chat.completions.create(**ASK).choices[0].message
    call = first.tool_calls[0]
    messages = [
        *ASK["messages"],
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sun": True})},
    ]
    second = client.chat.completions.create(**{**ASK, "messages": messages, "tool_choice": "none"})
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].message.content
    messages[-1]["tool_call_id"] = "other"
    with pytest.raises(openai.BadRequestError, match=r"messages\[2\]\.tool_call_id"):
        client.chat.completions.create(**{**ASK, "messages": messages})
