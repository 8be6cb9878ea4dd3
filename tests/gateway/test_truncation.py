"""Prompts that are cut: what the tokenizer puts around a text stays."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from baton.gateway.errors import BadRequest
from baton.gateway.reading.judging import activated, likelihood, scorer_of, scores_of, truncate_question
from baton.gateway.reading.prompts import Prompt
from baton.gateway.reading.truncation import Side, truncate
from baton.gateway.served_model import PAIR, QWEN3_RERANKER, ServedModel
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.params.pooling import pack_vector

BEGIN, END = 1000, 2000
SERVED = ServedModel(names=("m",), tokenizer=Path(), max_model_len=8, eos_token_ids=())


class Letters:
    """A token for each character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = list(map(ord, text))
        return [BEGIN, *ids, END] if add_special_tokens else ids


LETTERS = cast(Tokenizer, Letters())


@pytest.mark.parametrize(
    ("most", "side", "expected"),
    [
        (8, "right", "abcdef"),
        (5, "right", "abc"),
        (5, "left", "def"),
        (3, "right", "a"),
    ],
)
def test_texts_keep_what_is_around_them(most: int, side: Side, expected: str) -> None:
    prompt = Prompt(LETTERS.encode("abcdef"), "abcdef")
    found = list(truncate(prompt, most, side, LETTERS, special=True))
    assert found == [BEGIN, *map(ord, expected), END]


def test_ids_are_cut_as_they_are() -> None:
    prompt = Prompt([1, 2, 3, 4], None)
    assert truncate(prompt, 2, "right", LETTERS, special=True) == [1, 2]
    assert truncate(prompt, 2, "left", LETTERS, special=True) == [3, 4]
    text = Prompt(list(map(ord, "abcd")), "abcd")
    assert truncate(text, 2, "right", LETTERS, special=False) == [97, 98]


def test_a_question_keeps_its_end() -> None:
    judge = QWEN3_RERANKER
    text = judge.prompt("query", "d" * 500)
    ids = LETTERS.encode(text, add_special_tokens=False)
    cut = truncate_question(ids, len(ids) - 100, judge, LETTERS)
    assert "".join(map(chr, cut)) == judge.prompt("query", "d" * 400)
    assert truncate_question(ids, len(ids), judge, LETTERS) == ids
    with pytest.raises(BadRequest, match="truncate_prompt_tokens"):
        truncate_question(ids, 50, judge, LETTERS)


def test_placeholders_in_what_is_asked_are_text() -> None:
    text = QWEN3_RERANKER.prompt("{document}", "{instruction} {query}", "why")
    assert "<Instruct>: why\n<Query>: {document}\n<Document>: {instruction} {query}<|im_end|>" in text


def test_scores() -> None:
    assert likelihood(0.0, 0.0) == 0.5
    assert likelihood(5000.0, -5000.0) == 0.0
    assert likelihood(-5000.0, 5000.0) == 1.0
    vectors = [pack_vector(one) for one in ([1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [1.0, 0.0])]
    assert list(scores_of(vectors, 1, None)) == pytest.approx([0.0, 0.6, 1.0])
    assert list(scores_of(vectors, 2, None)) == pytest.approx([0.6, 0.0])
    judges = replace(SERVED, judge=QWEN3_RERANKER)
    assert scorer_of(SERVED) is None
    pairs = [pack_vector([0.0, 2.0]), pack_vector([1.0, 1.0])]
    assert list(scores_of(pairs, 1, scorer_of(judges))) == pytest.approx([1 / (1 + math.exp(-2)), 0.5])
    assert list(scores_of(pairs, 1, scorer_of(judges, use_activation=False))) == [2.0, 0.0]
    with pytest.raises(Exception, match="NaN"):
        list(scores_of([pack_vector([float("nan"), 0.0])], 1, scorer_of(judges)))


def test_what_makes_results_of_scores() -> None:
    assert activated([0.0, 0.0], "softmax") == [0.5, 0.5]
    assert activated([5000.0, -5000.0], "softmax") == [1.0, 0.0]
    assert activated([5000.0, -5000.0, 0.0], "sigmoid") == [1.0, 0.0, 0.5]
    assert activated([3.0, -1.0], "identity") == [3.0, -1.0]
    head = replace(SERVED, judge=PAIR, activation="sigmoid")
    (score,) = scores_of([pack_vector([-2.0])], 1, scorer_of(head))
    assert score == pytest.approx(1 / (1 + math.exp(2)))
    assert list(scores_of([pack_vector([-2.0])], 1, scorer_of(head, use_activation=False))) == [-2.0]


def test_a_helper_is_told_of_the_judge() -> None:
    import msgspec

    from baton.gateway.reading.settings import Settings

    settings = Settings(max_model_len=8, judge=QWEN3_RERANKER)
    again: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings)
    assert again == settings
