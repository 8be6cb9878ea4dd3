"""Whether ranks may replay collectives from graphs: tried when they start, and agreed on.

Theory.  As NCCL's manual has it ("Using NCCL with CUDA Graphs"), whether an operation is in a graph is a
property of the whole collective.  So all ranks must record the same step, and all replay it, or none.  Which
step is one follows from the batch and the configuration, which they share (`graphs.py`); whether graphs work
here at all may depend on a rank: its device, its driver, its memory.  So before the first step the ranks

1. agree that none of them has a reason against graphs (an eager minimum, which makes the communicator, too);
2. compute what a step sends, in both sizes that there can be, eagerly: sums, a gathering, a broadcast;
3. record the same, and agree that all have: nobody replays before, and would wait for who cannot;
4. replay it, with other numbers each time, and agree that all have found the numbers of 2.

If not, all compute eagerly.  Numbers are small and whole, so sums are exact in any order.

The host waits for the device by asking for an event, with a deadline: a rank that does not come is an error
of the start.  It names `--enforce-eager`, with which no rank tries.  What could not be recorded may leave a
communicator that NCCL refuses to use; that is the same error, because eager steps need it, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from baton.executor.devices.recorder import NotRecorded, Recorder
from baton.executor.streams.queue import DeviceQueue
from baton.executor.weights.forms import ExecutorError
from baton.model.layers.parallel import TensorParallel

_TURNS = (1, 2)
_LARGEST = 4
"""Numbers are below it: sums of 64 ranks are exact in bfloat16."""
_GATHERED = 8
"""Columns of a rank."""
_EVERY_S = 0.002
_ANOTHER = "another rank says why"


class Trial:
    """What a step of `rows` rows, and one of one row, lets ranks send, over tensors that stay."""

    def __init__(
        self, parallel: TensorParallel, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parallel = parallel
        self._numbers = torch.zeros(rows, max(width, _GATHERED), dtype=dtype, device=device)
        self.found: list[Tensor] = []

    def fill(self, turn: int) -> None:
        """With the rank's numbers of this turn."""
        numbers = self._numbers
        places = torch.arange(numbers.numel(), dtype=torch.int32, device=numbers.device).view(numbers.shape)
        numbers.copy_((places + turn * (self._parallel.rank + 2)).remainder(_LARGEST))

    def run(self) -> None:
        self.found = [part for rows in (1, len(self._numbers)) for part in self._of(self._numbers[:rows])]

    def _of(self, numbers: Tensor) -> list[Tensor]:
        parallel = self._parallel
        first = parallel.all_reduce(numbers.clone())
        second = parallel.all_reduce(first.remainder(_LARGEST))
        whole = parallel.gather_columns(second[:, :_GATHERED] + parallel.rank)
        tokens = torch.zeros(len(numbers), dtype=torch.int32, device=numbers.device)
        if whole is not None:
            tokens.copy_(whole.float().sum(1))
        return [first, second, parallel.broadcast(tokens), *([] if whole is None else [whole])]


class _Meeting:
    """The waits of one rank."""

    def __init__(
        self, parallel: TensorParallel, queue: DeviceQueue, device: torch.device, timeout_s: float
    ) -> None:
        self._parallel, self._queue, self._device = parallel, queue, device
        self._timeout_s = timeout_s
        self._give_up = time.monotonic() + timeout_s

    def run(self, work: Callable[[], None]) -> None:
        """The device does it, in time."""
        over = self._queue.event()
        self._queue.run(work)
        self._queue.run(over.record)
        while not over.done():
            if time.monotonic() > self._give_up:
                raise RuntimeError(f"the other ranks did not come within {self._timeout_s:g} s")
            time.sleep(_EVERY_S)

    def agreed(self, reason: str) -> bool:
        """Whether no rank has a reason against it."""
        shared = torch.tensor([int(not reason)], device=self._device)

        def meet() -> None:
            self._parallel.lowest(shared)

        self.run(meet)
        return bool(shared.item())


def why_not_together(
    parallel: TensorParallel,
    trial: Trial,
    recorder: Recorder,
    queue: DeviceQueue,
    device: torch.device,
    reason: str,
    timeout_s: float,
) -> str:
    """Why no rank records its steps, or "" on all of them.  `reason`: this rank's own, before anything was
    tried.

    Raises `ExecutorError` for ranks that do not come within `timeout_s`, and if a rank cannot even compute
    eagerly."""
    try:
        with torch.inference_mode():
            return _try(_Meeting(parallel, queue, device, timeout_s), trial, recorder, reason)
    except RuntimeError as error:
        told = " ".join(str(error).split())
        raise ExecutorError(
            f"rank {parallel.rank} of {parallel.size}: CUDA graphs of several ranks could not be tried: "
            f"{told}; --enforce-eager starts without graphs and without trying"
        ) from error


def _try(meeting: _Meeting, trial: Trial, recorder: Recorder, reason: str) -> str:
    if not meeting.agreed(reason):
        return reason or _ANOTHER
    expected = _found(meeting, trial, trial.run)
    try:
        replay = recorder.record(trial.run)
    except NotRecorded as error:
        reason = str(error)
    if not meeting.agreed(reason):
        return reason or _ANOTHER
    found = _found(meeting, trial, replay)
    if not all(torch.equal(*pair) for pair in zip(found, expected, strict=True)):
        reason = "collectives in a CUDA graph give other numbers than eager ones"
    return "" if meeting.agreed(reason) else reason or _ANOTHER


def _found(meeting: _Meeting, trial: Trial, run: Callable[[], None]) -> list[Tensor]:
    """What it finds in all turns, one behind the other."""
    kept: list[Tensor] = []

    def work() -> None:
        for turn in _TURNS:
            trial.fill(turn)
            run()
            kept.extend(part.clone() for part in trial.found)

    meeting.run(work)
    return kept
