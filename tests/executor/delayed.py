"""A device that runs behind the host, on a CPU: it does what it is given in order, and as late as may be.

Theory.  Work that is given to a queue stays there.  It is done when the host waits for an event, up to that
event and no further: a piece of work in whose middle the event is recorded stops there (`Piece`).  Or, with
`eager` above 0, by chance, some of it whenever the host gives more.  So the device has done nothing that the
host has not waited for, or anything: what counts on more shows in one of both.  Pinned memory is full of
rubbish at first, and afterwards of what was in it last.

Queues of one device run beside each other: whoever waits for an event of one moves the others only as far
as that one waits for them.  What a queue is given from within another's work it never does too early here,
as it hears of it no sooner; on a GPU it does, if it does not wait.  So for such work there is a rule
instead: it follows a `behind` of its own, with an event that the same piece has recorded before.

`on_a_delayed_device` lets a `LateTorchExecutor` believe that the CPU is such a device: attention reads
nothing but tensors "on the device", so that a step can be a graph; sampling is the CPU's kernel over a copy
of the slots' parameters that steps bring up to date, as the copy in a GPU's memory is.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.executor import torch_executor
from baton.executor.devices.graph_check import Trial, why_not_together
from baton.executor.devices.graphs import DecodeGraphs, graphs_of
from baton.executor.results import constraints
from baton.executor.streams import queue as queues
from baton.executor.torch_late import LateTorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.attention import AttentionStep
from baton.model.attention.torch_tiles import TorchTiles
from baton.model.cpu.sampling import KernelSampling, SlotParameters, sampling_kernel
from baton.model.layers.rotary import rotate
from tests.conftest import GENEROUS_S

RUBBISH = 0xA5


class Piece(threading.Thread):
    """A piece of work that stops where it passes what the host waits for.  It has a thread, because it may
    stop anywhere; the thread runs only while somebody is in `go_on`.  One that nobody lets go on again stays
    where it is until the process ends."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._turns, self._stops = threading.Semaphore(0), threading.Semaphore(0)
        self._until: object = None
        self._error: BaseException | None = None
        self.over = self._given_up = False
        self.start()

    def run(self) -> None:
        self._turns.acquire()
        try:
            if not self._given_up:
                self._work()
        except BaseException as error:
            self._error = error
        self.over = True
        self._stops.release()

    def go_on(self, until: object) -> None:
        """To its end, or until it passes this."""
        self._until = until
        self._turns.release()
        assert self._stops.acquire(timeout=GENEROUS_S), "the device's work does not come to an end"
        if self._error is not None and not self._given_up:
            raise self._error

    def passes(self, place: object) -> None:
        if threading.current_thread() is self and self._until is place:
            self._stops.release()
            self._turns.acquire()
            if self._given_up:
                raise SystemExit

    def give_up(self) -> None:
        """The rest is not done."""
        self._given_up = True
        self.go_on(None)


class DelayedEvent:
    def __init__(self, queue: DelayedQueue) -> None:
        self.queue = queue
        self.recorded = False
        self.piece = 0
        """Of its queue, that has recorded it."""
        self.asked = 0

    def record(self) -> None:
        self.recorded, self.piece = True, self.queue.begun
        self.queue.passes(self)

    def done(self) -> bool:
        """The device gets there while the host looks again and again."""
        self.asked += 1
        if self.asked > 3 and not self.queue.hangs:
            self.wait()
        return self.recorded

    def wait(self) -> None:
        self.queue.reach(self)


