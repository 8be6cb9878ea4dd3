"""Drafts by n-grams by a kernel: `native/ngram.cpp`, or numba where there is no library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from baton.model.cpu.library import INT, POINTER, Native, native

NgramKernel = Callable[..., None]
"""As `drafting.ngram.NgramKernel`."""

_ARGUMENTS = (POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, INT, POINTER, POINTER, POINTER)


def native_kernel(library: Native) -> NgramKernel:
    """The C++ kernel."""
    return library.function("ngram", *_ARGUMENTS)


def numba_kernel() -> NgramKernel:
    """Numba's; compiling it takes seconds, once a machine."""
    from baton.model.cpu.numba.ngram import ngram

    function = ngram()
    call = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 10)(function.address)

    def kernel(*arguments: int) -> None:
        call(*arguments)

    kernel.compiled = function  # type: ignore[attr-defined]  # it must outlive the call
    return kernel


def ngram_kernel() -> NgramKernel:
    """The best that there is."""
    library = native()
    return numba_kernel() if library is None else native_kernel(library)
