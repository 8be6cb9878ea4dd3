"""How many cores this process may compute on.

Three limits, of which the smallest counts:

* the affinity mask: what `taskset` or a batch system leaves, and the cpuset of its control groups;
* physical cores: two hardware threads of one core share its vector units, so the second one adds little to a
  matrix product, and a barrier waits for both.  It is left to the gateway and the engine;
* the CPU quota of its control groups: a container of two CPUs on a machine of 64 sees 64, and with as many
  threads the kernel stops it for most of each period.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from baton.ipc.processes.control_groups import ROOT, allowed_cpus, cpu_quota


def usable_cores(root: Path = ROOT) -> int:
    """At least 1.  `root`: of the file system, for tests."""
    cores = _physical(_allowed(root), root / "sys/devices/system/cpu")
    return max(1, math.ceil(min(cores, cpu_quota(root))))


def usable_threads(root: Path = ROOT) -> int:
    """Hardware threads: likewise, but two of one core are two."""
    return max(1, math.ceil(min(len(_allowed(root)), cpu_quota(root))))


def _allowed(root: Path) -> set[int]:
    allowed = os.sched_getaffinity(0)
    return allowed & (allowed_cpus(root) or allowed) or allowed


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
