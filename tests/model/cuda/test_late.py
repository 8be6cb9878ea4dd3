"""Steps that overlap with Triton's kernels, interpreted, on a device that delays: the CPU's tokens, and
nothing in a launch asks the device for a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.executor import torch_executor
from baton.executor.base import StepResult
from baton.executor.devices.graphs import graphs_of
from baton.executor.results import expert_load
from baton.executor.streams import queue as queues
from baton.executor.torch_executor import TorchExecutor
from baton.executor.torch_late import LateTorchExecutor
from baton.launch.planning.instance_config import instance_config
from tests.executor.delayed import DelayedQueue, Recorded
from tests.executor.driver import Driver
from tests.model.checkpoints import make_checkpoint
from tests.model.cuda.where import ON_CPU, serve
from tests.worker.late_torch import DRAWN, PLAIN, PROMPTS, SIZES
from tests.worker.lateness import Engine

CHOSEN = 3 * 4
"""Experts of a token of the mixture, in all layers."""
WISHES = [(1, DRAWN, 3), (0, PLAIN, 2)]
"""Few: a step takes the interpreter seconds."""


def told_of(told: list[list[int]], result: StepResult) -> StepResult:
    if result.expert_tokens:
        told.append(result.expert_tokens)
    return result


class ItWaits(TorchDispatchMode):
    """Notes operations that would wait for a device: they give the host a number, or need one from it."""

    _aten = torch.ops.aten
    waiting = (
        _aten._local_scalar_dense,
        _aten.item,
        _aten.nonzero,
        _aten.argwhere,
        _aten.masked_select,
        _aten.equal,
        _aten.is_nonzero,
        _aten.unique_consecutive,
        _aten._unique2,
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        booleans = packet in (self._aten.index, self._aten.index_put_) and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        # (`where` brings a number to the device as a tensor of its own.)
        numbers = packet is self._aten.where and any(
            not isinstance(one, torch.Tensor) or one.dim() == 0 for one in args
        )
        if packet in self.waiting or booleans or numbers:
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


class Scripted(Engine):
    def oracle(self, prompt: Any, sampling: Any, options: Any, count: int) -> list[int]:
        return []

    def check_pages(self, slot: int, epoch: int, computed: int) -> None:
        pass

    def scribble(self, blocks: Any) -> None:
        self.executor._pool.tensor[blocks] = float("nan")


def played(executor: LateTorchExecutor) -> list[list[int]]:
    engine = Scripted(executor, budget=5)
    for slot, (number, sampling, count) in enumerate(WISHES):
        engine.admit(slot, PROMPTS[number], sampling=sampling, more=1, max_tokens=count)
    engine.settle()
    return [engine.tokens[slot, 1] for slot in range(len(WISHES))]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ItWaits]:
    mode = ItWaits()

    depth = []

    def watched(true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            depth.append(true)
            try:
                with mode:
                    return true(*arguments)
            finally:
                depth.pop()

        return call

    def from_numpy(array: np.ndarray) -> torch.Tensor:
        """What is copied to a device from there waits for it: only `Staging` brings arrays."""
        if depth and array.nbytes:
            mode.found.add("from_numpy")
        return numpys(array)

    numpys = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", from_numpy)

    monkeypatch.setattr(LateTorchExecutor, "_ahead", watched(LateTorchExecutor._ahead))
    monkeypatch.setattr(DelayedQueue, "step", watched(DelayedQueue.step))
    return mode


@pytest.mark.skipif(not ON_CPU, reason="tests/gpu does it with real graphs and a real queue")
@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_tokens_are_the_cpus_and_nothing_waits(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: ItWaits
):
    monkeypatch.setattr(expert_load, "ENOUGH", 1)
    make_checkpoint(tmp_path, variant)
    config = instance_config(model=str(tmp_path), dtype="float32", num_threads=1, speculation=None, **SIZES)
    plain = TorchExecutor.from_config(config, 0, "")
    driver = Driver(plain)
    expected = []
    for number, sampling, count in WISHES:
        request = driver.add(PROMPTS[number], count, sampling)
        driver.run()
        expected.append(request.tokens)
    plain.close()
    device = DelayedQueue(eager=1.0)
    serve(monkeypatch)
    monkeypatch.setattr(queues, "device_queue", lambda _: device)

    def make_graphs(config: Any, model: Any, sampling: Any, parallel: Any, _: Any) -> Any:
        return graphs_of(config, model, sampling, Recorded(), device)

    monkeypatch.setattr(torch_executor, "make_graphs", make_graphs)
    monkeypatch.setattr(LateTorchExecutor, "_warm_up", lambda *_: None)
    executor = LateTorchExecutor.from_config(config, 0, "")
    assert executor.one_step_late
    device.eager = 0.0
    noted.found.clear()
    told: list[list[int]] = []
    monkeypatch.setattr(executor, "collect", lambda: told_of(told, LateTorchExecutor.collect(executor)))
    assert played(executor) == expected
    assert noted.found == set()
    # (Every so many tokens all since are told.)
    assert bool(told) == (variant == "qwen3-moe")
    if told:
        pairs = sum(map(sum, told))
        total = sum(len(PROMPTS[number]) + count - 1 for number, _, count in WISHES)
        assert 0 < pairs <= total * CHOSEN
        assert pairs % CHOSEN == 0
    executor.close()
