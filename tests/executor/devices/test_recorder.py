"""What is left when a step has been recorded, and when it could not be; `torch.cuda` is a double."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.executor.devices.recorder import CudaRecorder, NotRecorded, without_owning
from baton.executor.torch_late import LateTorchExecutor
from baton.protocol.params.sampling import Sampling
from tests.executor.delayed import DelayedQueue, Recorded, on_a_delayed_device
from tests.executor.driver import Driver
from tests.model.checkpoints import VOCAB, make_checkpoint

CPU = torch.device("cpu")


def executor_of(patch: pytest.MonkeyPatch, directory: Path) -> LateTorchExecutor:
    sizes = dict(max_model_len=64, block_size=8, num_blocks=30, max_num_seqs=4)
    return on_a_delayed_device(patch, directory, DelayedQueue(1.0), graphs=True, mirrored=False, **sizes)


def answers(executor: LateTorchExecutor) -> list[list[int]]:
    """Of a batch that shrinks: several sizes of graphs."""
    driver = Driver(executor)
    made = [
        driver.add(np.random.default_rng(n).integers(3, VOCAB, 6).tolist(), 2 + n, Sampling(n, 0.8 * (n % 2)))
        for n in range(3)
    ]
    driver.run()
    for request in made:
        driver.remove(request)
    return [request.tokens for request in made]


class Unable(Recorded):
    def __init__(self) -> None:
        self.tried = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        super().record(run)
        self.tried += 1
        raise NotRecorded("a CUDA graph could not be recorded: no memory is left")


def test_what_cannot_be_recorded_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """And not tried again, until there are other weights."""
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=2)
    executor = executor_of(monkeypatch, tmp_path)
    graphs, unable = executor._graphs, Unable()
    assert graphs is not None
    graphs.forget(executor._model)
    expected = answers(executor)
    assert graphs.why_no_more == ""
    graphs.forget(executor._model)
    monkeypatch.setattr(graphs, "_recorder", unable)
    assert answers(executor) == expected
    assert len(graphs._graphs) > 1
    assert unable.tried == 1
    assert caplog.text.count("no memory is left") == 1
    monkeypatch.setattr(graphs, "_recorder", Recorded())
    graphs.forget(executor._model)
    assert answers(executor) == expected
    assert graphs.why_no_more == ""
    executor.close()


def test_graphs_do_not_keep_the_memory_of_their_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else there were some for each size."""
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    executor = executor_of(monkeypatch, tmp_path)
    graphs, left = executor._graphs, []
    assert graphs is not None

    class Lends(Recorded):
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            run()
            return lambda: None  # (of the step that was run for practice)

        def lent(self, logits: Tensor) -> Tensor:
            left.append(weakref.ref(logits))
            return logits.clone()

    driver = Driver(executor)
    request = driver.add([5, 6, 7], 2)
    driver.run()
    driver.remove(request)
    graphs.forget(executor._model)
    monkeypatch.setattr(graphs, "_recorder", Lends())
    again = driver.add([5, 6, 7], 2)
    driver.run()
    assert again.tokens == request.tokens
    assert [logits() for logits in left] == [None]
    executor.close()


def test_memory_that_is_lent_is_the_same_and_goes_with_its_owner():
    array = np.arange(24, dtype=np.float32)
    owner = torch.from_numpy(array).view(4, 6)[:, 1:5].view(torch.bfloat16)
    seen = without_owning(owner)
    assert (seen.shape, seen.stride(), seen.dtype) == (owner.shape, owner.stride(), owner.dtype)
    assert torch.equal(seen, owner)
    owner[2, 3] = 77
    assert seen[2, 3] == 77
    alive = weakref.ref(array)
    del array, owner
    assert alive() is None


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "not even ended"])
def test_a_failure_says_what_failed_first_and_leaves_the_stream(ends: bool, monkeypatch: pytest.MonkeyPatch):
    """`torch.cuda.graph` ends a recording first, and gives the stream back then: if it does not raise."""
    streams = ["of steps"]

    class Stream:
        def __init__(self, *given: object) -> None: ...

        def wait_stream(self, stream: object) -> None: ...

    class Within:
        """`torch.cuda.stream(…)`, and of a graph"""

        def __init__(self, *given: object, stream: object = "", **_: object) -> None:
            self.before = streams[0]

        def __enter__(self) -> None:
            streams[0] = "of the recording"

        def __exit__(self, *_: object) -> None:
            streams[0] = self.before

    class Graph(Within):
        def __exit__(self, *_: object) -> None:
            if not ends:
                raise RuntimeError("the recording was invalidated")
            super().__exit__()

    class Current(Stream):
        pass

    current = Current()
    given: dict[str, Any] = dict(
        Stream=Stream,
        current_stream=lambda device: current,
        stream=Within,
        graph=Graph,
        CUDAGraph=object,
        synchronize=lambda device: None,
        set_stream=lambda stream: streams.__setitem__(0, "of steps" if stream is current else "wrong"),
    )
    for name, double in given.items():
        monkeypatch.setattr(torch.cuda, name, double)
    ran = []

    def run() -> None:
        ran.append(streams[0])
        if len(ran) == 2:
            raise ValueError("an operation\nthat waits for the device")

    with pytest.raises(
        NotRecorded, match="could not be recorded: ValueError: an operation that waits"
    ) as told:
        CudaRecorder(CPU).record(run)
    assert ("invalidated" in str(told.value)) == (not ends)
    assert ran == ["of the recording"] * 2
    assert streams == ["of steps"]
