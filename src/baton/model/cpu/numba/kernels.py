"""Attention's kernels in numba: for machines where there was no C++ compiler; see `kernels` for the
interface.

Theory.  A kernel is a function of one address, that of a task (`task`).  Each thread of PyTorch's
OpenMP runtime runs it, takes a number (which is its scratch memory), and then one item after the other from
a counter in the task, until there are none.

Numba compiles a kernel when it is first needed (seconds) and keeps it in a cache: beside the source if that
directory can be written, else in the user's cache directory, or where NUMBA_CACHE_DIR says.
"""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, var-annotated"
from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import types
from torch import Tensor

from baton.model.cpu.kernels import QUERY_ROWS, HeadNorms, KernelShape, Reads, Runs, address_of
from baton.model.cpu.numba.attention import attend
from baton.model.cpu.numba.steps import add_norm, quantize, silu_mul
from baton.model.cpu.numba.task import (
    EPS,
    HEADS,
    KV_INT8,
    NEXT,
    PIECE_BLOCKS,
    QUERIES,
    SCALE,
    SCRATCH_BYTES,
    SINKS,
    TASK_BYTES,
)
from baton.model.cpu.numba.vectors import PAIR_PRODUCTS, PAIRS, SINGLES
from baton.model.cpu.numba.writes import rotate_and_write, write
from baton.model.cpu.openmp import openmp

logger = logging.getLogger(__name__)


def _sources() -> str:
    """A digest of all that kernels are made from: numba's cache looks only at the file of a kernel."""
    digest = hashlib.sha256()
    for name in (
        "vectors",
        "product",
        "task",
        "attention",
        "pieces",
        "writes",
        "kv_int8",
        "bytes",
        "tile",
        "steps",
    ):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _entries(version: str) -> dict[str, Callable[..., None]]:
    """What is compiled and kept: variables such as `version` are part of a function's key in the cache."""

    def attend_pairs(task):
        version  # noqa: B018
        attend(task, PAIRS)

    def attend_singles(task):
        version  # noqa: B018
        attend(task, SINGLES)

    def write_pairs(task):
        version  # noqa: B018
        write(task, PAIRS)

    def write_singles(task):
        version  # noqa: B018
        write(task, SINGLES)

    def rotate_and_write_pairs(task):
        version  # noqa: B018
        rotate_and_write(task, PAIRS)

    def rotate_and_write_singles(task):
        version  # noqa: B018
        rotate_and_write(task, SINGLES)

    def add_norm_pairs(task):
        version  # noqa: B018
        add_norm(task, PAIRS)

    def add_norm_singles(task):
        version  # noqa: B018
        add_norm(task, SINGLES)

    def silu_mul_pairs(task):
        version  # noqa: B018
        silu_mul(task, PAIRS)

    def silu_mul_singles(task):
        version  # noqa: B018
        silu_mul(task, SINGLES)

    def quantize_pairs(task):
        version  # noqa: B018
        quantize(task, PAIRS)

    def quantize_singles(task):
        version  # noqa: B018
        quantize(task, SINGLES)

    return {name: entry for name, entry in locals().items() if callable(entry)}


@functools.cache
def kernel(name: str) -> Any:
    """The compiled function: numba's, which keeps it alive, with its `address`."""
    begin = time.perf_counter()
    entry = _entries(_sources())[name]
    signature = types.void(types.int64)
    try:
        found = numba.cfunc(signature, cache=True)(entry)
    except (RuntimeError, OSError):  # no directory that a cache could be in
        found = numba.cfunc(signature)(entry)
    logger.info("numba: %s ready in %.1f s", name, time.perf_counter() - begin)
    return found


_FOUR, _SIX, _SEVEN, _EIGHT = (struct.Struct(f"={count}q") for count in (4, 6, 7, 8))
_TEAM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_ALONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_TOKENS_OF_A_THREAD = 16


@functools.cache
def _team() -> Callable[[int, int, int, int], None] | None:
    runtime = openmp()
    return None if runtime is None else _TEAM(runtime.parallel)


def run_task(function: int, task: int, threads: int) -> None:
    """Runs a kernel's function on so many threads."""
    team = _team() if threads > 1 else None
    if team is not None:
        team(function, task, threads, 0)
    else:
        _ALONE(function)(task)


