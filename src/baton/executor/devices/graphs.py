"""Decode steps as CUDA graphs: what Python would launch kernel by kernel is recorded once and replayed.

Theory.  A step of one token a row is some hundred kernels of a few microseconds each, and Python takes
longer to launch one than a small model's takes to run.  A graph replays all of them by one call, with the
addresses and numbers that they were recorded with.  So what differs between steps lies in buffers that stay
(`StepBuffers`): the host fills one array in pinned memory, and one copy brings it to the device
(`streams/`). The token of a row that carries it (`StepBatch.carried`) is taken from `newest`, where each
step leaves its own.

*Sizes.*  A graph is of so many rows and of block tables of so many columns; both in steps, so that there
are few of them.  Rows that a batch has not are padding: they have no positions, are stored nowhere (place
-1), and what is computed of them nobody reads.  A graph is recorded with the first batch that needs it.  To
record runs the step for practice, with the batch's own numbers: a step that is run twice leaves the same
bytes.

*Drafts.*  What a row with drafts computes are positions of which each sees those before it, and a step stores
the keys and values of all its tokens before any of them looks.  So a step of rows with drafts is one of as
many decode rows as it has tokens (`as_decodes`), which the same graphs take: each token is a row with the
table of its request, and its result is what a step of its own would give.

What depends on more than (seed, position) is not recorded: rows with penalties, bans or masks are sampled
from the graph's logits, launched one by one.  Logits are read before the next replay, and all graphs may have
them at one place (`Recorder.lent`): with 256 rows those of 35 sizes would come to more than a gigabyte.

What cannot be recorded, for want of memory perhaps, is launched one operation after the other, and so is what
is not recorded by then.

*Ranks.*  What several ranks send each other is in the graph: sums, the logits' way to rank 0, and the
tokens' way back, so that each rank has them in `newest`.  All must record a step together and all replay it
(`graph_check.py`, which tries it at the start).  So which graph a batch has (`key_of`) follows from the batch
and the configuration alone.  To run for practice is an eager step on all ranks; to record sends nothing; then
they agree that all have recorded, or all fail, and nobody waits in a graph for who has none (of a group that
could not be recorded nobody knows whether it still works).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.executor.base import Int32Array, StepBatch
from baton.executor.devices.graph_check import Trial, why_not_together
from baton.executor.devices.recorder import CudaRecorder, NotRecorded, Recorder
from baton.executor.streams import queue as queues
from baton.executor.streams.queue import DeviceQueue
from baton.executor.streams.staging import Staging
from baton.model.attention import AttentionStep
from baton.model.decoder.decoder import Decoder, Prepared
from baton.model.layers.parallel import TensorParallel
from baton.model.loader import AnyDecoder
from baton.model.sampling.sampler import SlotSampling
from baton.protocol.config import InstanceConfig

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 1024
"""Of context, in the narrowest tables; wider ones are `_GROWTH` times as wide as the next narrower."""
_GROWTH = 4
_MOST_TOKENS = 512
"""Of a step with drafts: Python launches one with more tokens faster than the device computes it."""
_SPLIT_BYTES = 512 << 20
"""What attention may keep of splits, at most; larger steps are launched one by one."""
_ROW_WORDS = 12
"""Of a row in `StepBuffers`, beside its table: place (2), opened block (2), token, position, slot, new
position, item (4)."""


class StepBuffers:
    """The numbers of a step of `rows` rows with tables of `width` columns, on the device."""

    def __init__(self, rows: int, width: int, block_size: int, device: torch.device) -> None:
        self.rows, self.width, self._size = rows, width, block_size
        self._device = torch.zeros(rows * (_ROW_WORDS + width), dtype=torch.int32, device=device)
        self.on_device = _Columns(self._device, rows, width)

    def fill(self, batch: StepBatch, staging: Staging, opened: npt.NDArray[np.int64]) -> None:
        """Of a batch of decode rows alone, at most `rows`; what is sent next brings it to the device.
        `opened`: the blocks that it opens."""
        words: Int32Array = staging.into(self._device)
        rows, count, starts = self.rows, len(batch.slots), batch.starts
        places, clear = words[: 4 * rows].view(np.int64).reshape(2, rows)
        columns = words[4 * rows : 8 * rows].reshape(4, rows)
        columns[:, count:] = 0
        for column, values in zip(columns, (batch.tokens, starts, batch.slots, starts + 1), strict=True):
            column[:count] = values
        row = np.arange(count)
        blocks = batch.block_tables[row, starts // self._size].astype(np.int64)
        places[:count] = blocks * self._size + starts % self._size
        places[count:] = -1
        clear[: len(opened)] = opened
        items = words[8 * rows : 12 * rows].reshape(rows, 4)
        items[:count, 0] = items[:count, 3] = row
        items[:count, 1] = 1
        items[:count, 2] = starts
        items[count:] = 0
        tables = words[12 * rows :].reshape(rows, self.width)
        width = min(self.width, batch.block_tables.shape[1])
        tables[:count, :width] = batch.block_tables[:, :width]
        tables[count:] = 0


class _Columns:
    """Views of the words of a step."""

    def __init__(self, words: Tensor, rows: int, width: int) -> None:
        self.places, self.opened = words[: 4 * rows].view(torch.int64).view(2, rows)
        """[rows] block * block size + offset, -1: nowhere; and blocks to be cleared, as many as there are"""
        self.tokens, self.positions, self.slots, self.sampled = words[4 * rows : 8 * rows].view(4, rows)
        self.items = words[8 * rows : 12 * rows].view(rows, 4)
        """`model.cuda.attending.ITEM_COLUMNS`"""
        self.tables = words[12 * rows :].view(rows, width)


class DeviceSampling(Protocol):
    """Of `model.cuda.slot_sampling.TritonSampling`, what a recorded step needs."""

    def send(self, slots: Int32Array, into: Callable[[Tensor], npt.NDArray[Any]] | None = None) -> None: ...

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor: ...

    def have_chosen(self, logits: Tensor, tokens: Tensor) -> None: ...


@dataclass(frozen=True)
class Replayed:
    """What a graph leaves of a step, valid until the next one."""

    logits: Tensor | None
    """[T, vocab]; None on ranks but the first."""


class _Graph:
    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.replay: Callable[[], None] | None = None
        self.logits: Tensor | None = None
        self.tokens = torch.empty(0)


class DecodeGraphs:
    """The graphs of one model."""

    def __init__(
        self,
        model: Decoder,
        sampling: DeviceSampling,
        recorder: Recorder,
        max_num_seqs: int,
        max_model_len: int,
        queue: DeviceQueue,
        most_tokens: int | None = None,
    ) -> None:
        """`most_tokens`: of a step, `max_num_seqs` if no row has drafts."""
        shape = model.backend.shape
        self.queue, self.staging = queue, Staging(queue, shape.device)
        self.newest = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=shape.device)
        """The token that was sampled last, by slot; behind them a place for what nobody reads."""
        self._model, self._sampling, self._recorder = model, sampling, recorder
        self._parallel = model.placement.parallel
        self._size, self._device = shape.block_size, shape.device
        self._split_row = shape.num_heads * shape.head_dim * 4
        self._longest = max_model_len
        self._row_sizes = sizes_of_rows(most_tokens or max_num_seqs)
        self._widths = table_widths(max_model_len, shape.block_size)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self.why_no_more = ""
        """Why a step could not be recorded, and so nothing more is."""
        self.forget(model)

    def forget(self, model: AnyDecoder) -> None:
        """Weights have changed, or the model: what was recorded has addresses of the old ones."""
        assert isinstance(model, Decoder)
        self._model, self.why_no_more = model, ""
        self._drop()
        for rotary in model.rotaries:
            rotary.reach(self._longest)  # the tables of angles must stay where they are

    def close(self) -> None:
        """No graph is left.  NCCL waits with the end of a communicator until none holds its kernels."""
        self._drop()
        del self._recorder

    def _drop(self) -> None:
        for graph in self._graphs.values():
            graph.replay = None  # (whoever else still has the object)
        self._graphs.clear()

    def key_of(self, batch: StepBatch) -> tuple[int, int] | None:
        """Rows and columns of the graph for a batch of decode rows; None: it is to be launched eagerly.  The
        same on every rank.  (The caller keeps back batches whose experts somebody asks for, which are read
        after the step.)"""
        count = len(batch.slots)
        if not 0 < count <= self._row_sizes[-1] or batch.prompt_logprob_targets:
            return None
        rows = next(size for size in self._row_sizes if size >= count)
        needed = int(batch.starts.max()) // self._size + 1
        width = next((width for width in self._widths if width >= needed), None)
        if width is None:
            return None
        splits = self._model.backend.splits_of(width * self._size)
        return (rows, width) if rows * splits * self._split_row <= _SPLIT_BYTES else None

    def replayed(self, batch: StepBatch) -> Replayed | None:
        """As `run`, of decode rows with and without drafts; None: the batch is to be computed eagerly."""
        decodes = as_decodes(batch)
        key = None if decodes is None else self.key_of(decodes)
        return None if decodes is None or key is None else self.run(decodes, key)

    def run(self, batch: StepBatch, key: tuple[int, int]) -> Replayed:
        """Computes the step.  The sampling is told the tokens that the logits give.  The queue is empty."""
        self.staging.begin()
        replay = self.prepare(batch, key)
        self.staging.send(now=True)
        replay()
        graph, count = self._graphs[key], len(batch.slots)
        if graph.logits is None:
            return Replayed(None)
        logits = graph.logits[:count]
        self._sampling.have_chosen(logits, graph.tokens[:count])
        return Replayed(logits)

    def prepare(self, batch: StepBatch, key: tuple[int, int]) -> Callable[[], None]:
        """The host's half: what the step needs is staged.  Returns the device's, which leaves `tokens`."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = _Graph(StepBuffers(*key, self._size, self._device))
        backend = self._model.backend
        opened = backend.opened(batch.starts, batch.counts, batch.block_tables)
        self._sampling.send(batch.slots, self.staging.into)
        graph.buffers.fill(batch, self.staging, opened)
        clear = graph.buffers.on_device.opened[: len(opened)]
        step = AttentionStep(batch.starts, batch.counts, batch.block_tables, batch.num_decodes)
        plan = backend.before_replay(*key, step, self.staging.put)

        def replay() -> None:
            if len(clear):
                backend.pool.index_fill_(0, clear, 0)
            if plan is not None:
                plan()
            if graph.replay is None:
                graph.replay = self._record(graph)
            graph.replay()

        return replay

    def _record(self, graph: _Graph) -> Callable[[], None]:
        """To record runs the step, so what it carries on is put back: tokens, and what experts took.  Of
        several ranks all raise `NotRecorded` if one could not."""
        launched = partial(self._step, graph)
        if self.why_no_more:
            return launched
        carried = [self.newest, *(mixture.tokens for mixture in self._model.mixtures)]
        before = [tensor.clone() for tensor in carried]
        replay: Callable[[], None] | None = None
        failure = NotRecorded("another rank could not record this step as a CUDA graph; its log says why")
        try:
            replay = self._recorder.record(launched)
        except NotRecorded as error:
            failure = error
        agreed = self._parallel.minimum(int(replay is not None), self._device.type)
        for tensor, was in zip(carried, before, strict=True):
            tensor.copy_(was)
        if replay is not None and agreed:
            graph.logits = None if graph.logits is None else self._recorder.lent(graph.logits)
            return replay
        if self._parallel.size > 1:
            raise failure
        self.why_no_more = str(failure)
        logger.warning("decode steps of further sizes are launched eagerly, which is slower: %s", failure)
        return launched

    def tokens(self, key: tuple[int, int], count: int) -> Tensor:
        """int32 [count] of the step that ran last, on the device."""
        return self._graphs[key].tokens[:count]

    def _step(self, graph: _Graph) -> None:
        told = graph.buffers.on_device
        plan = self._model.backend.plan_of_decodes(
            told.places, told.positions, told.tables, told.items, graph.buffers.width * self._size
        )
        slots = told.slots.long()
        tokens = torch.where(told.tokens < 0, self.newest[slots], told.tokens).long()
        logits = self._model.on_device(tokens, Prepared(plan, present=told.places))
        graph.logits = logits
        if self._parallel.rank == 0:
            assert logits is not None
            chosen = self._sampling.choose(logits, told.slots, told.sampled)
        else:
            chosen = torch.empty_like(told.slots)
        graph.tokens = self._parallel.broadcast(chosen)
        nowhere = len(self.newest) - 1
        self.newest.index_copy_(0, slots.masked_fill(told.places < 0, nowhere), graph.tokens)


