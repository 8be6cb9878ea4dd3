"""A real server on a GPU: the answers of one on the CPU, and two instances on one device that hand over.

The embedded model, greedy, in float32: the same tokens everywhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.e2e.server import Server
from tests.model.cuda.where import ON_CPU, ON_DEVICE

PROMPTS = [
    "Once upon a time there was a",
    "The capital of France is",
    "def fibonacci(n):",
    "one two three four five six seven eight nine ten " * 12,
    "A B C D E",
    "In the beginning",
]
COMMON = ("--dtype", "float32", "--max-model-len", "1024", "--num-gpu-blocks-override", "200")
ON_GPU = ("--device", "cuda", "--gpu-memory-utilization", "0.2")
PAIR = ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")


def answers(server: Server) -> list[str]:
    """Of all prompts at once."""

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, f"{answer.text}\n{server.log()[-3000:]}"
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


@pytest.fixture(scope="module")
def expected() -> Iterator[list[str]]:
    """A CPU's."""
    with Server("--device", "cpu", *COMMON) as server:
        yield answers(server)


def arrived(server: Server) -> int:
    stats = server.http.get("/stats").json()
    return sum(one["handovers"]["arrived"] for one in stats.get("instances", {"": stats}).values())


@ON_DEVICE
@pytest.mark.parametrize("flags", [(), ("--enforce-eager",), ("--overlap-steps", "off")], ids=str)
def test_answers_are_those_of_a_cpu(flags: tuple[str, ...], expected: list[str]):
    with Server(*ON_GPU, *COMMON, *flags) as server:
        assert answers(server) == expected
        assert answers(server) == expected  # (with prefixes that are there)
        assert "attention by Triton" in server.log()
        assert "of further sizes are launched eagerly" not in server.log()


@ON_DEVICE
def test_few_blocks_preempt(expected: list[str]):
    """There is room for two of the six requests at a time."""
    tight = ("--dtype", "float32", "--max-model-len", "320", "--block-size", "16")
    with Server(*ON_GPU, *tight, "--num-gpu-blocks-override", "20", "--admission-headroom", "0") as server:
        assert answers(server) == expected
        assert server.metric("baton:num_preemptions_total") > 0


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_two_instances_on_one_device_hand_over(device: str, expected: list[str]):
    if device == "cuda" and ON_CPU:
        pytest.skip("only on a GPU: `make gpu` (BATON_TEST_DEVICE=cuda)")
    with Server(*(ON_GPU if device == "cuda" else ("--device", "cpu")), *COMMON, *PAIR) as server:
        assert answers(server) == expected
        assert arrived(server) >= len(PROMPTS)


@ON_DEVICE
def test_two_instances_hand_over_by_nixl(expected: list[str]):
    if not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12")):
        pytest.skip("nixl is not installed: pip install 'baton-llm[nixl]'")
    with Server(*ON_GPU, *COMMON, *PAIR, "--transfer", "nixl") as server:
        assert answers(server) == expected
        assert arrived(server) >= len(PROMPTS)


@ON_DEVICE
@pytest.mark.parametrize("flags", [(), ("--enforce-eager",), ("--speculation", "ngram")], ids=str)
def test_two_ranks_on_two_devices(flags: tuple[str, ...], expected: list[str]):
    """What they send each other is in their graphs (`test_ranks.py` has the executor alone)."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"there is {torch.cuda.device_count()} GPU, and two are needed")
    with Server(*ON_GPU, *COMMON, "--tensor-parallel-size", "2", *flags) as server:
        assert answers(server) == expected
        assert ("2 ranks record their decode steps as CUDA graphs" in server.log()) == (
            "--enforce-eager" not in flags
        )
