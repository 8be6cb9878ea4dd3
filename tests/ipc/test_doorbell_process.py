"""Doorbells, pidfds and dying with the parent."""

import os
import signal
import subprocess
import sys

import pytest

from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import ParentGone, Waiter, die_with_parent, open_pidfd, wait_any


def test_rings_until_drained():
    bell = Doorbell.create()
    assert wait_any([bell.fileno()], 0.0) == []
    bell.ring()
    bell.ring()
    assert wait_any([bell.fileno()], 0.0) == [bell.fileno()]
    assert bell.drain()
    assert not bell.drain()
    assert wait_any([bell.fileno()], 0.0) == []
    bell.close()
    bell.close()


def test_a_full_counter_does_not_block():
    bell = Doorbell.create()
    os.eventfd_write(bell.fileno(), 2**64 - 2)
    bell.ring()
    assert bell.drain()
    bell.close()


def test_a_wait_ends_without_a_ring():
    bell = Doorbell.create()
    assert wait_any([bell.fileno()], 0.02) == []
    bell.close()


def test_a_closed_descriptor_is_an_error_not_a_spin():
    bell = Doorbell.create()
    waiter = Waiter([bell.fileno()])
    bell.close()
    with pytest.raises(OSError, match="closed"):
        waiter.wait(1.0)


def test_pidfd_tells_of_a_death():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = open_pidfd(child.pid)
    assert wait_any([pidfd], 0.0) == []
    child.kill()
    assert wait_any([pidfd], 30.0) == [pidfd]
    child.communicate()
    os.close(pidfd)
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid)


def test_wrong_parent_is_refused():
    code = (
        "from baton.ipc.processes.process import *\n"
        "try: die_with_parent(1 << 22)\n"
        "except ParentGone: print('refused')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout == b"refused\n"
    assert issubclass(ParentGone, RuntimeError)
    assert callable(die_with_parent)


def test_child_dies_with_its_parent():
    grandchild = (
        "import os, time; from baton.ipc.processes.process import die_with_parent; "
        "die_with_parent(os.getppid()); print(os.getpid(), flush=True); time.sleep(60)"
    )
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    parent = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pidfd = open_pidfd(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    assert wait_any([pidfd], 30.0) == [pidfd]
    parent.communicate()
    os.close(pidfd)


def test_a_wait_longer_than_poll_knows_ends_when_there_is_news():
    fd = os.eventfd(1)
    assert Waiter([fd]).wait(3e6) == [fd]
    assert Waiter([fd]).wait(float("inf")) == [fd]
    os.close(fd)
