"""Vectors and labels of prompts, against transformers: however they are batched, cut and computed again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.executor.base import StepBatch
from baton.executor.torch_executor import TorchExecutor
from baton.model.checkpoint.files import LoadError
from baton.protocol.params.pooling import SCORES, Pooling, unpack_vector
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.driver import Driver, Request
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import make_checkpoint, make_classifier

KINDS = {
    "last": Pooling("last"),
    "mean": Pooling("mean"),
    "first": Pooling("first"),
    "raw": Pooling("last", normalize=False),
    "short": Pooling("mean", dimensions=24),
    "labels": Pooling("labels", labels=(17, 5, 190)),
}


class PoolingDriver(Driver):
    """Plays the worker for pooled requests too: they sample nothing."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.results: dict[int, bytes] = {}
        """By slot."""

    def pool(self, prompt: list[int], pooling: Pooling) -> Request:
        return self.add(prompt, sampling=Sampling(0, 0.0, pooling=pooling), stopping=Stopping(1))

    def _compose(self, running: list[Request], counts: dict[int, int]) -> StepBatch:
        batch = super()._compose(running, counts)
        for row, request in enumerate(running):
            if request.sampling.pooling is not None:
                batch.pooled[row] = bool(batch.samples[row])
                batch.samples[row] = False
                if row < batch.num_decodes:  # (one token that is left of a prompt is no token that was drawn)
                    batch.num_decodes = row
        self._batch, self._running = batch, running
        return batch

    def step(self) -> None:
        execute = self.executor.execute

        def watched(batch: StepBatch) -> Any:
            result = execute(batch)
            ended = [row for row, ends in batch.pooled.items() if ends]
            assert list(result.pooled) == [] or sorted(result.pooled) == ended  # (followers give none)
            for row in ended:
                request = self._running[row]
                self.results[request.slot] = result.pooled.get(row, b"")
                request.tokens.append(-1)  # done
            return result

        self.executor.execute = watched  # type: ignore[method-assign]
        try:
            super().step()
        finally:
            del self.executor.execute


@pytest.fixture(scope="module", params=["qwen3", "llama2", "stablelm"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(directory, request.param)
    executor = TorchExecutor.from_config(config_for(directory), 0, "")
    yield executor, model
    executor.close()


def pooled(
    executor: Any, prompts: Sequence[list[int]], pooling: Pooling, chunk: int = 1 << 20, beside: int = 0
) -> list[bytes]:
    """Computed in one crowd, `beside` so many requests that generate."""
    driver = PoolingDriver(executor, chunk)
    for number in range(beside):
        driver.add(prompt_of(9 + number, 50 + number), 12)
    requests = [driver.pool(prompt, pooling) for prompt in prompts]
    driver.run()
    results = [driver.results[request.slot] for request in requests]
    for request in list(driver.requests.values()):
        driver.remove(request)
    return results


def reference(model: Any, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    with torch.no_grad():
        found = model(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    if pooling.kind == "labels":
        return found.logits[0, -1, list(pooling.labels)]
    hidden = found.hidden_states[-1][0]  # after the last norm
    vector = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(dim=0)}[pooling.kind]
    if pooling.dimensions:
        vector = vector[: pooling.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if pooling.normalize else vector


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_transformers(pair: Any, kind: str) -> None:
    executor, model = pair
    prompts = [prompt_of(length, length) for length in (1, 5, 16, 17, 70, 300)]
    for prompt, data in zip(prompts, pooled(executor, prompts, KINDS[kind]), strict=True):
        found = torch.tensor(unpack_vector(data))
        torch.testing.assert_close(found, reference(model, prompt, KINDS[kind]), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_batch_or_cuts(pair: Any, kind: str) -> None:
    executor, _ = pair
    prompts = [prompt_of(length, length) for length in (1, 33, 70, 129)]
    alone = [pooled(executor, [prompt], KINDS[kind])[0] for prompt in prompts]
    assert pooled(executor, prompts, KINDS[kind]) == alone
    assert pooled(executor, prompts, KINDS[kind], chunk=7, beside=3) == alone
    assert pooled(executor, prompts[::-1], KINDS[kind], chunk=16, beside=1) == alone[::-1]


def test_generation_beside_is_not_changed(pair: Any) -> None:
    executor, _ = pair
    alone = Driver(executor)
    first = alone.add(prompt_of(20), 30)
    alone.run()
    alone.remove(first)
    crowd = PoolingDriver(executor, chunk=11)
    again = crowd.add(prompt_of(20), 30)
    requests = [crowd.pool(prompt_of(40 + number, number), KINDS[kind]) for number, kind in enumerate(KINDS)]
    crowd.run()
    assert again.tokens == first.tokens
    assert len(crowd.results) == len(requests)


def test_what_was_preempted_begins_anew(pair: Any) -> None:
    executor, _ = pair
    prompt = prompt_of(90)
    (whole,) = pooled(executor, [prompt], KINDS["mean"])
    driver = PoolingDriver(executor, chunk=40)
    begun = driver.pool(prompt, KINDS["mean"])
    driver.step()
    driver.remove(begun)
    again = driver.pool(prompt, KINDS["mean"])
    assert again.slot == begun.slot
    driver.run()
    assert driver.results[again.slot] == whole


def test_bf16_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    executor = TorchExecutor.from_config(config_for(tmp_path, dtype="bfloat16"), 0, "")
    prompts = [prompt_of(length, length) for length in (1, 33, 129)]
    for pooling in KINDS.values():
        alone = [pooled(executor, [prompt], pooling)[0] for prompt in prompts]
        assert pooled(executor, prompts, pooling, chunk=13, beside=2) == alone
        assert np.isfinite(unpack_vector(alone[1])).all()
    executor.close()


@pytest.mark.parametrize(
    ("variant", "dtype"), [("qwen3", "float32"), ("gemma2", "float32"), ("llama2", "bfloat16")]
)
def test_scores_are_those_of_transformers(variant: str, dtype: str, tmp_path: Path) -> None:
    """Of a head for whole texts: bit for bit the same whatever the batch and the cuts."""
    model = make_classifier(tmp_path, variant, labels=3)
    executor = TorchExecutor.from_config(config_for(tmp_path, dtype=dtype), 0, "")
    try:
        prompts = [prompt_of(length, length) for length in (1, 33, 70, 129)]
        alone = [pooled(executor, [prompt], SCORES)[0] for prompt in prompts]
        assert pooled(executor, prompts[::-1], SCORES, chunk=7, beside=2) == alone[::-1]
        for prompt, data in zip(prompts, alone, strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([prompt])).logits[0]
            loose = {} if dtype == "float32" else {"atol": 0.3, "rtol": 0.1}
            found = torch.tensor(unpack_vector(data))
            torch.testing.assert_close(found, expected, **({"atol": 3e-4, "rtol": 1e-4} | loose))
    finally:
        executor.close()


def test_a_head_that_is_damaged_or_missing_is_named(tmp_path: Path) -> None:
    make_classifier(tmp_path, "qwen3", labels=2)
    tensors = load_file(tmp_path / "model.safetensors")
    for score, says in (
        (torch.full_like(tensors["score.weight"], torch.nan), "score.weight"),
        (None, "score.weight"),
    ):
        del tensors["score.weight"]
        save_file(
            tensors | ({} if score is None else {"score.weight": score}), tmp_path / "model.safetensors"
        )
        with pytest.raises(LoadError, match=says):
            TorchExecutor.from_config(config_for(tmp_path), 0, "")
        tensors["score.weight"] = torch.zeros(2, 2)
