"""A pytest plugin of `make gpu`: what became of each test is in a file at once; no test stops the others.

Theory.  A kernel that writes where it must not leaves a CUDA context that refuses everything from then on,
and one that does not end cannot be interrupted from Python.  So each outcome is a line of JSON when it is
known; the device is asked after each test whether it still works, and the process ends at once if it does
not, or if a test takes too long.  `tools/gpu_run.py` starts another process then, which skips what has begun
already.

`-p tests.gpu.recording`, with BATON_GPU_RESULTS=FILE and BATON_GPU_TEST_S=SECONDS.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(os.environ.get("BATON_GPU_RESULTS", os.devnull))
LIMIT_S = float(os.environ.get("BATON_GPU_TEST_S", "100"))
LOST = 70
"""How the process ends that cannot go on."""
_running: tuple[str, float] | None = None


def write(**what: Any) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(what) + "\n")


def begun() -> set[str]:
    """Tests that another process has begun."""
    if not RESULTS.is_file():
        return set()
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {line["begin"] for line in lines if "begin" in line}


def pytest_configure() -> None:
    threading.Thread(target=_watch, daemon=True).start()


@pytest.hookimpl(trylast=True)  # (what -k leaves)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    before = begun()
    write(collected=[item.nodeid for item in items])
    items[:] = [item for item in items if item.nodeid not in before]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        write(begin=report.nodeid)
        write(end=report.nodeid, outcome="failed", message=_last(report.longreprtext), seconds=0.0)


def pytest_runtest_logstart(nodeid: str) -> None:
    global _running
    _running = nodeid, time.monotonic()
    write(begin=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        message = ""
        if report.failed:
            message = _last(report.longreprtext)
        elif report.skipped and isinstance(report.longrepr, tuple):
            message = str(report.longrepr[2])
        write(end=report.nodeid, outcome=report.outcome, message=message, seconds=round(report.duration, 2))


def pytest_runtest_logfinish(nodeid: str) -> None:
    global _running
    _running = None
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        write(end=nodeid, outcome="failed", message=f"the device is lost: {_last(str(error))}", seconds=0.0)
        os._exit(LOST)


def _watch() -> None:
    while True:
        time.sleep(1.0)
        running = _running
        if running is not None and time.monotonic() - running[1] > LIMIT_S:
            write(
                end=running[0], outcome="failed", message=f"not done within {LIMIT_S:.0f} s", seconds=LIMIT_S
            )
            faulthandler.dump_traceback(all_threads=True)
            os._exit(LOST)


def _last(text: str) -> str:
    """The line that says what was wrong."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
    return " ".join(lines[:3])[:400] or "failed"
