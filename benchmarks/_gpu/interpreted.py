"""A CPU in the place of a CUDA device, for `--tiny --device cpu`: the same executor with the same kernels.

Kernels are interpreted, the queue of the device does what it is given at once, and what is recorded as a
graph is the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton.executor import torch_executor
from baton.executor.devices.graphs import DecodeGraphs, graphs_of, why_not_recorded
from baton.executor.streams import queue as queues
from baton.model.ops import triton


class AtOnce:
    """A `DeviceQueue`, and the events of it."""

    def run(self, work: queues.Work) -> None:
        work()

    def event(self) -> AtOnce:
        return self

    def behind(self, event: queues.Event) -> None: ...

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def beside(self) -> AtOnce:
        return self

    def record(self) -> None: ...

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


class _Again:
    """A `graphs.Recorder`."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def lent(self, left: Tensor) -> Tensor:
        return left


def _make_graphs(config: Any, model: Any, sampling: Any, parallel: Any, device: Any) -> DecodeGraphs | None:
    if why_not_recorded(model, config.enforce_eager):
        return None
    return graphs_of(config, model, sampling, _Again(), AtOnce())


def interpret() -> None:
    """From now on, in this process.  Triton has been told before it was imported."""
    triton.serve = lambda device: True
    queues.device_queue = lambda device: AtOnce()
    torch_executor.make_graphs = _make_graphs
