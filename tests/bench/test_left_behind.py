"""What is left of processes is found, whether it is open or only mapped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from baton.bench.left_behind import Belongings, unfinished


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_memory_that_somebody_still_has(how: str) -> None:
    fd = os.memfd_create("baton-weights")
    os.ftruncate(fd, 4096)
    belongings = Belongings()
    belongings.look([os.getpid()])
    assert belongings.images() == 1
    with mmap.mmap(fd, 4096, prot=mmap.PROT_READ):
        if how == "mapped":
            os.close(fd)
        (line,) = (line for line in belongings.left() if "baton-weights" in line)
        assert line.endswith(f"is held by process {os.getpid()}")
    if how == "open":
        os.close(fd)
    assert not [line for line in belongings.left() if "baton-weights" in line]


def test_private_directories(tmp_path: Path) -> None:
    (private := tmp_path / "baton-run-1").mkdir()
    belongings = Belongings()
    with (private / "lock").open("w"):
        belongings.look([os.getpid(), 2**22 + 1])
    (private / "lock").unlink()
    assert f"{private} exists" in belongings.left()
    private.rmdir()
    assert f"{private} exists" not in belongings.left()


def test_files_that_were_being_written(tmp_path: Path) -> None:
    (tmp_path / "m-1.weights").touch()
    assert unfinished(tmp_path) == []
    (left := tmp_path / ".m-1.weights.abc").touch()
    assert unfinished(tmp_path) == [left]
