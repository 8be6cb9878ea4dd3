"""What the queue of a CUDA device asks of PyTorch; the device is a CPU, and `torch.cuda` a double that keeps
the last error and the device of each thread as CUDA does."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.executor.streams.queue import CudaQueue
from tests.conftest import GENEROUS_S

CPU = torch.device("cpu")
NOT_PERMITTED = 800


class Runtime:
    """`torch.cuda.cudart()`, where memory cannot be pinned."""

    last = 0
    """The error that nobody has asked for."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.last = NOT_PERMITTED
        return self.last


class Launches(TorchDispatchMode):
    """Behind each kernel PyTorch asks for the last error."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add_.Tensor:  # (an allocation and a memset are no kernels)
            error, self.runtime.last = self.runtime.last, 0
            if error:
                raise RuntimeError(f"CUDA error: {error}")
        return found


def test_memory_that_cannot_be_pinned_fails_nothing_else(monkeypatch: pytest.MonkeyPatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    numbers = torch.ones(3)
    with Launches(runtime):
        told = CudaQueue(CPU).pin(torch.zeros(8, dtype=torch.uint8))
        numbers.add_(1)
    assert told == "cudaHostRegister gives 800"
    assert numbers.tolist() == [2, 2, 2]


def test_a_thread_uses_a_stream_on_its_ranks_device(monkeypatch: pytest.MonkeyPatch):
    """PyTorch gives the device back that the thread had, and CUDA makes a context there."""
    mine = threading.local()
    contexts = set()
    rank = torch.device("cuda", 1)

    def set_device(device: torch.device) -> None:
        mine.device = device
        contexts.add(device)

    class Stream:
        """`torch.cuda.stream(…)`"""

        def __init__(self, of: torch.device) -> None:
            self.of = of

        def __enter__(self) -> None:
            self.before = getattr(mine, "device", torch.device("cuda", 0))
            if self.before != self.of:
                set_device(self.of)

        def __exit__(self, *_: object) -> None:
            if self.before != self.of:
                set_device(self.before)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "stream", Stream)
    stream: Any = rank
    queue, done = CudaQueue(rank, stream), []
    thread = threading.Thread(target=queue.run, args=(lambda: done.append(mine.device),))
    thread.start()
    thread.join(GENEROUS_S)
    assert done == [rank]
    assert contexts == {rank}


def test_nobody_waits_for_an_event_that_was_never_recorded(monkeypatch: pytest.MonkeyPatch):
    """CUDA would let both the host and a stream go on at once."""
    waited: list[Any] = []

    class OfCuda:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            waited.append("the host")

    monkeypatch.setattr(torch.cuda, "Event", OfCuda)
    stream: Any = SimpleNamespace(wait_event=lambda event: waited.append("the stream"))
    queue = CudaQueue(CPU, stream)
    event = queue.event()
    for wait in (event.wait, lambda: queue.behind(event)):
        with pytest.raises(RuntimeError, match="never recorded"):
            wait()
    assert not waited
    event.record()
    event.wait()
    queue.behind(event)
    assert waited == ["the host", "the stream"]
