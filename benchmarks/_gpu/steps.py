"""Decode and prefill steps of the whole executor: seconds of a step, beside what bytes and operations allow.

Steps overlap as in a worker: each is launched before the last one's tokens are read, which it takes on the
device; `waiting` steps are timed one by one, from the call to the tokens.  What the KV cache holds does not
matter to the time, so nothing is computed before.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from _gpu.figures import Figures
from _gpu.measuring import Device
from _gpu.models import Sizes, random_executor, shape_of, sizes_of
from baton.executor.base import StepBatch
from baton.executor.torch_late import LateTorchExecutor
from baton.protocol.params.sampling import Sampling, Stopping

GOALS = {"qwen3-0.6b": 700.0}
"""Tokens a second of one request."""
SHARES = {"qwen3-4b": 0.8, "llama-8b": 0.8}
"""Of the limit, for one request."""
PREFILL_SHARES = {"llama-8b": 0.6}
BLOCK = 32
_BUDGET_S = 1.5
"""For the steps of one figure."""


class Rows:
    """Requests on the slots 0, 1, …, each with its own blocks for `longest` tokens."""

    def __init__(self, executor: LateTorchExecutor, rows: int, longest: int) -> None:
        self._executor, self._rows = executor, rows
        per = -(-longest // BLOCK)
        assert rows * per <= executor.info.num_blocks, "the pool is too small"
        self._tables = np.arange(rows * per, dtype=np.int32).reshape(rows, per)
        self._numbers = np.random.default_rng(0)
        for slot in range(rows):
            sampling = Sampling(seed=slot, temperature=0.6)
            executor.admit(slot, self._tokens(4), 4, sampling, Stopping(max_tokens=longest))

    def _tokens(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self._numbers.integers(3, self._executor.info.vocab_size, count).astype(np.int32)

    def step(self, start: int, count: int = 1, carried: bool = False) -> StepBatch:
        """`count` tokens of each row from position `start` on; `carried`: those that the last step gave."""
        rows = self._rows
        return StepBatch(
            step=1,
            slots=np.arange(rows, dtype=np.int32),
            starts=np.full(rows, start, np.int32),
            counts=np.full(rows, count, np.int32),
            tokens=np.full(rows, -1, np.int32) if carried else self._tokens(rows * count),
            samples=np.ones(rows, np.bool_),
            block_tables=self._tables,
            num_decodes=rows if count == 1 else 0,
            carried=np.ones(rows, np.bool_) if carried else None,
        )

    def close(self) -> None:
        for slot in range(self._rows):
            self._executor.release(slot)


def measure_model(name: str, device: Device, figures: Figures) -> None:
    """Decode of 1, 8, 64 and 256 rows, as graphs and eagerly; prompts."""
    tiny = device.tiny
    shape = shape_of(name, tiny)
    sizes = sizes_of(shape)
    context, most = (20, 2) if tiny else (512, 256)
    prompts = (16,) if tiny else (2048, 8192)
    longest = context + (8 if tiny else 256)
    begin = time.perf_counter()
    executor = random_executor(
        shape,
        device.device,
        max_model_len=max(*prompts, longest) + BLOCK,
        block_size=BLOCK,
        num_blocks=max(most * -(-longest // BLOCK), -(-max(prompts) // BLOCK)),
        max_num_seqs=most,
        max_num_batched_tokens=max(prompts),
    )
    device.wait()
    figures.add("made and warmed up", seconds=time.perf_counter() - begin, note=executor.info.detail)
    try:
        for rows in (1, 2) if tiny else (1, 8, 64, 256):
            _decode(name, executor, rows, context, sizes, device, figures)
        for tokens in prompts:
            _prefill(name, executor, tokens, sizes, device, figures)
        for rows in (1,) if tiny else (1, 64, 256):
            _decode(name, executor, rows, context, sizes, device, figures, ", waiting")
        graphs, executor._graphs = executor._graphs, None
        for rows in (1,) if tiny else (1, 64):
            _decode(name, executor, rows, context, sizes, device, figures, ", eager")
        executor._graphs = graphs
    finally:
        executor.close()


def _decode(
    name: str,
    executor: LateTorchExecutor,
    rows: int,
    context: int,
    sizes: Sizes,
    device: Device,
    figures: Figures,
    how: str = "",
) -> None:
    batches = Rows(executor, rows, context + (8 if device.tiny else 256))
    times = _waiting if "waiting" in how else _overlapping
    try:
        for _ in range(1 if device.tiny else 3):  # compiles, and records
            executor.execute(batches.step(context))
        found = times(executor, batches, context, 2 if device.tiny else 200)
    finally:
        batches.close()
    seconds, keys = statistics.median(found), context + len(found) // 2
    limit = device.limit(sizes.bytes_of(rows, keys), sizes.operations_of(rows, rows, float(rows * keys)))
    goal, reached = "", None
    if rows == 1 and not how and not device.tiny:
        if name in GOALS:
            goal, reached = f"≥ {GOALS[name]:.0f} tokens/s", 1 / seconds >= GOALS[name]
        elif name in SHARES:
            goal = f"≥ {100 * SHARES[name]:.0f} % of the limit"
            reached = None if limit is None else limit / seconds >= SHARES[name]
    note = "" if how else _replayed(executor, rows, device)
    figures.add(
        f"decode, {rows} rows of {keys}{how}",
        seconds=seconds,
        rate=rows / seconds,
        unit="tokens/s",
        limit_s=limit,
        goal=goal,
        reached=reached,
        note=note,
    )


def _waiting(executor: LateTorchExecutor, batches: Rows, context: int, most: int) -> list[float]:
    """Seconds of each step that waits for its tokens."""
    found: list[float] = []
    ends = time.perf_counter() + _BUDGET_S
    while len(found) < most and (len(found) < 2 or time.perf_counter() < ends):
        batch = batches.step(context + len(found))
        begin = time.perf_counter()
        executor.execute(batch)
        found.append(time.perf_counter() - begin)
    return found


def _overlapping(executor: LateTorchExecutor, batches: Rows, context: int, most: int) -> list[float]:
    """Seconds from one step's tokens to the next one's, each step launched before the last one's are read."""
    if not executor.one_step_late:
        return _waiting(executor, batches, context, most)
    found: list[float] = []
    executor.launch(batches.step(context))
    begin = time.perf_counter()
    ends = begin + _BUDGET_S
    while len(found) < most and (len(found) < 2 or begin < ends):
        executor.launch(batches.step(context + len(found) + 1, carried=True))
        executor.collect()
        now = time.perf_counter()
        found.append(now - begin)
        begin = now
    executor.collect()
    return found


