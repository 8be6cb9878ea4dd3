"""Pages of another process on the same host: its pool is mapped here, read-only, and copied from.

Theory.  The source's pool is a memfd.  Its name in `PoolSource.shared_memory` is "PID:FD:DEVICE:INODE": the
reader opens /proc/PID/fd/FD and checks that it is the memory that was meant, so neither a reused process id
nor a reused descriptor can be taken for it.  The memory is sealed against shrinking, so reading it cannot
fault whatever its owner does, dying included: it lives as long as the last mapping.  So a source that hangs
or dies does not disturb a copy; whether its pages still mean what they should, the lease says.

A mapping is kept for the next fetch, together with a pidfd of its owner, and dropped when that is dead.

One `memcpy` a stretch of pages, with the GIL released.  With checksums, the copy is compared with the source
afterwards: that shows a page which changed while it was read, and memory that does not keep what is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select

import msgspec
import numpy as np

from baton.protocol.messages.handover import PoolSource
from baton.transfer.base import Bytes, Copy, Copying, PoolView, TransferError, this_host
from baton.transfer.layout import neighbours, part_here, part_there, rows

_TURN_BYTES = 4 << 20
"""Copied between two looks at whether the fetch was dropped: a fraction of a millisecond."""


class _Mapping:
    """The pool of a source rank, mapped."""

    def __init__(self, name: str) -> None:
        """Raises `OSError` or `ValueError`."""
        pid, fd, device, inode = (int(word) for word in name.split(":"))
        if not 0 < pid < 1 << 31:
            raise ValueError(f"{pid} is no process id")
        self._pidfd = os.pidfd_open(pid)
        try:
            memory = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.fstat(memory)
                if (found.st_dev, found.st_ino) != (device, inode):
                    raise ValueError(f"process {pid} is another one than that which had the pool")
                mapped = mmap.mmap(memory, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(memory)
        except BaseException:
            os.close(self._pidfd)
            raise
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    def owner_is_dead(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Unmapped when the last copy that uses it is over."""
        self.bytes = np.empty(0, np.uint8)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class SharedMemoryTransport:
    """See `base.Transport`."""

    name = "shared_memory"
    parallel = 1

    def __init__(self, pool: PoolView, *, checksums: bool = False) -> None:
        self._pool = pool
        self._here = np.frombuffer(pool.memory, np.uint8) if pool.memory is not None else None
        self._checksums = checksums
        self._mappings: dict[str, _Mapping] = {}
        self._host = this_host()

    def export(self, source: PoolSource) -> PoolSource:
        if self._pool.fd is None:
            return source
        memory = os.fstat(self._pool.fd)
        name = f"{os.getpid()}:{self._pool.fd}:{memory.st_dev}:{memory.st_ino}"
        return msgspec.structs.replace(source, shared_memory=name)

    def why_not(self, source: PoolSource) -> str:
        if self._here is None:
            return "this pool is not in main memory"
        if not source.shared_memory:
            return "the source offers none"
        if source.host != self._host:
            return "the source is on another host or in another container"
        try:
            self._mapping(source)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def copy(self, copy: Copy) -> Copying:
        assert self._here is not None  # as `why_not` said
        try:
            there = self._mapping(copy.source).bytes
        except (OSError, ValueError) as error:
            raise TransferError(f"the pool of rank {copy.source.rank} cannot be mapped: {error}") from None
        part, other = part_here(copy, self._pool), part_there(copy, self._pool)
        as_runs = part.is_run and other.is_run
        source, target = rows(there, other, as_runs=as_runs), rows(self._here, part, as_runs=as_runs)
        most = max(1, _TURN_BYTES // part.page_bytes)
        since_turn = 0
        for page, block, count in neighbours(copy.pages, copy.blocks):
            for first in range(0, count, most):
                n = min(most, count - first)
                read = source[page + first : page + first + n]
                written = target[block + first : block + first + n]
                np.copyto(written, read)
                if self._checksums and not np.array_equal(written, read):
                    what = f"pages {page + first} to {page + first + n - 1} of rank {copy.source.rank}"
                    raise TransferError(f"{what} differ from their copy: they changed meanwhile")
                since_turn += n * part.page_bytes
                if since_turn >= _TURN_BYTES:
                    since_turn = 0
                    yield None
        return len(copy.pages) * part.page_bytes

    def tick(self) -> bool:
        for name, mapping in list(self._mappings.items()):
            if mapping.owner_is_dead():
                self._mappings.pop(name).close()
        return bool(self._mappings)

    def close(self) -> None:
        while self._mappings:
            self._mappings.popitem()[1].close()
        self._here = None

    def _mapping(self, source: PoolSource) -> _Mapping:
        found = self._mappings.get(source.shared_memory)
        if found is None:
            found = _Mapping(source.shared_memory)
            if len(found.bytes) < source.num_blocks * source.block_bytes:
                with contextlib.suppress(OSError):
                    found.close()
                raise ValueError("its memory is smaller than the pool should be")
            self._mappings[source.shared_memory] = found
        return found
