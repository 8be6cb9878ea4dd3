"""However a text is cut, the deltas together are the same, and say what the text says."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.parsing.deltas import Call, Delta
from baton.gateway.parsing.formats import CALLS, THINKS
from tests.gateway.parsing.fixtures import Answer, answers, broken, meaning, read

WELL, ILL = answers(), broken()


def check_everywhere(answer: Answer, rng: random.Random) -> int:
    """Every cut in two, some in many, and one character at a time; returns how many cuts."""
    text = answer.text
    whole = meaning(read(answer, [text]))
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    cuts.append(list(text))
    for _ in range(3):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 12)))
        cuts.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    for pieces in cuts:
        assert meaning(read(answer, pieces)) == whole, pieces
    return len(cuts)


def test_what_is_well_formed_means_what_it_says() -> None:
    assert len(WELL) > 300
    for answer in WELL:
        content, reasoning, calls = meaning(read(answer, [answer.text]))
        assert (content, reasoning) == (answer.content, answer.reasoning), answer.text
        assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == answer.called, answer.text


@pytest.mark.parametrize("name", ["well", "ill"])
def test_cuts_change_nothing(name: str) -> None:
    rng = random.Random(1)
    fixtures = rng.sample(WELL, 60) if name == "well" else rng.sample(ILL, 60)
    count = sum(check_everywhere(answer, rng) for answer in fixtures)
    assert count > 5_000


_MARKS = sorted(
    {
        marker
        for calls in CALLS.values()
        for frame in calls.frames
        for marker in (*frame.open, frame.close)
        if marker
    }
    | {marker for calls in CALLS.values() for marker in calls.dropped}
    | {"<think>", "</think>", "<|channel|>", "<|message|>", "<|call|>", "analysis", " to=functions.x "}
    | {"<function=x>", "<parameter=city>", "</parameter>", "</function>", "<arg_key>", "<arg_value>"}
    | {
        '{"name": "x", "arguments": ',
        '{"a": 1}',
        "}",
        "[",
        "]",
        "x(",
        "city=",
        "'a'",
        ")",
        '"',
        "\\",
        "\n",
        " ",
    }
)
_TEXTS = st.lists(st.sampled_from(_MARKS) | st.text(max_size=4), max_size=14).map("".join)


@given(
    text=_TEXTS,
    calls=st.sampled_from([None, *CALLS.values()]),
    think=st.sampled_from([None, *THINKS.values()]),
    thinking=st.booleans(),
    data=st.data(),
)
def test_any_text_in_any_pieces(text, calls, think, thinking, data) -> None:
    answer = Answer(text, think, calls, thinking)
    whole = meaning(read(answer, [text]))
    assert meaning(read(answer, list(text))) == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert meaning(read(answer, pieces)) == whole


def test_a_calls_name_comes_first_and_once_and_its_arguments_as_they_come() -> None:
    for answer in WELL:
        if not answer.called:
            continue
        parser = answer.parser()
        deltas: list[Delta] = []
        for character in answer.text:
            deltas += parser.push(character)
        deltas += parser.finish()
        calls = [delta for delta in deltas if isinstance(delta, Call)]
        assert [one.index for one in calls] == sorted(one.index for one in calls)
        for index in range(len(answer.called)):
            names = [one.name for one in calls if one.index == index]
            assert names[0] is not None
            assert names[1:] == [None] * (len(names) - 1)
            size = sum(len(one.arguments) for one in calls if one.index == index)
            # (Text of one type comes character by character; other values of tags as a whole.)
            assert len(names) >= min(size, 8) // 4, answer.text


def test_one_call_alone_where_no_more_are_wanted() -> None:
    for answer in WELL:
        if len(answer.called) > 1:
            parsed = read(answer, list(answer.text), parallel=False)
            assert [one.name for one in parsed.calls] == [answer.called[0][0]]
            assert "".join(parsed.content) == answer.content


def test_without_tools_calls_are_text() -> None:
    for answer in WELL:
        if answer.called and answer.calls is not None and not answer.calls.harmony and answer.think is None:
            content, _, calls = meaning(read(answer, [answer.text], calling=False))
            assert not calls
            assert all(name in content for name, _ in answer.called)