class NumbaKernels:
    """See `kernels.Kernels`."""

    def __init__(self, shape: KernelShape) -> None:
        self.name = "numba, bfloat16 products" if PAIR_PRODUCTS and shape.bfloat16 else "numba"
        self._shape = shape
        pairs = shape.bfloat16
        kind = "pairs" if pairs else "singles"
        self._kind = kind
        self._attend = kernel(f"attend_{kind}").address
        self._size = 2 if pairs else 4
        self._task = np.zeros(TASK_BYTES // 8, np.int64)
        self._task_address = address_of(self._task)
        self._fields = memoryview(self._task)  # type: ignore[arg-type]
        floats = self._task.view(np.float32)
        floats[SCALE // 4] = shape.scale * math.log2(math.e)
        self._task[HEADS // 8 : SCALE // 8] = (
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.block_stride * (1 if shape.kv_int8 else self._size),
        )
        self._task[PIECE_BLOCKS // 8] = shape.piece_blocks
        self._task[KV_INT8 // 8] = shape.kv_int8
        self._units = shape.num_kv_heads * shape.head_chunks
        self._threads = 0
        self._grow(0)

    def _grow(self, slots: int) -> None:
        """Room for partial results."""
        self._slots = slots
        self._partials = np.empty((slots, self._units, QUERY_ROWS, self._shape.head_dim + 2), np.float32)
        self._finished = np.zeros((slots, self._units), np.int32)

    def _run(
        self, function: int, threads: int, layer: int, work: npt.NDArray[np.int32], work_address: int
    ) -> None:
        """The rest of the task is filled in."""
        threads = min(threads, torch.get_num_threads())
        if threads > self._threads:
            self._threads = threads
            self._scratch = np.zeros(threads * SCRATCH_BYTES + 64, np.uint8)
            self._scratch_address = -(-address_of(self._scratch) // 64) * 64
        _SIX.pack_into(self._fields, NEXT, 0, 0, len(work), work_address, self._scratch_address, layer)
        run_task(function, self._task_address, threads)

    def turns(self, norms: HeadNorms | None, grows: bool) -> bool:
        return not grows and (norms is None or not norms.plus)

    def write(self, layer: int, keys: Tensor, values: Tensor, runs: Runs) -> None:
        size = self._size
        fields = keys.data_ptr(), keys.stride(0) * size, values.data_ptr(), values.stride(0) * size
        _FOUR.pack_into(self._fields, QUERIES, *fields)
        threads = max(1, len(keys) // _TOKENS_OF_A_THREAD)
        self._run(kernel(f"write_{self._kind}").address, threads, layer, runs.runs, runs.address)

    def rotate_and_write(
        self,
        layer: int,
        qkv: Tensor,
        queries: Tensor,
        cos: Tensor,
        sin: Tensor,
        growth: Tensor | None,
        norms: HeadNorms | None,
        runs: Runs,
    ) -> None:
        if cos.stride(0) != sin.stride(0):
            raise ValueError("cos and sin must be views of tables of the same width")
        _SEVEN.pack_into(
            self._fields,
            QUERIES,
            qkv.data_ptr(),
            queries.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            4 * cos.stride(0),
            0 if norms is None else norms.queries.data_ptr(),
            0 if norms is None else norms.keys.data_ptr(),
        )
        if norms is not None:
            self._task.view(np.float32)[EPS // 4] = norms.eps
        threads = max(1, len(queries) // _TOKENS_OF_A_THREAD)
        self._run(kernel(f"rotate_and_write_{self._kind}").address, threads, layer, runs.runs, runs.address)

    def attend(
        self, layer: int, queries: Tensor, out: Tensor, reads: Reads, sinks: Tensor | None = None
    ) -> None:
        if reads.slots > self._slots:
            self._grow(2 * reads.slots)
        self._task[SINKS // 8] = 0 if sinks is None else sinks.data_ptr()
        _EIGHT.pack_into(
            self._fields,
            QUERIES,
            queries.data_ptr(),
            queries.stride(0) * self._size,
            out.data_ptr(),
            reads.tables_address,
            reads.tables.shape[1],
            reads.window,
            address_of(self._partials),
            address_of(self._finished),
        )
        self._run(self._attend, len(reads.items) * self._units, layer, reads.items, reads.items_address)
