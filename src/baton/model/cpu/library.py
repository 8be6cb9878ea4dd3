"""The native library: which of its builds this CPU runs, and how Python calls them.

The library holds each kernel for several instruction sets; `native` picks the best that the CPU has.
Functions are called through ctypes: about a microsecond, and the GIL is free meanwhile.  Two variables of the
environment, for tests and comparisons: `BATON_NATIVE=0` ignores the library, `BATON_CPU_ISA=avx2` forces one
build.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from baton.model.cpu.openmp import openmp

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_native.so")
SOURCES = Path(__file__).with_name("native")

Function = Callable[..., None]
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
"""The types of arguments: addresses (`tensor.data_ptr()`), int64_t, float."""


_OF_A_SUM = (POINTER, INT, INT, POINTER, INT)

# Best first.
_LANES = {"amx": 16, "avx512bf16": 16, "avx512vnni": 16, "avx512": 16, "avx2vnni": 8, "avx2": 8}


class Native:
    """The builds for one instruction set."""

    def __init__(self, library: ctypes.CDLL, instruction_set: str) -> None:
        self._library = library
        self.instruction_set = instruction_set
        self.lanes = _LANES.get(instruction_set, 4)
        """float32 of a vector."""
        self._functions: dict[str, Function] = {}

    def function(self, name: str, *argument_types: Any) -> Function:
        """The C function `void baton_<name>_<instruction set>(…)`; see POINTER, INT, FLOAT."""
        if name not in self._functions:
            found = self._library[f"baton_{name}_{self.instruction_set}"]
            found.argtypes = argument_types
            found.restype = None
            self._functions[name] = found
        return self._functions[name]

    def use_blocking(self, chunk: int, item: int, ahead: int) -> None:
        """How products are cut from now on, for all builds: see `blocking.Blocking`."""
        self._library.baton_set_blocking.argtypes = [INT, INT, INT]
        self._library.baton_set_blocking.restype = None
        self._library.baton_set_blocking(chunk, item, ahead)


@functools.cache
def native() -> Native | None:
    """The library for this CPU, or None: not built, not loadable, or switched off."""
    if os.environ.get("BATON_NATIVE") == "0":
        return None
    usable = instruction_sets()
    _tell_what_is_missing(usable)
    if not usable:
        return None
    wanted = os.environ.get("BATON_CPU_ISA")
    if wanted and wanted not in usable:
        raise ValueError(
            f"BATON_CPU_ISA={wanted}: this CPU and build have {', '.join(usable)} "
            "(`python hatch_build.py` builds for every CPU)"
        )
    return load(wanted or usable[0])


@functools.cache
def load(instruction_set: str) -> Native:
    """One of `instruction_sets()`: who asks for these has asked the operating system for what they need."""
    library = _open()
    assert library is not None
    assert instruction_set in instruction_sets(), instruction_set
    return Native(library, instruction_set)


@functools.cache
def instruction_sets() -> list[str]:
    """What the library was built for and this CPU has, best first; empty without a library."""
    library = _open()
    if library is None:
        return []
    library.baton_instruction_sets.restype = ctypes.c_char_p
    names: list[str] = library.baton_instruction_sets().decode().split(",")
    return [name for name in names if library.baton_cpu_has(name.encode())]


class RankFunctions(NamedTuple):
    """`baton_barrier` and `baton_all_reduce` of `ranks.cpp`."""

    barrier: Callable[..., int]
    all_reduce: Callable[..., int]


@functools.cache
def rank_functions() -> RankFunctions | None:
    """Every build of the library has them; None without one."""
    library = None if os.environ.get("BATON_NATIVE") == "0" else _open()
    if library is None:
        return None
    for function, more in ((library.baton_barrier, ()), (library.baton_all_reduce, _OF_A_SUM)):
        function.argtypes = [POINTER, *6 * (INT,), *more]
        function.restype = INT
    return RankFunctions(library.baton_barrier, library.baton_all_reduce)


def _tell_what_is_missing(usable: list[str]) -> None:
    """A library that was compiled on another machine may have nothing for this CPU, or not the best."""
    library = _open()
    if library is None:
        return
    best = next((name for name in _LANES if library.baton_cpu_has(name.encode())), "")
    if best and best not in usable:
        log.log(
            logging.INFO if usable else logging.WARNING,
            "this CPU has %s, for which the kernels were not compiled here: %s is used; "
            "`python hatch_build.py` compiles them",
            best,
            usable[0] if usable else "numba",
        )


def made_of() -> str:
    """Tells libraries that pack otherwise apart: of the C++ files that it was made of; "" without one."""
    library = _open()
    if library is None:
        return ""
    library.baton_sources.restype = ctypes.c_char_p
    found: str = library.baton_sources().decode()
    return found


def check_sources(library: ctypes.CDLL, sources: Path) -> None:
    """Raises `ValueError` if the library was made of other C++ files than those beside it, if there are any.

    Its functions might take other arguments than Python gives them, which ends a worker with a signal.
    """
    paths = sorted((*sources.glob("*.cpp"), *sources.glob("*.h")))
    if not paths:
        return
    made_of = hashlib.sha256()
    for path in paths:
        made_of.update(path.name.encode() + b"\0" + path.read_bytes())
    try:
        library.baton_sources.restype = ctypes.c_char_p
        found = library.baton_sources().decode()
    except AttributeError:
        found = ""
    if found != made_of.hexdigest()[:16]:
        raise ValueError(
            f"{LIBRARY} was built from other C++ files than {sources} has now: run `make install-dev`, or "
            "`python hatch_build.py`; BATON_NATIVE=0 goes on without it"
        )


@functools.cache
def _open() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    check_sources(library, SOURCES)
    runtime = openmp()
    if runtime is not None:
        library.baton_bind_max_threads.argtypes = [POINTER]
        library.baton_bind_max_threads(runtime.max_threads)
    return library
