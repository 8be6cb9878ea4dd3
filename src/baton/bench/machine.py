"""The hardware, the software and the command line that a result belongs to."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.version import __version__


def machine() -> dict[str, Any]:
    """Facts for the JSON of a result."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "baton": __version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "command": _command(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _command() -> str:
    """As it was typed, but for the directory of an installed command."""
    program, *arguments = sys.argv
    if program.endswith(".py"):
        return shlex.join(["python", program, *arguments])
    return shlex.join([Path(program).name, *arguments])


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
