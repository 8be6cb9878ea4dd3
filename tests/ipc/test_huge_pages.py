"""Shared memory in huge pages: the same memory, whoever looks, before and after; small pages do as well."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from baton.ipc.huge_pages import HUGE_PAGE, HugeMapping
from baton.ipc.memory import create_memory

_NAME = "baton-test-huge"


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{_NAME}")


def populates() -> bool:
    with mmap.mmap(-1, 4096) as page:
        try:
            page.madvise(22)  # MADV_POPULATE_READ, of Linux 5.14
        except OSError:
            return False
    return True


def huge_bytes(of: str = "ShmemPmdMapped") -> int:
    """Of the mappings of this name that are in huge pages."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key = line.split()[0]
        if not key.endswith(":"):
            ours = f"memfd:{_NAME}" in line
        elif ours and key == f"{of}:":
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.parametrize("size", [5000, HUGE_PAGE, 3 * HUGE_PAGE + 4096])
def test_what_others_see(size: int) -> None:
    fd = create_memory(_NAME, size)
    other = mmap.mmap(fd, size)
    memory = HugeMapping(fd)
    bytes_ = memory.bytes
    other[0] = other[size // 2] = other[size - 1] = 7
    for stop in (1, size // 2 + 1, size, size + 10):
        memory.use(stop)
        assert (bytes_[0], bytes_[size // 2], bytes_[size - 1]) == (7, 7, 7)
    bytes_[size - 2] = 9
    assert other[size - 2] == 9
    assert bytes(bytes_).count(0) == size - 4
    os.close(fd)


def test_huge_where_the_system_can() -> None:
    fd = create_memory(_NAME, 4 * HUGE_PAGE)
    memory = HugeMapping(fd)
    memory.use(HUGE_PAGE + 1)
    found = huge_bytes()
    if not found:
        pytest.skip("this system gives no huge pages on request")
    assert found == 2 * HUGE_PAGE
    os.close(fd)


def test_what_is_protected_stays_mapped() -> None:
    """Else the kernel copies it to a file page by page (`executor/weights/cache_file.py`), and the file gets
    small pages."""
    fd = create_memory(_NAME, 3 * HUGE_PAGE)
    memory = HugeMapping(fd)
    memory.use(3 * HUGE_PAGE)
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    memory.protect(readable, 2 * HUGE_PAGE + 4096)
    if not populates():
        pytest.skip("this system maps pages one by one")
    assert huge_bytes("Rss") == 2 * HUGE_PAGE + 4096
    os.close(readable)
    os.close(fd)


def test_unmapped_with_the_last_view() -> None:
    fd = create_memory(_NAME, 10_000)
    before = mappings()
    memory = HugeMapping(fd)
    view = memory.bytes
    assert mappings() == before + 1
    del memory
    assert mappings() == before + 1
    view[0] = 1
    view.release()
    del view
    assert mappings() == before
    os.close(fd)


def test_what_cannot_be_mapped() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match="mapping 0 bytes"):
        HugeMapping(read_end)
    os.close(read_end)
    os.close(write_end)


class Interrupted:
    """Memory whose every read is followed by the turn of another thread, which must end before it goes on:
    the worst moment for whoever writes back what was read."""

    def __init__(self, memory: memoryview, read: threading.Event, written: threading.Event) -> None:
        self._memory, self._read, self._written = memory, read, written

    def __getitem__(self, index: int) -> int:
        value = self._memory[index]
        self._read.set()
        assert self._written.wait(60)
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._memory[index] = value


def test_what_another_thread_writes_meanwhile_stays() -> None:
    """Pages of a hand-over are copied into blocks that a step makes huge at the same time."""
    fd = create_memory(_NAME, 3 * HUGE_PAGE)
    memory = HugeMapping(fd)
    pages = memory.bytes
    read, written = threading.Event(), threading.Event()

    def copy() -> None:
        assert read.wait(60)
        pages[:] = b"\x07" * len(pages)
        written.set()

    copying = threading.Thread(target=copy)
    copying.start()
    memory.bytes = Interrupted(pages, read, written)  # type: ignore[assignment]
    memory.use(len(pages))
    copying.join()
    assert bytes(pages).count(7) == len(pages)
    os.close(fd)


def test_pages_that_are_copied_while_others_come_into_use_are_whole() -> None:
    """The same without a staged moment: a thread copies, as the transfer thread does without the
    interpreter's lock, while the step loop uses stretch after stretch."""
    size = 8 * HUGE_PAGE
    source = np.full(size, 7, np.uint8)
    for _ in range(5):
        fd = create_memory(_NAME, size)
        memory = HugeMapping(fd)
        target = np.frombuffer(memory.bytes, np.uint8)
        copying = threading.Thread(target=np.copyto, args=(target, source))
        copying.start()
        for stop in range(HUGE_PAGE, size + 1, HUGE_PAGE):
            memory.use(stop)
        copying.join()
        assert np.array_equal(target, source)
        os.close(fd)
