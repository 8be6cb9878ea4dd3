"""The OpenMP runtime that PyTorch has loaded, for kernels that share a step with PyTorch's own products.

Theory.  Two pools of threads in one process fight for the cores (each spins for a while after its work),
which costs a third of a step.  The native library computes all of a step on threads of its own
(`native/team.cpp`) and asks here only how many `torch.set_num_threads` allows.  numba's kernels, which run
between products of oneDNN, bring no pool.  An OpenMP runtime exports what compilers call for `#pragma omp
parallel`: `GOMP_parallel(function, data, threads, flags)` (LLVM's and Intel's runtimes have it too).  We call
the very function that PyTorch calls, so the threads are the ones that have just computed a matrix product.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401  loads its OpenMP runtime

_ALREADY_LOADED = os.RTLD_NOLOAD | ctypes.DEFAULT_MODE if hasattr(os, "RTLD_NOLOAD") else ctypes.DEFAULT_MODE
_RUNTIME = re.compile(r"/lib(g|i)?omp[^/]*\.so[^/]*$")


@dataclass(frozen=True)
class OpenMP:
    """Addresses of the runtime's C functions."""

    parallel: int
    """void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)"""
    thread_num: int
    """int omp_get_thread_num(void)"""
    max_threads: int
    """int omp_get_max_threads(void); what torch.set_num_threads has set"""
    set_threads: int
    """void omp_set_num_threads(int), for the thread that calls it"""


@functools.cache
def openmp() -> OpenMP | None:
    """The runtime; None where PyTorch uses none that we know."""
    # The global name space first: there PyTorch itself finds one that was preloaded.
    for library in (None, *_mapped_runtimes()):
        try:
            found = ctypes.CDLL(library, mode=_ALREADY_LOADED)
            return OpenMP(
                parallel=_address(found.GOMP_parallel),
                thread_num=_address(found.omp_get_thread_num),
                max_threads=_address(found.omp_get_max_threads),
                set_threads=_address(found.omp_set_num_threads),
            )
        except (OSError, AttributeError):
            continue
    return None


def _address(function: ctypes._CFuncPtr) -> int:  # type: ignore[name-defined]
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _mapped_runtimes() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return list(dict.fromkeys(path for path in paths if _RUNTIME.search(path)))
