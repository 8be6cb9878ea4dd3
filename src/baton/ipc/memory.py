"""Shared memory without a name: memfds that children inherit.

Nothing of it appears in /dev/shm, so nothing stays behind when processes are killed.  Sizes are sealed: no
process can shrink memory that another one reads (which would get SIGBUS).
"""

from __future__ import annotations

import fcntl
import mmap
import os


def create_memory(name: str, size: int) -> int:
    """A zeroed memfd of `size` bytes.  `name` shows in /proc/PID/maps only."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class SharedMemory:
    """A mapping of a whole memfd, as bytes and as 64-bit words.

    An aligned word is read and written by one machine instruction (`memoryview.cast('Q')`; the `struct`
    module would copy byte by byte).  The descriptor stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("Q")

    def close(self) -> None:
        """Unmaps; safe to call twice.  Views taken from `bytes` or `words` must be gone."""
        self.words.release()
        self.bytes.release()
        self._map.close()
