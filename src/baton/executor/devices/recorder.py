"""What makes a graph of a function that launches kernels.

`Recorder` is the seam: on a device a CUDA graph, in tests on a CPU the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class NotRecorded(RuntimeError):
    """The function was run for practice and could not be recorded."""


class Recorder(Protocol):
    """Makes of a function that launches kernels one that does all of it again."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it for practice first.  Raises what that raises, and `NotRecorded` if only the recording
        fails: then the function has met other ranks as often as theirs has."""


class CudaRecorder:
    """CUDA graphs that share their memory, because one runs at a time.

    Other threads, a hand-over's or NCCL's watchdog, may pin memory and ask for events meanwhile: only the
    thread that records must not.  PyTorch takes no graph into the memory of graphs that are all gone
    (`DecodeGraphs.forget`), so the first one is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]
        self._first: torch.cuda.CUDAGraph | None = None

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
            told = " ".join(str(error).split())
            raise NotRecorded(
                f"a CUDA graph could not be recorded: {type(error).__name__}: {told}"
            ) from error
        self._first = self._first or graph
        replay: Callable[[], None] = graph.replay
        return replay