class DelayedQueue:
    """A `DeviceQueue`.  `eager`: how probable it is that the device does a piece of work while the host gives
    it another."""

    def __init__(self, eager: float = 0.0, seed: int = 0, giver: DelayedQueue | None = None) -> None:
        self.eager = eager
        self.chance = random.Random(seed)
        self.works: deque[Callable[[], None] | DelayedEvent] = deque()
        self.others: list[DelayedQueue] = []
        self.hangs = False
        """However often it is asked, it gets no further."""
        self._piece: Piece | None = None
        """It has begun, and stopped."""
        self._giver = giver
        """The queue beside which this one is."""
        self.begun = 0
        """Pieces."""
        self._worker: int | None = None
        """The thread that does its work."""
        self._waits = False
        """Nothing was given since it was told to wait."""

    def run(self, work: Callable[[], None]) -> None:
        if self._giver is not None and self._giver._worker == threading.get_ident():
            assert self._waits, "a device may do it before what the other queue did so far"
            self._waits = False
        self.works.append(work)
        if self._giver is not None:
            self._giver.passes(self)
        for queue in (self, *self.others):
            while queue.has_work and self.chance.random() < queue.eager:
                queue.step()

    def event(self) -> DelayedEvent:
        return DelayedEvent(self)

    def behind(self, event: DelayedEvent) -> None:
        assert event.recorded, "an event is waited for that was never recorded"
        assert event.piece == event.queue.begun, "the event is of an earlier piece of work"
        self._waits = True
        self.works.append(event)

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.full((count * dtype.itemsize,), RUBBISH, dtype=torch.uint8).view(dtype)

    def pin(self, memory: Tensor) -> str:
        return ""

    def unpin(self, memory: Tensor, stretch: int) -> None:
        pass

    def beside(self) -> DelayedQueue:
        made = DelayedQueue(self.eager, self.chance.getrandbits(32), self)
        self.others.append(made)
        return made

    def step(self, until: object = None) -> None:
        """The device does the oldest piece; `until`: it stops where that is passed."""
        if self._piece is None:
            work = self.works.popleft()
            if isinstance(work, DelayedEvent):
                work.wait()
                return
            self.begun += 1
            if until is None:
                self._work(work)
                return
            self._piece = Piece(partial(self._work, work))
        piece = self._piece
        try:
            piece.go_on(until)
        finally:
            if piece.over:
                self._piece = None

    def _work(self, work: Callable[[], None]) -> None:
        self._worker = threading.get_ident()
        try:
            work()
        finally:
            self._worker = None

    def passes(self, place: object) -> None:
        """From within work."""
        if self._piece is not None:
            self._piece.passes(place)

    def reach(self, event: DelayedEvent) -> None:
        while not event.recorded:
            if self.has_work:
                self.step(event)
            elif self._giver is not None and self._giver.has_work:
                self._giver.step(self)
            else:
                raise AssertionError("an event is waited for that nothing records")

    @property
    def has_work(self) -> bool:
        return bool(self.works) or self._piece is not None

    def forget(self) -> None:
        """Nothing of what it was given is done any more."""
        self.works.clear()
        if self._piece is not None:
            self._piece.give_up()
            self._piece = None

    def drain(self) -> None:
        while self.has_work:
            self.step()


