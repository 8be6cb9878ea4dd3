"""The torch executor against transformers: every architecture, however a request is batched and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.protocol.config import InstanceConfig
from baton.protocol.params.sampling import Sampling, TokenLogprobs
from tests.executor.driver import Driver, Request
from tests.executor.handing import handed_over
from tests.model.checkpoints import (
    MAX_POSITIONS,
    MIXTURES,
    VARIANTS,
    VOCAB,
    make_checkpoint,
    reference_logprobs,
    reference_routes,
)

BLOCK = 16
ONE_OF_EACH = list({family: name for name, (family, _) in VARIANTS.items()}.values())
"""Of the variants of each family, the last."""
ALL = Sampling(seed=0, temperature=0.0, logprobs=VOCAB, prompt_logprobs=VOCAB)


def config_for(directory: Path, **changes: Any) -> InstanceConfig:
    settings: dict[str, Any] = {
        "model": str(directory),
        "max_model_len": MAX_POSITIONS,
        "dtype": "float32",
        "block_size": BLOCK,
        "num_blocks": 200,
        "max_num_seqs": 16,
        "num_threads": 1,
    }
    return instance_config(**{**settings, **changes})


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(executor, reference) of one architecture; every other checkpoint is sharded."""
    directory = tmp_path_factory.mktemp(request.param)
    sharded = list(VARIANTS).index(request.param) % 2 == 1
    model = make_checkpoint(directory, request.param, "100KB" if sharded else "1GB")
    assert (directory / "model.safetensors.index.json").exists() == sharded
    executor = TorchExecutor.from_config(config_for(directory), 0, "")
    yield executor, model
    executor.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, length)]


def same_in_a_crowd(executor: TorchExecutor) -> None:
    """A request gets the same tokens alone and among five others."""
    alone = Driver(executor)
    first = alone.add(prompt_of(20), 30)
    alone.run()
    alone.remove(first)
    crowd = Driver(executor, seed=1)
    again = crowd.add(prompt_of(20), 30)
    for index in range(5):
        crowd.add(prompt_of(10 + index, index), 30)
    crowd.run()
    assert again.tokens == first.tokens


def vector(report: TokenLogprobs) -> torch.Tensor:
    """The whole distribution of a report that was asked for with logprobs = VOCAB."""
    found = torch.full((VOCAB,), float("nan"))
    for token, logprob in report.best():
        found[token] = logprob
    return found


CLOSE = {"atol": 1e-4, "rtol": 1e-5}
"""Of float32 whose sums have another order on each kind of CPU."""


def check(request: Request, model: Any) -> None:
    """Greedy tokens and every distribution of the request are the reference's."""
    expected = reference_logprobs(model, request.all_tokens)
    first = len(request.prompt) - 1
    assert request.tokens == expected[first:-1].argmax(dim=-1).tolist()
    if request.logprobs:
        found = torch.stack([vector(report) for report in request.logprobs])
        torch.testing.assert_close(found, expected[first:-1], **CLOSE)
    if request.prompt_logprobs:
        found = torch.stack([vector(report) for report in request.prompt_logprobs])
        assert [report.token for report in request.prompt_logprobs] == request.prompt[1:]
        torch.testing.assert_close(found, expected[:first], **CLOSE)


@pytest.mark.parametrize("length", [5, 3 * BLOCK + 1])
def test_one_request(pair: Any, length: int) -> None:
    executor, model = pair
    driver = Driver(executor)
    request = driver.add(prompt_of(length), 64, ALL)
    driver.run()
    assert len(request.tokens) == 64
    assert len(request.logprobs) == 64
    assert len(request.prompt_logprobs) == length - 1
    check(request, model)


def test_three_hundred_tokens(pair: Any) -> None:
    """Beyond windows, and of a context of several pieces; in one step, and after it token by token."""
    executor, model = pair
    driver = Driver(executor)
    request = driver.add(prompt_of(300), 48, ALL)
    driver.run()
    assert len(request.prompt_logprobs) == 299
    assert len(request.logprobs) == 48
    check(request, model)


