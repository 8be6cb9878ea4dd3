"""The hash of what a row's blocks hold, from which the simulated executor makes all that it says.

The hash of n tokens is the sum over i of (token_i + 1) * P^i mod 2^64, with the number n and the salt mixed
in and finished as in splitmix64.  A sum can be computed for all rows at once.  It is computed from scratch
each step: no state of a step saves the next one from reading its blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.executor.base import Int32Array
from baton.executor.simulated.pool import TokenPool
from baton.executor.simulated.results import powers
from baton.model.sampling.counter_random import mix
from baton.protocol.rules.seeds import mix_one

UInt64Array = npt.NDArray[np.uint64]

_LENGTH_MIX = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
_CHUNK_CELLS = 1 << 18
"""Rows are read back in groups of so many cells, so that long contexts need no large temporaries."""
_FEW_ROWS, _SHORT = 8, 256
"""So few rows, all of them so short, are hashed one by one: an operation on arrays costs more than that."""


class RowHashes:
    """Of the rows in a pool."""

    def __init__(self, pool: TokenPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._weights = np.empty(0, np.uint64)
        self._positions = np.empty(0, np.int64)
        self._short: dict[int, UInt64Array] = {}
        """By length: the weights of the cells of as many blocks as it needs, 0 past it."""

    def of(self, tables: Int32Array, lengths: Int32Array, salts: UInt64Array) -> UInt64Array:
        """[R] of what the rows' blocks [R, W] hold in their first `lengths` positions."""
        if len(lengths) <= _FEW_ROWS and tables.shape[1] * self._block_size <= _SHORT:
            return self._of_few(tables, lengths, salts)
        hashes = np.empty(len(lengths), np.uint64)
        step = max(1, _CHUNK_CELLS // (tables.shape[1] * self._block_size))
        for first in range(0, len(lengths), step):
            part = slice(first, first + step)
            sums = np.add.reduce(self._read_back(tables[part], lengths[part]), axis=1)
            hashes[part] = finish(sums, lengths[part], salts[part])
        return hashes

    def after_each(self, table: Int32Array, lengths: Int32Array, most: int, salt: int) -> UInt64Array:
        """[n] of one row's leading `lengths` [n] positions, at most `most`."""
        terms = self._read_back(table[None], np.array([most], np.int32))[0]
        in_order = np.argsort(self._positions[: len(terms)], kind="stable")
        sums = np.cumsum(terms[in_order])
        return finish(sums[lengths - 1], lengths, np.uint64(salt))

    def _of_few(self, tables: Int32Array, lengths: Int32Array, salts: UInt64Array) -> UInt64Array:
        if not len(lengths):
            return np.empty(0, np.uint64)
        cells = self._pool.read(tables, lengths).astype(np.uint64)
        hashes = []
        for row, length, salt in zip(cells, lengths.tolist(), salts.tolist(), strict=True):
            weights = self._short.get(length)
            if weights is None:
                weights = self._short[length] = self._weights_of(length)
            hashes.append(finish_one(int(row[: len(weights)].dot(weights)), length, salt))
        return np.array(hashes, np.uint64)

    def _weights_of(self, length: int) -> UInt64Array:
        num_blocks = -(-length // self._block_size)
        width = num_blocks * len(self._pool.order)
        if width > len(self._weights):
            self._extend(2 * num_blocks)
        return np.where(self._positions[:width] < length, self._weights[:width], np.uint64(0))

    def _read_back(self, tables: Int32Array, lengths: Int32Array) -> UInt64Array:
        """[R, cells] the terms of the hash, in the order of cells; 0 past each row's length."""
        cells = self._pool.read(tables, lengths)
        width = cells.shape[1]
        if width > len(self._weights):
            self._extend(2 * tables.shape[1])
        terms = cells * self._weights[:width]
        terms[self._positions[:width] >= lengths[:, None]] = 0
        return terms

    def _extend(self, num_blocks: int) -> None:
        """Positions and weights of the cells of tables so wide."""
        size = self._block_size
        order = self._pool.order
        self._positions = (np.arange(num_blocks)[:, None] * size + order).reshape(-1)
        self._weights = powers(num_blocks * size)[np.minimum(self._positions, num_blocks * size - 1)]


def salt_of(seed: int | None) -> int:
    """`seed`: of a request whose temperature is above 0, else None."""
    return 0 if seed is None else (seed * _LENGTH_MIX + 1) & _MASK


def sum_of(tokens: npt.ArrayLike) -> int:
    """What is finished to the hash of these tokens."""
    row = np.asarray(tokens, np.int64)
    return int(((row + 1).astype(np.uint64) * powers(len(row))).sum(dtype=np.uint64))


def finish(sums: UInt64Array, lengths: Int32Array, salts: UInt64Array | np.uint64) -> UInt64Array:
    """Length and salt are mixed in, then all bits with each other."""
    return np.asarray(mix((sums + lengths.astype(np.uint64) * np.uint64(_LENGTH_MIX)) ^ salts))


def finish_one(total: int, length: int, salt: int) -> int:
    """The same."""
    return mix_one((total + length * _LENGTH_MIX) & _MASK ^ salt)