def _replayed(executor: LateTorchExecutor, rows: int, device: Device) -> str:
    """What the device alone takes for the graph: the rest of a step is the host's."""
    graphs = getattr(executor, "_graphs", None)
    if graphs is None or device.device.type != "cuda":
        return "no graph"
    if graphs.why_no_more:
        return f"no graph: {graphs.why_no_more}"
    recorded = [graph for key, graph in graphs._graphs.items() if key[0] == rows and graph.replay is not None]
    if not recorded:
        return "no graph"
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        recorded[-1].replay()
    end.record()
    end.synchronize()
    return f"device alone {begin.elapsed_time(end) / 10:.3f} ms"


def _prefill(
    name: str, executor: LateTorchExecutor, tokens: int, sizes: Sizes, device: Device, figures: Figures
) -> None:
    batches = Rows(executor, 1, tokens)
    try:
        found: list[float] = []
        for _ in range(2 if device.tiny else 6):
            batch = batches.step(0, tokens)
            begin = time.perf_counter()
            executor.execute(batch)
            found.append(time.perf_counter() - begin)
    finally:
        batches.close()
    seconds = statistics.median(found[1:])
    operations = sizes.operations_of(tokens, 1, tokens * (tokens + 1) / 2)
    limit = device.limit(sizes.weight_bytes, operations)
    goal, reached = "", None
    if name in PREFILL_SHARES and not device.tiny:
        share = PREFILL_SHARES[name]
        goal = f"≥ {100 * share:.0f} % of the peak"
        reached = None if limit is None else limit / seconds >= share
    figures.add(
        f"prompt of {tokens}",
        seconds=seconds,
        rate=tokens / seconds,
        unit="tokens/s",
        limit_s=limit,
        goal=goal,
        reached=reached,
        note=f"{operations / seconds / 1e12:.1f} TFLOP/s",
    )
