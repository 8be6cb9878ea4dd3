"""The server of weight images, with processes that are killed while they fill one."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from baton.ipc.huge_pages import HugeMapping
from baton.ipc.image_client import ImageClient, KeeperGone
from baton.launch.instances.image_server import image_server, loading
from baton.model.weights.image import _SEALS
from tests.conftest import GENEROUS_S

FILLER = """
import os, sys, time
from baton.ipc.image_client import ImageClient
client = ImageClient(sys.argv[1])
fill, fd = client.ask("key", "place", 30)
assert fill
os.write(fd, b"x" * 100_000)
print("filling", flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[str]:
    with image_server() as path:
        yield path


def seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def test_what_a_killed_filler_left_is_never_mapped(server: str) -> None:
    filler = subprocess.Popen([sys.executable, "-c", FILLER, server], stdout=subprocess.PIPE)
    try:
        assert filler.stdout is not None
        assert filler.stdout.readline() == b"filling\n"
        got: list[tuple[bool, int]] = []
        client = ImageClient(server)
        waiter = threading.Thread(target=lambda: got.append(client.ask("key", "place", 30)))
        waiter.start()
        waiter.join(0.2)
        assert not got
        filler.send_signal(signal.SIGKILL)
        waiter.join(30)
        fill, fd = got[0]
        assert fill
        assert os.fstat(fd).st_size == 0
        os.close(fd)
        client.close()
    finally:
        filler.kill()
        filler.wait()
        filler.stdout.close()


def test_how_far_a_filler_is(server: str) -> None:
    client = ImageClient(server)
    fill, fd = client.ask("key", "place", 30)
    assert fill
    assert loading("a") == ""
    for far in ("10 % (layer 1)", "20 % (layer 2)"):
        client.doing("a", far)
        wait_until(lambda far=far: loading("a") == far)
    assert loading("b") == ""
    os.write(fd, b"weights")
    seal(fd)
    client.filled(None)
    wait_until(lambda: loading("a") == "")
    client.doing("a", "warming up")
    wait_until(lambda: loading("a") == "warming up")
    waiting = ImageClient(server)
    waiting.doing("b", "waiting for the weights")
    wait_until(lambda: loading("b") == "waiting for the weights")
    waiting.close()
    os.close(fd)
    client.close()
    wait_until(lambda: loading("a") == "")


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_one_memory_for_all_who_ask(server: str) -> None:
    first, second, third = (ImageClient(server) for _ in range(3))
    fill, fd = first.ask("key", "place", 30)
    assert fill
    os.write(fd, b"weights")
    seal(fd)
    first.filled(None)
    for client in (second, third):
        fill, other = client.ask("key", "place", 30)
        assert not fill
        assert os.fstat(other).st_ino == os.fstat(fd).st_ino
        assert bytes(HugeMapping(other, writable=False).bytes) == b"weights"
        os.close(other)
        client.close()
    first.close()
    os.close(fd)
    again = ImageClient(server)  # all who used it have ended
    fill, fd = again.ask("key", "place", 30)
    assert not fill
    os.close(fd)
    again.close()


def test_what_is_not_sealed_is_not_given_to_others(server: str) -> None:
    first, second = ImageClient(server), ImageClient(server)
    fill, fd = first.ask("key", "place", 30)
    os.write(fd, b"weights")
    first.filled(None)
    fill, other = second.ask("key", "place", 30)
    assert fill
    assert os.fstat(other).st_size == 0
    for each in (fd, other):
        os.close(each)
    first.close()
    second.close()


def test_a_worker_that_says_nonsense_is_left_alone(server: str) -> None:
    odd = ImageClient(server)
    odd._socket.send(b'{"type":"Ask"}')
    with pytest.raises(KeeperGone):
        odd.ask("key", "place", 30)
    odd.close()
    good = ImageClient(server)
    fill, fd = good.ask("key", "place", 30)
    assert fill
    os.close(fd)
    good.close()


def test_without_a_server_nobody_waits() -> None:
    with image_server() as path, image_server() as same:
        assert path == same
    assert not os.path.exists(path)
    with pytest.raises(KeeperGone):
        ImageClient(path)


def test_when_the_server_goes_who_waits_hears_of_it() -> None:
    with image_server() as path:
        filler, waiter = ImageClient(path), ImageClient(path)
        _, fd = filler.ask("key", "place", 30)
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                waiter.ask("key", "place", 30)
            except KeeperGone as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
    thread.join(30)
    assert failed
    os.close(fd)


def test_when_there_is_no_memory_for_another_image_nobody_waits(server: str, monkeypatch) -> None:
    filler, waiting = ImageClient(server), ImageClient(server)
    fill, fd = filler.ask("key", "place", 30)
    assert fill
    os.close(fd)
    failed: list[KeeperGone] = []

    def wait() -> None:
        try:
            waiting.ask("key", "place", 30, asked.set)
        except KeeperGone as error:
            failed.append(error)

    asked = threading.Event()
    waiter = threading.Thread(target=wait)
    waiter.start()
    assert asked.wait(30)

    def full(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    filler.close()
    waiter.join(30)
    assert len(failed) == 1
    with pytest.raises(KeeperGone):
        ImageClient(server).ask("other", "place", 30)
    waiting.close()
