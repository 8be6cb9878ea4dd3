"""The masks of constrained requests, on the rank that samples: where the vocabulary comes from, and the
threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from llguidance import LLTokenizer
from torch import Tensor

from baton.executor.base import Int32Array, Int64Array, StepBatch, StepResult
from baton.executor.devices.kernels import device_sampling
from baton.executor.devices.sizes import num_threads_of
from baton.executor.drafts.runs import NOTHING, Places, drafts_of
from baton.grammar.masks import Masks
from baton.grammar.vocabulary import Vocabulary, matching_tokenizer
from baton.ipc.processes.cores import usable_threads
from baton.model.cpu.sampling import sampling_kernel
from baton.model.sampling.sampler import Sampler, SlotSampling
from baton.protocol.config import InstanceConfig
from baton.protocol.params.sampling import NOTHING_LEFT, Sampling, Stopping, TokenLogprobs

FAILED, LATE = -1, -2
"""In place of a token, on its way between ranks: none could be chosen; none can be chosen yet."""
_WRITTEN_S = 30.0
"""So long the launcher may take to write the vocabulary, which it does once an instance is ready."""


class ConstrainedSampler:
    """The sampler of an executor.  Every rank has one; only rank 0's is given logits."""

    def __init__(
        self, config: InstanceConfig, vocab_size: int, rank: int, device: torch.device | None = None
    ) -> None:
        """`device`: of the logits; None: main memory."""
        on_device = None if device is None else device_sampling(device)
        self._sampler = sampler = Sampler(vocab_size, config.max_num_seqs, sampling_kernel(), on_device)
        self._masks: Masks | None = None
        self._together = False
        """Whether all positions of this step with drafts are sampled together, masks included."""
        if rank == 0:
            threads = num_threads_of(config)
            computing = threads * config.tensor_parallel_size * config.memory_shares
            self._masks = Masks(
                _tokenizer_of(config.vocabulary, vocab_size),
                sampler.masks,
                sampler.masked,
                vocab_size,
                threads=threads,
                beside=usable_threads() > computing,
            )

    @property
    def on_device(self) -> SlotSampling | None:
        """The sampler's."""
        return self._sampler.on_device

    @property
    def masks(self) -> Masks | None:
        """On rank 0."""
        return self._masks

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
        self._together = False
        if self._masks is None or not self._masks.any:
            return
        slots, drafts = batch.slots[batch.samples], None
        if batch.drafts is not None and self._sampler.masks_together(slots):
            drafts = drafts_of(batch)
        self._together = self._masks.begin(slots, drafts)

    def sample(
        self, result: StepResult, logits: Tensor | None, batch: StepBatch, rows: Int64Array | None
    ) -> Int32Array:
        """The tokens of these rows, None: of all, each of one token; `FAILED` or `LATE` where there is none.
        Puts log-probabilities into `result`.  `logits` None: some numbers."""
        slots, positions = batch.slots, batch.starts + batch.counts
        if rows is not None:
            slots, positions = slots[rows], positions[rows]
        if logits is None:
            return np.empty(len(slots), np.int32)
        tokens, found, failed = self._choose(logits, slots, positions)
        for place in np.flatnonzero(np.isin(slots, list(failed))).tolist() if failed else ():
            tokens[place] = FAILED
            row = place if rows is None else int(rows[place])
            result.failed[row] = failed[int(slots[place])]
        result.logprobs = {index if rows is None else int(rows[index]): [one] for index, one in found.items()}
        return tokens

    def sample_places(self, result: StepResult, logits: Tensor | None, places: Places) -> Int32Array:
        """As `sample` at the positions of a step with drafts, `logits` [P, vocab]; `NOTHING` behind the
        runs."""
        count = len(places.positions)
        if logits is None:
            return np.empty(count, np.int32)
        logprobs = result.logprobs
        together = self._together
        if together or not self._sampler.remembers(places.slots):
            masks = self._masks if together else None
            failed, late = ({}, []) if masks is None else masks.ready()
            above = None if masks is None else masks.ahead
            every, found = self._sampler.sample(logits, places.slot_of, places.positions, above)
            sampled = places.runs_alone(every)
            if masks is not None:
                self._within(masks, result, sampled, places, failed, late)
            for place, one in sorted(found.items()):
                if sampled[place] not in (NOTHING, LATE):  # (a row that is late has no token)
                    logprobs.setdefault(int(places.rows[places.row_of[place]]), []).append(one)
            return np.array(sampled, np.int32)
        tokens = np.full(count, NOTHING, np.int32)
        for number, wave in enumerate(places.waves()):
            if number and self._masks is not None and self._masks.any:
                self._masks.begin(wave.slots)
            first, alone = wave.places[0], len(wave.places) == 1
            of = logits[first : first + 1] if alone else logits[wave.places]
            wave.tokens, found, failed = self._choose(of, wave.slots, wave.positions)
            for index in np.flatnonzero(np.isin(wave.slots, list(failed))).tolist() if failed else ():
                wave.tokens[index] = FAILED
                result.failed[int(wave.rows[index])] = failed[int(wave.slots[index])]
            for index, one in found.items():
                logprobs.setdefault(int(wave.rows[index]), []).append(one)
            # (A run ends before a token that is late: the next step computes the one before again.)
            for place, token in zip(wave.places, wave.tokens.tolist(), strict=True):
                if token != LATE or number == 0:
                    tokens[place] = token
        return tokens

    @staticmethod
    def _within(
        masks: Masks,
        result: StepResult,
        sampled: list[int],
        places: Places,
        failed: dict[int, str],
        late: list[int],
    ) -> None:
        """Runs that were sampled together, of constrained rows: ends them where there is no mask any more
        (the next step goes on there), and where no token could be chosen."""
        for row, slot, (first, end) in zip(places.rows, places.slots.tolist(), places.spans(), strict=True):
            filled = masks.filled_ahead(slot)
            if filled is None:
                continue
            if slot in failed or slot in late:
                sampled[first:end] = [NOTHING] * (end - first)
                sampled[first] = FAILED if slot in failed else LATE
                if slot in failed:
                    result.failed[int(row)] = failed[slot]
                continue
            run = [token for token in sampled[first : first + filled] if token != NOTHING]
            right, why = masks.chosen_ahead(slot, run)
            sampled[first + right : end] = [NOTHING] * (end - first - right)
            if right < len(run):
                sampled[first + right] = FAILED
                result.failed[int(row)] = why

    def _choose(
        self, logits: Tensor, slots: Int32Array, positions: Int32Array
    ) -> tuple[Int32Array, dict[int, TokenLogprobs], dict[int, str]]:
        """Of different slots: tokens, log-probabilities by index, and which slots failed.  What is late is
        `LATE`."""
        masks = self._masks if self._masks is not None and self._masks.any else None
        failed: dict[int, str] = {}
        if masks is None:
            tokens, found = self._sampler.sample(logits, slots, positions)
        else:
            tokens, found, failed = self._constrained(masks, logits, slots, positions)
        if self._sampler.dead:
            failed = dict.fromkeys(self._sampler.dead, NOTHING_LEFT) | failed
        return tokens, found, failed

    def _constrained(
        self, masks: Masks, logits: Tensor, slots: Int32Array, positions: Int32Array
    ) -> tuple[Int32Array, dict[int, TokenLogprobs], dict[int, str]]:
        """As the sampler's; then which slots failed.  What is late is not sampled."""
        failed, late = masks.ready()
        if not late:
            tokens, found = self._sampler.sample(logits, slots, positions)
            return tokens, found, failed | masks.chosen(slots, tokens)
        there = np.flatnonzero(~np.isin(slots, late))
        tokens = np.full(len(slots), LATE, np.int32)
        found = {}
        if len(there):
            chosen = torch.from_numpy(there).to(logits.device)
            tokens[there], of = self._sampler.sample(logits[chosen], slots[there], positions[there])
            found = {int(there[index]): one for index, one in of.items()}
            failed |= masks.chosen(slots[there], tokens[there])
        return tokens, found, failed

    @staticmethod
    def take(
        result: StepResult, tokens: Int32Array, rows: Int64Array | None, places: Places | None = None
    ) -> None:
        """What every rank has of it: of `sample`, or with `places` of `sample_places`."""
        runs = None if places is None else places.runs(tokens)
        if runs is not None:
            tokens = tokens[tokens != NOTHING]
        result.runs, result.tokens = runs, tokens
        if not len(tokens) or tokens.min() >= 0:
            return
        if places is not None and runs is not None:
            rows = places.rows[np.repeat(np.arange(len(places.rows)), runs)]
        for place in np.flatnonzero(tokens < 0).tolist():
            row = place if rows is None else int(rows[place])
            if tokens[place] == FAILED:
                result.failed.setdefault(row, "")
            else:
                result.late.append(row)

    def special(self, slots: Int32Array) -> bool:
        """As the sampler's."""
        return self._sampler.special(slots)

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
            raise OSError("this instance was started without a vocabulary")
        give_up = time.monotonic() + _WRITTEN_S
        while not Path(path).exists():
            if time.monotonic() > give_up:
                raise OSError(f"the vocabulary was not written within {_WRITTEN_S:g} s")
            time.sleep(0.02)
        found = Vocabulary.decode(Path(path).read_bytes())
        return matching_tokenizer(found.tokens, found.special, vocab_size)

    return make