def as_decodes(batch: StepBatch) -> StepBatch | None:
    """The batch with each token as a decode row of its request; None: not all rows go on with an answer.
    Slots that have drafts are there more than once: tokens that they leave in `newest` mean nothing."""
    if batch.num_decodes == len(batch.slots):
        return batch
    if batch.drafts is None or not batch.samples.all() or (batch.counts != batch.drafts + 1).any():
        return None
    rows = np.repeat(np.arange(len(batch.slots)), batch.counts)
    positions = AttentionStep(batch.starts, batch.counts, batch.block_tables, 0).positions()
    return replace(
        batch,
        slots=batch.slots[rows],
        starts=positions.astype(np.int32),
        counts=np.ones(len(rows), np.int32),
        samples=np.ones(len(rows), np.bool_),
        block_tables=batch.block_tables[rows],
        num_decodes=len(rows),
        drafts=None,
    )


def sizes_of_rows(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, … up to 256, then in steps of 32; `most` is the last."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, most + 32, 32)]
    return [size for size in sizes if size < most] + [most]


def table_widths(max_model_len: int, block_size: int) -> list[int]:
    """Columns of block tables, ascending; the last holds the longest context."""
    last, found, tokens = -(-max_model_len // block_size), [], _LEAST_TOKENS
    while tokens < max_model_len:
        found.append(-(-tokens // block_size))
        tokens *= _GROWTH
    return [width for width in found if width < last] + [last]


def graphs_of(
    config: InstanceConfig,
    model: AnyDecoder,
    sampling: SlotSampling,
    recorder: Recorder,
    queue: DeviceQueue,
) -> DecodeGraphs:
    """Of a model for which `why_not_recorded` has no reason."""
    assert isinstance(model, Decoder)
    chosen = cast(DeviceSampling, sampling)  # (of a device whose attention is recorded)
    most = most_tokens_of(config)
    return DecodeGraphs(model, chosen, recorder, config.max_num_seqs, config.max_model_len, queue, most)


def most_tokens_of(config: InstanceConfig) -> int:
    """Of a recorded step, drafts included."""
    rows, drafts = config.max_num_seqs, config.speculation.num_speculative_tokens if config.speculation else 0
    return max(rows, min(rows * (1 + drafts), _MOST_TOKENS))


def make_graphs(
    config: InstanceConfig,
    model: AnyDecoder,
    sampling: SlotSampling | None,
    parallel: TensorParallel,
    device: torch.device,
) -> DecodeGraphs | None:
    """None: steps are launched one operation after the other, on all ranks.  Raises `ExecutorError` if the
    other ranks do not come."""
    if device.type != "cuda":
        return None
    reason = why_not_recorded(model, config.enforce_eager)
    if not reason and sampling is None:
        reason = "PyTorch samples"
    if parallel.size > 1 and not config.enforce_eager:
        recorder, queue = CudaRecorder(device), queues.device_queue(device)
        size = most_tokens_of(config), model.config.hidden_size
        trial = Trial(parallel, *size, model.placement.dtype, device)
        # (Half of what NCCL waits itself, so that it is not what speaks first.)
        timeout_s = config.step_timeout_s / 2
        reason = why_not_together(parallel, trial, recorder, queue, device, reason, timeout_s)
    if reason:
        logger.info("steps are launched eagerly: %s", reason)
        return None
    if parallel.size > 1 and parallel.rank == 0:
        logger.info("%d ranks record their decode steps as CUDA graphs", parallel.size)
    assert sampling is not None
    return graphs_of(config, model, sampling, CudaRecorder(device), queues.device_queue(device))


def why_not_recorded(model: object, enforce_eager: bool) -> str:
    """Why the steps of this model are not recorded, or ""."""
    if enforce_eager:
        return "--enforce-eager"
    if not isinstance(model, Decoder):
        return "transformers computes the model"
    if not all(mixture.on_device() for mixture in model.mixtures):
        return "a mixture's experts are computed one after the other"
    if model.mtp is not None:
        return "drafts come of hidden states"
    return "" if model.backend.records else "PyTorch computes attention"
