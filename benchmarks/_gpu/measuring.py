"""What a device can do at best, bandwidth and peak, measured; and how long a call takes on it.

Theory.  The limit of a step or a kernel is the larger of its bytes over the measured bandwidth and its
operations over the measured peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from _gpu.figures import Figures, read

_REPEATED = 20
"""Launches in one replay of a graph at most, so that launching it is not what is measured."""
_REPLAY_S = 5e-3
"""What a replay takes, about."""


@dataclass(frozen=True)
class Device:
    """Where is measured, and what it reached."""

    device: torch.device
    tiny: bool
    bandwidth: float = 0.0
    """Bytes read and written a second, by a copy"""
    peak: float = 0.0
    """bf16 operations a second, by a product of large matrices"""

    def limit(self, moved: float, operations: float = 0.0) -> float | None:
        """Seconds for so many bytes and operations; None: not measured."""
        if not self.bandwidth or not self.peak:
            return None
        return max(moved / self.bandwidth, operations / self.peak)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], rounds: int = 10) -> float:
        """Of one `run`, the median of some; on a CUDA device without what launching it takes, if it can be
        recorded as a graph."""
        if self.device.type != "cuda":
            return self._by_the_wall(run, 2 if self.tiny else rounds)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # (which makes what `run` reads)
        with torch.cuda.stream(stream):
            run()  # compiles
            self.wait()
            begin = time.perf_counter()
            run()
            self.wait()
        once = time.perf_counter() - begin
        graph, times = torch.cuda.CUDAGraph(), max(1, min(_REPEATED, int(_REPLAY_S / once)))
        replay: Callable[[], object] = graph.replay
        try:
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(times):
                    run()
        except RuntimeError:  # launched one by one: what that takes is in the figure
            replay, times = run, 1
        replay()
        found = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / times)
        return statistics.median(found)

    def _by_the_wall(self, run: Callable[[], object], rounds: int) -> float:
        run()
        found = []
        for _ in range(rounds):
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)


def measure_device(device: Device, figures: Figures) -> None:
    """Bandwidth of a copy, of reading alone, and the peak of a bf16 product."""
    where = device.device
    size = 1 << (22 if device.tiny else 31)
    source = torch.empty(size, dtype=torch.uint8, device=where).fill_(1)
    target = torch.empty_like(source)
    taken = device.seconds(lambda: target.copy_(source), rounds=5)
    figures.add("copy, read and written", seconds=taken, rate=2 * size / taken / 1e9, unit="GB/s")
    numbers = source.view(torch.float32)
    taken = device.seconds(lambda: numbers.sum(), rounds=5)
    figures.add("sum, read alone", seconds=taken, rate=size / taken / 1e9, unit="GB/s")
    side = 128 if device.tiny else 8192
    a, b = (torch.randn(side, side, device=where, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    taken = device.seconds(lambda: torch.mm(a, b, out=out), rounds=5)
    figures.add(f"bf16 product of {side}", seconds=taken, rate=2 * side**3 / taken / 1e12, unit="TFLOP/s")


def known_device(device: torch.device, tiny: bool, out: Path | None) -> Device:
    """With what `measure_device` has found, if it was there."""
    found = {
        figure.what: figure.rate or 0.0 for figure in (read(out) if out else []) if figure.part == "device"
    }
    peaks = [rate for what, rate in found.items() if what.startswith("bf16 product")]
    return Device(
        device, tiny, found.get("copy, read and written", 0.0) * 1e9, max(peaks, default=0.0) * 1e12
    )
