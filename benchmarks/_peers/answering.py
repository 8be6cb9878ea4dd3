"""The other end of `peers.py`: a process that holds one engine and completes batches on request.

Runs in the environment of the engine, so nothing of Baton is imported here.  Orders are lines of JSON on
standard input, answers lines on what was standard output; whatever the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Complete = Callable[[list[list[int]], int], int]
"""(prompts as token ids, output tokens of each) → output tokens in all."""


@dataclass(frozen=True)
class Settings:
    """What an engine is started with."""

    model: str
    """Directory of the checkpoint."""
    dtype: str
    quantization: str | None
    threads: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_bytes: int
    converted: str
    """Directory for what the engine makes of the checkpoint, if it cannot read it as it is."""


class NotOffered(Exception):
    """The engine cannot do what the settings ask for; the message says what."""


def answer(load: Callable[[Settings], tuple[str, Complete]]) -> None:
    """Loads the engine (`load` returns its version and a function), then answers until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**content: object) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    start = time.perf_counter()
    try:
        version, complete = load(Settings(**json.loads(sys.argv[1])))
    except NotOffered as error:
        reply(error=str(error))
        return
    reply(version=version, load_s=time.perf_counter() - start, resident_bytes=resident_bytes())
    for line in sys.stdin:
        order = json.loads(line)
        before = time.perf_counter()
        tokens = complete(order["prompts"], order["output_len"])
        elapsed = time.perf_counter() - before
        reply(elapsed_s=elapsed, output_tokens=tokens, resident_bytes=resident_bytes())


def resident_bytes() -> int:
    """Memory of this process and its descendants; what several share counts once (PSS)."""
    rollups = _read_all("smaps_rollup")
    lines = [line for rollup in rollups for line in rollup.splitlines() if line.startswith("Pss:")]
    return sum(int(line.split()[1]) for line in lines) * 1024


def _read_all(name: str) -> list[str]:
    """The file /proc/PID/`name` of this process and of all its descendants."""
    found, pending = [], [os.getpid()]
    while pending:
        directory = Path(f"/proc/{pending.pop()}")
        try:
            for task in (directory / "task").iterdir():
                pending += [int(word) for word in (task / "children").read_text().split()]
            found.append((directory / name).read_text())
        except OSError:  # it has just ended
            continue
    return found
