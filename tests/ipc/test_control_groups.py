"""Limits of control groups, wherever they stand on the way from the root to this process's own group."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from baton.executor.kv_pool import available_memory
from baton.ipc.processes.control_groups import allowed_cpus, cpu_quota, memory_left
from baton.ipc.processes.cores import usable_cores

SERVICE = "system.slice/baton.service"
GIB = 1 << 30


class Machine:
    """A root folder with what the kernel says of control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mounts: list[str] = []
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def in_group(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mount(self, kind: str, place: str, options: str = "rw", of: str = "/") -> None:
        number = len(self._mounts) + 30
        self._mounts.append(
            f"{number} 23 0:{number} {of} {place} rw,nosuid shared:4 - {kind} {kind} {options}\n"
        )
        self.write("proc/self/mountinfo", "".join(self._mounts))
        (self.root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return Machine(tmp_path)


@pytest.fixture
def unified(machine: Machine) -> Machine:
    """Version 2, as on a machine with systemd; this process is in a service."""
    machine.mount("cgroup2", "/sys/fs/cgroup", "rw,nsdelegate")
    machine.in_group(f"0::/{SERVICE}")
    return machine


@pytest.fixture
def legacy(machine: Machine) -> Machine:
    """Version 1: a hierarchy for CPUs, one for memory, and one of systemd's without controllers."""
    machine.mount("cgroup", "/sys/fs/cgroup/cpu,cpuacct", "rw,cpu,cpuacct")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", "rw,memory")
    machine.mount("cgroup2", "/sys/fs/cgroup/unified")
    machine.in_group(f"5:memory:/{SERVICE}", f"3:cpu,cpuacct:/{SERVICE}", "1:name=systemd:/", "0::/")
    return machine


@pytest.mark.parametrize("group", ["", "system.slice/", f"{SERVICE}/"])
def test_the_quota_of_each_group_above_counts(unified: Machine, group: str) -> None:
    for other in ("", "system.slice/", f"{SERVICE}/"):
        unified.write(f"sys/fs/cgroup/{other}cpu.max", "max 100000\n")
    unified.write(f"sys/fs/cgroup/{group}cpu.max", "200000 100000\n")
    assert cpu_quota(unified.root) == 2
    assert usable_cores(unified.root) == 2


def test_the_tightest_quota_wins(unified: Machine) -> None:
    unified.write(f"sys/fs/cgroup/{SERVICE}/cpu.max", "800000 100000\n")
    unified.write("sys/fs/cgroup/system.slice/cpu.max", "300000 100000\n")
    assert cpu_quota(unified.root) == 3


@pytest.mark.parametrize("limit", ["memory.max", "memory.high"])
@pytest.mark.parametrize("group", ["", "system.slice/", f"{SERVICE}/"])
def test_the_memory_of_each_group_above_counts(unified: Machine, group: str, limit: str) -> None:
    for other in ("system.slice/", f"{SERVICE}/"):
        unified.write(f"sys/fs/cgroup/{other}memory.max", "max\n")
        unified.write(f"sys/fs/cgroup/{other}memory.current", f"{GIB}\n")
    unified.write(f"sys/fs/cgroup/{group}{limit}", f"{4 * GIB}\n")
    unified.write(f"sys/fs/cgroup/{group}memory.current", f"{3 * GIB}\n")
    unified.write(f"sys/fs/cgroup/{group}memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file 7\n")
    assert memory_left(unified.root) == 2 * GIB
    assert available_memory(unified.root) == 2 * GIB


def test_without_a_limit_the_machine_is_the_limit(unified: Machine) -> None:
    unified.write(f"sys/fs/cgroup/{SERVICE}/memory.max", "max\n")
    unified.write(f"sys/fs/cgroup/{SERVICE}/memory.current", "5\n")
    assert memory_left(unified.root) == math.inf
    assert available_memory(unified.root) == 32 * GIB
    assert cpu_quota(unified.root) == math.inf
    assert allowed_cpus(unified.root) is None


def test_a_group_that_has_used_all_it_may_leaves_nothing(unified: Machine) -> None:
    unified.write("sys/fs/cgroup/system.slice/memory.high", f"{GIB}\n")
    unified.write("sys/fs/cgroup/system.slice/memory.current", f"{2 * GIB}\n")
    assert available_memory(unified.root) == 0


def test_cpusets_of_all_groups_are_taken_together(unified: Machine) -> None:
    unified.write(f"sys/fs/cgroup/{SERVICE}/cpuset.cpus.effective", "0-3,8\n")
    unified.write("sys/fs/cgroup/system.slice/cpuset.cpus.effective", "2-9\n")
    assert allowed_cpus(unified.root) == {2, 3, 8}
    assert usable_cores(unified.root) == 3


def test_version_1_has_a_hierarchy_for_each_controller(legacy: Machine) -> None:
    legacy.write(f"sys/fs/cgroup/cpu,cpuacct/{SERVICE}/cpu.cfs_quota_us", "-1\n")
    legacy.write(f"sys/fs/cgroup/cpu,cpuacct/{SERVICE}/cpu.cfs_period_us", "100000\n")
    legacy.write("sys/fs/cgroup/cpu,cpuacct/system.slice/cpu.cfs_quota_us", "150000\n")
    legacy.write("sys/fs/cgroup/cpu,cpuacct/system.slice/cpu.cfs_period_us", "100000\n")
    legacy.write(f"sys/fs/cgroup/memory/{SERVICE}/memory.limit_in_bytes", f"{2 * GIB}\n")
    legacy.write(f"sys/fs/cgroup/memory/{SERVICE}/memory.usage_in_bytes", f"{GIB}\n")
    legacy.write(
        f"sys/fs/cgroup/memory/{SERVICE}/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n"
    )
    assert cpu_quota(legacy.root) == 1.5
    assert memory_left(legacy.root) == GIB + GIB // 2


@pytest.mark.parametrize(
    ("group", "mounted"),
    [
        (
            f"/{SERVICE}",
            f"/{SERVICE}",
        ),  # a container that sees the host's paths; its mount begins with its group
        ("/", "/"),  # with a namespace of its own
        ("/", "/../.."),  # mounted from outside of the namespace
        ("/../elsewhere", "/"),  # moved out of its namespace's root
    ],
)
def test_a_container_has_its_group_at_the_root(machine: Machine, group: str, mounted: str) -> None:
    machine.mount("cgroup2", "/sys/fs/cgroup", of=mounted)
    machine.in_group(f"0::{group}")
    machine.write("sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert cpu_quota(machine.root) == 2.5


def test_a_group_within_what_a_container_sees(machine: Machine) -> None:
    machine.mount("cgroup2", "/sys/fs/cgroup", of="/kubepods/pod 1".replace(" ", "\\040"))
    machine.in_group("0::/kubepods/pod 1/box/inner")
    machine.write("sys/fs/cgroup/box/cpu.max", "100000 100000\n")
    machine.write("sys/fs/cgroup/box/inner/cpu.max", "max 100000\n")
    assert cpu_quota(machine.root) == 1


def test_a_mount_elsewhere(machine: Machine) -> None:
    machine.mount("cgroup2", "/run/groups")
    machine.in_group("0::/a")
    machine.write("run/groups/a/cpu.max", "100000 100000\n")
    assert cpu_quota(machine.root) == 1


def test_groups_of_others_do_not_count(unified: Machine) -> None:
    unified.write("sys/fs/cgroup/system.slice/ssh.service/cpu.max", "1000 100000\n")
    unified.write("sys/fs/cgroup/user.slice/memory.max", "1\n")
    unified.write("sys/fs/cgroup/user.slice/memory.current", "1\n")
    assert cpu_quota(unified.root) == math.inf
    assert memory_left(unified.root) == math.inf


@pytest.mark.parametrize("text", ["", "nonsense", "0::relative", "::::", "1:cpu", "x\ny:\n\0"])
def test_what_cannot_be_read_limits_nothing(machine: Machine, text: str) -> None:
    machine.write("proc/self/cgroup", text)
    machine.write("proc/self/mountinfo", text)
    machine.write("sys/fs/cgroup/memory.max", "many\n")
    machine.write("sys/fs/cgroup/cpu.max", "1\n")
    machine.write("sys/fs/cgroup/cpuset.cpus.effective", "all\n")
    assert cpu_quota(machine.root) == math.inf
    assert memory_left(machine.root) == math.inf
    assert allowed_cpus(machine.root) is None


def test_of_this_machine() -> None:
    assert cpu_quota() > 0
    assert memory_left() >= 0
