"""Ranks in processes of their own: a module of tests that is run once for each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def told_by_ranks(module: str, arguments: Sequence[Sequence[str]], timeout_s: float) -> list[Any]:
    """Runs `python -m module …` with these arguments of each rank, side by side.  Returns what the last line
    says that each of them prints, as JSON.  `timeout_s`: for each of them, behind the one before."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *given],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for given in arguments
    ]
    try:
        found = []
        for process in processes:
            out, errors = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, errors
            found.append(json.loads(out.splitlines()[-1]))
        return found
    finally:
        for process in processes:
            process.kill()