class DelayedSampling:
    """`SlotSampling` and `graphs.DeviceSampling` of this device."""

    def __init__(self, parameters: SlotParameters, vocab_size: int) -> None:
        kernel = sampling_kernel()
        if kernel is None:
            pytest.skip("there is no kernel that samples: Baton's library is not built")
        self._have = parameters
        arrays = {field.name: getattr(parameters, field.name).copy() for field in fields(SlotParameters)}
        self._there = SlotParameters(**arrays)
        self._kernel = KernelSampling(kernel, self._there, vocab_size)
        self._host = KernelSampling(kernel, parameters, vocab_size)

    def takes(self, logits: Tensor) -> bool:
        return True

    def sample(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self._host.sample(logits, slots, positions)

    def send(self, slots: np.ndarray, into: Callable[[Tensor], np.ndarray] | None = None) -> None:
        assert into is not None
        for name in ("temperature", "top_k", "top_p", "min_p", "streams"):
            here, there = getattr(self._have, name), getattr(self._there, name)
            if here.dtype == np.uint64:
                here, there = here.view(np.int64), there.view(np.int64)
            into(torch.from_numpy(there))[:] = here

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return torch.from_numpy(self._kernel.sample(logits, slots.numpy(), positions.numpy()))

    def have_chosen(self, logits: Tensor, tokens: Tensor) -> None:
        pass

    def edit(self, logits: Tensor, entries: Mapping[str, np.ndarray]) -> None:
        """As `model.cuda.sampling.edit`."""
        told = {name: torch.from_numpy(array) for name, array in entries.items()}
        rows, ids, counts = told["rows"].long(), told["ids"].long(), told["counts"]
        found = logits[rows, ids] + told["biases"]
        found = found.masked_fill(told["banned"].bool(), float("-inf"))
        repetition = told["repetitions"][rows]
        repeated = torch.where(found > 0, found / repetition, found * repetition)
        found = torch.where(told["seen"].bool(), repeated, found)
        logits[rows, ids] = (
            found - counts * told["frequencies"][rows] - (counts > 0) * told["presences"][rows]
        )


class Recorded:
    """A recorder: what is replayed is the function, over buffers that are filled anew."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def lent(self, left: Tensor) -> Tensor:
        return left


@dataclass(frozen=True)
class TokenPlan:
    places: Tensor
    """int64 [T] block * block size + offset; -1: nowhere"""
    positions: Tensor
    """[T]"""
    tables: Tensor
    """[T, W]"""


class TokenAttention(TorchTiles):
    """Each token by itself, straight from its table, in float32: slow, and all that it reads lies on the
    device."""

    records = True

    def turns(self, norms: Any, grows: bool) -> bool:
        assert norms is None
        assert not grows
        return True

    def prepare(self, step: AttentionStep) -> TokenPlan:
        size, rows = self.shape.block_size, np.repeat(np.arange(len(step.counts)), step.counts)
        positions, tables = step.positions(), step.block_tables[rows]
        blocks = tables[np.arange(len(rows)), positions // size].astype(np.int64)
        places = blocks * size + positions % size
        return TokenPlan(self._tensor(places), self._tensor(positions), self._tensor(tables))

    def plan_of_decodes(
        self, places: Tensor, positions: Tensor, tables: Tensor, items: Tensor, longest: int
    ) -> TokenPlan:
        return TokenPlan(places, positions, tables)

    def rotate_and_write(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, growth: Any, norms: Any, plan: TokenPlan
    ) -> Tensor:
        shape = self.shape
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        keys = shape.num_heads + shape.num_kv_heads
        at = plan.positions.long()
        turned = rotate(heads[:, :keys], cos[at].unsqueeze(1), sin[at].unsqueeze(1))
        there = plan.places >= 0
        blocks = plan.places[there] // shape.block_size, plan.places[there] % shape.block_size
        self.pool[blocks[0], layer, 0, :, blocks[1]] = turned[there, shape.num_heads :]
        self.pool[blocks[0], layer, 1, :, blocks[1]] = heads[there, keys:]
        return turned[:, : shape.num_heads]

    def attend(
        self, layer: int, queries: Tensor, window: int | None, plan: TokenPlan, sinks: Tensor | None = None
    ) -> Tensor:
        assert window is None
        assert sinks is None
        shape, (count, width) = self.shape, plan.tables.shape
        seen = torch.arange(width * shape.block_size) <= plan.positions[:, None]
        tables = plan.tables.where(seen[:, :: shape.block_size], 0).long()
        # [T, W, 2, heads, block, dim] → [2, T, heads, W * block, dim]
        found = self.pool[tables, layer].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        found = found.masked_fill(~seen[None, :, None, :, None], 0.0)
        keys, values = found.repeat_interleave(self._heads_per_kv, dim=2)
        scores = torch.einsum("thd,thkd->thk", queries, keys) * shape.scale
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return torch.einsum("thk,thkd->thd", weights, values).reshape(count, -1)

    def write_kv(self, layer: int, keys: Tensor, values: Tensor, plan: Any) -> None:
        raise AssertionError("it rotates by itself")


def on_a_delayed_device(
    patch: pytest.MonkeyPatch,
    directory: Path,
    queue: DelayedQueue,
    *,
    graphs: bool,
    mirrored: bool,
    rank: int = 0,
    **sizes: Any,
) -> LateTorchExecutor:
    """Of the checkpoint in `directory`, in float32.  `graphs`: decode steps are replayed.  `mirrored`: its
    pages are."""

    def make_graphs(
        config: Any, model: Any, sampling: Any, parallel: Any, device: Any
    ) -> DecodeGraphs | None:
        if graphs and parallel.size > 1:
            trial = Trial(parallel, 6, 64, torch.float32, device)
            assert why_not_together(parallel, trial, Recorded(), queue, device, "", 30) == ""
        return graphs_of(config, model, sampling, Recorded(), queue) if graphs else None

    patch.setattr(torch_executor, "attention_backend", lambda config, shape: TokenAttention(shape))
    patch.setattr(torch_executor, "make_graphs", make_graphs)
    patch.setattr(constraints, "device_sampling", lambda device: DelayedSampling)
    patch.setattr(queues, "device_queue", lambda device: queue)
    patch.setattr(queues, "mirror_queue", lambda config, device: queue if mirrored else None)
    options = dict(dtype="float32", num_threads=1, speculation=None)
    config = instance_config(model=str(directory), **{**options, **sizes})
    return LateTorchExecutor.from_config(config, rank, str(directory / "meet"))
