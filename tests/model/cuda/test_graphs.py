"""Decode steps over fixed buffers, as a graph would replay them: a function takes the graph's place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.executor.base import StepBatch
from baton.executor.devices.graphs import (
    StepBuffers,
    graphs_of,
    sizes_of_rows,
    table_widths,
    why_not_recorded,
)
from baton.executor.streams.staging import Staging
from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.cuda.slot_sampling import TritonSampling
from baton.model.layers.parallel import TensorParallel
from baton.model.ops import triton
from baton.protocol.config import Speculation
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.delayed import DelayedQueue
from tests.executor.driver import Driver
from tests.executor.serving import Request as Asked
from tests.executor.serving import Serving, plant
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.where import ON_CPU

CPU = torch.device("cpu")


ATTENTION = "PyTorch computes attention"


class Again:
    """A recorder: what is replayed is the function, whose buffers are filled anew."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay

    def lent(self, left: torch.Tensor) -> torch.Tensor:
        return left


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_rows_that_a_batch_has_not_are_stored_nowhere():
    buffers = StepBuffers(4, 3, block_size=8, device=CPU)
    queue = DelayedQueue(eager=1.0)
    staging = Staging(queue, CPU)

    def fill(batch: StepBatch, opened: list[int]) -> None:
        staging.begin()
        buffers.fill(batch, staging, np.array(opened, np.int64))
        staging.send()
        queue.drain()

    tables = np.array([[5, 6, 99, 99], [7, 1 << 30, 1 << 30, 1 << 30]], np.int32)
    batch = StepBatch(
        1, ints(3, 1), ints(9, 0), ints(1, 1), ints(20, 21), np.ones(2, np.bool_), tables, num_decodes=2
    )
    fill(batch, [7])
    found = buffers.on_device
    assert found.opened[:1].tolist() == [7]
    assert found.places.tolist() == [6 * 8 + 1, 7 * 8, -1, -1]
    assert found.tokens.tolist() == [20, 21, 0, 0]
    assert found.positions.tolist() == [9, 0, 0, 0]
    assert found.slots.tolist() == [3, 1, 0, 0]
    assert found.sampled.tolist() == [10, 1, 0, 0]
    assert found.items.tolist() == [[0, 1, 9, 0], [1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert found.tables[0, :2].tolist() == [5, 6]
    # (A smaller batch after a larger one leaves nothing of it.)
    fill(StepBatch(2, ints(2), ints(4), ints(1), ints(9), np.ones(1, np.bool_), tables[:1], 1), [])
    assert found.places.tolist() == [5 * 8 + 4, -1, -1, -1]
    assert found.items[1:].count_nonzero() == 0


def test_sizes_end_with_what_there_can_be():
    assert sizes_of_rows(1) == [1]
    assert sizes_of_rows(6) == [1, 2, 4, 6]
    assert sizes_of_rows(20) == [1, 2, 4, 8, 16, 20]
    assert sizes_of_rows(300)[-3:] == [256, 288, 300]
    assert table_widths(96, 8) == [12]
    assert table_widths(5000, 32) == [32, 128, 157]


@pytest.mark.skipif(not ON_CPU, reason="tests/gpu/test_steps.py does it with real graphs")
@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_tokens_are_those_of_eager_steps(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Greedy, sampled, penalized; the batch shrinks, so that graphs of two sizes and padding take part.
    Padding has no experts."""
    make_checkpoint(tmp_path, variant, num_hidden_layers=2)
    sizes = dict(
        max_model_len=64, dtype="float32", block_size=8, num_blocks=30, max_num_seqs=4, num_threads=1
    )
    config = instance_config(model=str(tmp_path), **sizes)
    wishes = [
        Sampling(seed=1, temperature=0.0),
        Sampling(seed=2, temperature=0.9, top_k=30, top_p=0.9),
        Sampling(seed=3, temperature=1.1, repetition_penalty=1.4),
    ]

    def answers(executor: TorchExecutor) -> list[list[int]]:
        driver = Driver(executor)
        made = [
            driver.add(np.random.default_rng(n).integers(3, VOCAB, 6).tolist(), 2 + n, wish)
            for n, wish in enumerate(wishes)
        ]
        driver.run()
        return [request.tokens for request in made]

    plain = TorchExecutor.from_config(config, 0, "")
    expected = answers(plain)
    assert plain._graphs is None
    told = why_not_recorded(plain._model, False)
    assert told == ("a mixture's experts are computed one after the other" if "moe" in variant else ATTENTION)
    plain.close()
    monkeypatch.setattr(triton, "serve", lambda device: True)
    executor = TorchExecutor.from_config(config, 0, "")
    assert executor._graphs is None  # (of a CPU)
    assert why_not_recorded(executor._model, True) == "--enforce-eager"
    assert why_not_recorded(executor._model, False) == ""
    again, sampling = Again(), executor._sampler.on_device
    assert sampling is not None
    executor._graphs = graphs_of(config, executor._model, sampling, again, DelayedQueue(eager=1.0))
    mixtures = executor._model.mixtures
    before = [mixture.tokens.clone() for mixture in mixtures]
    assert answers(executor) == expected
    assert (again.recorded, again.replayed) == (3, 3)
    for mixture, first in zip(mixtures, before, strict=True):
        assert int((mixture.tokens - first).sum()) == (3 * 6 + 1 + 2 + 3) * mixture.config.chosen
    decode = StepBatch(
        9, ints(0), ints(6), ints(1), ints(5), np.ones(1, np.bool_), np.zeros((1, 1), np.int32), 1
    )
    assert executor._graphs.key_of(decode) == (1, 8)
    if mixtures:
        ask_for_experts(executor, decode, again)
    ends_before_the_group(executor, monkeypatch)


def ask_for_experts(executor: TorchExecutor, decode: StepBatch, again: Again) -> None:
    """Such a step is eager on all ranks, also on those that do not report: a graph sends what eager steps of
    other ranks cannot meet."""
    asking = Sampling(seed=1, temperature=0.0, routes_from=0)
    for reports in (True, False):
        for wish, eager in ((asking, True), (Sampling(seed=1, temperature=0.0), False)):
            executor._experts._reports = reports
            executor.admit(0, np.full(6, 5, np.int32), 6, wish, Stopping(9))
            before = again.replayed
            executor.execute(decode)
            assert (again.replayed == before) == eager
            executor.release(0)


def ends_before_the_group(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL waits for graphs that hold its kernels."""
    graphs = executor._graphs
    assert graphs is not None
    alive = [weakref.ref(graph.replay) for graph in graphs._graphs.values() if graph.replay is not None]
    assert len(alive) > 1
    left = []

    def end(parallel: TensorParallel) -> None:
        left.append(sum(replay() is not None for replay in alive))

    monkeypatch.setattr(TensorParallel, "close", end)
    executor.close()
    assert left == [0]


@pytest.mark.skipif(not ON_CPU, reason="tests/gpu/test_steps.py does it with real graphs")
def test_steps_with_drafts_give_the_tokens_of_eager_steps_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each token of such a step is a row of the graph, and what the graph chose is what counts."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    config = instance_config(
        model=str(tmp_path), max_model_len=64, dtype="float32", block_size=8, num_blocks=30, max_num_seqs=2,
        num_threads=1, speculation=Speculation(method="planted", num_speculative_tokens=3),
    )  # fmt: skip
    monkeypatch.setattr(triton, "serve", lambda device: True)
    executor = TorchExecutor.from_config(config, 0, "")
    again, sampling = Again(), executor._sampler.on_device
    assert isinstance(sampling, TritonSampling)
    graphs = graphs_of(config, executor._model, sampling, again, DelayedQueue(eager=1.0))
    chosen = []

    def sample(given: TritonSampling, logits: torch.Tensor, *others: np.ndarray) -> np.ndarray:
        chosen.append(given._chosen is not None and logits is given._chosen[0])
        return TritonSampling_sample(given, logits, *others)

    TritonSampling_sample = TritonSampling.sample
    monkeypatch.setattr(TritonSampling, "sample", sample)
    answers: list[tuple] = []
    for drafting in (False, True):
        requests = [
            Asked([5, 6, 7], Sampling(seed=1, temperature=0.0), Stopping(7)),
            Asked([9, 8], Sampling(seed=2, temperature=0.9), Stopping(6)),
        ]
        serving = Serving(executor, slots=2, budget=16, longest=64, seed=1, preempts=0.0)
        executor._graphs = graphs if drafting else None
        executor.speculator.drafter = None
        if drafting:
            executor.speculator.drafter = plant(serving, requests, answers, 3, VOCAB, 0.7)
            chosen.clear()
        found = serving.run(requests)
        assert not answers or found == answers
        answers = found
    assert 0 < serving.right < serving.drafts
    assert again.replayed >= 2
    assert sum(chosen) == again.replayed, "what the graph chose is taken"
    executor.close()
