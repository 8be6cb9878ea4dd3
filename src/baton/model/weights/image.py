"""A weight image: all that a rank has packed, in one file that many processes map.

Layout: a header of 4 KB, the tensors (each on a multiple of `_ALIGNED` bytes), the table of contents.  The
header says where the table is, how long the file is, and the table's SHA-256; it is written last, so a file
that was left unfinished, or cut, is none.  The table has the *key* (what the image is a function of: the
checkpoint, formats, rank, instruction set, …), and of each tensor its name, dtype, shape, place and CRC-32.

The file is a memfd or, in a weight cache, one on disk; the bytes are the same.  A memfd is sealed when it has
been filled: no process can write, cut or extend it any more.  It is filled, and mapped, in huge pages.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
from torch import Tensor

from baton.ipc.huge_pages import HugeMapping
from baton.model.weights.store import Facts

_MAGIC = b"BATON WEIGHTS\0\0\1"
"""Its last byte is the version of this layout."""
_HEADER = struct.Struct("<16sQQQ32s")
"""Magic, bytes of the file, where the table begins, its bytes, its SHA-256."""
_FIRST = 4096
_ALIGNED = 256
_SEALS = 8 | 4 | 2 | 1
"""F_SEAL_WRITE, _GROW, _SHRINK and _SEAL of Linux; on other systems `fcntl` has no such names."""
_CHECKED_AT_ONCE = 64 << 20


class ImageError(ValueError):
    """These bytes are not the image that is needed.  One line that says why."""


class Entry(msgspec.Struct, frozen=True):
    """A tensor."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In the file, of the first byte."""
    bytes: int
    crc: int


class Table(msgspec.Struct, frozen=True):
    """What the image holds."""

    key: str
    tensors: dict[str, Entry]
    facts: dict[str, dict[str, int | float | str]]


class ImageWriter:
    """The store of a model that is being loaded into an empty memfd.  See `store.WeightStore`.

    Several threads may make tensors.  These lie in the order in which they were made.
    """

    def __init__(self, fd: int, key: str, room: int) -> None:
        """`room`: more bytes than will be needed; what is not used takes no memory.  Raises `OSError`.
        The descriptor stays the caller's."""
        self.complete = False
        self._fd, self._key = fd, key
        os.ftruncate(fd, room)
        self._mapping = HugeMapping(fd)
        self._size = _FIRST
        self._lock = threading.Lock()
        self._tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self._facts: dict[str, dict[str, int | float | str]] = {}

    @property
    def nbytes(self) -> int:
        """Of the image, so far."""
        return self._size

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device.type == "cpu"
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            assert name not in self._tensors, name
            offset = -(-self._size // _ALIGNED) * _ALIGNED
            self._tensors[name] = (_name_of(dtype), shape, offset, size)
            self._size = offset + size
        self._mapping.use(offset + size)
        return _tensor(self._mapping, offset, shape, dtype)

    def note(self, name: str, facts: Callable[[], Facts]) -> Facts:
        assert name not in self._facts, name
        return self._facts.setdefault(name, dict(facts()))

    def finish(self, threads: int = 1) -> None:
        """Nothing is written any more: makes it an image, and its memory read-only, for every process.

        Raises `OSError`.
        """
        table = msgspec.msgpack.encode(Table(self._key, self._entries(threads), self._facts))
        begin = -(-self._size // _ALIGNED) * _ALIGNED
        size = begin + len(table)
        self._mapping.use(size)
        memory = self._mapping.bytes
        memory[begin:size] = table
        memory[: _HEADER.size] = _HEADER.pack(_MAGIC, size, begin, len(table), hashlib.sha256(table).digest())
        readable = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._mapping.protect(readable, size)
        finally:
            os.close(readable)
        os.ftruncate(self._fd, size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._size, self.complete = size, True

    @property
    def bytes(self) -> memoryview:
        """Of the finished image."""
        return self._mapping.bytes[: self._size]

    def _entries(self, threads: int) -> dict[str, Entry]:
        def entry(name: str) -> Entry:
            dtype, shape, offset, size = self._tensors[name]
            return Entry(dtype, shape, offset, size, zlib.crc32(self._mapping.bytes[offset : offset + size]))

        with ThreadPoolExecutor(threads) as pool:
            return dict(zip(self._tensors, pool.map(entry, self._tensors), strict=True))


class ImageReader:
    """The store of a model that takes its weights from an image.  See `store.WeightStore`."""

    complete = True

    def __init__(self, fd: int, key: str) -> None:
        """Maps it.  Raises `ImageError` if it is not the image of `key`, whole; what tensors hold is for
        `verify` to see.  The descriptor, opened for reading, stays the caller's."""
        size = os.fstat(fd).st_size
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or header[:16] != _MAGIC:
            raise ImageError("it is no finished weight image of this version")
        _, whole, begin, length, digest = _HEADER.unpack(header)
        if whole != size or begin + length != size:
            raise ImageError(f"it has {size} bytes, not {whole}: it was cut or extended")
        table = os.pread(fd, length, begin)
        if hashlib.sha256(table).digest() != digest:
            raise ImageError("its table of contents is damaged")
        try:
            self._table = msgspec.msgpack.decode(table, type=Table)
        except msgspec.MsgspecError as error:
            raise ImageError(f"its table of contents is of another kind: {error}") from None
        if self._table.key != key:
            raise ImageError("it was made of another checkpoint, or for other settings")
        if any(entry.offset + entry.bytes > begin for entry in self._table.tensors.values()):
            raise ImageError("its table of contents names places outside of it")
        try:
            self._mapping = HugeMapping(fd, writable=False)
        except OSError as error:
            raise ImageError(f"it cannot be mapped: {error.strerror}") from None

    @property
    def nbytes(self) -> int:
        return len(self._mapping.bytes)

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Raises `ImageError` if there is no such tensor."""
        entry = self._table.tensors.get(name)
        if entry is None or (entry.dtype, entry.shape) != (_name_of(dtype), tuple(shape)):
            raise ImageError(f"it has no tensor {name!r} of {list(shape)} in {_name_of(dtype)}")
        return _tensor(self._mapping, entry.offset, shape, dtype)

    def note(self, name: str, facts: Callable[[], Facts]) -> Facts:
        """Raises `ImageError` if there is no such note."""
        found = self._table.facts.get(name)
        if found is None:
            raise ImageError(f"it has no note {name!r}")
        return found

    def verify(self, threads: int = 1) -> None:
        """Reads all of it.  Raises `ImageError` if a tensor is not what was written."""

        def wrong(name: str) -> bool:
            entry, crc = self._table.tensors[name], 0
            for first in range(entry.offset, entry.offset + entry.bytes, _CHECKED_AT_ONCE):
                stop = min(first + _CHECKED_AT_ONCE, entry.offset + entry.bytes)
                crc = zlib.crc32(self._mapping.bytes[first:stop], crc)
            return crc != entry.crc

        with ThreadPoolExecutor(threads) as pool:
            damaged = [
                name
                for name, is_wrong in zip(
                    self._table.tensors, pool.map(wrong, self._table.tensors), strict=True
                )
                if is_wrong
            ]
        if damaged:
            raise ImageError(f"tensor {damaged[0]!r} is damaged (its checksum is another one)")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(mapping: HugeMapping, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    elements = math.prod(shape)
    if not elements:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping.bytes, dtype=dtype, count=elements, offset=offset).view(shape)
