"""What makes a graph of a function that launches kernels.

`Recorder` is the seam: on a device a CUDA graph, in tests on a CPU the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class NotRecorded(RuntimeError):
    """The function was run for practice and could not be recorded."""


class Recorder(Protocol):
    """Makes of a function that launches kernels one that does all of it again."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it for practice first.  Raises what that raises, and `NotRecorded` if only the recording
        fails: then the function has met other ranks as often as theirs has."""

    def lent(self, left: Tensor) -> Tensor:
        """What a recorded function leaves, where it leaves it.  It holds until the next replay: the memory is
        free for what is recorded later."""


class CudaRecorder:
    """CUDA graphs that share their memory, because one runs at a time.

    Other threads, a hand-over's or NCCL's watchdog, may pin memory and ask for events meanwhile: only the
    thread that records must not.  PyTorch takes no graph into the memory of graphs that are all gone
    (`DecodeGraphs.forget`), so the first one is kept.  What fails is kept as well: of a recording that could
    not be ended PyTorch's allocator goes on asking which memory is its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]
        self._first: torch.cuda.CUDAGraph | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # for practice: Triton compiles, cuBLAS makes its workspaces, NCCL connects
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        pool: Any = None if self._first is None else self._first.pool()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except Exception as error:
            torch.cuda.set_stream(current)  # (PyTorch leaves its own where a recording cannot even be ended)
            self._failed.append(graph)
            raise NotRecorded(f"a CUDA graph could not be recorded: {_told(error)}") from error
        self._first = self._first or graph
        replay: Callable[[], None] = graph.replay
        return replay

    def lent(self, left: Tensor) -> Tensor:
        return without_owning(left)


def without_owning(tensor: Tensor) -> Tensor:
    """The same numbers in the same memory, which goes when others let it go."""
    kept = tensor.untyped_storage()
    seen: Any = torch._C._construct_storage_from_data_pointer(kept.data_ptr(), tensor.device, kept.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(seen, tensor.storage_offset(), tensor.size(), tensor.stride())


def _told(error: Exception) -> str:
    """Where the end of a recording fails, the reason is what failed within."""
    found = [error.__context__] if isinstance(error.__context__, Exception) else []
    texts = (f"{type(one).__name__}: {' '.join(str(one).split())}" for one in (*found, error))
    return "; then ".join(texts)
