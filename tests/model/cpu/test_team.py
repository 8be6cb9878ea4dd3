"""The native library's threads: every item once, whoever comes or not; none busy without work."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import GENEROUS_S

ROOT = Path(__file__).parents[3]

KERNEL = """
#include "parallel.h"
// Adds one to counts[item] of each item, `times` times over; notes in `seen` which threads came.
BATON_EXPORT(count)(int64_t items, int64_t threads, int64_t times, int64_t work,
                    int32_t* counts, int32_t* seen) {
    for (int64_t i = 0; i < times; ++i)
        parallel_for(items, (int)threads, [&](int64_t item, int thread) {
            for (volatile int64_t spin = 0; spin < work; spin = spin + 1) {}
            ++counts[item];
            seen[thread] = 1;
        });
}
"""


def tasks() -> set[int]:
    """Threads of this process."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


class Counter:
    """A library of its own, with one kernel."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._count = library.baton_count_plain
        self._count.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_void_p] * 2
        self._count.restype = None
        before = tasks()
        self(100, 12, 1)
        self.helpers = tasks() - before
        """Threads that the library has started: no more of them are needed in any test."""

    def __call__(self, items: int, threads: int, times: int, work: int = 0) -> int:
        """Returns how many threads came."""
        counts, seen = (ctypes.c_int32 * items)(), (ctypes.c_int32 * max(threads, 1))()
        self._count(items, threads, times, work, counts, seen)
        assert list(counts) == [times] * items
        return sum(seen)


@pytest.fixture(scope="module")
def count(tmp_path_factory: pytest.TempPathFactory) -> Counter:
    spec = importlib.util.spec_from_file_location("hatch_build_of_team", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    if build.find_compiler() is None or os.environ.get("BATON_NATIVE") == "0":
        pytest.skip("no compiler")
    place = tmp_path_factory.mktemp("team")
    sources = place / "native"
    sources.mkdir()
    for name in ("blocking.h", "glibc.h", "parallel.h", *build.COMMON_SOURCES):
        (sources / name).write_bytes((build.SOURCES / name).read_bytes())
    (sources / "count.cpp").write_text(KERNEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", sources)
        patch.setattr(build, "LIBRARY", place / "_team.so")
        patch.setattr(build, "OBJECTS", place / "objects")
        patch.setattr(build, "INSTRUCTION_SETS", {build.platform.machine(): {"plain": []}})
        assert build.build()
    return Counter(place / "_team.so")


def num_switches(threads: set[int]) -> int:
    """How often these threads have given up a core or lost one."""
    total = 0
    for task in threads:
        for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines():
            if "ctxt_switches" in line:
                total += int(line.split()[1])
    return total


def sleeps(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [1, 2, 7, 100])
def test_every_item_once(count: Counter, threads: int, items: int) -> None:
    """More jobs than there are numbers for them, with pauses after some for helpers to fall asleep."""
    count(items, threads, 70_000 if items < 100 else 2_000)
    for _ in range(20):
        time.sleep(0.001)
        count(items, threads, 3)


def test_helpers_come_and_sleep_again(count: Counter) -> None:
    assert len(count.helpers) >= 11
    for _ in range(50):
        if count(100, 5, 1, work=200_000) > 1:
            break
    else:
        pytest.fail("nobody ever came to help")
    until = time.monotonic() + GENEROUS_S
    while True:
        switches = num_switches(count.helpers)
        time.sleep(0.2)
        if num_switches(count.helpers) == switches and all(map(sleeps, count.helpers)):
            return
        assert time.monotonic() < until, "helpers that have nothing to do do not come to rest"


def test_signals_are_for_others(count: Counter) -> None:
    for task in count.helpers:
        status = Path(f"/proc/self/task/{task}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        assert blocked >> (signal.SIGTERM - 1) & 1
        assert blocked >> (signal.SIGINT - 1) & 1


def test_several_callers_at_once(count: Counter) -> None:
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(200):
                count(50, 3, 20)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert not failures


def test_a_forked_child_works_alone(count: Counter) -> None:
    count(10, 4, 10)
    child = os.fork()
    if child == 0:
        try:
            count(10, 4, 1_000)
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")
