"""What the memory of processes is used for.

Theory.  The *proportional set size* (PSS) counts a page that n processes map as 1/n in each of them, so the
numbers of all processes add up to what they use together.  The kernel says it for each mapping in
/proc/PID/smaps, where Baton's shared memory has names: the weights' image, the pool of the KV cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_IMAGE, _CACHED = "/memfd:baton-weights", ".weights"
"""How the name of a mapping of a weights' image begins; of one that is a file of a weight cache, ends."""
_KV_POOL = "/memfd:baton-kv"

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)$")


@dataclass(frozen=True)
class Memory:
    """Of one process, in bytes of PSS."""

    pss: int
    image: int
    """The weights, where they lie in an image that processes share."""
    kv_pool: int
    """What of the pool has been used so far; another instance's, if its pages are being read."""

    @property
    def private(self) -> int:
        """All else: heap, code, rings, and weights that are in no image."""
        return self.pss - self.image - self.kv_pool

    def as_dict(self) -> dict[str, int]:
        """As operators see it."""
        return {
            "pss_bytes": self.pss,
            "image_bytes": self.image,
            "kv_pool_bytes": self.kv_pool,
            "private_bytes": self.private,
        }


def sum_of(parts: Iterable[Memory]) -> Memory:
    """Of several processes."""
    every = list(parts)
    return Memory(
        sum(one.pss for one in every), sum(one.image for one in every), sum(one.kv_pool for one in every)
    )


def memory_of_all(processes: Mapping[str, int]) -> dict[str, Memory]:
    """By the names that they are given with; without those that are gone.  Takes milliseconds for each."""
    found = {name: memory_of(pid) for name, pid in processes.items()}
    return {name: memory for name, memory in found.items() if memory is not None}


def memory_of(pid: int) -> Memory | None:
    """None: there is no such process any more.  Raises `OSError` where the kernel does not say it."""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/smaps").exists():
            return None
        raise
    return read_smaps(text)


def read_smaps(text: str) -> Memory:
    """Adds up the mappings."""
    pss = image = kv_pool = 0
    name = ""
    for line in text.splitlines():
        if line.startswith("Pss:"):
            amount = int(line.split()[1]) * 1024
            pss += amount
            image += amount if name.startswith(_IMAGE) or name.endswith(_CACHED) else 0
            kv_pool += amount if name.startswith(_KV_POOL) else 0
        elif (head := _HEAD.match(line)) is not None:
            name = head[1]
    return Memory(pss, image, kv_pool)


def child_processes(pid: int) -> list[int]:
    """Of all its threads; none if there is no such process."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass
    return found
