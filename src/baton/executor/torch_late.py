"""The Torch executor one step late: a `LateExecutor` on a device that runs behind the host.

Theory.  A step has two halves (`streams/queue.py`).  The host's reads the batch: what the device needs of
it is staged, and goes there by one copy.  The device's computes, samples, leaves each token in `newest` by
slot, where the next step finds those that it carries, and copies the tokens into pinned memory; an event
behind that says when they may be read.  So between two launches the host waits for nothing but what it
collects.

*Steps that wait.*  What the host must know, or do, in the middle of a step cannot be launched ahead:
penalties, biases and bans, which are edits of logits; masks of grammars; log-probabilities; results of
prompts.  A step in which a row that samples wants one of these is computed within its `launch`, as
`TorchExecutor` does, after the steps before it are over; `collect` finds its result.  By then the host has
all tokens, so rows with penalties are carried like others.  Requests under a grammar are not: which token
may come depends on a matcher, and none may be ready (`StepResult.late`).

| in a step | it |
| --- | --- |
| greedy and sampled rows, pieces of prompts | is launched ahead, decode rows alone as a graph |
| penalties, biases, bans, `min_tokens`, masks, log-probabilities, pooled prompts, routes | waits |

Models and devices for which every step would wait (`why_waits`) are driven by the ordinary loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from baton.executor.base import Int32Array, OnLayers, StepBatch, StepResult
from baton.executor.devices.graphs import DeviceSampling
from baton.executor.drafts.runs import sampled_tokens
from baton.executor.streams import queue as queues
from baton.executor.streams.mirror import Mirror
from baton.executor.streams.queue import Event
from baton.executor.streams.staging import Staging
from baton.executor.torch_executor import TorchExecutor
from baton.model.attention import AttentionStep
from baton.model.decoder.decoder import Decoder
from baton.protocol.params.sampling import Sampling, Stopping

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Steps that may be launched and not collected."""
_PARTS = 8
"""Layers of a hand-over's last chunk are told so many times at most."""
_NONE = np.empty(0, np.int64)


class _Flight(Protocol):
    """A step that was launched and is not collected."""

    def result(self) -> StepResult:
        """Waits for it.  May be asked for again."""


@dataclass
class _Computed:
    """One that `launch` has waited for."""

    found: StepResult

    def result(self) -> StepResult:
        return self.found


@dataclass
class _Shown:
    """Layers [first, stop) that the step writes are final, and where others may read them."""

    first: int
    stop: int
    final: Event
    copied: Event | None
    """None: they are read where they are."""
    told: bool
    """Somebody waits for them in the middle of the step."""

    def wait(self) -> None:
        self.final.wait()
        if self.copied is not None:
            self.copied.wait()


@dataclass
class _Launched:
    """One that runs, or will."""

    slots: Int32Array
    """[n] those that sample, in the order of their tokens."""
    tokens: Tensor
    """[n] pinned; the tokens, when the device has passed `over`."""
    over: Event
    known: Int32Array
    """[slots] where tokens are noted."""
    on_layers: OnLayers | None
    shown: list[_Shown]
    load: Callable[[], list[int]] | None
    """`StepResult.expert_tokens`, once the step is over; None: they are not due."""
    found: StepResult | None = None

    def result(self) -> StepResult:
        if self.found is None:
            for part in self.shown:
                part.wait()
                if self.on_layers is not None and part.told:
                    self.on_layers(part.stop)
            self.over.wait()
            tokens: Int32Array = self.tokens.numpy().copy()
            self.known[self.slots] = tokens
            self.found = StepResult(tokens, expert_tokens=[] if self.load is None else self.load())
        return self.found


