"""What agents send, recorded by `make agents` and reduced (`reducing.py`): it is served, and the prompt holds
the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import baton
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.codec import unpack_int32
from tests.agents.programs import ANSWER, NOTE, PROGRAMS
from tests.gateway.harness import GatewayServer

TINY = Path(baton.__file__).parent / "assets" / "baton-tiny"
TOKENIZER = Tokenizer.from_directory(TINY)
END = 2
BODIES = Path(__file__).parent / "bodies"
SAYS = "All is done."


@pytest.fixture(scope="module")
def site() -> Iterator[GatewayServer]:
    with GatewayServer(TINY, eos=END, vocab=1024, max_model_len=100_000) as server:
        yield server


def _recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (BODIES / f"{name}.jsonl").read_text().splitlines()]


def _prompt(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def _answers(prompt: list[int]) -> Callable[[int], int]:
    """Thinks where the prompt asks for it, and says that all is done."""
    text = f"Well.\n</think>\n\n{SAYS}" if _prompt(prompt).endswith("<think>\n") else SAYS
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), END]
    return lambda index: tokens[index]


def _ask(site: GatewayServer, request: dict[str, Any]) -> tuple[str, str]:
    """(what the answer says, the prompt)."""
    site.reset()
    site.engine.behaviour.answer = _answers
    body = {**request["body"], "model": "tiny"}
    with site.http() as http:
        reply = http.post(request["path"], json=body, headers=request["headers"])
    assert reply.status_code == 200, reply.text
    (submit,) = site.engine.submits
    return _said(request["path"].partition("?")[0], reply), _prompt(unpack_int32(submit.prompt))


def _said(api: str, reply: httpx.Response) -> str:
    if not reply.headers["content-type"].startswith("text/event-stream"):
        assert api == "/v1/chat/completions"
        return str(reply.json()["choices"][0]["message"]["content"])
    told = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    if api == "/v1/chat/completions":
        assert told.pop() == "[DONE]"
    events = [json.loads(line) for line in told]
    match api:
        case "/v1/messages":
            assert events[-1]["type"] == "message_stop"
            deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
            return "".join(delta.get("text", "") for delta in deltas)
        case "/v1/responses":
            assert events[-1]["type"] == "response.completed"
            return "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
        case _:
            deltas = [one["choices"][0]["delta"] for one in events if one["choices"]]
            return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_asked_is_served(name: str, site: GatewayServer) -> None:
    for request in _recorded(name):
        said, prompt = _ask(site, request)
        assert said == SAYS
        for tool in request["body"].get("tools") or ():
            if tool.get("type", "function") in ("function", "custom"):
                assert f'"name": {json.dumps(tool.get("name") or tool["function"]["name"])}' in prompt
            for inner in tool.get("tools") or ():  # (of a namespace)
                assert inner["name"] in prompt


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_last_turn_has_the_conversation(name: str, site: GatewayServer) -> None:
    program = PROGRAMS[name]
    _, prompt = _ask(site, _recorded(name)[1])
    places = [prompt.find(text) for text in (program.task, NOTE.strip(), ANSWER.strip())]
    assert all(place > 0 for place in places)
    if program.calls:
        assert places == sorted(places)
        assert prompt.count("<tool_call>\n") == prompt.count("<tool_response>") == 3
