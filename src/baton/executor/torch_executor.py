"""The executor that computes: PyTorch on a CPU (or CUDA), one process a tensor-parallel rank.

Theory.  A step is one forward pass over the tokens of all rows, a final norm and output head over the
positions that yield something, and the sampler.  Every rank runs the same passes in the same order; rank 0
has the logits, samples, and broadcasts the tokens, so that all ranks return the same.

An executor is driven by one thread and owns its process's torch settings (threads).  It keeps no
truth about requests: which blocks hold what, and how far a request is, stands in each batch.

A rank that waits for another one inside a collective does so for `step_timeout_s` at most, then raises; in a
CUDA graph until the engine has heard nothing for as long.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import record_function

from baton.executor.banner import banner
from baton.executor.base import ControlRefused, ExecutorInfo, Int32Array, OnLayers, StepBatch, StepResult
from baton.executor.checks import gives_numbers
from baton.executor.devices.graphs import make_graphs
from baton.executor.devices.kernels import attention_backend, kernels_of, ops_of
from baton.executor.devices.memory import measured_budget, taken_at_start
from baton.executor.devices.sizes import attention_shape, device_of, num_blocks_of, num_threads_of
from baton.executor.drafts.draft_model import DTYPES, LoadedDraftModel, Needs, load_draft_model
from baton.executor.drafts.mtp import MtpLayer, longest_row, mtp_layer_of
from baton.executor.drafts.runs import sampled_tokens
from baton.executor.kv_pool import KvPool
from baton.executor.profiler import StepProfiler
from baton.executor.reading import read_config, read_model
from baton.executor.results.pooling import Float64Array, Pooler
from baton.executor.results.prompt_logprobs import prompt_logprobs
from baton.executor.results.routing import ExpertReports
from baton.executor.results.step_sampler import StepSampler
from baton.executor.streams import queue as queues
from baton.executor.weights.forms import ExecutorError, groups_of, weights_form
from baton.executor.weights.images import WeightMemory, open_weights
from baton.executor.weights.new_weights import NextWeights, Second
from baton.model.adapted.check import why_not_alone
from baton.model.adapted.decoder import AdaptedDecoder
from baton.model.attention import AttentionBackend, AttentionStep
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.files import LoadError
from baton.model.checkpoint.fingerprint import fingerprint
from baton.model.cpu import blocking
from baton.model.decoder.decoder import Decoder
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.placement import Placement
from baton.model.loader import AnyDecoder, check_numbers, check_weights, load_model, load_weights
from baton.observe.logs import unless_shown
from baton.protocol.config import InstanceConfig
from baton.protocol.params.sampling import Sampling, Stopping
from baton.transfer.base import PoolView

logger = logging.getLogger(__name__)

_FEW_TOKENS = 32
"""Of a pooled prompt: what fewer save in the last layer costs less than their logits, which nobody reads."""


class TorchExecutor:
    """See `executor.base.Executor`."""

    one_step_late = False

    def __init__(
        self,
        config: InstanceConfig,
        model_config: ModelConfig,
        model: AnyDecoder,
        backend: AttentionBackend,
        parallel: TensorParallel,
        pool: KvPool,
        device: torch.device,
        memory: WeightMemory,
        draft: LoadedDraftModel | MtpLayer | None = None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._next = NextWeights(config, parallel.rank)
        self._block_size = config.block_size
        self._vocab_size = model_config.vocab_size
        self._model_config = model_config
        self._model = model
        self._backend = backend
        self._parallel = parallel
        self._pool = pool
        first_head, _ = model_config.kv_heads_of_rank(parallel.rank, parallel.size)
        self._view = pool.view(first_head, model_config.num_kv_heads)
        self._device = device
        self._profiler = StepProfiler(parallel.rank)
        self._experts = ExpertReports(parallel.rank)
        self._draft = draft
        """With what rank 0 drafts, if it is a model or a layer of the model."""
        drafter = draft.drafter(config) if draft else None
        self._sampler = StepSampler(config, model_config.vocab_size, parallel, device, drafter)
        self.speculator = self._sampler.speculator
        self._graphs = make_graphs(config, model, self._sampler.on_device, parallel, device)
        self._pooler = Pooler(
            lambda hidden: self._model.final(hidden), self._scores if model_config.labels else None
        )
        self._info = ExecutorInfo(
            num_blocks=pool.num_blocks,
            block_size=config.block_size,
            tile=backend.tile_name,
            block_bytes=pool.block_bytes,
            vocab_size=model_config.vocab_size,
            detail=banner(config, model, pool, device, memory) + (f", {draft.told}" if draft else ""),
        )

    @classmethod
    def from_config(cls, config: InstanceConfig, rank: int, rendezvous: str) -> Self:
        """Loads rank `rank`'s part of the model and allocates its KV pool.

        Raises `ExecutorError`, `UnsupportedModel`, `ModelNotFound` or `LoadError`, each of one line.
        """
        device = device_of(config, rank)
        before = taken_at_start(config, device)
        dtype = DTYPES[config.dtype]
        torch.set_num_threads(num_threads_of(config))
        size = config.tensor_parallel_size
        model_config, built = read_model(config, config.model)
        model_config.check_tensor_parallel(size)
        if config.max_model_len > model_config.max_context:
            raise ExecutorError(
                f"max_model_len {config.max_model_len}: the model's context is "
                f"{model_config.max_context} tokens; give at most that"
            )
        parallel = TensorParallel.connect(
            rank, size, rendezvous, config.device, config.step_timeout_s, config.nodes.host
        )
        with torch.inference_mode():
            shape = attention_shape(config, model_config, rank, dtype, device)
            backend = attention_backend(config, shape)
            weights = weights_form(config, dtype, device)
            ops = ops_of(dtype, device, longest_row(config, model_config), int8=weights == "int8")
            mtp = mtp_layer_of(config, model_config, rank, device)
            groups = groups_of(config, model_config, device)
            memory = open_weights(config, Path(config.model), rank, weights, groups)
            blocking.use(measure=rank == 0 and device.type == "cpu" and not memory.store.complete)
            made = {**groups, "store": memory.store, "kernels": kernels_of(config, device)}
            placement = Placement(parallel, dtype, device, weights, ops, **made)
            model = load_model(
                Path(config.model),
                model_config,
                placement,
                backend,
                config.max_model_len,
                memory.progress,
                built,
                None if mtp is None else mtp.backend,
            )
            memory.done()
            if mtp is not None:
                mtp.follow(model)
            draft = mtp or (load_draft_model(config, model_config, device) if rank == 0 else None)
            needs = draft.needs if draft else Needs()
            measured = measured_budget(config, model, before)
            num_blocks = parallel.minimum(num_blocks_of(config, backend, *needs, measured), config.device)
        # Outside of inference mode, so that a transport may write into the pool from anywhere.
        sizes = shape.num_layers, shape.num_kv_heads, backend.tile_shape
        pool = KvPool(num_blocks, *sizes, backend.pool_dtype, device, queues.mirror_queue(config, device))
        backend.bind(pool.tensor)
        if draft is not None:
            draft.make_pool(num_blocks)
        executor = cls(config, model_config, model, backend, parallel, pool, device, memory, draft)
        memory.say(config.name, "warming up")
        executor._warm_up(config)
        logger.log(unless_shown(logging.INFO), "rank %d: %s", rank, executor.info.detail)
        return executor

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def pool(self) -> PoolView:
        return self._view

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        """Raises `ValueError` for a token id outside the vocabulary."""
        outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if len(outside):
            raise ValueError(f"token id {outside[0]} is outside the model's vocabulary of {self._vocab_size}")
        self._experts.admit(slot, sampling, self._model)
        self._sampler.admit(slot, tokens, num_prompt, sampling, stopping, salt)
        self._pooler.admit(slot, sampling.pooling)

    def release(self, slot: int) -> None:
        self._experts.release(slot)
        self._sampler.release(slot)
        self._pooler.release(slot)

    def execute(self, batch: StepBatch, on_layers: OnLayers | None = None) -> StepResult:
        self._experts.begin(batch, self._model)
        result = self._run(batch, on_layers)
        queues.synchronize(self._device)  # a step without tokens, too: who hears of it may read its pages
        self._sampler.done()
        self._experts.end(batch, self._model, result)
        if self._pool.mirror is not None and self._pool.mirror.show_step(batch):
            self._parallel.minimum(1, self._device.type)  # (on every rank)
        return result

    def _run(self, batch: StepBatch, on_layers: OnLayers | None) -> StepResult:
        if self._profiler.recording:
            with record_function("baton::step"), torch.inference_mode():
                result = self._execute(batch, on_layers)
            self._profiler.step_done()
            return result
        if self._model.is_program:  # then PyTorch does next to nothing: spare it the switching
            return self._execute(batch, on_layers)
        with torch.inference_mode():
            return self._execute(batch, on_layers)

    def _execute(self, batch: StepBatch, on_layers: OnLayers | None) -> StepResult:
        if self._device.type != "cpu":
            on_layers = None  # the device runs behind: what Python has launched is not written yet
        self._pool.use(batch.block_tables)
        self._sampler.begin(batch)
        all_decode = batch.num_decodes == len(batch.counts)
        step = AttentionStep(batch.starts, batch.counts, batch.block_tables, batch.num_decodes)
        result = StepResult(np.empty(0, np.int32))
        if batch.pooled:
            return self._execute_pooled(batch, step, result, on_layers)
        graphs = None if self._experts.asks(batch) else self._graphs
        if graphs is not None and (replayed := graphs.replayed(batch)) is not None:
            self._sampler.sample_some(result, replayed.logits, batch, sampled_tokens(batch)[1])
            return result
        if all_decode:
            hidden, logits = self._model(batch.tokens, step, None, on_layers)
            self._sampler.read(batch, hidden)
            self._sampler.sample(result, logits, batch, None)
        else:
            sampled, places = sampled_tokens(batch)
            whole = bool(batch.prompt_logprob_targets) or self._sampler.reads
            hidden, logits = self._model(batch.tokens, step, sampled, on_layers, whole)
            self._sampler.read(batch, hidden)
            self._sampler.sample_some(result, logits, batch, places)
        self._add_prompt_logprobs(batch, hidden, result)
        return result

    def _execute_pooled(
        self, batch: StepBatch, step: AttentionStep, result: StepResult, on_layers: OnLayers | None
    ) -> StepResult:
        """As `_execute`, where results are wanted of some prompts.  (Of these rank 0 has the logits, and its
        results are the ones that are looked at.)"""
        labelled = self._pooler.labelled(batch)
        ended = [row for row, over in batch.pooled.items() if over]
        whole = bool(batch.prompt_logprob_targets) or self._pooler.needs_all(batch) or self._sampler.reads
        whole = whole or len(batch.tokens) < _FEW_TOKENS * (len(ended) - len(labelled))
        sampled, places = sampled_tokens(batch)
        lasts = np.cumsum(batch.counts, dtype=np.int64) - 1
        yields = np.union1d(sampled, lasts[labelled if whole else ended])
        if whole:
            hidden, logits = self._model(batch.tokens, step, yields, on_layers, True)
            self._sampler.read(batch, hidden)
        else:
            hidden, logits = self._model.rows(batch.tokens, step, yields, on_layers)
        of = None if logits is None else logits[torch.from_numpy(np.searchsorted(yields, sampled))]
        self._sampler.sample_some(result, of, batch, places)
        if logits is not None:
            for row, at in zip(labelled, np.searchsorted(yields, lasts[labelled]).tolist(), strict=True):
                result.pooled[row] = self._pooler.labels(int(batch.slots[row]), logits[at])
        self._add_prompt_logprobs(batch, hidden, result)
        if self._parallel.rank == 0:
            result.pooled |= self._pooler.vectors(batch, hidden, None if whole else yields)
        return result

    def _scores(self, hidden: Float64Array) -> npt.NDArray[np.float32]:
        """Of a head of scores, which has a text's last hidden state."""
        assert isinstance(self._model, Decoder)
        assert self._model.scores is not None
        return self._model.scores(hidden)

    def _add_prompt_logprobs(self, batch: StepBatch, hidden: Tensor, result: StepResult) -> None:
        for row, targets in batch.prompt_logprob_targets.items():
            first = int(batch.counts[:row].sum())
            count = self._sampler.prompt_logprobs_of(int(batch.slots[row]))
            of = hidden[first : first + len(targets)]
            result.prompt_logprobs[row] = prompt_logprobs(self._model, of, targets, count)

    def check_weights(self, directory: str) -> str:
        if name := self._next.prepared(directory):
            return name
        if reason := self._why_not_load(directory):
            raise ControlRefused(reason)
        name = fingerprint(Path(directory))
        if self._model.placement.store.complete:
            self._next.prepare(directory, name, Second(self._model, self._memory))
        return name

    @torch.inference_mode()
    def update_weights(self, directory: str) -> None:
        """What was prepared takes its place.  Private weights are loaded layer by layer: the old ones of each
        go when its new ones have been packed."""
        self._put_in_place(directory)
        if isinstance(self._draft, MtpLayer):
            self._draft.follow(self._model)
        if self._graphs is not None:
            self._graphs.forget(self._model)

    def _put_in_place(self, directory: str) -> None:
        self._refuse_together("" if self._next.prepared(directory) else self._why_not_load(directory))
        if not self._model.placement.store.complete:
            load_weights(self._model, Path(directory), self._read_config(directory))
            return
        present = Second(self._model, self._memory)
        self._model, self._memory = self._next.take(directory) or self._next.make(directory, present)
        present.memory.release()

    def release_weights(self) -> None:
        self._next.drop()

    def start_profile(self, directory: str) -> None:
        self._refuse_together(self._profiler.why_not_start(directory))
        self._profiler.start(directory)

    def stop_profile(self) -> None:
        self._profiler.stop()

    def close(self) -> None:
        self._backend.bind(torch.empty((0, *self._pool.tensor.shape[1:]), dtype=self._pool.tensor.dtype))
        self._view = self._view.without_memory()
        self._pool.close()
        if self._graphs is not None:
            self._graphs.close()
        self._parallel.close()
        self._next.drop()
        self._memory.release()
        if self._draft is not None:
            self._draft.close()
        self._sampler.close()

    def _read_config(self, directory: str) -> ModelConfig:
        return read_config(self._config, directory)

    def _why_not_load(self, directory: str) -> str:
        """Why the checkpoint cannot take the place of the one that is loaded, or ""."""
        try:
            config = self._read_config(directory)
            if difference := config.sizes_differ(self._model_config):
                return f"{directory!r} is another model: {difference}; restart with it instead"
            check_weights(self._model, Path(directory), config)
            if self._parallel.rank == 0:
                check_numbers(Path(directory))
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    def _refuse_together(self, reason: str) -> None:
        """Raises `ControlRefused` on every rank if there is a reason on any."""
        if not self._parallel.minimum(int(not reason), self._device.type):
            raise ControlRefused(reason or "another rank refused")

    def _warm_up(self, config: InstanceConfig) -> None:
        """Two small steps in block 0, so that the first request does not wait for lazy set-up."""
        table = np.zeros((1, 1), np.int32)
        prompt = min(self._block_size - 1, 16)
        self.admit(0, np.zeros(max(prompt, 1), np.int32), 1, Sampling(0, 0.0), Stopping(2))
        for start, count in ((0, prompt), (prompt, 1)):
            if count:
                self.execute(
                    StepBatch(
                        step=0,
                        slots=np.zeros(1, np.int32),
                        starts=np.array([start], np.int32),
                        counts=np.array([count], np.int32),
                        tokens=np.zeros(count, np.int32),
                        samples=np.ones(1, np.bool_),
                        block_tables=table,
                        num_decodes=int(count == 1),
                    )
                )
        self.release(0)
        with torch.inference_mode():
            if isinstance(self._model, AdaptedDecoder) and (reason := why_not_alone(self._model)):
                raise LoadError(f"{config.model!r} cannot be computed through transformers: {reason}")
            if not gives_numbers(self._model, self._vocab_size, table):
                check_numbers(Path(config.model))
                raise LoadError(
                    f"{config.model!r}: the model gives NaN or infinity, though its weights are numbers; "
                    f"they may be too large for {config.dtype}: try --dtype float32"
                )
            self._pool.tensor[0].zero_()