class LateTorchExecutor(TorchExecutor):
    """See `executor.base.LateExecutor`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.why_waits = self._why_waits()
        """Why every step would have to wait, or ""."""
        self._flights: deque[_Flight] = deque()
        if self.why_waits:
            logger.info("steps do not overlap: %s", self.why_waits)
            return
        slots = self._config.max_num_seqs
        if self._graphs is not None:
            self._queue, self._staging, self._newest = (
                self._graphs.queue,
                self._graphs.staging,
                self._graphs.newest,
            )
        else:
            self._queue = queues.device_queue(self._device)
            self._staging = Staging(self._queue, self._device)
            self._newest = torch.zeros(slots + 1, dtype=torch.int32, device=self._device)
        self._known: Int32Array = np.zeros(slots, np.int32)
        self._returns = [self._queue.pinned(slots, torch.int32) for _ in range(IN_FLIGHT + 1)]
        self._counts = [torch.empty(0, dtype=torch.int64) for _ in self._returns]
        self._launches = 0
        self._everybody = torch.zeros(1, dtype=torch.int32, device=self._device)

    @property
    def one_step_late(self) -> bool:  # type: ignore[override]
        return not self.why_waits

    def carries(self, sampling: Sampling, stopping: Stopping) -> bool:
        return sampling.constraint is None

    def launch(self, batch: StepBatch, on_layers: OnLayers | None = None) -> None:
        if len(self._flights) == IN_FLIGHT:
            raise RuntimeError(f"step {batch.step} is launched while {IN_FLIGHT} others are in flight")
        if self._waits(batch):
            flight: _Flight = self._compute(batch)
        else:
            with torch.inference_mode():
                flight = self._ahead(batch, on_layers)
        self._flights.append(flight)

    def collect(self) -> StepResult:
        if not self._flights:
            raise RuntimeError("nothing is in flight")
        result = self._flights[0].result()
        self._flights.popleft()
        return result

    def execute(self, batch: StepBatch, on_layers: OnLayers | None = None) -> StepResult:
        if self._flights:
            raise RuntimeError(f"step {batch.step} is executed while another one is in flight")
        return super().execute(batch, on_layers)

    # ---- steps that wait

    def _waits(self, batch: StepBatch) -> bool:
        """The same on every rank."""
        return bool(
            batch.pooled
            or batch.prompt_logprob_targets
            or self._profiler.recording
            or self._experts.asks(batch)
            or self._sampler.special(batch.slots[batch.samples])
        )

    def _compute(self, batch: StepBatch) -> _Computed:
        """Now, after all that was launched."""
        over = self._queue.event()
        self._queue.run(over.record)
        over.wait()
        for flight in self._flights:
            flight.result()
        if batch.carried is not None:
            tokens = batch.tokens.copy()
            (carried,) = np.nonzero(batch.carried)
            tokens[carried] = self._known[batch.slots[carried]]
            batch = replace(batch, tokens=tokens, carried=None)
        result = super().execute(batch)
        slots = batch.slots[batch.samples]
        if len(slots):
            # (Where none could be chosen, its request ends, and what comes of the next row is dropped.)
            self._known[slots] = np.maximum(result.tokens, 0)
            self._staging.begin()
            index = self._staging.put(slots.astype(np.int64))
            tokens_there = self._staging.put(self._known[slots])
            self._staging.send(now=True)
            with torch.inference_mode():
                self._newest.index_copy_(0, index, tokens_there)
        return _Computed(result)

    # ---- steps that are launched ahead

    def _ahead(self, batch: StepBatch, on_layers: OnLayers | None) -> _Launched:
        self._pool.use(batch.block_tables)
        self._staging.begin()
        slots: Int32Array = batch.slots[batch.samples]
        all_decode = batch.num_decodes == len(batch.counts)
        key = self._graphs.key_of(batch) if all_decode and self._graphs is not None else None
        mirror, layers = self._pool.mirror, self._view.num_layers
        blocks = _NONE if mirror is None else mirror.shown_by(batch)
        shown = self._parts(key is None and on_layers is not None, mirror if len(blocks) else None)
        if key is not None:
            assert self._graphs is not None
            graphs, count = self._graphs, len(slots)
            replay = graphs.prepare(batch, key)

            def compute() -> Tensor:
                replay()
                return graphs.tokens(key, count)
        else:
            compute = self._eager(batch, lambda done: show(done) if done < layers else None)
        out = self._returns[self._launches % len(self._returns)][: len(slots)]
        self._launches += 1
        over = self._queue.event()

        counted, load = self._counted(len(batch.tokens))

        def show(done: int) -> None:
            for part in shown:
                if part.stop == done:
                    if part.copied is None:
                        part.final.record()
                    else:
                        assert mirror is not None
                        mirror.show_beside(blocks, part.final, part.copied, part.first, done - part.first)

        def step() -> None:
            tokens = compute()
            if mirror is not None and len(blocks) and self._parallel.size > 1:
                mirror.show(blocks)
                self._parallel.all_reduce(self._everybody)  # (no rank is told before all have copied)
            show(layers)
            if len(slots):
                out.copy_(tokens, non_blocking=True)
            if counted is not None:
                counted.copy_(torch.stack(self._experts.load.counts), non_blocking=True)
            over.record()

        self._staging.send()
        self._give(step)
        return _Launched(slots.copy(), out, over, self._known, on_layers, shown, load)

    def _counted(self, tokens: int) -> tuple[Tensor | None, Callable[[], list[int]] | None]:
        """Pinned memory for what the experts of mixtures have taken, if a step of so many tokens is to tell
        it, and what is made of it then."""
        load = self._experts.load
        if not load.due(self._model, tokens):
            return None, None
        mixtures, experts = len(load.counts), len(load.counts[0])
        place = self._launches % len(self._counts)
        if len(self._counts[place]) != mixtures * experts:
            self._counts[place] = self._queue.pinned(mixtures * experts, torch.int64)
        counted = self._counts[place].view(mixtures, experts)
        return counted, lambda: load.told(list(counted.numpy().copy()))

    def _parts(self, by_layers: bool, mirror: Mirror | None) -> list[_Shown]:
        """The layers of a step as they become final; `mirror`: they are copied into it.  With several ranks
        all of them are copied together, behind what the step launches last."""
        layers = self._view.num_layers
        beside = mirror is not None and self._parallel.size == 1
        if not beside and (mirror is not None or not by_layers):
            return []
        every = -(-layers // _PARTS) if by_layers else layers
        stops = [*range(every, layers, every), layers]
        return [
            _Shown(
                first,
                stop,
                self._queue.event(),
                mirror.shown() if mirror is not None else None,
                by_layers and stop < layers,
            )
            for first, stop in zip([0, *stops], stops, strict=False)
        ]

    def _eager(self, batch: StepBatch, on_layers: OnLayers) -> Callable[[], Tensor]:
        """Stages what a step needs that is no graph.  Returns the device's half, which gives its tokens."""
        assert isinstance(self._model, Decoder)
        model, put, pool = self._model, self._staging.put, self._pool.tensor
        step = AttentionStep(batch.starts, batch.counts, batch.block_tables, batch.num_decodes)
        opened = self._backend.opened(batch.starts, batch.counts, batch.block_tables)
        opened_there = put(opened)
        tokens = put(batch.tokens)
        prepared = model.prepare(step, put)
        carried: tuple[Tensor, Tensor] | None = None
        if batch.carried is not None:
            (rows,) = np.nonzero(batch.carried)
            carried = put(rows), put(batch.slots[rows].astype(np.int64))
        sampled, _ = sampled_tokens(batch)
        wanted = put(sampled) if len(sampled) < len(batch.tokens) else None
        slots: Int32Array = batch.slots[batch.samples]
        slots_there, slots_index = put(slots), put(slots.astype(np.int64))
        positions = put((batch.starts + batch.counts)[batch.samples])
        sampling = cast(DeviceSampling, self._sampler.on_device)
        sampling.send(slots, self._staging.into)
        newest, parallel, count = self._newest, self._parallel, len(slots)

        def compute() -> Tensor:
            if len(opened):
                pool.index_fill_(0, opened_there, 0)
            ids = tokens.long()
            if carried is not None:
                ids.index_copy_(0, carried[0], newest[carried[1]].long())
            logits = model.on_device(ids, prepared, wanted, on_layers)
            if not count:
                return slots_there
            if parallel.rank == 0:
                assert logits is not None
                found = sampling.choose(logits, slots_there, positions)
            else:
                found = torch.empty_like(slots_there)
            parallel.broadcast(found)
            newest.index_copy_(0, slots_index, found)
            return found

        return compute

    def _give(self, work: Callable[[], object]) -> None:
        def within() -> None:
            with torch.inference_mode():
                work()

        self._queue.run(within)

    def _why_waits(self) -> str:
        if self._sampler.on_device is None:
            return "PyTorch samples"
        if not isinstance(self._model, Decoder):
            return "transformers computes the model"
        if not all(mixture.on_device() for mixture in self._model.mixtures):
            return "a mixture's experts are computed one after the other"
        return "" if self._draft is None else "a draft model needs the tokens"

    def close(self) -> None:
        self._flights.clear()
        super().close()
