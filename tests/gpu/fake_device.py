"""A CUDA device that is not there: tensors "on" it have shapes and a place, and no numbers.

Theory.  PyTorch's fake tensors know their device, and refuse operations between two.  So an executor that
believes in such a device is loaded and runs its steps, and whoever forgets to bring something to the device,
or to leave it on the host, is found on a CPU.  Kernels are not started: what each would be given is checked.
Tensors of the host are real where numpy looks into them (pinned memory).

Indexing, copies and assignments ask a device to be there before they come to fake tensors, so they are done
here (`_Places`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from baton.executor import torch_executor
from baton.executor.devices import graphs
from baton.executor.streams import queue as queues
from baton.executor.torch_late import LateTorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.cuda.launch import Launch
from baton.model.layers import placement
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.rounding import Grouping, in_groups
from baton.model.ops import triton
from baton.model.reading.safetensors import SafetensorsSource
from baton.model.weights.grouped import Grouped
from tests.executor.delayed import DelayedQueue, Recorded

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten


class _Queue(DelayedQueue):
    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        with unset_fake_temporarily():
            return torch.zeros(count, dtype=dtype)


class _Places(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if (
            tensors
            and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
            and not _moves(args, kwargs)
        ):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is Tensor.to and tensors and not isinstance(args[0], FakeTensor):
            dtypes = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.dtype)]
            return torch.empty(args[0].shape, dtype=(dtypes or [args[0].dtype])[0], device=DEVICE)
        if func is Tensor.__getitem__:
            return _part(*args)
        if func is Tensor.__setitem__:
            _part(args[0], args[1])
            return None
        if func is Tensor.copy_:
            assert torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape
            return args[0]
        return func(*args, **kwargs)


def _moves(args: Any, kwargs: Any) -> bool:
    """Whether a call names the device."""
    return any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in tree_leaves((args, kwargs)))


def _part(x: Tensor, index: Any) -> Tensor:
    """x[index]"""
    dim, parts = 0, index if isinstance(index, tuple) else (index,)
    for number, one in enumerate(parts):
        if one is Ellipsis:
            dim = x.dim() - sum(other is not None for other in parts[number + 1 :])
        elif one is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(one, slice):
            start, stop, step = one.indices(x.shape[dim])
            x, dim = aten.slice.Tensor(x, dim, start, max(start, stop), step), dim + 1
        elif isinstance(one, Tensor):
            assert one.device == x.device, f"an index on {one.device} of a tensor on {x.device}"
            x, dim = aten.index.Tensor(x, [None] * dim + [one]), dim + one.dim()
        else:
            x = aten.select.int(x, dim, int(one))
    return x


_read = SafetensorsSource.read


def _read_for_real(source: SafetensorsSource, *asked: Any) -> Any:
    with unset_fake_temporarily():
        return _read(source, *asked)


def _zeros_in_groups(weight: Tensor, grouping: Grouping) -> tuple[Grouped, float]:
    """In the place of a weight without numbers."""
    with unset_fake_temporarily():
        return in_groups(torch.zeros(weight.shape, dtype=weight.dtype), grouping)


@contextmanager
def fake_device(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Gives the names of the kernels that were launched."""
    launched: list[str] = []

    def run(launch: Launch) -> None:
        for name, value in launch.arguments.items():
            if isinstance(value, Tensor):
                assert value.device == DEVICE, f"{launch.kernel.__name__}: {name} is on {value.device}"
        launched.append(launch.kernel.__name__)

    patch.setattr(triton, "serve", lambda device: device.type == "cuda")
    patch.setattr(queues, "device_queue", lambda device: _Queue(1.0))
    patch.setattr(Launch, "run", run)
    patch.setattr(torch_executor, "device_of", lambda config, rank: DEVICE)
    patch.setattr(torch_executor, "taken_at_start", lambda config, device: 0)
    patch.setattr(graphs, "CudaRecorder", lambda device: Recorded())
    patch.setattr(SafetensorsSource, "read", _read_for_real)
    patch.setattr(placement, "in_groups", _zeros_in_groups)
    # (It looks at numbers.)
    patch.setattr(torch_executor.TorchExecutor, "_warm_up", lambda executor, config: None)
    with FakeTensorMode(allow_non_fake_inputs=True), _Places():
        yield launched


class FakeGroup:
    """A process group of a rank whose others are not there: notes what it is to send, and in which order."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, tuple[int, ...], str]] = []

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> FakeGroup:
        return self._note("all-reduce", tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> FakeGroup:
        return self._note("broadcast", tensors)

    def gather(self, parts: list[list[Tensor]], tensors: list[Tensor], options: Any) -> FakeGroup:
        for part in parts[0] if parts else []:
            assert (part.shape, part.dtype, part.device) == (tensors[0].shape, tensors[0].dtype, DEVICE)
        return self._note("gather", tensors)

    def wait(self) -> None:
        pass

    def _note(self, what: str, tensors: list[Tensor]) -> FakeGroup:
        (tensor,) = tensors
        assert tensor.device == DEVICE, f"{what}: a tensor on {tensor.device}"
        assert tensor.is_contiguous()
        self.sent.append((what, tuple(tensor.shape), str(tensor.dtype)))
        return self


def executor_of_two(
    patch: pytest.MonkeyPatch, directory: Path, rank: int, **changes: Any
) -> tuple[LateTorchExecutor, FakeGroup]:
    """Rank `rank` of two, on such a device."""
    group = FakeGroup()
    parallel = TensorParallel(rank, 2, group)
    patch.setattr(TensorParallel, "connect", lambda *given: parallel)
    # (They look at numbers.)
    patch.setattr(TensorParallel, "minimum", lambda parallel, value, device: value)
    patch.setattr(graphs, "why_not_together", lambda *given: "")
    executor = executor_there(directory, rank, tensor_parallel_size=2, **changes)
    group.sent.clear()
    return executor, group


def executor_there(directory: Path, rank: int = 0, **changes: Any) -> LateTorchExecutor:
    sizes = dict(max_model_len=96, block_size=16, num_blocks=40, max_num_seqs=4, num_threads=1)
    settings = {**sizes, "dtype": "bfloat16", "device": "cuda", **changes}
    return LateTorchExecutor.from_config(instance_config(model=str(directory), **settings), rank, "")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)
