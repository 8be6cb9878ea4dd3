"""A private directory for sockets and rendezvous files, which is removed even if its owner is killed.

The owner holds a lock on a file in it for as long as it lives.  Nobody can clean up after a SIGKILL, so
whoever comes next does: a directory of this user whose lock is free belongs to nobody any more.  It gets
the name by which it is found only when it is locked, so that nobody takes a new one for an abandoned one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "baton-run-"
_UNFINISHED = "baton-new-"
_LOCK = "lock"
_LONGEST_SOCKET = 107
"""Bytes of a unix socket's path at most, on Linux."""
_NAME_BYTES = len("/12345678.sock")


class RuntimeDirectory:
    """Made at construction, mode 0700; `remove` takes it away."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent / (_PREFIX + "12345678"))) + _NAME_BYTES > _LONGEST_SOCKET:
            parent = Path("/tmp")
        _sweep(parent)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
        self._lock = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = unfinished.rename(parent / unfinished.name.replace(_UNFINISHED, _PREFIX))

    def remove(self) -> None:
        """Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path) -> None:
    """Removes directories whose owner is dead."""
    for path in parent.glob(_PREFIX + "*"):
        with suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
