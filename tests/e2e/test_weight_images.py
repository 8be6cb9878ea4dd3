"""One copy of the weights for all workers of a server, whoever is killed; nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.server import Server, alive

IMAGE = "memfd:baton-weights"


def mapped(pid: int) -> set[str]:
    """The inodes of weight images that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if IMAGE in line}


def holders(inodes: set[str]) -> set[int]:
    """All processes that have one of these images mapped, or open."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if mapped(pid) & inodes:
            found.add(pid)
        with suppress(OSError):
            for fd in (process / "fd").iterdir():
                with suppress(OSError):
                    if IMAGE in os.readlink(fd) and str(fd.stat().st_ino) in inodes:
                        found.add(pid)
    return found


def until(what: Callable[[], bool], deadline_s: float = 120.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_workers_share_an_image_and_a_restarted_one_maps_it() -> None:
    with Server("--prefill", "1", "--decode", "1", "--dtype", "float32") as server:
        old = server.children()["worker"]
        assert len(old) == 2
        (image,) = (mapped(pid) for pid in old[:1])
        assert len(image) == 1
        assert mapped(old[1]) == image
        assert server.banner.count("made here") == 1
        assert server.banner.count("MB, shared") == 1
        assert holders(image) == {*old, server.process.pid}
        os.kill(old[0], signal.SIGKILL)
        until(lambda: not alive(old[0]))
        until(lambda: len(server.children()["worker"]) == 2 and all(map(mapped, server.children()["worker"])))
        server.wait_ready()
        workers = server.children()["worker"]
        assert [mapped(pid) for pid in workers] == [image, image]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        until(lambda: not holders(image))


@pytest.mark.slow
def test_ranks_have_an_image_each_and_the_next_start_maps_their_files(tmp_path: Path) -> None:
    flags = ("--tensor-parallel-size", "2", "--dtype", "float32", "--weight-cache", str(tmp_path / "cache"))
    with Server(*flags) as server:
        first, second = map(mapped, server.children()["worker"])
        assert len(first) == len(second) == 1
        assert first != second
        answer = complete(server)
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 2
    with Server(*flags) as server:
        assert "from the weight cache" in server.banner
        assert complete(server) == answer
        assert not any(map(mapped, server.children()["worker"]))
    assert sorted((tmp_path / "cache").iterdir()) == files


def complete(server: Server) -> str:
    found = server.client().completions.create(model="", prompt="once upon a time", max_tokens=20, seed=1)
    return found.choices[0].text
