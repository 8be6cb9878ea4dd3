"""A token's result does not depend on how its prompt was cut: bit for bit, on every backend (see `cuts`).

BATON_CUTS=2000 tries so many prompts in all, of up to 3,000 tokens, instead of a few (`make soak-cuts`).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from baton.executor.torch_executor import TorchExecutor
from baton.model.layers.int8 import why_not_int8
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuts import BACKENDS, Requests, backend

FORMS = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "kv int8"))
"""dtype, and what is quantized."""
SHAPES = {
    "groups": ("llama3", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "windows": ("qwen2-window", {"sliding_window": 700}),
    "norms": ("qwen3", {"head_dim": 32}),
    "odd": ("llama-biased-linear", {"hidden_size": 72, "intermediate_size": 107, "head_dim": 18}),
    "sinks": ("gpt-oss", {"sliding_window": 700, "num_local_experts": 4}),
}
LENGTH = 4096
PROMPTS = int(os.environ.get("BATON_CUTS", "0"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, (variant, changes) in SHAPES.items():
        found[name] = tmp_path_factory.mktemp(name)
        make_checkpoint(found[name], variant, max_position_embeddings=LENGTH, num_hidden_layers=2, **changes)
    return found


def check(
    name: str, directory: Path, form: tuple[str, str | None], seed: int, prompts: int, longest: int
) -> tuple[int, int]:
    """At least so many prompts, each once alone and in one piece, then cut and together with others.

    Returns how many there were, and how many positions were compared.
    """
    chance = random.Random(seed)
    dtype, quantization = form
    block = chance.choice([16, 16, 8, 32])
    config = config_for(
        directory,
        dtype=dtype,
        quantization="int8" if quantization == "int8" else None,
        kv_cache_dtype="int8" if quantization == "kv int8" else None,
        block_size=block,
        num_blocks=4 * (longest // block + 8),
        num_threads=2 if name == BACKENDS[0] else 1,  # OpenMP's threads are slow on a busy machine
        max_model_len=LENGTH,
    )
    executor = TorchExecutor.from_config(config, 0, "")
    tried = positions = 0
    try:
        while tried < prompts:
            requests = Requests(executor, chance)
            common = np.array([chance.randrange(VOCAB) for _ in range(longest)], np.int32)
            some = []
            for _ in range(chance.randrange(1, 4)):  # with more or less of a prefix in common
                tokens = common[: chance.randrange(longest // 2, longest)].copy()
                other = chance.randrange(len(tokens))
                tokens[other:] = [chance.randrange(VOCAB) for _ in range(len(tokens) - other)]
                some.append(tokens)
            requests.run(some, [requests.whole(tokens) for tokens in some])
            tried += len(some)
            positions += requests.counted
    finally:
        executor.close()
    return tried, positions


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[1] or form[0])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_token_does_not_depend_on_the_cuts(
    name: str, form: tuple[str, str | None], checkpoints: dict[str, Path]
) -> None:
    with backend(name):
        if form[1] == "int8" and why_not_int8():
            pytest.skip(why_not_int8())
        number = BACKENDS.index(name) * len(FORMS) + FORMS.index(form)
        for place, shape in enumerate(checkpoints):
            seed = number * len(SHAPES) + place
            if PROMPTS:
                share = -(-PROMPTS // (len(BACKENDS) * len(FORMS) * len(SHAPES)))
                tried, positions = check(name, checkpoints[shape], form, seed, share, 3000)
                print(
                    f"{name} {form} {shape}: {tried} prompts, {positions} positions, the same bits",
                    flush=True,
                )
            elif (number + place) % 2 == 0:
                check(name, checkpoints[shape], form, seed, 2, 1200)
