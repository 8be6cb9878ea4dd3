"""An executor without a model: its KV cache holds the token ids, its next token is a hash of them.

Theory.  The pool (`pool.py`) has the shape of a real one and holds token ids.  `execute` writes each query
token at its position through the block table, then, for each row that samples, reads back *every* token
of the row through the same table and hashes what it finds.  A wrong block, a stale or reused one, a page that
was never computed: each changes the output, and the output of a correct run is known without running
anything (`simulated_next_token`).  So this executor is an oracle for schedulers, hand-overs and caches, and a
device for benchmarks of everything but the model.

The next token is the hash (`hashes.py`) modulo the vocabulary.  With `speculation` a drafter that knows this
proposes drafts, some right and some wrong.

Only these sampling parameters have an effect: `seed` when `temperature` is above 0 (the salt), `logprobs`,
`prompt_logprobs` (invented), and constraints of a kind of its own (`grammar.py`).
A pooled vector is made of the same hash; with `mean` and `first` it is right only if every token of the
prompt was computed in the slot.  A step takes what `CostModel` says: slept in real time, or only added to
`virtual_seconds`.  Where a decoding instance fetches layer by layer, layers are written one by one, spread
over that time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.drafting.planted import PlantedDrafter
from baton.executor.base import ControlRefused, ExecutorInfo, Int32Array, OnLayers, StepBatch, StepResult
from baton.executor.drafts.runs import NOTHING, Places
from baton.executor.drafts.speculating import Speculator
from baton.executor.simulated.grammar import SimulatedMatchers
from baton.executor.simulated.hashes import RowHashes, finish_one, salt_of, sum_of
from baton.executor.simulated.pool import TokenPool
from baton.executor.simulated.results import InventedRoutes, invented_logprobs, simulated_vector
from baton.protocol.config import CostModel, InstanceConfig, Speculation
from baton.protocol.params.pooling import Pooling, pack_vector
from baton.protocol.params.sampling import Sampling, Stopping
from baton.transfer.base import PoolView

UInt64Array = npt.NDArray[np.uint64]

TILE = "token-ids"
_LATE = -2


class WrongBlock(RuntimeError):
    """A step refers to a block outside the pool, or to a slot that was never admitted."""


class SimulatedExecutor:
    """An `Executor` whose pool holds token ids."""

    one_step_late = False

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        cost: CostModel | None = None,
        real_time: bool = False,
        pool: TokenPool | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`pool` None: one of `num_blocks`, as small as possible, that other processes cannot read."""
        if vocab_size < 1:
            raise ValueError("vocab_size: the simulated executor needs at least one token; set it above 0")
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, not {num_blocks}, {block_size}")
        self._tokens = TokenPool(num_blocks, block_size) if pool is None else pool
        self._pool = self._tokens.view
        self.info = ExecutorInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            tile=TILE,
            block_bytes=self._pool.block_bytes,
            vocab_size=vocab_size,
            detail=f"simulated, {num_blocks} blocks of {block_size}",
        )
        self.virtual_seconds = 0.0
        """What all steps so far took, by the cost model."""
        self._cost = cost or CostModel()
        self._real_time = real_time
        self._hashes = RowHashes(self._tokens, block_size)
        self._admitted = np.zeros(max_num_seqs, np.bool_)
        self._salts = np.zeros(max_num_seqs, np.uint64)
        self._wanted_logprobs: dict[int, int] = {}
        self._wanted_prompt_logprobs: dict[int, int] = {}
        self._routes = InventedRoutes()
        self._matchers = SimulatedMatchers(vocab_size)
        self._pooling: dict[int, Pooling] = {}
        self._seen: dict[int, int] = {}
        """Of slots that pool: tokens of the prompt that were computed."""
        self._speculator: Speculator | None = None
        if speculation is not None:  # (every rank has the same drafter, and all propose the same)
            most, right = speculation.num_speculative_tokens, speculation.planted_right
            drafter = PlantedDrafter(
                self._following, most=most, right=right, vocab_size=vocab_size, varied=True
            )
            self._speculator = Speculator(drafter, most, vocab_size)

    @classmethod
    def from_config(cls, config: InstanceConfig, rank: int = 0, *, shared: bool = False) -> SimulatedExecutor:
        """Sizes the pool as the configuration says; else so that every slot can be full.

        `shared`: in memory that other processes can read.
        """
        size = config.tensor_parallel_size

        def make(num_blocks: int) -> TokenPool:
            return TokenPool(
                num_blocks,
                config.block_size,
                num_layers=config.simulated_layers,
                total_kv_heads=config.simulated_kv_heads,
                tile_bytes=config.simulated_tile_bytes,
                rank=rank,
                size=size,
                shared=shared and num_blocks > 0,
            )

        num_blocks = config.num_blocks
        if num_blocks is None and config.kv_cache_memory_bytes is not None:
            num_blocks = config.kv_cache_memory_bytes // make(1).view.block_bytes
        if num_blocks is None:
            num_blocks = config.max_num_seqs * math.ceil(config.max_model_len / config.block_size)
        if num_blocks < 1:
            raise ValueError(
                f"num_blocks must be at least 1, not {num_blocks}; give more memory for the KV cache"
            )
        return cls(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            vocab_size=config.vocab_size,
            cost=config.simulated_cost,
            real_time=config.simulated_real_time,
            pool=make(num_blocks),
            speculation=config.speculation,
        )

    @property
    def pool(self) -> PoolView:
        return self._pool

    def tokens_in(self, block: int) -> list[int]:
        """What a block of this rank holds, by position; -1 where nothing was written."""
        return self._tokens.tokens_in(block)

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        self.release(slot)
        self._matchers.admit(slot, tokens[num_prompt:], sampling.constraint, stopping)
        if sampling.logprobs is not None:
            self._wanted_logprobs[slot] = sampling.logprobs
        if sampling.prompt_logprobs is not None:
            self._wanted_prompt_logprobs[slot] = sampling.prompt_logprobs
        self._routes.admit(slot, sampling)
        if sampling.pooling:
            self._pooling[slot], self._seen[slot] = sampling.pooling, 0
        self._salts[slot] = salt_of(sampling.seed if sampling.temperature > 0 else None)
        self._admitted[slot] = True
        if self._speculator is not None:
            self._speculator.admit(slot, tokens, num_prompt, sampling, stopping, salt)

    def release(self, slot: int) -> None:
        self._wanted_logprobs.pop(slot, None)
        self._wanted_prompt_logprobs.pop(slot, None)
        self._pooling.pop(slot, None)
        self._matchers.release(slot)
        self._admitted[slot] = False
        if self._speculator is not None:
            self._speculator.release(slot)

    def execute(self, batch: StepBatch, on_layers: OnLayers | None = None) -> StepResult:
        """Raises `WrongBlock` for a slot or a block that does not exist."""
        return self._run(batch, on_layers, time.perf_counter())

    def _run(self, batch: StepBatch, on_layers: OnLayers | None, began: float) -> StepResult:
        if np.count_nonzero(self._admitted.take(batch.slots)) < len(batch.slots):
            unknown = batch.slots[~self._admitted[batch.slots]].tolist()
            raise WrongBlock(f"step {batch.step} runs slots {unknown}, which were not admitted")
        lengths: Int32Array = batch.starts + batch.counts
        in_order = lengths.tolist()
        tables = self._checked_tables(batch, lengths, max(in_order))
        cost = self._cost_of(batch, sum(in_order))
        self._write(batch, tables, on_layers, began, cost)
        result = self._sample(batch, tables, lengths)
        self._prompt_logprobs(batch, tables, lengths, result)
        self._routes.add(batch, result)
        if batch.pooled:
            self._pool_rows(batch, tables, lengths, result)
        if self._speculator is not None:
            self._speculator.draft(batch, result)
        self.virtual_seconds += cost
        self._sleep_until(began + cost)
        return result

    def check_weights(self, directory: str) -> str:
        self.update_weights(directory)
        return ""

    def update_weights(self, directory: str) -> None:
        """There are no weights: the directory must exist, and tokens stay what they are."""
        if not os.path.isdir(directory):
            raise ControlRefused(f"{directory!r} is no directory")

    def release_weights(self) -> None:
        pass

    def start_profile(self, directory: str) -> None:
        raise ControlRefused("profiles are not supported by the simulated executor; serve with the torch one")

    def stop_profile(self) -> None:
        raise ControlRefused("profiles are not supported by the simulated executor; serve with the torch one")

    def close(self) -> None:
        self._admitted[:] = False
        self._tokens.close()

    def _sleep_until(self, moment: float) -> None:
        if self._real_time and (left := moment - time.perf_counter()) > 0.0:
            time.sleep(left)

    def _checked_tables(self, batch: StepBatch, lengths: Int32Array, longest: int) -> Int32Array:
        """[R, W] the block tables as wide as needed, block 0 where they mean nothing."""
        size = self.info.block_size
        width = -(-longest // size)
        if width > batch.block_tables.shape[1]:
            raise WrongBlock(f"step {batch.step} needs {width} blocks, its tables have fewer columns")
        tables: Int32Array = batch.block_tables[:, :width]
        if len(lengths) > 1:  # (a row alone uses all columns)
            means = np.arange(0, width * size, size, dtype=np.int32) < lengths[:, None]
            tables = np.where(means, tables, np.int32(0))
        # (As they are unsigned, those below 0 are large.)
        if np.maximum.reduce(tables.view(np.uint32), axis=None) >= self.info.num_blocks:
            bad = tables[(tables < 0) | (tables >= self.info.num_blocks)].tolist()
            raise WrongBlock(f"step {batch.step} names blocks {bad} of a pool of {self.info.num_blocks}")
        return tables

    def _write(
        self, batch: StepBatch, tables: Int32Array, on_layers: OnLayers | None, began: float, cost: float
    ) -> None:
        """Puts the query tokens into their cells; layer by layer, over the time of the step, if asked."""
        size = self.info.block_size
        if len(batch.slots) == 1:
            start = int(batch.starts[0])
            positions = np.arange(start, start + len(batch.tokens))
            blocks = tables[0].take(positions // size)
        elif batch.num_decodes == len(batch.slots):
            positions = batch.starts.astype(np.int64)
            blocks = tables[np.arange(len(positions)), positions // size]
        else:
            rows = np.repeat(np.arange(len(batch.slots)), batch.counts)
            firsts = batch.starts - (np.cumsum(batch.counts) - batch.counts)
            positions = np.arange(len(batch.tokens)) + firsts[rows]
            blocks = tables[rows, positions // size]
        places = positions % size
        if on_layers is None:
            self._tokens.write(blocks, places, batch.tokens)
            return
        count = self._tokens.num_layers
        for layer in range(count):
            self._tokens.write(blocks, places, batch.tokens, layer)
            self._sleep_until(began + cost * (layer + 1) / count)
            on_layers(layer + 1)

    def _sample(self, batch: StepBatch, tables: Int32Array, lengths: Int32Array) -> StepResult:
        if batch.drafts is not None:
            return self._sample_places(batch, tables)
        rows = batch.samples.nonzero()[0]
        if len(rows) < len(lengths):
            tables, lengths = tables[rows], lengths[rows]
        slots = batch.slots[rows]
        hashes = self._hashes.of(tables, lengths, self._salts[slots])
        result = StepResult(tokens=(hashes % np.uint64(self.info.vocab_size)).astype(np.int32))
        result.late = rows[self._matchers.choose(slots, result.tokens, hashes)].tolist()
        self._add_logprobs(result, rows, slots, hashes)
        return result

    def _sample_places(self, batch: StepBatch, tables: Int32Array) -> StepResult:
        """The same, in waves, of a step with drafts."""
        places = Places(batch, batch.samples.nonzero()[0])
        tokens = np.full(len(places.positions), NOTHING, np.int32)
        result = StepResult(tokens)
        for number, wave in enumerate(places.waves()):
            hashes = self._hashes.of(tables[wave.rows], wave.positions, self._salts[wave.slots])
            wave.tokens = (hashes % np.uint64(self.info.vocab_size)).astype(np.int32)
            late = self._matchers.choose(wave.slots, wave.tokens, hashes, again=number > 0)
            result.late += wave.rows[late].tolist()
            wave.tokens[late] = _LATE
            tokens[wave.places] = wave.tokens
            self._add_logprobs(result, wave.rows, wave.slots, hashes)
        result.runs, result.tokens = places.runs(tokens), tokens[tokens != NOTHING]
        return result

    def _following(self, slot: int, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens that will follow these."""
        found: list[int] = []
        matcher, salt = self._matchers.copy(slot), int(self._salts[slot])
        for _ in range(count):
            seen = finish_one(sum_of([*tokens, *found]), len(tokens) + len(found), salt)
            found.append(seen % self.info.vocab_size if matcher is None else matcher.choose(seen))
            if matcher is not None:
                matcher.read(found[-1])
        return found

    def _add_logprobs(
        self, result: StepResult, rows: npt.NDArray[np.int64], slots: Int32Array, hashes: UInt64Array
    ) -> None:
        if not self._wanted_logprobs:
            return
        for row, slot, seen in zip(rows.tolist(), slots.tolist(), hashes.tolist(), strict=True):
            k = self._wanted_logprobs.get(slot)
            if k is not None and row not in result.late:
                found = invented_logprobs(seen, None, k, self.info.vocab_size)
                result.logprobs.setdefault(row, []).append(found)

    def _prompt_logprobs(
        self, batch: StepBatch, tables: Int32Array, lengths: Int32Array, result: StepResult
    ) -> None:
        for row, targets in batch.prompt_logprob_targets.items():
            k = self._wanted_prompt_logprobs.get(int(batch.slots[row]), 0)
            first = int(batch.starts[row])
            known = np.arange(first + 1, first + 1 + len(targets), dtype=np.int32)
            hashes = self._hashes.after_each(tables[row], known, int(lengths[row]), salt_of(None))
            result.prompt_logprobs[row] = [
                invented_logprobs(seen, target, k, self.info.vocab_size)
                for seen, target in zip(hashes.tolist(), targets.tolist(), strict=True)
            ]

    def _pool_rows(
        self, batch: StepBatch, tables: Int32Array, lengths: Int32Array, result: StepResult
    ) -> None:
        for row, ends in batch.pooled.items():
            slot = int(batch.slots[row])
            pooling = self._pooling[slot]
            self._seen[slot] += int(batch.counts[row])
            if not ends:
                continue
            one = slice(row, row + 1)
            seen = int(self._hashes.of(tables[one], lengths[one], self._salts[batch.slots[one]])[0])
            if pooling.whole:  # what was not computed is not in the sum
                seen ^= int(lengths[row]) - self._seen[slot]
            result.pooled[row] = pack_vector(simulated_vector(seen, pooling))

    def _cost_of(self, batch: StepBatch, num_kv_tokens: int) -> float:
        """Seconds."""
        cost = self._cost
        return (
            cost.base
            + cost.per_prefill_token * (len(batch.tokens) - batch.first_prompt)
            + cost.per_decode_sequence * batch.first_prompt
            + cost.per_kv_token * num_kv_tokens
        )


def simulated_next_token(tokens: Sequence[int] | Int32Array, vocab_size: int, seed: int | None = None) -> int:
    """The oracle: what the executor samples after `tokens` (prompt and generated, at least one).

    `seed` is the request's where its temperature is above 0, else None.
    """
    return finish_one(sum_of(tokens), len(tokens), salt_of(seed)) % vocab_size


def simulated_tokens(
    prompt: Sequence[int] | Int32Array, count: int, vocab_size: int, seed: int | None = None
) -> list[int]:
    """The oracle's answer: the `count` tokens that follow `prompt`."""
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        tokens.append(simulated_next_token(tokens, vocab_size, seed))
    return tokens[len(prompt) :]
