"""Why an instance fails whose processes have ended, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.ipc.processes.process import describe_exit


def describe_deaths(
    dead: set[int], rank_of: Mapping[int, int], pids: Sequence[int], said: Mapping[int, str]
) -> str:
    """`dead`: pidfds of processes that have ended; `rank_of` whose they are, `pids` by rank, `said` what
    ranks reported before.  One process may stand for several ranks, on other hosts: it is named once."""
    parts: list[str] = []
    named: set[int] = set()
    for fd in sorted(dead, key=lambda fd: (rank_of[fd] not in said, rank_of[fd])):
        rank = rank_of[fd]
        if pids[rank] in named:
            continue
        named.add(pids[rank])
        parts.append(f"worker rank {rank} (process {pids[rank]}) {describe_exit(fd)}")
        if rank in said:
            parts[-1] += f": {said[rank]}"
    gone = {rank_of[fd] for fd in dead}
    parts += [f"worker rank {rank} failed: {said[rank]}" for rank in said if rank not in gone]
    return "; ".join(parts)
