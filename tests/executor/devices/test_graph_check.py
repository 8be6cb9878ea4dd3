"""Ranks try at the start whether collectives may be in graphs: threads of one process, over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.executor.devices import graphs
from baton.executor.devices.graph_check import Trial, why_not_together
from baton.executor.devices.graphs import make_graphs
from baton.executor.devices.recorder import NotRecorded
from baton.executor.streams import queue as queues
from baton.executor.weights.forms import ExecutorError
from baton.model.layers.parallel import TensorParallel
from tests.conftest import GENEROUS_S
from tests.executor.delayed import DelayedQueue

CPU = torch.device("cpu")


class Again:
    """A recorder: what is replayed is the function."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


class Unable(Again):
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        super().record(run)
        raise NotRecorded("out of memory")


class Stale(Again):
    """What is replayed reads numbers that were copied when it was recorded."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        replay, copied = super().record(run), self.trial._numbers.clone()

        def stale() -> None:
            self.trial._numbers.copy_(copied)
            replay()

        return stale


def all_ranks(size: int, tmp_path: Path, act: Callable[[TensorParallel], Any], timeout_s: float) -> list[Any]:
    """What `act` gives on each rank, or raises; no group is closed before all are done."""
    found: list[Any] = [None] * size
    together = threading.Barrier(size)

    def rank(index: int) -> None:
        parallel = TensorParallel.connect(index, size, str(tmp_path / "meet"), "cpu", timeout_s)
        try:
            found[index] = act(parallel)
        except Exception as error:
            found[index] = error
        together.wait(GENEROUS_S)
        parallel.close()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GENEROUS_S)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_can_all_record(size: int, dtype: torch.dtype, tmp_path: Path):
    recorders = [Again() for _ in range(size)]

    def act(parallel: TensorParallel) -> str:
        trial = Trial(parallel, 12, 64, dtype, CPU)
        queue = DelayedQueue(0.5)
        return why_not_together(parallel, trial, recorders[parallel.rank], queue, CPU, "", GENEROUS_S)

    assert all_ranks(size, tmp_path, act, GENEROUS_S) == [""] * size
    assert [(one.recorded, one.replayed) for one in recorders] == [(1, 2)] * size


@pytest.mark.parametrize(
    ("kind", "reason", "recorded", "replayed"),
    [
        ("reason", "PyTorch computes attention", 0, 0),
        ("unable", "out of memory", 1, 0),
        ("stale", "collectives in a CUDA graph give other numbers than eager ones", 1, 2),
    ],
)
@pytest.mark.parametrize("wrong", [0, 1])
def test_one_rank_that_cannot_keeps_all_eager(
    kind: str, reason: str, recorded: int, replayed: int, wrong: int, tmp_path: Path
):
    """Nobody replays before all have recorded."""
    recorders: dict[int, Again] = {}

    def act(parallel: TensorParallel) -> str:
        trial = Trial(parallel, 12, 64, torch.float32, CPU)
        kinds = {"unable": Unable, "stale": lambda: Stale(trial)} if parallel.rank == wrong else {}
        recorder = recorders[parallel.rank] = kinds.get(kind, Again)()
        own = reason if kind == "reason" and parallel.rank == wrong else ""
        queue = DelayedQueue(1.0)
        return why_not_together(parallel, trial, recorder, queue, CPU, own, GENEROUS_S)

    found = all_ranks(2, tmp_path, act, GENEROUS_S)
    assert found[wrong] == reason
    # (What one rank sends that has stale numbers reaches the others.)
    assert found[1 - wrong] == (reason if kind == "stale" else "another rank says why")
    assert [(one.recorded, one.replayed) for one in recorders.values()] == [(recorded, replayed)] * 2


def test_a_rank_that_does_not_come_is_an_error_of_the_start(tmp_path: Path):
    def act(parallel: TensorParallel) -> str:
        if parallel.rank:
            return "stays away"
        trial = Trial(parallel, 2, 64, torch.float32, CPU)
        return why_not_together(parallel, trial, Again(), DelayedQueue(1.0), CPU, "", GENEROUS_S)

    error, _ = all_ranks(2, tmp_path, act, timeout_s=1.0)
    assert isinstance(error, ExecutorError)
    assert str(error).startswith("rank 0 of 2: CUDA graphs of several ranks could not be tried: ")
    assert "--enforce-eager" in str(error)
    assert "\n" not in str(error)


def test_a_device_that_waits_for_another_rank_forever_is_an_error_of_the_start():
    """As NCCL's kernels do: the host is free."""
    queue = DelayedQueue(0.0)
    queue.hangs = True
    alone = TensorParallel()
    trial = Trial(alone, 2, 64, torch.float32, CPU)
    with pytest.raises(ExecutorError, match=r"did not come within 0\.05 s; --enforce-eager"):
        why_not_together(alone, trial, Again(), queue, CPU, "", 0.05)


@pytest.mark.parametrize(
    ("enforce_eager", "reasons", "tried", "made"),
    [
        (False, ["", ""], True, True),
        (False, ["", "PyTorch computes attention"], True, False),
        (True, ["--enforce-eager"] * 2, False, False),
    ],
)
def test_all_ranks_have_graphs_or_none(
    enforce_eager: bool,
    reasons: list[str],
    tried: bool,
    made: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """`make_graphs` itself; the device is a CPU that says it is none."""
    asked = []

    def why(parallel: TensorParallel, trial: Trial, recorder: Any, queue: Any, _: Any, *rest: Any) -> str:
        asked.append(parallel.rank)
        return why_not_together(parallel, trial, recorder, queue, CPU, *rest)

    class Model:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.config = self.placement = self
            self.hidden_size, self.dtype = 64, torch.float32

    class Config:
        max_num_seqs, speculation, step_timeout_s = 4, None, GENEROUS_S

        def __init__(self) -> None:
            self.enforce_eager = enforce_eager

    monkeypatch.setattr(graphs, "CudaRecorder", lambda device: Again())
    monkeypatch.setattr(graphs, "Trial", lambda *given: Trial(*given[:-1], CPU))
    monkeypatch.setattr(graphs, "why_not_together", why)
    monkeypatch.setattr(graphs, "why_not_recorded", lambda model, eager: reasons[model.rank])
    monkeypatch.setattr(graphs, "graphs_of", lambda *given: "graphs")
    monkeypatch.setattr(queues, "device_queue", lambda device: DelayedQueue(1.0))

    def act(parallel: TensorParallel) -> Any:
        given: Any = Config(), Model(parallel.rank), object()
        return make_graphs(*given, parallel, torch.device("cuda", 0))

    assert all_ranks(2, tmp_path, act, GENEROUS_S) == (["graphs"] * 2 if made else [None] * 2)
    assert sorted(asked) == ([0, 1] if tried else [])
