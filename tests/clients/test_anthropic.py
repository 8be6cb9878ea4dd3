"""Anthropic's SDK: messages, its stream helper, tools, forms of answers, counts, errors as its exceptions."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

anthropic = pytest.importorskip("anthropic")

QUESTION = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")
    days: Literal[1, 2, 3]
    unit: Literal["C", "F"]


TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": Weather.model_json_schema(),
    "strict": True,
}
SEED = {"extra_body": {"seed": 5}}
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": QUESTION, **SEED}
CALL: dict[str, Any] = {
    **ASK,
    "tools": [TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture
def client(base_url: str) -> Any:
    return anthropic.Anthropic(
        base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120
    )


def alike(message: Any) -> dict[str, Any]:
    """Without ids, which are other ones each time, and what is cached, which grows."""
    blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
    usage = message.usage.model_dump(exclude={"input_tokens", "cache_read_input_tokens"})
    return {"content": blocks, "usage": usage, "ends": (message.stop_reason, message.stop_sequence)}


def test_a_message_and_its_stream(client: Any) -> None:
    ask = {**ASK, "system": "Be brief.", "stop_sequences": ["\n\n\n"], "max_tokens": 30}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert alike(final) == alike(whole)
    assert text == "".join(block.text for block in whole.content if block.type == "text") != ""
    assert whole.usage.output_tokens > 0
    assert whole._request_id == whole.id.removeprefix("msg_")


def test_demanded_calls_and_an_agents_turns(client: Any) -> None:
    whole = client.messages.create(**CALL)
    *_, call = whole.content
    assert (call.type, call.name, whole.stop_reason) == ("tool_use", "weather", "tool_use")
    Weather.model_validate(call.input)
    with client.messages.stream(**CALL) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 2
    assert Weather.model_validate_json("".join(pieces)) == Weather.model_validate(call.input)
    assert alike(final) == alike(whole)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny.", "is_error": False}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**{**ASK, "messages": turns, "max_tokens": 5})
    assert answer.usage.output_tokens > 0
    named = {**CALL, "tool_choice": {"type": "tool", "name": "weather"}}
    assert client.messages.create(**named).content[-1].name == "weather"


def test_the_form_of_an_answer(client: Any) -> None:
    done = client.messages.parse(**ASK, output_format=Weather)
    assert done.stop_reason == "end_turn"
    assert isinstance(done.parsed_output, Weather)


def test_tokens_are_counted(client: Any) -> None:
    fields = {"model": "tiny", "messages": QUESTION, "tools": [TOOL], "system": "Be brief."}
    counted = client.messages.count_tokens(**fields)
    usage = client.messages.create(**fields, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_models(client: Any) -> None:
    (model,) = client.models.list()
    assert model == client.models.retrieve("tiny")
    assert (model.id, model.type) == ("tiny", "model")


def test_errors(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'other' is not served here") as missing:
        client.messages.create(**{**ASK, "model": "other"})
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as long:
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "word " * 20_000}]})
    assert long.value.type == "invalid_request_error"


def test_an_image_does_not_end_a_conversation(client: Any) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    call = {"type": "tool_use", "id": "x", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image]}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result, image]}]
    raw = client.messages.with_raw_response.create(**{**ASK, "messages": [*ASK["messages"], *turns]})
    assert raw.headers["x-unsupported-content"] == "image=2"
    assert raw.parse().role == "assistant"


def test_the_program_of_the_document(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "messages.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    url = base_url.removesuffix("/v1")
    exec(program.replace("http://127.0.0.1:8000", url).replace("MODEL", "tiny"), {})
    shown = capsys.readouterr().out
    assert re.match(r"[0-9]+ tokens\n", shown)
    assert "output_tokens=" in shown.splitlines()[-1]


@pytest.mark.parametrize("beta", [False, True])
def test_asynchronous_streams(base_url: str, beta: bool) -> None:
    async def run() -> Any:
        url = base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, auth_token="none", max_retries=0) as client:
            messages = client.beta.messages if beta else client.messages
            async with messages.stream(**CALL) as stream:
                return await stream.get_final_message()

    Weather.model_validate(asyncio.run(run()).content[-1].input)
