"""The private directory: held by the living, swept by whoever comes after the dead."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from baton.launch.instances.runtime_dir import RuntimeDirectory


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_it_is_private_and_goes_away() -> None:
    directory = RuntimeDirectory()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_the_next_one_sweeps_what_a_killed_owner_left_and_nothing_else(tmp_path: Path) -> None:
    living, dead = RuntimeDirectory(), RuntimeDirectory()
    (dead.path / "a.sock").touch()
    os.close(dead._lock)  # what the kernel does when the owner is killed
    unrelated = tmp_path / "baton-run-of-somebody"
    unrelated.mkdir()
    third = RuntimeDirectory()
    assert living.path.exists()
    assert unrelated.exists()
    assert not dead.path.exists()
    third.remove()
    living.remove()


def test_a_long_temporary_path_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = RuntimeDirectory()
    assert directory.path.parent == Path("/tmp")
    directory.remove()
