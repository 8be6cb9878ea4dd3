"""Which experts tokens went to: what a request may ask for, and how an answer's array is put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from baton.gateway.errors import BadRequest
from baton.gateway.generation.costs import MAX_ROUTES, check_routes
from baton.gateway.generation.generation import Generation
from baton.gateway.generation.routes import routed_experts
from baton.gateway.served_model import Routing, ServedModel
from baton.protocol.params.sampling_params import SamplingParams
from baton.protocol.routes import Routes

QWEN3_30B = Routing(mixtures=48, chosen=8, experts=128)
SERVED = ServedModel(
    names=("m",), tokenizer=Path(), max_model_len=40_960, eos_token_ids=(), routing=QWEN3_30B
)


def test_an_answer_may_be_so_large() -> None:
    params = SamplingParams(return_routed_experts=True, max_tokens=2000, n=1)
    most = MAX_ROUTES // QWEN3_30B.row_bytes
    check_routes([[5] * 2000], params.replace(n=32, max_tokens=(most - 2000) // 32), SERVED, "prompt")
    with pytest.raises(BadRequest, match="more than 256"):
        check_routes([[5] * 2000], params.replace(n=32, max_tokens=most // 32), SERVED, "prompt")
    with pytest.raises(BadRequest, match="more than 256; lower n or max_tokens, give routed_experts_prompt"):
        check_routes([[5] * 2000], params.replace(n=128, max_tokens=None), SERVED, "prompt")
    check_routes([[5] * 2000], params.replace(routed_experts_prompt_start=1999), SERVED, "prompt")
    with pytest.raises(BadRequest, match="2000 must be less than the 2000 tokens of messages"):
        check_routes([[5] * 2000], params.replace(routed_experts_prompt_start=2000), SERVED, "messages")


@dataclass
class Told:
    """As a `Sequence` that has ended."""

    prompt: list[int]
    num_generated: int
    routes: list[Routes] = field(default_factory=list)
    routes_start: int | None = 0


def run(first: int, stop: int, mark: int = 0) -> Routes:
    """Of positions [first, stop): the position and the mark, in one layer."""
    ids = bytes(value for position in range(first, stop) for value in (position, mark))
    return Routes(first, 1, 2, 1, ids)


def array_of(*sequences: Told, index: int = 0) -> Any:
    generation = cast(Generation, _Generation(list(sequences), len(sequences)))
    found = routed_experts(generation, index)
    return None if found is None else found[:, 0, :].tolist()


@dataclass
class _Generation:
    sequences: list[Told]
    choices: int


def test_rows_follow_each_other_and_end_before_the_last_token() -> None:
    told = Told([1] * 4, 3, [run(0, 2), run(2, 5), run(5, 9)])
    assert array_of(told) == [[position, 0] for position in range(6)]
    told.routes_start = 3
    assert array_of(told) == [[3, 0], [4, 0], [5, 0]]
    told.routes_start = None
    assert array_of(told) is None


def test_what_is_missing_makes_no_array() -> None:
    assert array_of(Told([1] * 4, 3, [run(0, 5)])) is None
    assert array_of(Told([1] * 4, 0, [run(0, 3)])) is None
    assert array_of(Told([1] * 4, 0, [run(0, 4)])) == [[position, 0] for position in range(4)]


def test_the_first_choice_tells_of_the_prompt_of_all() -> None:
    first, second = Told([1] * 4, 2, [run(0, 5)]), Told([1] * 4, 3, [run(3, 6, mark=9)])
    shared = [[0, 0], [1, 0], [2, 0]]
    assert array_of(first, second) == [*shared, [3, 0], [4, 0]]
    assert array_of(first, second, index=1) == [*shared, [3, 9], [4, 9], [5, 9]]
    first.routes = []
    assert array_of(first, second, index=1) is None
