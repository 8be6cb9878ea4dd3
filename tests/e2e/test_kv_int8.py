"""`--kv-cache-dtype int8` through servers: the same answers however requests are cut or handed over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.hub import resolve_model
from tests.e2e.mixed_requests import make_asks
from tests.e2e.server import Server
from tests.e2e.test_disaggregation import ask_all, clean_ledgers, learn_from, stats

BLOCK = 32
TIGHT = ("--num-gpu-blocks-override", "40", "--max-model-len", "1024", "--admission-headroom", "0")
FLAGS = ("--kv-cache-dtype", "int8", "--dtype", "bfloat16", "--block-size", str(BLOCK))


def page_bytes() -> int:
    """A byte a number; a scale of four for each position and head of keys and of values."""
    model = ModelConfig.from_directory(resolve_model(None))
    return model.num_layers * 2 * model.num_kv_heads * BLOCK * (model.head_dim + 4)


def answer(server: Server, number: int) -> str:
    """A short prompt of its own and a long answer: twelve at once do not fit."""
    return (
        server.client()
        .completions.create(
            model="",
            prompt=[3 + (7 * number + token) % 200 for token in range(40)],
            max_tokens=150,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        .choices[0]
        .text
    )


@pytest.mark.slow
def test_answers_are_those_of_requests_alone_in_one_instance_and_in_two() -> None:
    asks = make_asks(24, seed=8, longest_prompt=400, longest_output=60)
    with Server(*FLAGS, *TIGHT) as one:
        learn_from(one, asks)
        hits = one.metric("baton:prefix_cache_hits_total")
        wrong = ask_all(one, asks, at_once=24)
        assert not wrong, f"{len(wrong)} of {len(asks)}:\n" + "\n".join(wrong[:5])
        assert one.metric("baton:prefix_cache_hits_total") > hits
        alone = [answer(one, number) for number in range(12)]
        before = one.metric("baton:num_preemptions_total")
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(lambda number: answer(one, number), range(12))) == alone
        assert one.metric("baton:num_preemptions_total") > before
    with Server("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0", *FLAGS) as two:
        wrong = ask_all(two, asks, at_once=8)
        assert not wrong, f"{len(wrong)} of {len(asks)}:\n" + "\n".join(wrong[:5])
        clean_ledgers(two)
        counts = stats(two)["decode-0"]
        assert counts["arrived"] > 0
        assert counts["fetched_bytes"] > 0
        # Whole pages of half the size and scales, or layers of such.
        layer_bytes = page_bytes() // ModelConfig.from_directory(resolve_model(None)).num_layers
        assert counts["fetched_bytes"] % layer_bytes == 0
        assert not two.warnings(), "\n".join(two.warnings()[:10])
        before = counts["fetched_bytes"]
        prompt = [3 + token % 200 for token in range(7 * BLOCK + 5)]
        two.client().completions.create(model="", prompt=prompt, max_tokens=4, temperature=0)
        clean_ledgers(two)
        assert stats(two)["decode-0"]["fetched_bytes"] - before == 8 * page_bytes()
