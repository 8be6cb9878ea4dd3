"""Whole executors with attention by FlashInfer, on a GPU where it is installed; its first use of each kernel
may compile it.  (What it computes is tests/model/cuda/test_flashinfer.py's.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.executor.torch_executor import TorchExecutor
from baton.executor.torch_late import LateTorchExecutor
from baton.model.ops import flashinfer
from baton.protocol.params.sampling import Sampling
from tests.executor.driver import Driver, Request
from tests.gpu.test_parity import distributions, executor_of, prompt_of, vector
from tests.gpu.test_steps import config_of, overlapped
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.where import ON_DEVICE

pytestmark = [
    ON_DEVICE,
    pytest.mark.skipif(
        not flashinfer.installed(), reason="FlashInfer is not installed: pip install flashinfer-python"
    ),
]
OURS = dict(dtype="bfloat16", attention_backend="flashinfer")
TOLD = Sampling(seed=0, temperature=0.0, logprobs=VOCAB)


@pytest.mark.parametrize("variant", ["qwen3", "gemma2"])
def test_bfloat16_is_as_near_to_float32_as_the_cpus(variant: str, tmp_path: Path):
    make_checkpoint(tmp_path, variant, head_dim=64)
    exact = distributions(executor_of(tmp_path, "cpu"))
    cpu = distributions(executor_of(tmp_path, "cpu", dtype="bfloat16"))
    ours = executor_of(tmp_path, "cuda", **OURS)
    assert "attention by FlashInfer" in ours.info.detail
    of_cpu, of_ours = ((found - exact).abs().mean() for found in (cpu, distributions(ours)))
    assert of_ours <= 1.5 * of_cpu + 0.01, f"from float32: {of_ours:.4f}, the CPU's: {of_cpu:.4f}"


def told(executor: TorchExecutor, rows: int, count: int) -> list[tuple[list[int], torch.Tensor]]:
    """Of each row its tokens, and all log-probabilities of each."""
    driver = Driver(executor)
    made = [driver.add(prompt_of(3 + 20 * n, n), count, TOLD) for n in range(rows)]
    driver.run()
    for request in made:
        driver.remove(request)
    return [(one.tokens, torch.stack([vector(report) for report in one.logprobs])) for one in made]


def test_graphs_compute_what_eager_steps_do(tmp_path: Path):
    """Contexts are cut otherwise, so to a rounding; as long as the tokens are the same."""
    make_checkpoint(tmp_path, "qwen3", head_dim=64)
    recorded = TorchExecutor.from_config(config_of(tmp_path, **OURS), 0, "")
    eager = TorchExecutor.from_config(config_of(tmp_path, enforce_eager=True, **OURS), 0, "")
    assert recorded._graphs is not None
    for rows in (1, 3, 8):
        for (ours, found), (others, expected) in zip(
            told(recorded, rows, 12), told(eager, rows, 12), strict=True
        ):
            same = next((n for n in range(12) if ours[n] != others[n]), 11) + 1
            assert same > 1, "the first token"
            assert (found[:same] - expected[:same]).abs().mean() < 0.05
    assert recorded._graphs._graphs, "no step was recorded"
    assert recorded._graphs.why_no_more == ""
    for executor in (recorded, eager):
        executor.close()


def test_steps_that_overlap_compute_what_those_that_wait_do(tmp_path: Path):
    """A plan is not written over while the device still reads it: then tokens would be rubbish at once.  The
    first half of the answers must be the same; a tie may be broken otherwise later."""
    make_checkpoint(tmp_path, "qwen3", head_dim=64)
    executor = LateTorchExecutor.from_config(config_of(tmp_path, **OURS), 0, "")
    assert executor.one_step_late, executor.why_waits
    rows, count = 5, 24

    def begun(driver: Driver) -> list[Request]:
        wish: Any = Sampling(seed=1, temperature=0.0)
        return [driver.add(prompt_of(4 + 30 * n, n), count, wish) for n in range(rows)]

    driver = Driver(executor)
    made = begun(driver)
    driver.run()
    expected = [request.tokens for request in made]
    for request in made:
        driver.remove(request)
    late = Driver(executor, seed=3)
    made = begun(late)
    late.step()  # the prompts
    found = overlapped(executor, late, made, count)
    alike = sum(one[: count // 2] == other[: count // 2] for one, other in zip(found, expected, strict=True))
    assert alike >= rows - 1, f"{alike} of {rows} answers"
    executor.close()
