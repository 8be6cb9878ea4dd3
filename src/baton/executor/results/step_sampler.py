"""What the logits of a step become, on all ranks: tokens, and the drafts for the next step.

Rank 0 samples and drafts, and broadcasts both together, in an array whose size all ranks know.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from baton.drafting.base import Drafter
from baton.drafting.making import make_drafter
from baton.executor.base import Int32Array, Int64Array, StepBatch, StepResult
from baton.executor.drafts.runs import Places
from baton.executor.drafts.speculating import Speculator
from baton.executor.results.constraints import ConstrainedSampler
from baton.grammar.masks import Masks
from baton.model.cpu.ngram import ngram_kernel
from baton.model.cpu.suffix import suffix_kernel
from baton.model.layers.parallel import TensorParallel
from baton.model.sampling.sampler import SlotSampling
from baton.protocol.config import InstanceConfig
from baton.protocol.params.sampling import Sampling, Stopping


class StepSampler:
    """The sampler, and the drafter if there is one, of one rank."""

    def __init__(
        self,
        config: InstanceConfig,
        vocab_size: int,
        parallel: TensorParallel,
        device: torch.device,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter`: on rank 0, if it drafts with a model, or a layer of the one that serves."""
        self._parallel = parallel
        self._device = device
        self._sampler = ConstrainedSampler(config, vocab_size, parallel.rank, device)
        self.speculator = speculator_of(config, vocab_size, self._sampler.masks, drafter)
        """None: no drafts."""
        self.reads = config.speculation is not None and config.speculation.method == "mtp"
        """Whether drafts come of hidden states: then steps keep those of all their tokens."""
        self._began = self._computed = self._over = 0.0
        """Of the last step: when it began, had tokens, and had drafts for the next one."""
        self._size = 0
        """Its tokens, 0: it does not count."""

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        self._sampler.admit(slot, tokens, num_prompt, sampling, stopping)
        if self.speculator is not None:
            self.speculator.admit(slot, tokens, num_prompt, sampling, stopping, salt)

    def release(self, slot: int) -> None:
        self._sampler.release(slot)
        if self.speculator is not None:
            self.speculator.release(slot)

    def begin(self, batch: StepBatch) -> None:
        """The batch is computed now."""
        if self.speculator is not None:
            self._measure(self.speculator)
        self._sampler.begin(batch)

    def _measure(self, speculator: Speculator) -> None:
        """Tells the drafter what the last step took, with what the worker did between it and this one: drafts
        make more of that, too.  (Where that is longer than the step itself, there was nothing to do.)"""
        now = time.perf_counter()
        if self._size:
            took, between = self._computed - self._began, now - self._over
            speculator.took(self._size, took + between if between < took else took)
            self._size = 0
        self._began = now

    def read(self, batch: StepBatch, hidden: Tensor) -> None:
        """What the layers gave, of all query tokens if `reads`; before the batch is sampled."""
        if self.reads and self.speculator is not None:
            self.speculator.read(batch, hidden)

    def done(self) -> None:
        """The batch is over."""
        if self.reads and self.speculator is not None:
            self.speculator.done()

    def sample(
        self, result: StepResult, logits: Tensor | None, batch: StepBatch, rows: Int64Array | None
    ) -> None:
        """Samples these rows, None: all, each of one token.  `logits` on rank 0 only."""
        tokens = self._sampler.sample(result, logits, batch, rows)
        self._finish(result, tokens, batch, rows, None)

    def sample_some(
        self, result: StepResult, logits: Tensor | None, batch: StepBatch, places: Places | None
    ) -> None:
        """The same of the rows that sample, if there are any; with `places` at those of a step with drafts.
        `logits` [n, vocab] are in the order of `sampled_tokens`."""
        rows = np.flatnonzero(batch.samples)
        if places is not None:
            tokens = self._sampler.sample_places(result, logits, places)
            self._finish(result, tokens, batch, None, places)
        elif len(rows):
            self.sample(result, logits, batch, rows)

    @property
    def on_device(self) -> SlotSampling | None:
        """The sampler's."""
        return self._sampler.on_device

    def special(self, slots: Int32Array) -> bool:
        """As the sampler's."""
        return self._sampler.special(slots)

    def prompt_logprobs_of(self, slot: int) -> int:
        """As the sampler's."""
        return self._sampler.prompt_logprobs_of(slot)

    def close(self) -> None:
        self._sampler.close()

    def _finish(
        self,
        result: StepResult,
        tokens: Int32Array,
        batch: StepBatch,
        rows: Int64Array | None,
        places: Places | None,
    ) -> None:
        if self.speculator is None:
            self._sampler.take(result, self._shared(tokens), rows, places)
            return
        if self._parallel.rank == 0:
            self._sampler.take(result, tokens, rows, places)
            self._computed = time.perf_counter()
            self.speculator.draft(batch, result)
            self._over = time.perf_counter()
            self._size = len(batch.tokens) if batch.first_prompt == len(batch.slots) else 0
        if self._parallel.size > 1:
            self._share(self.speculator, result, tokens, batch, rows, places)

    def _share(
        self,
        speculator: Speculator,
        result: StepResult,
        tokens: Int32Array,
        batch: StepBatch,
        rows: Int64Array | None,
        places: Places | None,
    ) -> None:
        """Gives every rank what rank 0 has sampled and drafted."""
        if self._parallel.rank == 0:
            drafts = speculator.packed(batch, result)
            self._shared(np.concatenate((tokens, drafts.reshape(-1))))
            return
        size = int(batch.samples.sum()), speculator.most
        shared = self._shared(np.concatenate((tokens, np.empty(size[0] * size[1], np.int32))))
        self._sampler.take(result, shared[: len(tokens)], rows, places)
        speculator.unpack(batch, result, shared[len(tokens) :].reshape(size))

    def _shared(self, numbers: Int32Array) -> Int32Array:
        """Rank 0's, on every rank."""
        if self._parallel.size == 1:
            return numbers
        shared = self._parallel.broadcast(torch.from_numpy(numbers).to(self._device))
        found: Int32Array = shared.cpu().numpy()
        return found


def speculator_of(
    config: InstanceConfig, vocab_size: int, masks: Masks | None, drafter: Drafter | None = None
) -> Speculator | None:
    """None: the configuration wants no drafts.  `masks`: on rank 0, which drafts.  `drafter`: there, of a
    draft model.  (Who plants drafts puts a drafter in the place of None.)"""
    wanted = config.speculation
    if wanted is None:
        return None
    if masks is not None and wanted.method not in ("planted", "draft", "mtp"):
        drafter = make_drafter(
            wanted,
            max_num_seqs=config.max_num_seqs,
            vocab_size=vocab_size,
            ngram=ngram_kernel(),
            suffix=suffix_kernel,
            forced=masks.forced,
            constrained=lambda: masks.any,
        )
    return Speculator(drafter, wanted.num_speculative_tokens, vocab_size)
