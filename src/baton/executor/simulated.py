"""An executor without a model: its KV cache holds the token ids, its next token is a hash of them.

Theory.  The pool (`simulated_pool.py`) has the shape of a real one and holds token ids.  `execute` writes
each query token at its position through the block table, then, for each row that samples, reads back
*every* token of the row through the same table and hashes what it finds.  A wrong block, a stale or reused
one, a page that was never computed: each changes the output, and the output of a correct run is known
without running anything (`simulated_next_token`).  So this executor is an oracle for schedulers, hand-overs
and caches, and a device for benchmarks of everything but the model.

The hash of n tokens is the sum over i of (token_i + 1) * P^i mod 2^64, with the number n and the salt
mixed in and finished as in splitmix64; the next token is that modulo the vocabulary.  A sum can be computed
for all rows at once.  It is computed from scratch each step: no state of a step saves the next one from
reading its blocks.

Only these sampling parameters have an effect: `seed` when `temperature` is above 0 (the salt), `logprobs`,
`prompt_logprobs` (invented), and constraints of a kind of its own (`simulated_grammar.py`).
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

from baton.executor.base import ControlRefused, ExecutorInfo, Int32Array, OnLayers, StepBatch, StepResult
from baton.executor.simulated_grammar import SimulatedMatchers
from baton.executor.simulated_pool import TokenPool
from baton.executor.simulated_results import InventedRoutes, invented_logprobs, powers, simulated_vector
from baton.model.sampling.counter_random import mix
from baton.protocol.config import CostModel, InstanceConfig
from baton.protocol.pooling import Pooling, pack_vector
from baton.protocol.sampling import Sampling, Stopping
from baton.protocol.sampling_params import mix_one
from baton.transfer.base import PoolView

UInt64Array = npt.NDArray[np.uint64]

TILE = "token-ids"
_LENGTH_MIX = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
_CHUNK_CELLS = 1 << 18
"""Rows are read back in groups of so many cells, so that long contexts need no large temporaries."""
_FEW_ROWS, _SHORT = 8, 256
"""So few rows, all of them so short, are hashed one by one: an operation on arrays costs more than that."""


class WrongBlock(RuntimeError):
    """A step refers to a block outside the pool, or to a slot that was never admitted."""


class SimulatedExecutor:
    """An `Executor` whose pool holds token ids."""

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
        self._weights = np.empty(0, np.uint64)
        self._positions = np.empty(0, np.int64)
        self._short: dict[int, UInt64Array] = {}
        """By length: the weights of the cells of as many blocks as it needs, 0 past it."""
        self._admitted = np.zeros(max_num_seqs, np.bool_)
        self._salts = np.zeros(max_num_seqs, np.uint64)
        self._wanted_logprobs: dict[int, int] = {}
        self._wanted_prompt_logprobs: dict[int, int] = {}
        self._routes = InventedRoutes()
        self._matchers = SimulatedMatchers(vocab_size)
        self._pooling: dict[int, Pooling] = {}
        self._seen: dict[int, int] = {}
        """Of slots that pool: tokens of the prompt that were computed."""

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
        )

    @property
    def pool(self) -> PoolView:
        return self._pool

    def tokens_in(self, block: int) -> list[int]:
        """What a block of this rank holds, by position; -1 where nothing was written."""
        return self._tokens.tokens_in(block)

    def admit(
        self, slot: int, tokens: Int32Array, num_prompt: int, sampling: Sampling, stopping: Stopping
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
        self._salts[slot] = _salt(sampling.seed if sampling.temperature > 0 else None)
        self._admitted[slot] = True

    def release(self, slot: int) -> None:
        self._wanted_logprobs.pop(slot, None)
        self._wanted_prompt_logprobs.pop(slot, None)
        self._pooling.pop(slot, None)
        self._matchers.release(slot)
        self._admitted[slot] = False

    def execute(self, batch: StepBatch, on_layers: OnLayers | None = None) -> StepResult:
        """Raises `WrongBlock` for a slot or a block that does not exist."""
        began = time.perf_counter()
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
        rows = batch.samples.nonzero()[0]
        if len(rows) < len(lengths):
            tables, lengths = tables[rows], lengths[rows]
        salts = self._salts[batch.slots[rows]]
        if len(rows) <= _FEW_ROWS and tables.shape[1] * self.info.block_size <= _SHORT:
            hashes = self._few_hashes(tables, lengths, salts)
        else:
            hashes = self._hashes(tables, lengths, salts)
        result = StepResult(tokens=(hashes % np.uint64(self.info.vocab_size)).astype(np.int32))
        self._matchers.choose(result, batch, rows, hashes)
        if self._wanted_logprobs:
            for row, seen in zip(rows.tolist(), hashes.tolist(), strict=True):
                k = self._wanted_logprobs.get(int(batch.slots[row]))
                if k is not None and row not in result.late:
                    result.logprobs[row] = invented_logprobs(seen, None, k, self.info.vocab_size)
        return result

    def _hashes(self, tables: Int32Array, lengths: Int32Array, salts: UInt64Array) -> UInt64Array:
        """[R] of what the rows' blocks hold."""
        hashes = np.empty(len(lengths), np.uint64)
        step = max(1, _CHUNK_CELLS // (tables.shape[1] * self.info.block_size))
        for first in range(0, len(lengths), step):
            part = slice(first, first + step)
            sums = np.add.reduce(self._read_back(tables[part], lengths[part]), axis=1)
            hashes[part] = _finish(sums, lengths[part], salts[part])
        return hashes

    def _few_hashes(self, tables: Int32Array, lengths: Int32Array, salts: UInt64Array) -> UInt64Array:
        """The same."""
        if not len(lengths):
            return np.empty(0, np.uint64)
        cells = self._tokens.read(tables, lengths).astype(np.uint64)
        hashes = []
        for row, length, salt in zip(cells, lengths.tolist(), salts.tolist(), strict=True):
            weights = self._short.get(length)
            if weights is None:
                weights = self._short[length] = self._weights_of(length)
            total = int(row[: len(weights)].dot(weights))
            hashes.append(mix_one((total + length * _LENGTH_MIX) & _MASK ^ salt))
        return np.array(hashes, np.uint64)

    def _weights_of(self, length: int) -> UInt64Array:
        num_blocks = -(-length // self.info.block_size)
        width = num_blocks * len(self._tokens.order)
        if width > len(self._weights):
            self._extend(2 * num_blocks)
        return np.where(self._positions[:width] < length, self._weights[:width], np.uint64(0))

    def _read_back(self, tables: Int32Array, lengths: Int32Array) -> UInt64Array:
        """[R, cells] the terms of the hash, in the order of cells; 0 past each row's length."""
        cells = self._tokens.read(tables, lengths)
        width = cells.shape[1]
        if width > len(self._weights):
            self._extend(2 * tables.shape[1])
        terms = cells * self._weights[:width]
        terms[self._positions[:width] >= lengths[:, None]] = 0
        return terms

    def _extend(self, num_blocks: int) -> None:
        """Positions and weights of the cells of tables so wide."""
        size = self.info.block_size
        order = self._tokens.order
        self._positions = (np.arange(num_blocks)[:, None] * size + order).reshape(-1)
        self._weights = powers(num_blocks * size)[np.minimum(self._positions, num_blocks * size - 1)]

    def _prompt_logprobs(
        self, batch: StepBatch, tables: Int32Array, lengths: Int32Array, result: StepResult
    ) -> None:
        for row, targets in batch.prompt_logprob_targets.items():
            k = self._wanted_prompt_logprobs.get(int(batch.slots[row]), 0)
            terms = self._read_back(tables[row : row + 1], lengths[row : row + 1])[0]
            in_order = np.argsort(self._positions[: len(terms)], kind="stable")
            sums = np.cumsum(terms[in_order])
            first = int(batch.starts[row])
            known = np.arange(first + 1, first + 1 + len(targets), dtype=np.int32)
            hashes = _finish(sums[known - 1], known, np.uint64(_salt(None)))
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
            seen = int(self._hashes(tables[one], lengths[one], self._salts[batch.slots[one]])[0])
            if pooling.whole:  # what was not computed is not in the sum
                seen ^= int(lengths[row]) - self._seen[slot]
            result.pooled[row] = pack_vector(simulated_vector(seen, pooling))

    def _cost_of(self, batch: StepBatch, num_kv_tokens: int) -> float:
        """Seconds."""
        cost = self._cost
        return (
            cost.base
            + cost.per_prefill_token * (len(batch.tokens) - batch.num_decodes)
            + cost.per_decode_sequence * batch.num_decodes
            + cost.per_kv_token * num_kv_tokens
        )


def simulated_next_token(tokens: Sequence[int] | Int32Array, vocab_size: int, seed: int | None = None) -> int:
    """The oracle: what the executor samples after `tokens` (prompt and generated, at least one).

    `seed` is the request's where its temperature is above 0, else None.
    """
    row = np.asarray(tokens, np.int64)
    terms = (row + 1).astype(np.uint64) * powers(len(row))
    length = np.array([len(row)], np.int32)
    seen = _finish(terms.sum(dtype=np.uint64, keepdims=True), length, np.uint64(_salt(seed)))
    return int(seen[0]) % vocab_size


def simulated_tokens(
    prompt: Sequence[int] | Int32Array, count: int, vocab_size: int, seed: int | None = None
) -> list[int]:
    """The oracle's answer: the `count` tokens that follow `prompt`."""
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        tokens.append(simulated_next_token(tokens, vocab_size, seed))
    return tokens[len(prompt) :]


def _salt(seed: int | None) -> int:
    return 0 if seed is None else (seed * _LENGTH_MIX + 1) & _MASK


def _finish(sums: UInt64Array, lengths: Int32Array, salts: UInt64Array | np.uint64) -> UInt64Array:
    """Length and salt are mixed in, then all bits with each other."""
    return np.asarray(mix((sums + lengths.astype(np.uint64) * np.uint64(_LENGTH_MIX)) ^ salts))
