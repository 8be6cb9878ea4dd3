from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.ipc.processes.cores import usable_cores, usable_threads


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight hardware threads of four cores, all allowed, no quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for cpu in range(8):
        directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def test_physical_cores_count(root: Path):
    assert usable_cores(root) == 4


def test_the_affinity_mask_counts(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 5})
    assert usable_cores(root) == 2


def test_without_topology_each_thread_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", 4), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("nonsense", 4)],
)
def test_the_quota_of_a_control_group(root: Path, text: str, cores: int):
    (root / "sys/fs/cgroup/cpu.max").write_text(text + "\n")
    assert usable_cores(root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 4), ("300000", 3)])
def test_the_quota_of_version_1(root: Path, quota: str, cores: int):
    directory = root / "sys/fs/cgroup/cpu"
    directory.mkdir()
    (directory / "cpu.cfs_quota_us").write_text(quota)
    (directory / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(root) == cores


def test_hardware_threads_count_where_they_are_asked_for(root: Path):
    assert usable_threads(root) == 8
    (root / "sys/fs/cgroup/cpu.max").write_text("300000 100000\n")
    assert usable_threads(root) == 3


def test_the_cpuset_of_a_control_group_counts(root: Path):
    (root / "sys/fs/cgroup/cpuset.cpus.effective").write_text("0-1,4\n")
    assert usable_cores(root) == 2
    assert usable_threads(root) == 3


def test_of_this_machine():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
