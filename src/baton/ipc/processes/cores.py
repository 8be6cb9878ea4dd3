"""How many cores this process may compute on.

Three limits, of which the smallest counts:

* the affinity mask: what `taskset` or a batch system leaves;
* physical cores: two hardware threads of one core share its vector units, so the second one adds little to a
  matrix product, and a barrier waits for both.  It is left to the gateway and the engine;
* the CPU quota of the control group: a container of two CPUs on a machine of 64 sees 64, and with as many
  threads the kernel stops it for most of each period.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

_SYS = Path("/sys")


def usable_cores(sys: Path = _SYS) -> int:
    """At least 1.  `sys`: for tests."""
    allowed = os.sched_getaffinity(0)
    cores = _physical(allowed, sys / "devices/system/cpu")
    return max(1, math.ceil(min(cores, _quota(sys / "fs/cgroup"))))


def _physical(cpus: Iterable[int], directory: Path) -> int:
    """Cores that have at least one of these hardware threads; each counts where the kernel says nothing."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (directory / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)


def _quota(directory: Path) -> float:
    """CPUs that the control group may use; infinite without a limit.  Version 2, else version 1."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (directory / "cpu/cpu.cfs_quota_us").read_text()
            period = (directory / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return math.inf
    try:
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return math.inf
    return cpus if cpus > 0 else math.inf
