"""How answers are compared: every change of what a client gets is found, and no other one."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.speculating.answers import Answer, difference, joined


def chunk(text: str, ids: list[int], finish: str | None = None, **more: Any) -> str:
    logprobs = {
        "tokens": [str(token) for token in ids],
        "token_logprobs": [-0.1 * token for token in ids],
        "top_logprobs": [{"a": -0.5, "b": -1.5} for _ in ids],
        "text_offset": [5 * token for token in ids],
    }
    choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
    choice["stop_reason"] = "stone" if finish else None
    return json.dumps({"id": "cmpl-1", "created": 7, "model": "m", "choices": [choice], **more})


USAGE = json.dumps({"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 2}})
STREAM = [chunk("a", [1]), chunk("bc", [2, 3]), chunk("d", [4], "stop"), USAGE, "[DONE]"]


def test_how_a_stream_is_cut_does_not_matter() -> None:
    other = [chunk("abc", [1, 2, 3]), chunk("", []), chunk("d", [4], "stop"), USAGE, "[DONE]"]
    one, two = joined(STREAM), joined(other)
    assert difference(one, two) is None
    assert (one.runs, two.runs) == ([1, 2, 1], [3, 1])
    (choice,) = one.choices
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("abcd", [1, 2, 3, 4], "stop")
    assert choice["logprobs"]["text_offset"] == [5, 10, 15, 20]
    assert one.body["usage"] == {"completion_tokens": 4, "prompt_tokens": 2}


@pytest.mark.parametrize("events", [STREAM[:-1], [*STREAM[:3], STREAM[2], *STREAM[3:]], []])
def test_a_stream_that_is_cut_off_or_ends_twice_is_another_answer(events: list[str]) -> None:
    assert difference(joined(STREAM), joined(events))


def one_bit_more(body: dict[str, Any]) -> None:
    values = body["choices"][0]["logprobs"]["token_logprobs"]
    values[2] = math.nextafter(values[2], 0)


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("token_ids[3]", lambda body: body["choices"][0]["token_ids"].__setitem__(3, 5)),
    ("token_ids has 5", lambda body: body["choices"][0]["token_ids"].append(9)),
    ("text", lambda body: body["choices"][0].update(text="abcd ")),
    ("finish_reason", lambda body: body["choices"][0].update(finish_reason="length")),
    ("stop_reason", lambda body: body["choices"][0].update(stop_reason=None)),
    ("token_logprobs[2]", one_bit_more),
    ("top_logprobs[1].b", lambda body: body["choices"][0]["logprobs"]["top_logprobs"][1].update(b=-1.0)),
    ("top_logprobs[1].c", lambda body: body["choices"][0]["logprobs"]["top_logprobs"][1].update(c=-1.0)),
    ("usage.completion_tokens", lambda body: body["usage"].update(completion_tokens=5)),
    ("choices has 2", lambda body: body["choices"].append(body["choices"][0])),
]


@pytest.mark.parametrize(("place", "change"), CHANGES, ids=[place for place, _ in CHANGES])
def test_every_change_is_found(place: str, change: Callable[[dict[str, Any]], object]) -> None:
    expected = joined(STREAM)
    got = Answer(200, copy.deepcopy(expected.body))
    assert difference(expected, got) is None
    change(got.body)
    found = difference(expected, got)
    assert found is not None
    assert place in found


def test_another_status_and_a_zero_of_another_sign_are_found() -> None:
    assert difference(Answer(200, {}), Answer(500, {"error": "x"}))
    assert difference(Answer(200, {"a": 0.0}), Answer(200, {"a": -0.0}))
