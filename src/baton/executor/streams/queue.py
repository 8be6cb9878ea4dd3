"""The queue of a device that runs behind the host.

Theory.  A device does what it is given in order, later.  So there are two kinds of code in a step.  *The
host's* reads the batch and writes pinned memory, at once.  *The device's* is handed to `DeviceQueue.run`:
it reads and writes the device's memory, copies between it and pinned memory, and records events; it must
read nothing that the host may change before it has run.  What the host wants back it reads from pinned
memory after the event that was recorded behind the copy, and pinned memory is written again only after the
event behind what read it.

With CUDA `run` calls the work at once, and each operation in it goes into the stream.  A queue that keeps
the work and does it as late as may be shows whoever confuses the two kinds: `tests/executor/delayed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from baton.protocol.config import InstanceConfig

Work = Callable[[], None]
_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for the contexts of all threads."""


class Event(Protocol):
    """A place in a queue."""

    def record(self) -> None:
        """From within work: the place is here."""

    def done(self) -> bool:
        """Whether the device has passed it."""

    def wait(self) -> None:
        """The host waits until the device has passed it.  (If it never does, the engine gives the worker up
        after `--step-timeout`.)"""


class DeviceQueue(Protocol):
    """Work of one device, one after the other."""

    def run(self, work: Work) -> None:
        """The device does it, behind what it was given before."""

    def event(self) -> Event:
        """One that is not recorded yet."""

    def behind(self, event: Event) -> None:
        """From within the work of another queue, which has recorded `event`: what this one is given from now
        on begins when the device has passed it.  Raises if it was not recorded."""

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] in main memory, for copies that nobody waits for."""

    def beside(self) -> DeviceQueue:
        """Another queue of the device, whose work runs beside this one's."""

    def pin(self, memory: Tensor) -> str:
        """Makes main memory (bytes that begin a page) pinned.  Returns why that is impossible, or ""; copies
        are right all the same."""

    def unpin(self, memory: Tensor, stretch: int) -> None:
        """What was pinned by `stretch` bytes at a time no longer is."""


class CudaEvent:
    """An `Event`."""

    def __init__(self) -> None:
        self.of_cuda: Any = torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]
        self._recorded = False

    def record(self) -> None:
        self.of_cuda.record()
        self._recorded = True

    def done(self) -> bool:
        return self._recorded and bool(self.of_cuda.query())

    def wait(self) -> None:
        self.must_be_recorded()
        self.of_cuda.synchronize()

    def must_be_recorded(self) -> None:
        """CUDA does not wait for an event that was never recorded, be it the host or a stream that is to."""
        if not self._recorded:
            raise RuntimeError("an event is waited for that was never recorded")


class CudaQueue:
    """A stream.  `stream` None: the device's current one, of the thread that computes steps.  A thread of its
    own begins with the first device of the process, and PyTorch gives it back after each use of a stream: on
    another rank's device that would make a context, of some 500 MB.  So a thread is told its device."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    def run(self, work: Work) -> None:
        if self._stream is None:
            work()
        else:
            torch.cuda.set_device(self._device)
            within: AbstractContextManager[object] = torch.cuda.stream(self._stream)
            with within:
                work()

    def event(self) -> CudaEvent:
        return CudaEvent()

    def behind(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.must_be_recorded()
        stream = self._stream or torch.cuda.current_stream(self._device)
        stream.wait_event(event.of_cuda)

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=True)

    def pin(self, memory: Tensor) -> str:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call,unused-ignore]
        with torch.cuda.device(self._device):
            status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))
            if status:
                _take_error(self._device)
        return "" if status == 0 else f"cudaHostRegister gives {status}"

    def unpin(self, memory: Tensor, stretch: int) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call,unused-ignore]
        for first in range(0, memory.numel(), stretch):
            runtime.cudaHostUnregister(memory[first:].data_ptr())

    def beside(self) -> CudaQueue:
        return CudaQueue(self._device, torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call,unused-ignore]


def _take_error(device: torch.device) -> None:
    """CUDA keeps a thread's last error until somebody asks for it, and PyTorch asks behind each kernel that
    it starts.  So one is started here: else the next one would fail for what has been dealt with."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def device_queue(device: torch.device) -> DeviceQueue:
    """The queue of a rank's device.  Who chooses one asks this, by the module's name, so that tests can have
    one that delays on a CPU."""
    if device.type != "cuda":
        raise ValueError(f"{device} does not run behind the host")
    return CudaQueue(device)


def synchronize(device: torch.device) -> None:
    """The host waits until the device has done all that its current stream was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def mirror_queue(config: InstanceConfig, device: torch.device) -> DeviceQueue | None:
    """The queue of a device whose pages are mirrored in main memory: they may be handed over, and not by
    what reads a device's memory.  None: there is no mirror."""
    if device.type == "cuda" and config.peer_endpoint and config.transfer != "nixl":
        return device_queue(device)
    return None
