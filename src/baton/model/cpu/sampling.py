"""Sampling on a CPU by a kernel: `native/sampling.cpp`, which tells the theory, behind one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.cpu.library import INT, POINTER, Native, native

Int32Array = npt.NDArray[np.int32]
SampleKernel = Callable[..., None]
"""(logits, rows, vocab, stride of rows, columns of `SlotParameters`, slots, positions, tokens out, scratch,
bytes of it a thread, threads): integers and addresses; see `KernelSampling.sample`."""

_CHUNK = 1024
_SCRATCH_PER_TOKEN = 13
"""Bytes a thread needs for each entry of the vocabulary, rounded up."""
_WORTH_A_THREAD = 1 << 15
"""Logits: below about 10 us of work a second thread is not woken."""


@dataclass(frozen=True)
class SlotParameters:
    """What the request on each slot asks for, all [num_slots]."""

    temperature: npt.NDArray[np.float32]
    """0: greedy."""
    top_k: npt.NDArray[np.int64]
    """The size of the vocabulary: all."""
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    streams: npt.NDArray[np.uint64]
    """Where the request's random numbers start: `counter_random.stream_starts` of its seed."""
    masked: npt.NDArray[np.uint8]
    """1: only tokens of its mask may be chosen."""
    masks: npt.NDArray[np.uint32]
    """[num_slots, words]: a bit for each token, the lowest of the first word is token 0."""

    @classmethod
    def of_greedy(cls, num_slots: int, vocab_size: int) -> SlotParameters:
        """As if every slot's request were greedy."""
        return cls(
            np.zeros(num_slots, np.float32),
            np.full(num_slots, vocab_size, np.int64),
            np.ones(num_slots, np.float64),
            np.zeros(num_slots, np.float32),
            np.zeros(num_slots, np.uint64),
            np.zeros(num_slots, np.uint8),
            np.zeros((num_slots, vocab_size // 32 + 1), np.uint32),
        )


def native_kernel(library: Native) -> SampleKernel:
    """The C++ kernel."""
    return library.function("sample", POINTER, INT, INT, INT, *(POINTER,) * 5, INT, INT)


def sampling_kernel() -> SampleKernel | None:
    """The best that there is; None: PyTorch's operations must do."""
    library = native()
    return None if library is None else native_kernel(library)


class KernelSampling:
    """Draws tokens for slots.  The arrays of `parameters` are looked at in each call, and must stay."""

    def __init__(self, kernel: SampleKernel, parameters: SlotParameters, vocab_size: int) -> None:
        self._sample = kernel
        self._vocab_size = vocab_size
        self._arrays = parameters
        self._columns = _addresses(parameters)
        self._make_rows(len(parameters.temperature))
        self._make_each(0)
        chunks = -(-vocab_size // _CHUNK)
        self._scratch_bytes = chunks * _CHUNK * _SCRATCH_PER_TOKEN
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._room_for = 0
        """Threads."""

    def _make_rows(self, count: int) -> None:
        """Arguments and result have a fixed place: to ask for an array's address takes a microsecond."""
        self._rows = np.zeros((3, count), np.int32)
        self._addresses = [row.ctypes.data for row in self._rows]

    def _make_each(self, count: int) -> None:
        """Parameters by row, as `SlotParameters` has them by slot; masks are given with the rows."""
        self._each = SlotParameters.of_greedy(count, 0)
        self._each_columns = _addresses(self._each)
        self._each_rows = np.arange(count, dtype=np.int32)

    @staticmethod
    def takes(logits: Tensor) -> bool:
        return logits.dtype is torch.float32 and logits.device.type == "cpu" and logits.stride(1) == 1

    def sample(self, logits: Tensor, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """Logits [n, vocab] of these slots, positions of the new tokens [n] → tokens [n].  See `takes`."""
        return self._call(logits, self._columns, slots, positions)

    def sample_each(
        self, logits: Tensor, slots: Int32Array, positions: Int32Array, masks: npt.NDArray[np.uint32]
    ) -> Int32Array:
        """The same with a mask for each row, `masks` [n or more, words], where its slot is masked: a slot may
        have several rows."""
        count = len(slots)
        if count > len(self._each_rows):
            self._make_each(2 * count)
        for of_slot, of_row in zip(_by_slot(self._arrays), _by_slot(self._each), strict=True):
            np.take(of_slot, slots, out=of_row[:count])
        self._each_columns[-1] = masks.ctypes.data
        return self._call(logits, self._each_columns, self._each_rows[:count], positions)

    def _call(
        self, logits: Tensor, columns: ctypes.Array[ctypes.c_void_p], slots: Int32Array, positions: Int32Array
    ) -> Int32Array:
        count, vocab = logits.shape
        if vocab != self._vocab_size:
            raise ValueError(f"logits [{count}, {vocab}] of a vocabulary of {self._vocab_size}")
        if count > self._rows.shape[1]:  # (a slot with drafts has several rows)
            self._make_rows(2 * count)
        threads = min(torch.get_num_threads(), count) if count * vocab > _WORTH_A_THREAD else 1
        if threads > self._room_for:
            self._scratch = torch.empty(threads * self._scratch_bytes, dtype=torch.uint8)
            self._room_for = threads
        self._rows[0, :count] = slots
        self._rows[1, :count] = positions
        self._sample(
            logits.data_ptr(),
            count,
            vocab,
            logits.stride(0),
            columns,
            *self._addresses,
            self._scratch.data_ptr(),
            self._scratch_bytes,
            threads,
        )
        return self._rows[2, :count].copy()


def _by_slot(parameters: SlotParameters) -> tuple[npt.NDArray[Any], ...]:
    """All but the masks, as the kernel has them."""
    return (
        parameters.temperature,
        parameters.top_k,
        parameters.top_p,
        parameters.min_p,
        parameters.streams,
        parameters.masked,
    )


def _addresses(parameters: SlotParameters) -> ctypes.Array[ctypes.c_void_p]:
    columns = (*_by_slot(parameters), parameters.masks)
    return (ctypes.c_void_p * len(columns))(*(column.ctypes.data for column in columns))
