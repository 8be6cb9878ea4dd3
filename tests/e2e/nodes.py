"""Hosts as network namespaces, and instances on several of them.  For tests and `benchmarks/nodes.py`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.protocol.rules.cluster_secret import SECRET_BYTES, ClusterSecret
from tests.e2e.server import child_pids
from tests.e2e.test_cluster import Joined


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """This host and some others, each with a link of its own to this one.  Raises `OSError` or
    `CalledProcessError` where that cannot be made (it needs root)."""

    def __init__(self, others: int) -> None:
        self._tag = f"{os.getpid():x}"[-7:]
        base = 2 * (os.getpid() % 16000)
        self._net = f"10.{100 + base // 256 % 100}.{base % 256}"
        self.here = f"{self._net}.1"
        self.names = [f"baton-n{number}-{self._tag}" for number in range(1, others + 1)]
        self.addresses = [f"{self._net}.{number + 1}" for number in range(1, others + 1)]
        bridge = f"bn{self._tag}"
        self._bridge = bridge
        self._made: list[str] = []
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{self.here}/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for number, name in enumerate(self.names, 1):
                ip("netns", "add", name)
                self._made.append(name)
                ip("link", "add", self.link(number), "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", self.link(number), "master", bridge, "up")
                ip("-n", name, "addr", "add", f"{self.addresses[number - 1]}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def link(self, number: int) -> str:
        """The device here that leads to host `number` (from 1)."""
        return f"bv{number}{self._tag}"

    def down(self, number: int) -> None:
        ip("link", "set", self.link(number), "down")

    def up(self, number: int) -> None:
        ip("link", "set", self.link(number), "up")

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)


@contextmanager
def hosts_or_skip(others: int) -> Iterator[Hosts]:
    """The test is skipped where they cannot be made."""
    try:
        made = Hosts(others)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace or veth can be made here: {error}")
    try:
        yield made
    finally:
        made.close()


class JoinedFrom(Joined):
    """`baton serve --instance` in a namespace."""

    def __init__(self, namespace: str, *flags: str) -> None:
        self._namespace = namespace
        super().__init__(None, *flags)

    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self._namespace]


class NodeHost(JoinedFrom):
    """`baton serve --instance --node N` in a namespace."""

    def __init__(self, namespace: str, number: int, leader: str, *flags: str) -> None:
        super().__init__(namespace, "--node", str(number), "--leader", leader, *flags)

    def relay(self) -> int | None:
        """The process id of its relay, while one runs."""
        return next((pid for pid in child_pids(self.process.pid) if named(pid, b"processes.relay")), None)

    def workers(self) -> list[int]:
        relay = self.relay()
        return [] if relay is None else child_pids(relay)


def named(pid: int, word: bytes) -> bool:
    """Whether its command line has this word."""
    try:
        return word in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def write_secret(path: Path) -> str:
    path.touch(0o600)
    path.write_text(ClusterSecret.make(os.urandom(SECRET_BYTES)).file())
    return str(path)
