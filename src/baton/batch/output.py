"""The file of answers: appended line by line, so that whoever kills the run loses nothing that is in it.

A line is written by one call, with the line break at its end.  What a killed run left without one is cut off
when the next run opens the file; each other line must be of this batch.  The file is locked meanwhile.
"""

from __future__ import annotations

import fcntl
import os

from baton.batch.lines import done_line

_CHUNK = 1 << 20


class OutputError(ValueError):
    """A file that cannot be gone on with, or not be written; one line with the fix."""


class Output:
    """Opened, locked, cut, and read: `done` are the lines of the input that it answers."""

    def __init__(self, path: str) -> None:
        """Raises `OutputError`."""
        self.path = path
        self.done: dict[int, str] = {}
        """Number of the input's line → the id of its answer."""
        self.cut = 0
        """Bytes of a line that a run was killed in."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(f"-o {path}: cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: bytes) -> None:
        """Raises `OutputError`; what was written of the line is taken back then."""
        before = os.lseek(self._file, 0, os.SEEK_END)
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            os.ftruncate(self._file, before)
            raise OutputError(f"-o {self.path}: cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """After it, what was written is on the disk."""
        if self._file >= 0:
            try:
                os.fsync(self._file)
            except OSError:  # (a pipe, say)
                pass
            os.close(self._file)
            self._file = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(
                f"-o {self.path}: another run writes it; let it end, or give another file"
            ) from None

    def _read(self) -> None:
        number = 0
        rest = b""
        position = 0
        while chunk := os.pread(self._file, _CHUNK, position):
            position += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n") if b"\n" in chunk else [rest + chunk]
            for line in lines:
                number += 1
                self._take(number, line)
        if rest:
            os.ftruncate(self._file, position - len(rest))
            self.cut = len(rest)

    def _take(self, number: int, line: bytes) -> None:
        found = done_line(line)
        if found is None:
            raise OutputError(
                f"-o {self.path}: line {number} is no answer of run-batch; give another file, or remove it"
            )
        if found[0] in self.done:
            raise OutputError(f"-o {self.path}: line {number} answers line {found[0]} of the input again")
        self.done[found[0]] = found[1]
