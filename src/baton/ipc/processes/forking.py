"""Forks of a process that has imported what is slow.

Theory.  A fork copies the thread that calls it and nothing of the others, so only a process of one thread
is forked (`num_threads`), and what it has loaded works in the child as if the child had loaded it.  What a
plain start would give the child anew, it gets here by hand: descriptors (those that are named, under the
numbers that are named, and no other), environment, command line, signals, seeds.  What libraries read from
the environment when they are loaded (OpenMP's variables, malloc's) they have read in the parent: the child's
environment must have the same there.

`fork_for_parent` makes a *sibling* (clone with CLONE_PARENT): its parent is the parent of the process that
forks.  That process, which asked for the child, waits for it as for any child, and the child dies with it;
whether the forking process lives does not matter to either.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from baton.ipc.processes.children import Child

_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220, "ppc64le": 120}
"""Numbers of clone(2) where its flags are the first argument."""
_CLONE_PARENT = 0x8000
_PR_GET_TID_ADDRESS = 40
_FIRST_FREE = 3
"""Descriptors below are stdin, stdout, stderr."""


def can_fork_for_parent() -> bool:
    """On this kind of machine."""
    return sys.platform == "linux" and os.uname().machine in _CLONE


def num_threads() -> int:
    """Of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def fork_for_parent() -> int:
    """As `os.fork`, but the child's parent is this process's.  Raises `OSError`.

    Python's own part of a fork (locks, its list of threads, what modules have registered) is done as
    `os.fork` does it.  glibc remembers the thread's number: it is written there, as glibc's own fork does.
    """
    libc, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    number = _CLONE[os.uname().machine]
    flags = ctypes.c_ulong(_CLONE_PARENT | signal.SIGCHLD)
    nothing = ctypes.c_void_p()
    kept = ctypes.c_void_p()
    known = libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(kept), 0, 0, 0) == 0 and kept.value
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(number, flags, nothing, nothing, nothing, nothing)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        if known:
            ctypes.c_int.from_address(known).value = os.getpid()
        return 0
    code = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, f"clone: {os.strerror(code)}")
    return pid


def fork_child(
    work: Callable[[], int], command: Sequence[str], environment: Mapping[str, str], keep: Sequence[int]
) -> Child:
    """A child of this process that does this work and ends with the exit code that it returns.

    Of descriptors it has stdin, stdout, stderr and `keep`.  Raises `OSError`.
    """
    pid = os.fork()
    if pid:
        return Child(pid)
    with leaving():
        close_all_but({0, 1, 2, *keep})
        become(command, environment)
        leave(work())


class leaving:
    """In a forked child: whatever is raised here ends the process with a traceback, exit code 1."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> NoReturn:
        if isinstance(error, SystemExit):
            leave(error.code if isinstance(error.code, int) else int(error.code is not None))
        if error is not None:
            traceback.print_exception(error)
        leave(1)


def leave(code: int) -> NoReturn:
    """Ends a forked child.  Not as the interpreter would: what its parent had made is not its to clean up."""
    with suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """The rest of what makes a fork like a process of its own."""
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGTTOU):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    set_command_line(command)
    if "numpy.random" in sys.modules:  # (Python's own generator is seeded by the fork)
        sys.modules["numpy.random"].seed()


def place_descriptors(given: Sequence[int], numbers: Sequence[int]) -> None:
    """What is open as `given` becomes `numbers`, one by one; everything else is closed."""
    above = max(_FIRST_FREE, *numbers) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in given]
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number, inheritable=number < _FIRST_FREE)
    close_all_but(set(numbers))


def close_all_but(keep: set[int]) -> None:
    """Closes every other descriptor, also those of libraries."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with suppress(OSError):  # that of the listing itself
                os.close(int(name))


def command_line_room() -> int:
    """Bytes that a command line of this process may have."""
    first, end = _command_line()
    return end - first


def set_command_line(command: Sequence[str]) -> None:
    """What /proc/PID/cmdline and `ps` show, as far as there is room."""
    first, end = _command_line()
    if first:
        text = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - first - 1]
        ctypes.memset(first, 0, end - first)
        ctypes.memmove(first, text, len(text))


def _command_line() -> tuple[int, int]:
    """Where in this process's memory the kernel reads it; zeros if it does not say."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[45]), int(fields[46])
