"""However a text is cut, the events together say what the whole answer says, item by item."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from baton.gateway.api.calls import call_id
from baton.gateway.responses.output import Output
from tests.gateway.parsing.fixtures import Answer, answers, broken
from tests.gateway.parsing.test_splits import WELL

_TEXTS = {
    "response.output_text.delta",
    "response.reasoning_text.delta",
    "response.function_call_arguments.delta",
}


def output(tells: bool) -> Output:
    return Output("t", lambda own: call_id(own or "own", short=False), tells=tells, encrypted=True)


def run(answer: Answer, pieces: list[str], found: Output) -> bytes:
    parser = answer.parser()
    events = [found.add(delta) for piece in pieces for delta in parser.push(piece)]
    events += [found.add(delta) for delta in parser.finish()]
    return b"".join([*events, found.close("completed")])


def put_together(stream: bytes) -> list[Any]:
    """The items, made of nothing but what began them and their deltas."""
    items: list[Any] = []
    for number, block in enumerate(stream.decode().removesuffix("\n\n").split("\n\n") if stream else ()):
        event = msgspec.json.decode(block.partition("data: ")[2])
        assert event["sequence_number"] == number
        if event["type"] == "response.output_item.added":
            item = event["item"]
            assert event["output_index"] == len(items)
            items.append(item | {"said": ""})
        elif event["type"] in _TEXTS:
            assert event["item_id"] == items[-1]["id"]
            items[-1]["said"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            done = event["item"]
            said = done["arguments"] if "arguments" in done else done["content"][0]["text"]
            assert said == items[-1].pop("said")
            items[-1] = done
    return items


def check(answer: Answer, rng: random.Random) -> int:
    text = answer.text
    whole = output(tells=False)
    assert run(answer, [text], whole) == b""
    expected = [msgspec.json.decode(data) for _, data in whole.items]
    cuts = [[text[:i], text[i:]] for i in range(0, len(text) + 1, 3)] + [list(text), [text]]
    for _ in range(3):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 12)))
        cuts.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    for pieces in cuts:
        found = output(tells=True)
        assert put_together(run(answer, pieces, found)) == expected, pieces
        assert found.items == whole.items
    return len(cuts)


@pytest.mark.parametrize("name", ["well", "ill"])
def test_cuts_change_nothing(name: str) -> None:
    rng = random.Random(2)
    fixtures = rng.sample(WELL if name == "well" else broken(), 40)
    assert sum(check(answer, rng) for answer in fixtures) > 1_000


def test_items_together_say_what_a_chat_says() -> None:
    for answer in answers():
        found = output(tells=False)
        run(answer, [answer.text], found)
        items = [msgspec.json.decode(data) for _, data in found.items]
        texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        thoughts = [item["content"][0]["text"] for item in items if item["type"] == "reasoning"]
        calls = [(item["name"], msgspec.json.decode(item["arguments"])) for item in items if "name" in item]
        assert ("".join(texts), "".join(thoughts), calls) == (
            answer.content,
            answer.reasoning,
            answer.called,
        )