def test_seven_requests_in_chunks_at_different_times(pair: Any) -> None:
    executor, model = pair
    driver = Driver(executor, chunk=11)
    requests = []
    for index, length in enumerate((1, 3, BLOCK, BLOCK + 1, 40, 77, 130)):
        requests.append(driver.add(prompt_of(length, seed=index), 20, ALL if index % 2 else Sampling(0, 0.0)))
        driver.step()
    driver.run()
    for request in requests:
        check(request, model)


def routes_of(request: Request, start: int = 0) -> np.ndarray[Any, Any]:
    """[tokens from `start` on but the last one, mixtures, chosen], of rows that follow each other."""
    position = start
    for run in request.routes:
        assert run.first == position
        position = run.stop
    ids = b"".join(run.ids for run in request.routes)
    return np.frombuffer(ids, np.uint8).reshape(-1, request.routes[0].mixtures, request.routes[0].chosen)


@pytest.mark.parametrize("pair", MIXTURES, indirect=True)
@pytest.mark.parametrize("native", [True, False])
def test_experts_are_those_of_the_reference(pair: Any, native: bool) -> None:
    """In pieces, beside requests that do not ask, after a prefix hit; as one native call and as modules."""
    executor, model = pair
    executor._model._program = None if native else False
    driver = Driver(executor, chunk=11)
    driver.add(prompt_of(30, 1), 12)
    asks = Sampling(0, 0.0, routes_from=0)
    first = driver.add(prompt_of(40), 8, asks)
    driver.run()
    start = 2 * BLOCK + 3
    again = driver.add(prompt_of(40), 8, Sampling(0, 0.0, routes_from=start), prefix_of=first)
    assert again.computed == 2 * BLOCK
    driver.run()
    executor._model._program = None
    expected = reference_routes(model, first.all_tokens[:-1])
    assert routes_of(first).tolist() == expected.tolist()
    assert again.tokens == first.tokens
    assert routes_of(again, start).tolist() == expected[start:].tolist()
    assert not next(iter(driver.requests.values())).routes


@pytest.mark.parametrize("pair", ONE_OF_EACH, indirect=True)
def test_handed_over(pair: Any) -> None:
    """To another executor, through the transport of shared memory."""
    executor, model = pair
    config = config_for(Path(executor._config.model), peer_endpoint="ipc://unused", transfer="shared_memory")
    asks = msgspec.structs.replace(ALL, routes_from=0) if executor._model.mixtures else ALL
    request = handed_over(executor, config, prompt_of(3 * BLOCK + 5), 12, asks)
    check(request, model)
    if executor._model.mixtures:
        assert routes_of(request).tolist() == reference_routes(model, request.all_tokens[:-1]).tolist()


def test_prefix_hit_reads_the_other_requests_blocks(pair: Any) -> None:
    executor, model = pair
    driver = Driver(executor)
    prompt = prompt_of(4 * BLOCK + 5)
    first = driver.add(prompt, 10)
    driver.run()
    second = driver.add([*prompt[: 3 * BLOCK + 2], 9, 8, 7], 10, ALL, prefix_of=first)
    third = driver.add([*prompt, *first.tokens], 10, prefix_of=first)
    assert (second.computed, third.computed) == (3 * BLOCK, 4 * BLOCK)
    second_start = second.computed
    driver.run()
    check(first, model)
    check(third, model)
    # Of a cached prefix no log-probabilities are computed; the worker starts reporting after it.
    assert [report.token for report in second.prompt_logprobs] == second.prompt[second_start + 1 :]
    second.prompt_logprobs.clear()
    check(second, model)


def test_resume_after_a_preemption(pair: Any) -> None:
    executor, model = pair
    driver = Driver(executor)
    prompt = prompt_of(2 * BLOCK + 3)
    whole = driver.add(prompt, 24)
    driver.run()
    part = driver.add(prompt, 9)
    driver.run()
    driver.remove(part)
    resumed = driver.add(prompt, 24, generated=part.tokens)
    driver.run()
    assert resumed.tokens == whole.tokens
    check(resumed, model)
