"""Drafts from other requests' answers: `native/suffix.cpp`, or numba where there is no library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from baton.model.cpu.library import INT, POINTER, Native, native


class SuffixKernel(NamedTuple):
    """As `drafting.suffix.SuffixKernel`."""

    guess: Callable[..., None]
    indexing: Callable[..., None]


_GUESS = (*(POINTER,) * 6, INT, INT, POINTER, POINTER, POINTER)
_INDEX = (POINTER, INT)


def native_suffix(library: Native) -> SuffixKernel:
    """The C++ kernel."""
    return SuffixKernel(library.function("suffix", *_GUESS), library.function("suffix_index", *_INDEX))


def numba_suffix() -> SuffixKernel:
    """Numba's; compiling it takes seconds, once a machine."""
    from baton.model.cpu.numba.suffix import suffix

    def callable_of(function: object, arguments: int) -> Callable[..., None]:
        call = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * arguments)(function.address)  # type: ignore[attr-defined]

        def kernel(*given: int) -> None:
            call(*given)

        kernel.compiled = function  # type: ignore[attr-defined]  # it must outlive the call
        return kernel

    guess, index = suffix()
    return SuffixKernel(callable_of(guess, len(_GUESS)), callable_of(index, len(_INDEX)))


def suffix_kernel() -> SuffixKernel:
    """The best that there is."""
    library = native()
    return numba_suffix() if library is None else native_suffix(library)
