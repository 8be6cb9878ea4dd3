"""The masks of constrained requests, on the rank that samples: where the vocabulary comes from, and the
threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer
from torch import Tensor

from baton.executor.base import Int32Array, Int64Array, StepBatch, StepResult
from baton.executor.sizes import num_threads_of
from baton.grammar.masks import Masks, MatchingError
from baton.grammar.vocabulary import Vocabulary, matching_tokenizer
from baton.model.cpu.sampling import sampling_kernel
from baton.model.sampling.sampler import Sampler
from baton.protocol.config import InstanceConfig
from baton.protocol.sampling import Sampling, Stopping

FAILED = -1
"""In place of a token, on its way between ranks: none could be chosen."""
_WRITTEN_S = 30.0
"""So long the launcher may take to write the vocabulary, which it does once an instance is ready."""


class ConstrainedSampler:
    """The sampler of an executor.  Every rank has one; only rank 0's is given logits."""

    def __init__(self, config: InstanceConfig, vocab_size: int, rank: int) -> None:
        self._sampler = sampler = Sampler(vocab_size, config.max_num_seqs, sampling_kernel())
        self._masks: Masks | None = None
        self._failures: dict[int, str] = {}
        if rank == 0:
            threads = num_threads_of(config)
            computing = threads * config.tensor_parallel_size * config.memory_shares
            self._masks = Masks(
                _tokenizer_of(config.vocabulary, vocab_size),
                sampler.masks,
                sampler.masked,
                vocab_size,
                threads=threads,
                beside=len(os.sched_getaffinity(0)) > computing,
            )

    def admit(
        self, slot: int, tokens: Int32Array, num_prompt: int, sampling: Sampling, stopping: Stopping
    ) -> None:
        self._sampler.admit(slot, tokens, num_prompt, sampling, stopping)
        if self._masks is not None:
            self._masks.admit(slot, tokens[num_prompt:], sampling.constraint, stopping)

    def release(self, slot: int) -> None:
        self._sampler.release(slot)
        if self._masks is not None:
            self._masks.release(slot)

    def begin(self, batch: StepBatch) -> None:
        """The batch is computed now: so long there is time for masks."""
        if self._masks is not None and self._masks.any:
            self._masks.begin(batch.slots[batch.samples])

    def sample(
        self, result: StepResult, logits: Tensor | None, batch: StepBatch, rows: Int64Array | None
    ) -> Int32Array:
        """The tokens of these rows, None: of all, each of one token; `FAILED` where there is none.  Puts
        log-probabilities into `result`.  `logits` None: some numbers."""
        slots, positions = batch.slots, batch.starts + batch.counts
        if rows is not None:
            slots, positions = slots[rows], positions[rows]
        if logits is None:
            return np.empty(len(slots), np.int32)
        masks = self._masks if self._masks is not None and self._masks.any else None
        self._failures = {} if masks is None else masks.failures()
        tokens, found = self._sampler.sample(logits, slots, positions)
        if masks is not None:
            masks.chosen(slots, tokens)
        for place in np.flatnonzero(np.isin(slots, list(self._failures))).tolist() if self._failures else ():
            tokens[place] = FAILED
            row = place if rows is None else int(rows[place])
            result.failed[row] = self._failures[int(slots[place])]
        result.logprobs = {index if rows is None else int(rows[index]): one for index, one in found.items()}
        return tokens

    @staticmethod
    def take(result: StepResult, tokens: Int32Array, rows: Int64Array | None) -> None:
        """What every rank has of it."""
        result.tokens = tokens
        for place in np.flatnonzero(tokens == FAILED).tolist():
            result.failed.setdefault(place if rows is None else int(rows[place]), "")

    def prompt_logprobs_of(self, slot: int) -> int:
        """As the sampler's."""
        return self._sampler.prompt_logprobs_of(slot)

    def close(self) -> None:
        if self._masks is not None:
            self._masks.close()


def _tokenizer_of(path: str, vocab_size: int) -> Callable[[], LLTokenizer]:
    """What makes it when the first constrained request asks for it, in the thread that compiles grammars.

    100,000 tokens take 0.3 s, by which no start shall be longer, and no restart after a kill.
    """

    @cache
    def make() -> LLTokenizer:
        if not path:
            raise MatchingError("this instance was started without a vocabulary")
        give_up = time.monotonic() + _WRITTEN_S
        while not Path(path).exists():
            if time.monotonic() > give_up:
                raise MatchingError(f"the vocabulary was not written within {_WRITTEN_S:g} s")
            time.sleep(0.02)
        found = Vocabulary.decode(Path(path).read_bytes())
        return matching_tokenizer(found.tokens, found.special, vocab_size)

    return make
