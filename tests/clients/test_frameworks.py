"""Frameworks of agents, where they are installed (`make clients` installs them)."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

QUESTION = "How is the weather?"


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")
    days: Literal[1, 2, 3]
    unit: Literal["C", "F"]


def test_langchain_calls_and_streams(base_url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=base_url, api_key="none", model="tiny", max_tokens=200, seed=5)
    bound = model.bind_tools([Weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    Weather.model_validate(call["args"])
    whole: Any = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [one["args"] for one in whole.tool_calls] == [call["args"]]
    structured = model.with_structured_output(Weather, method="function_calling", strict=True)
    assert isinstance(structured.invoke(QUESTION), Weather)


def test_litellm(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # (else it asks the network)
    litellm = pytest.importorskip("litellm")
    tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
    ask: dict[str, Any] = {
        "model": "openai/tiny",
        "api_base": base_url,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 200,
        "seed": 5,
    }
    calls = litellm.completion(**ask).choices[0].message.tool_calls
    Weather.model_validate_json(calls[0].function.arguments)
    chunks = list(litellm.completion(**ask, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=ask["messages"])
    again = built.choices[0].message.tool_calls
    assert [json.loads(one.function.arguments) for one in again] == [
        json.loads(one.function.arguments) for one in calls
    ]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(base_url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=base_url, api_key="none"), mode=instructor.Mode[mode])
    found = client.chat.completions.create(
        model="tiny",
        response_model=Weather,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=200,
        max_retries=0,
        seed=5,
    )
    assert isinstance(found, Weather)
