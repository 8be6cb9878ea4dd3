"""The whole executor on a device beside the CPU's, over families: the same tokens in float32, and in bfloat16
no further from float32 than the CPU's own bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.protocol.params.sampling import Sampling, TokenLogprobs
from tests.executor.driver import Driver
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.where import DEVICE, ON_CPU, ON_DEVICE, THERE, serve

pytestmark = pytest.mark.skipif(not THERE, reason="Triton is not installed: pip install 'baton-llm[cuda]'")

FAMILIES = [
    "llama2",
    "llama-biased-linear",
    "mistral",
    "qwen2-window",
    "qwen3-yarn",
    "ernie4_5-biased",
    "smollm3-odd",
    "granite-odd",
    "phi3-odd",
    "olmo2-odd",
    "olmo3-odd",
    "glm4-odd",
    "ministral3",
    "gemma",
    "gemma2-odd",
    "gemma3",
]
MIXTURES = ["ernie4_5-moe-odd", "qwen3-moe-odd", "mixtral", "gpt-oss", "gpt-oss-odd"]
INTERPRETED = "gemma2-odd"
"""What CI runs in the interpreter: windows, a soft-cap, odd sizes; tests/model/cuda has others."""
ALL = Sampling(seed=0, temperature=0.0, prompt_logprobs=VOCAB)


def executor_of(directory: Path, device: str, **changes: Any) -> TorchExecutor:
    sizes = dict(max_model_len=160, block_size=16, num_blocks=60, max_num_seqs=8, num_threads=1)
    settings = {**sizes, "dtype": "float32", **changes}
    return TorchExecutor.from_config(instance_config(model=str(directory), device=device, **settings), 0, "")


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint of a family."""

    def make(variant: str) -> Path:
        make_checkpoint(tmp_path, variant)
        return tmp_path

    return make


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, length)]


def answers(executor: TorchExecutor, lengths: tuple[int, ...], count: int) -> list[list[int]]:
    """Prompts cut in chunks, greedy and sampled rows in one batch."""
    driver = Driver(executor, chunk=37)
    wishes = [
        Sampling(seed=1, temperature=0.0),
        Sampling(seed=2, temperature=0.9, top_p=0.95),
        Sampling(seed=3, temperature=0.8, top_k=30),
        Sampling(seed=4, temperature=1.1, min_p=0.01, repetition_penalty=1.2),
    ]
    made = [
        driver.add(prompt_of(length, number), count, wishes[number % len(wishes)])
        for number, length in enumerate(lengths)
    ]
    driver.run()
    for request in made:
        driver.remove(request)
    return [request.tokens for request in made]


CASES = [
    pytest.param(name, id=name, marks=() if name == INTERPRETED else ON_DEVICE)
    for name in (*FAMILIES, *MIXTURES)
]


@pytest.mark.parametrize("variant", CASES)
def test_tokens_are_the_cpus_in_float32(
    variant: str, made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    directory = made(variant)
    lengths, count = ((5, 21), 2) if ON_CPU else ((5, 40, 90, 1, 33), 24)
    cpu = executor_of(directory, "cpu")
    expected = answers(cpu, lengths, count)
    cpu.close()
    serve(monkeypatch)
    ours = executor_of(directory, DEVICE.type)
    assert "attention by Triton" in ours.info.detail
    assert answers(ours, lengths, count) == expected
    ours.close()


@ON_DEVICE
@pytest.mark.parametrize("kv", [None, "int8"], ids=["", "KV in 8 bits"])
@pytest.mark.parametrize("variant", [*FAMILIES, *MIXTURES])
def test_bfloat16_is_as_near_to_float32_as_the_cpus(
    variant: str, kv: str | None, made: Callable[[str], Path]
):
    """Distributions at all positions of a prompt that is cut in pieces."""
    directory = made(variant)
    exact = distributions(executor_of(directory, "cpu"))
    cpu = distributions(executor_of(directory, "cpu", dtype="bfloat16", kv_cache_dtype=kv))
    ours = distributions(executor_of(directory, "cuda", dtype="bfloat16", kv_cache_dtype=kv))
    of_cpu, of_ours = ((found - exact).abs().mean() for found in (cpu, ours))
    assert of_ours <= 1.5 * of_cpu + 0.01, f"from float32: {of_ours:.4f}, the CPU's: {of_cpu:.4f}"


def distributions(executor: TorchExecutor) -> torch.Tensor:
    """Log-probabilities [positions, vocab]."""
    driver = Driver(executor, chunk=50)
    request = driver.add(prompt_of(120), 1, ALL)
    driver.run()
    executor.close()
    return torch.stack([vector(report) for report in request.prompt_logprobs])


def vector(report: TokenLogprobs) -> torch.Tensor:
    found = torch.full((VOCAB,), float("nan"))
    for token, logprob in report.best():
        found[token] = logprob
    assert not found.isnan().any()
    return found
