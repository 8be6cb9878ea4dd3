"""A mapping of shared memory in huge pages.

Theory.  Attention reads a KV cache in stretches of some kilobytes that lie far apart, each in other pages:
with pages of 4 KB the processor spends up to a quarter of the time looking up where they are, above
all in a virtual machine, whose page tables are themselves looked up.  Systems seldom give shared memory huge
pages by themselves (`shmem_enabled` is "never" by default), but they do on request: MADV_COLLAPSE (Linux 6.1
and later) makes a 2 MB stretch one page, whatever the settings are, if the mapping begins at a
multiple of 2 MB and something of the stretch is there.  To touch, collapse and fill a stretch takes less than
half of the time that faulting its 512 small pages takes.

So memory is made huge from its beginning on, as it comes into use.  Where the system refuses, small pages
serve as ever.

Pages of a file on disk cannot be made huge afterwards.  Some file systems (XFS; ext4 since Linux 6.16) give
a file huge pages when it is written in large pieces whose source is mapped already (else the kernel copies
page by page), or when it is read through a mapping with MADV_HUGEPAGE.

Nothing here writes: a stretch that is about to be used may lie where another thread is copying to at this
moment (pages of a hand-over that arrive in blocks with smaller numbers).  To touch is to read, which gives a
hole of a memfd its memory as well, and collapsing keeps what others write meanwhile: they wait in the kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

HUGE_PAGE = 2 << 20
"""Bytes; of x86-64, and of ARM with pages of 4 KB."""
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_COLLAPSE = 14, 22, 25
_PROT_NONE, _MAP_FIXED = 0, 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HugeMapping:
    """A whole memfd or file, mapped shared.  Unmapped when nothing refers to its memory any more."""

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        """Raises `OSError` if it cannot be mapped.  The descriptor stays the caller's.  Who writes into
        `bytes` of a mapping that is not `writable` gets SIGSEGV."""
        size = os.fstat(fd).st_size
        room = _map(None, size + HUGE_PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        address = -(-room // HUGE_PAGE) * HUGE_PAGE
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        _map(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        if not writable:
            _libc.madvise(address, size, _MADV_HUGEPAGE)  # what is not in memory yet is read in huge pages
        array = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(array, _libc.munmap, room, size + HUGE_PAGE).atexit = False
        self.bytes = memoryview(array).cast("B")
        self._address, self._size = address, size
        self._used = 0
        self._lock = threading.Lock()
        self._stretches = size // HUGE_PAGE * HUGE_PAGE

    def use(self, stop: int) -> None:
        """The first `stop` bytes are about to be used: makes them huge pages, where they are not yet.

        Changes no byte, so other threads and processes may write there meanwhile.  Of threads that call it
        each takes what those before it have not taken."""
        with self._lock:
            first, last = self._used, -(-min(stop, self._stretches) // HUGE_PAGE) * HUGE_PAGE
            self._used = max(first, last)
        for stretch in range(first, last, HUGE_PAGE):
            self.bytes[stretch]  # reading it makes the kernel give it memory
            _libc.madvise(self._address + stretch, HUGE_PAGE, _MADV_COLLAPSE)

    def protect(self, fd: int, size: int) -> None:
        """From now on the first `size` bytes can be read only, at the same addresses; the rest is let go.

        `fd` is the same file, opened for reading: a mapping of it does not keep the file from being sealed
        against writing.  The pages are mapped at once, as they were before.
        """
        _map(self._address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
        _libc.madvise(self._address, size, _MADV_POPULATE_READ)
        end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if end < self._size:
            nowhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _map(self._address + end, self._size - end, _PROT_NONE, nowhere, -1)


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {size} bytes: {os.strerror(error)}")
    return found
