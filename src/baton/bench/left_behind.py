"""What is left of processes when they have ended: shared memory, files of their private directories.

Shared memory of Baton has no name in any directory, so nobody could find it afterwards.  So while the
processes live, `Belongings.look` notes what they have open and mapped; when they have ended, `left` says what
of that is still there, and who has it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_MEMORY = re.compile(r"/memfd:(baton-\S*)")
_PRIVATE = re.compile(r"^(.*/baton-(?:run|new)-[^/]+)(?:/|$)")
_SHM = "/dev/shm/"


class Belongings:
    """Of processes; those of one name are counted once."""

    def __init__(self) -> None:
        self.memory: dict[int, str] = {}
        """Inode → name, of shared memory."""
        self._paths: set[str] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Notes what these processes have now.  Those that have ended are left out."""
        for pid in pids:
            memory, paths = _held(pid)
            self.memory |= memory
            for path in paths:
                private = _PRIVATE.match(path)
                if private:
                    self._paths.add(private[1])
                elif path.startswith(_SHM):
                    self._paths.add(path)

    def images(self) -> int:
        """How many weight images were seen."""
        return sum(name.startswith("baton-weights") for name in self.memory.values())

    def left(self) -> list[str]:
        """What there is still: a line each.  A process of another user is not looked at."""
        found = [f"{path} exists" for path in sorted(self._paths) if Path(path).exists()]
        for directory in Path("/proc").glob("[0-9]*"):
            memory, _ = _held(int(directory.name))
            found += [
                f"{memory[inode]} ({inode}) is held by process {directory.name}"
                for inode in sorted(memory.keys() & self.memory.keys())
            ]
        return found


def unfinished(cache: Path) -> list[Path]:
    """Files of a weight cache that were being written."""
    return sorted(path for path in cache.iterdir() if path.name.startswith("."))


def _held(pid: int) -> tuple[dict[int, str], set[str]]:
    """Shared memory and paths that a process has open or mapped."""
    memory: dict[int, str] = {}
    paths: set[str] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6:
                found = _MEMORY.match(words[5])
                if found:
                    memory[int(words[4])] = found[1]
                else:
                    paths.add(words[5])
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(fd)
                found = _MEMORY.match(target)
                if found:
                    memory[fd.stat().st_ino] = found[1]
                else:
                    paths.add(target)
    return memory, paths
