"""Shared memory in huge pages: the same memory, whoever looks, before and after; small pages do as well."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from baton.ipc.huge_pages import HUGE_PAGE, HugeMapping
from baton.ipc.memory import create_memory

_NAME = "baton-test-huge"


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{_NAME}")


def huge_bytes() -> int:
    """Of the mappings of this name that are in huge pages."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key = line.split()[0]
        if not key.endswith(":"):
            ours = f"memfd:{_NAME}" in line
        elif ours and key == "ShmemPmdMapped:":
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
