"""What an answer costs by token, counted: about what a chat's does."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from baton.gateway.generation.sequence import Update
from baton.gateway.parsing.deltas import Call, Content, Delta, Reasoning
from baton.gateway.rendering.chat import ChatOptions, ChatRenderer
from baton.gateway.rendering.formats import TokenNames
from baton.gateway.rendering.responses import ResponsesOptions, ResponsesRenderer

GENERATION: Any = SimpleNamespace(request_id="x", sequences=[SimpleNamespace(prompt=[1])])
NAMES: Any = TokenNames(None, False)  # type: ignore[arg-type]


def renderers() -> tuple[ChatRenderer, ResponsesRenderer]:
    chat = ChatOptions(
        model="tiny",
        top_logprobs=None,
        prompt_logprobs=None,
        token_ids=False,
        routed_experts=False,
        include_usage=False,
        continuous_usage=False,
    )
    options = ResponsesOptions(token="t", model="tiny", said='"a":1', temperature=1.0, top_p=1.0, stream=True)
    return (
        ChatRenderer(GENERATION, chat, NAMES),
        ResponsesRenderer(GENERATION, options, NAMES, None),
    )


def calls_of(renderer: Any, update: Update) -> tuple[int, int]:
    """(calls of functions, bytes) of one more such update."""
    renderer.chunk(update)
    count = 0

    def on_event(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        data = renderer.chunk(update)
    finally:
        sys.setprofile(None)
    return count, len(data)


@pytest.mark.parametrize("delta", [None, Content(" fox"), Reasoning(" fox"), Call(0, None, " fox")])
def test_a_token_costs_what_a_chats_does(delta: Delta | None) -> None:
    chat, responses = renderers()
    if isinstance(delta, Call):
        responses.chunk(Update(0, "", [1], [], None, None, [Call(0, "weather", "{")]))
    update = Update(0, " fox", [1], [], None, None, None if delta is None else [delta])
    calls, size = calls_of(responses, update)
    theirs, their_size = calls_of(chat, update)
    assert calls <= theirs + 2
    assert size <= 1.5 * their_size
