"""What the control groups of this process allow: CPUs and memory.

A process is in one group of each hierarchy, and every group above it binds it, too: systemd puts `CPUQuota=`
and `MemoryMax=` on a service's own group, far below the root of /sys/fs/cgroup, and a container may be a
group within a limited pod.  /proc/self/cgroup names the group, /proc/self/mountinfo where its hierarchy is
mounted, and from which of its groups on: a container may see its own as the root, or the host's path of a
group that its mount begins with.  Version 2 has one hierarchy for all controllers, version 1 one for some of
them each; a machine may have both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path("/")
_USUAL: Final = "sys/fs/cgroup"
_UNIFIED: Final = ""
"""What /proc/self/cgroup has in place of controllers for version 2."""
_MEMORY_V2: Final = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_MEMORY_V1: Final = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_MOST_CPUS: Final = 1 << 16


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs that the tightest group may use; infinite without a limit.

    `root`: of the file system, for tests.
    """
    quotas = [math.inf]
    for folder in _folders("cpu", root):
        words = _text(folder / "cpu.max").split()
        if not words:
            words = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        quotas.append(_ratio(words))
    return min(quotas)


def allowed_cpus(root: Path = ROOT) -> frozenset[int] | None:
    """Hardware threads that every group's cpuset has; None without one."""
    found: frozenset[int] | None = None
    for folder in _folders("cpuset", root):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            if cpus := _cpus(_text(folder / name)):
                found = cpus if found is None else found & cpus
    return found


def memory_left(root: Path = ROOT) -> float:
    """Bytes that the fullest group still lets this process have; infinite without a limit.

    Cached pages of files (a checkpoint just read) count as used but are given up on demand.
    """
    left = math.inf
    for folder in _folders("memory", root):
        for limits, used_name, cached_name in (_MEMORY_V2, _MEMORY_V1):
            limit = min((_number(_text(folder / name)) for name in limits), default=math.inf)
            used = _number(_text(folder / used_name))
            if math.isfinite(limit) and math.isfinite(used):
                cached = _field(_text(folder / "memory.stat"), cached_name)
                left = min(left, max(limit - used + cached, 0))
    return left


def _folders(controller: str, root: Path) -> list[Path]:
    """Of the groups that bind this process, the innermost first."""
    groups = list(_groups(_text(root / "proc/self/cgroup")))
    paths = {hierarchy: path for hierarchy, path in groups if hierarchy in (controller, _UNIFIED)}
    found: dict[Path, None] = {}
    for hierarchy, mounted, place in _mounts(_text(root / "proc/self/mountinfo")):
        if (path := paths.get(hierarchy)) is not None:
            found |= dict.fromkeys(_upwards(root / place.lstrip("/"), _inside(path, mounted)))
    # Where nothing is said of mounts, or a group of which only the root can be seen.
    usual = root / _USUAL
    found |= dict.fromkeys((usual, usual / controller))
    return [folder for folder in found if folder.is_dir()]


def _groups(text: str) -> Iterator[tuple[str, str]]:
    """(controller, path of its group); of version 2 `_UNIFIED`."""
    for line in text.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if path.startswith("/"):
            yield from ((controller, path) for controller in controllers.split(","))


def _mounts(text: str) -> Iterator[tuple[str, str, str]]:
    """(controller or `_UNIFIED`, the group that is mounted, where)."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), (*after.split(), "", "", "")[:3]
        if len(fields) < 5:
            continue
        mounted, place = (_unescaped(field) for field in fields[3:5])
        if kind == "cgroup2":
            yield _UNIFIED, mounted, place
        elif kind == "cgroup":
            yield from ((option, mounted, place) for option in options.split(","))


def _inside(path: str, mounted: str) -> str:
    """The group's path within a mount; "" if it is the mount's root, or cannot be seen there."""
    inside = path if mounted == "/" else path.removeprefix(mounted) if _is_within(path, mounted) else ""
    inside = inside.strip("/")
    return "" if ".." in PurePosixPath(inside).parts else inside


def _is_within(path: str, mounted: str) -> bool:
    return path == mounted or path.startswith(f"{mounted}/")


def _upwards(mount: Path, inside: str) -> Iterator[Path]:
    parts = PurePosixPath(inside).parts
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _unescaped(field: str) -> str:
    """Spaces and the like stand as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def _ratio(words: list[str]) -> float:
    """Of quota and period; a quota of "max" or below zero is none."""
    try:
        quota, period = (int(word) for word in words)
        return quota / period if quota > 0 else math.inf
    except (ValueError, ZeroDivisionError):
        return math.inf


def _cpus(text: str) -> frozenset[int]:
    """'0-3,8' → 0, 1, 2, 3, 8; empty for what is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        if match is None:
            return frozenset()
        first = int(match[1])
        found |= set(range(first, min(int(match[2] or first), _MOST_CPUS) + 1))
    return frozenset(found)


def _number(text: str) -> float:
    """Bytes; infinite for "max" and what is not there."""
    return int(text) if text.isdecimal() else math.inf


def _field(text: str, key: str) -> int:
    lines: Iterable[list[str]] = (line.split() for line in text.splitlines())
    return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == key), 0)


def _text(path: Path) -> str:
    """What a file of the kernel's says; "" if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
