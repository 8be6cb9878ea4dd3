"""However a text comes, the blocks of the events are those of the whole message."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.gateway.generation.generation import Completion, Update
from baton.gateway.parsing.deltas import Content, Delta, Parsed, Reasoning
from baton.gateway.rendering.chat import ChatOptions, ChatRenderer
from baton.gateway.rendering.inputs import object_in
from baton.gateway.rendering.messages import MessageOptions, MessageRenderer
from tests.gateway.anthropic.events import events_of, put_together, same, settled
from tests.gateway.parsing.fixtures import Answer, answers, broken

WELL, ILL = answers(), broken()
SHOWN = MessageOptions(model="m", max_tokens=100)
OMITTED = MessageOptions(model="m", max_tokens=100, omitted=True)
HIDDEN = MessageOptions(model="m", max_tokens=100, thinking=False)


def renderer_of(options: MessageOptions) -> MessageRenderer:
    counts = {"num_prompt": 7, "num_generated": 100, "num_cached": 0, "num_reasoning": 0}
    generation: Any = SimpleNamespace(request_id="r", has_reasoning=False, sequences=[None], **counts)
    return MessageRenderer(generation, options)


def whole_of(deltas: list[Delta], options: MessageOptions) -> dict[str, Any]:
    completion = Completion(0, finish_reason="stop", parsed=Parsed())
    assert completion.parsed is not None
    completion.parsed.add(deltas)
    (part,) = renderer_of(options).whole([completion])
    return settled(json.loads(part[1]))


def streamed(several: list[list[Delta]], options: MessageOptions) -> dict[str, Any]:
    renderer = renderer_of(options)
    data = renderer.begin()
    for number, deltas in enumerate(several, 1):
        end = "stop" if number == len(several) else None
        data += renderer.chunk(Update(0, "", [1], [], end, None, deltas))
    return settled(put_together(events_of((data + renderer.end()).decode())))


def deltas_of(answer: Answer, pieces: list[str]) -> list[list[Delta]]:
    parser = answer.parser()
    found = [parser.push(piece) for piece in pieces]
    return [*found, parser.finish()]


@pytest.mark.parametrize("options", [SHOWN, OMITTED, HIDDEN], ids=["shown", "omitted", "hidden"])
def test_cuts_change_nothing(options: MessageOptions) -> None:
    rng = random.Random(3)
    count = 0
    for answer in rng.sample(WELL, 60) + rng.sample(ILL, 60):
        text = answer.text
        whole = whole_of([d for some in deltas_of(answer, [text]) for d in some], options)
        cuts = [list(text)]
        for _ in range(12):
            places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6)))
            cuts.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
        for pieces in cuts:
            several = deltas_of(answer, pieces)
            assert same(streamed(several, options), whole), pieces
            assert whole_of([d for some in several for d in some], options) == whole
            count += 1
    assert count > 1_000


def test_thoughts_are_shown_or_signed_or_left_out() -> None:
    deltas: list[Delta] = [Content("a"), Reasoning("hm é"), Content("b"), Content("c")]
    several = [[delta] for delta in deltas]
    for options in (SHOWN, OMITTED, HIDDEN):
        assert streamed(several, options) == whole_of(deltas, options)
    shown, omitted, hidden = (whole_of(deltas, one)["content"] for one in (SHOWN, OMITTED, HIDDEN))
    assert [block["type"] for block in shown] == ["text", "thinking", "text"]
    assert (shown[1]["thinking"], omitted[1]["thinking"]) == ("hm é", "")
    assert shown[1]["signature"] != omitted[1]["signature"] != ""
    assert hidden == [{"type": "text", "text": "abc"}]


def test_nothing_is_no_block() -> None:
    assert whole_of([], SHOWN)["content"] == streamed([[]], SHOWN)["content"] == []
    assert whole_of([Content("")], SHOWN)["content"] == streamed([[Content("")]], SHOWN)["content"] == []


@pytest.mark.parametrize(
    "text", ["", "{", '{"a', '{"a":', '{"a": "x', '{"a": "x"', '{"a": [1, 2', "[]", "1", "nul"]
)
def test_half_of_an_object_is_none(text: str) -> None:
    """What was cut off is never completed: somebody might run it."""
    assert object_in(text) is None


def test_arguments_as_they_were_written() -> None:
    for text in ("{}", '{"a": 12345678901234567890123, "b": [1.0]}'):
        assert msgspec.json.encode(object_in(text)) == text.encode()


def test_a_token_of_text_costs_what_a_chats_does() -> None:
    """Counted: calls of functions while an update of text, or a delta of it, is written."""
    counts = {"num_prompt": 7, "num_generated": 1, "num_cached": 0, "num_reasoning": 0}
    generation: Any = SimpleNamespace(request_id="r", has_reasoning=False, sequences=[None], **counts)
    shape = ChatOptions(
        model="m",
        top_logprobs=None,
        prompt_logprobs=None,
        token_ids=False,
        include_usage=False,
        continuous_usage=False,
        routed_experts=False,
    )
    names: Any = None
    chat, message = ChatRenderer(generation, shape, names), MessageRenderer(generation, SHOWN)
    for deltas in (None, [Content("x")]):
        update = Update(0, "x", [1], [], None, None, deltas)
        message.chunk(update)  # (the block begins)
        assert _calls(message.chunk, update) <= _calls(chat.chunk, update) + 1


def _calls(run: Any, update: Update) -> int:
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run(update)
    finally:
        sys.setprofile(None)
    return count
