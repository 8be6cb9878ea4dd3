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


@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_of_langchain_calls_and_tells(base_url: str, streaming: bool) -> None:
    """Its loop runs to the end: the model asks for the tool, gets the result, and answers with it."""
    agents = pytest.importorskip("langchain.agents")
    langchain = pytest.importorskip("langchain_openai")
    asked: list[str] = []

    def weather(city: str) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        return "sunny"

    model = langchain.ChatOpenAI(
        base_url=base_url, api_key="none", model="tiny", temperature=0, max_tokens=200
    )
    agent = agents.create_agent(model, tools=[weather])
    asking = {"messages": [{"role": "user", "content": "How is the weather in Paris?"}]}
    if streaming:
        pieces = list(agent.stream(asking, stream_mode="messages"))
        answers = [piece for piece, about in pieces if about["langgraph_node"] == "model"]
        last = [piece for piece in answers if piece.id == answers[-1].id]
        text = "".join(piece.text for piece in last)
        assert len(last) > 2
    else:
        messages = agent.invoke(asking)["messages"]
        assert [one.type for one in messages] == ["human", "ai", "tool", "ai"]
        text = messages[-1].text
    assert asked == ["Paris"]
    assert "sunny" in text.lower()


def test_litellm_plain_and_streamed(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    ask: dict[str, Any] = {
        "model": "hosted_vllm/tiny",
        "api_base": base_url,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 40,
        "temperature": 0,
    }
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens > 1
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert told == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("streaming", [False, True])
async def test_litellms_adapter_for_anthropics_clients(
    base_url: str, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """A client of the Messages API behind LiteLLM, which asks this server as OpenAI's."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    tool = {"name": "weather", "description": "Tells it.", "input_schema": Weather.model_json_schema()}
    answer = await litellm.anthropic.messages.acreate(
        model="hosted_vllm/tiny",
        api_base=base_url,
        api_key="none",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=200,
        tools=[tool],
        tool_choice={"type": "any"},
        stream=streaming,
    )
    if not streaming:
        (block,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert (answer["stop_reason"], block["name"]) == ("tool_use", "weather")
        Weather.model_validate(block["input"])
        return
    text = "".join([piece.decode() if isinstance(piece, bytes) else str(piece) async for piece in answer])
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = "".join(one["partial_json"] for one in deltas if one["type"] == "input_json_delta")
    Weather.model_validate_json(arguments)
    assert events[-1]["type"] == "message_stop"


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
