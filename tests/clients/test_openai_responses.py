"""OpenAI's SDK and its Responses API: helpers, an agent's turns, answers that go on from others."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.test_openai import Weather

TOOL: Any = {"type": "function", **openai.pydantic_function_tool(Weather, name="weather")["function"]}
ASK: dict[str, Any] = {
    "model": "tiny",
    "input": "How is the weather?",
    "tools": [TOOL],
    "tool_choice": "required",
    "max_output_tokens": 200,
    "parallel_tool_calls": False,
    "extra_body": {"seed": 5},
}


@pytest.fixture
def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)


def test_a_demanded_call_whole_and_streamed(client: OpenAI) -> None:
    whole = client.responses.create(**ASK)
    assert whole.status == "completed"
    (call,) = whole.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(**ASK) as stream:
        deltas = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(delta.delta for delta in deltas) == call.arguments == deltas[-1].snapshot
    assert final.output[0].arguments == call.arguments
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_parse_gives_the_models_of_pydantic(client: OpenAI) -> None:
    done = client.responses.parse(
        **{**ASK, "tools": [openai.pydantic_function_tool(Weather, name="weather")]}
    )
    assert isinstance(done.output[0].parsed_arguments, Weather)
    asked = {**ASK, "tools": [], "tool_choice": "none"}
    done = client.responses.parse(**asked, text_format=Weather)
    assert isinstance(done.output_parsed, Weather)
    with client.responses.stream(**asked, text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == done.output_parsed


def test_an_agents_turns_without_and_with_a_store(client: OpenAI) -> None:
    first = client.responses.create(**ASK)
    call = first.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"sun": True})}
    question = {"role": "user", "content": ASK["input"]}
    rest = {**ASK, "tool_choice": "none"}
    sent = client.responses.create(
        **{**rest, "input": [question, call.model_dump(exclude_none=True), result], "store": False}
    )
    kept = client.responses.create(**{**rest, "input": [result], "previous_response_id": first.id})
    assert sent.output_text == kept.output_text != ""
    assert sent.usage.input_tokens == kept.usage.input_tokens
    count = client.responses.input_tokens.count(
        model="tiny", input=[result], tools=[TOOL], tool_choice="none", previous_response_id=first.id
    )
    assert count.input_tokens == kept.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="no function_call before it"):
        client.responses.create(**{**rest, "input": [result]})
