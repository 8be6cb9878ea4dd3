"""A cluster of two hosts with a secret: a network namespace is the other host, and what passes is captured.

Needs root, for the namespace; without it the module is skipped.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.ipc.sockets.half_open import MAX_HALF_OPEN
from baton.protocol.codec import pack_int32
from baton.protocol.rules.cluster_secret import ClusterSecret
from tests.e2e.server import Server, child_pids, is_engine
from tests.e2e.test_cluster import (
    DEADLINE_S,
    PROMPT,
    SIMULATED,
    InBackground,
    Joined,
    complete,
    handed_over,
    instances,
    nothing_is_held,
    until,
)

NUMBER = os.getpid() % 250
NAME = f"baton-m{os.getpid()}"
LINK = f"bm{os.getpid()}"
HERE, THERE = f"10.97.{NUMBER}.1", f"10.97.{NUMBER}.2"
PAGES = ("--transfer", "tcp", "--block-size", "16")
"""Memory could be shared between these hosts.  Of 16 tokens those at even places lie together, each as its
id + 1 (`executor/simulated/pool.py`)."""
REQUEST = "whose-request-this-is-is-nobodys-business"
ETH_P_ALL = 3


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """The name of a namespace that is another host; a link leads there from here."""
    try:
        ip("netns", "add", NAME)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    try:
        try:
            ip("link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", NAME)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no veth can be made here: {error.stderr}")
        ip("addr", "add", f"{HERE}/24", "dev", LINK)
        ip("link", "set", LINK, "up")
        for words in (("addr", "add", f"{THERE}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            ip("-n", NAME, *words)
        ip("-n", NAME, "link", "set", "lo", "up")
        yield NAME
    finally:
        ip("netns", "del", NAME)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("secrets") / "ours", os.urandom(32))


def written(path: Path, random: bytes) -> str:
    path.touch(0o600)
    path.write_text(ClusterSecret.make(random).file())
    return str(path)


class Elsewhere(Joined):
    """An instance on the other host."""

    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", NAME]

    def engine(self) -> int:
        (found,) = filter(is_engine, child_pids(self.process.pid))
        return found


def gateway(*flags: str) -> Server:
    near = ("--host", HERE, "--peer-host", HERE, "--prefill", "1", "--disaggregation-threshold", "0")
    return Server(*SIMULATED, *PAGES, *near, "--admin-key", "boss", *flags)


def elsewhere(server: Server, *flags: str, name: str = "far") -> Elsewhere:
    there = ("--host", THERE, "--label", "decode", "--name", name)
    return Elsewhere(server, *SIMULATED, *PAGES, *there, *flags)


@contextmanager
def cluster(*flags: str) -> Iterator[tuple[Server, Elsewhere]]:
    with gateway(*flags) as server:
        server.http.headers["Authorization"] = "Bearer boss"
        with elsewhere(server, *flags) as far:
            until(lambda: instances(server).get("far", {}).get("state") == "ready", "it joins")
            yield server, far


@pytest.fixture(scope="module")
def pair(host: str, secret: str) -> Iterator[tuple[Server, Elsewhere]]:
    with cluster("--cluster-secret", secret) as made:
        yield made


class Capture:
    """All packets of the link while the context lasts."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.bind((LINK, 0))
        self._socket.settimeout(0.1)
        self._stopping = threading.Event()
        self.packets: list[tuple[int, int, bytes]] = []
        """(source port, destination port, what TCP carries)."""

    def __enter__(self) -> Capture:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                packet = self._socket.recv(1 << 17)
            except TimeoutError:
                continue
            if packet[12:14] == b"\x08\x00" and packet[23] == socket.IPPROTO_TCP:
                start = 14 + 4 * (packet[14] & 15)
                source, target = struct.unpack_from("!HH", packet, start)
                length = struct.unpack_from("!H", packet, 16)[0]
                self.packets.append(
                    (source, target, packet[start + 4 * (packet[start + 12] >> 4) : 14 + length])
                )

    def text(self) -> bytes:
        """Of each direction of each connection in order."""
        streams: dict[tuple[int, int], bytearray] = {}
        for source, target, data in self.packets:
            streams.setdefault((source, target), bytearray()).extend(data)
        return b"\0".join(map(bytes, streams.values()))


def socket_inodes(pid: int) -> set[str]:
    """Of all sockets of one process."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
        except OSError:
            continue
        if found:
            inodes.add(found[1])
    return inodes


def listening_ports(pid: int) -> set[int]:
    """Of TCP, of one process."""
    inodes = socket_inodes(pid)
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def page_ports(instance: int) -> set[int]:
    """Of the workers of an engine."""
    return {port for worker in child_pids(instance) for port in listening_ports(worker)}


def seen(server: Server, far: Elsewhere) -> list[str]:
    """What of a request can be read on the link between the two, in clear."""
    prefiller = next(filter(is_engine, child_pids(server.process.pid)))
    # (Another prompt each time: what D has already is not fetched again.)
    ids = random.Random(handed_over(server)).sample(range(300, 1000), 64)
    before = handed_over(server)
    with Capture() as capture:
        body = {"prompt": ids, "max_tokens": 64, "ignore_eos": True, "return_token_ids": True}
        answer = server.http.post("/v1/completions", json=body, headers={"x-request-id": REQUEST})
        tokens = answer.raise_for_status().json()["choices"][0]["token_ids"]
    assert handed_over(server) == before + 1
    assert len(tokens) == 64
    (page_port,) = page_ports(prefiller)
    pages = sum(len(data) for source, _, data in capture.packets if source == page_port)
    assert pages > 4 * len(ids), "the pages have passed here"
    text = capture.text()
    assert len(text) > 2000, "there was something to read"
    looked_for = {"the request's name": REQUEST.encode()}
    looked_for |= {f"the prompt from {at}": pack_int32(ids[at : at + 4]) for at in range(0, 61, 4)}
    looked_for |= {
        f"KV from {at}": pack_int32([id_ + 1 for id_ in ids[at : at + 16 : 2]]) for at in (0, 16, 32)
    }
    return [what for what, found in looked_for.items() if found in text]


def test_nothing_of_a_request_can_be_read_between_two_hosts(pair: tuple[Server, Elsewhere]) -> None:
    """Gateway to engine, engine to engine, pages from worker to worker, of a request that is handed over."""
    assert seen(*pair) == []


def test_what_passes_is_found_where_nothing_is_encrypted(host: str, secret: str) -> None:
    """So the test before this one looks at the right places; and a private network can do without."""
    with cluster("--cluster-secret", secret, "--transfer-encryption", "off") as (server, far):
        found = seen(server, far)
        assert "the request's name" in found
        assert len([what for what in found if what.startswith("the prompt")]) > 10
        assert [what for what in found if what.startswith("KV")] == ["KV from 0", "KV from 16", "KV from 32"]
        assert any("--transfer-encryption off: who is on the network" in line for line in server.warnings())
        strange = server.http.put("/cluster/instances/x", json={})
        assert strange.status_code == 403, "signatures stay"
        assert far.leave() == 0


def test_garbage_and_silence_at_the_ports_disturb_nobody(pair: tuple[Server, Elsewhere]) -> None:
    server, _ = pair
    engine = next(filter(is_engine, child_pids(server.process.pid)))
    ports = listening_ports(engine)
    assert ports, "the engine listens for others"
    (page_port,) = page_ports(engine)
    descriptors = len(os.listdir(f"/proc/{engine}/fd"))
    (expected, _), strange = complete(server, max_tokens=300), []
    request = InBackground(lambda: complete(server, max_tokens=300))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
    for port in ports:
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", greeting, random.Random(1).randbytes(5000)) * 20:
            strange.append(socket.create_connection((HERE, port)))
            strange[-1].sendall(sent)
        strange += [socket.create_connection((HERE, port)) for _ in range(4 * MAX_HALF_OPEN)]
    for sent in (b"GET / HTTP/1.1\r\n\r\n", random.Random(2).randbytes(5000)) * 5:
        strange.append(socket.create_connection((HERE, page_port)))
        strange[-1].sendall(sent)
    assert request.result()[0] == expected
    assert complete(server, max_tokens=300)[0] == expected
    many = MAX_HALF_OPEN + 30
    until(lambda: len(os.listdir(f"/proc/{engine}/fd")) < descriptors + many, "the others are sent away")
    for one in strange:
        one.close()
    until(lambda: nothing_is_held(server), "every block is free or cached")
    until(lambda: refusals(server, "half_open") > 0, "the engine counts those that it has sent away")
    until(lambda: refusals(server, "page_connection") == 10, "and those of its page servers")
    assert any(f"pages: a connection from {HERE} is refused: " in line for line in server.warnings())


def refusals(server: Server, at: str, instance: str = "prefill-0") -> float:
    """Of an engine, as they are counted for Prometheus."""
    pattern = rf'^baton:cluster_refusals_total{{at="{at}",instance="{instance}",.*}} (\S+)$'
    (count,) = re.findall(pattern, server.http.get("/metrics").text, re.M)
    return float(count)


def test_an_engine_that_is_killed_comes_back_with_another_key(pair: tuple[Server, Elsewhere]) -> None:
    server, far = pair
    first = instances(server)["far"]["incarnation"]
    before, expected = handed_over(server), complete(server, max_tokens=300)
    request = InBackground(lambda: complete(server, max_tokens=300))
    os.kill(far.engine(), signal.SIGKILL)
    assert request.result() == expected
    until(
        lambda: (one := instances(server)["far"])["state"] == "ready" and one["incarnation"] != first,
        "it is back",
    )
    before = handed_over(server)
    assert complete(server, max_tokens=300) == expected
    assert handed_over(server) == before + 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--host 10.*: it would listen there for everybody who reaches this machine"),
        (("--insecure-cluster", "--admin-key", "boss"), "only members of the cluster join"),
        (("--cluster-secret", "strange"), "is not signed with this cluster's secret"),
        (("--cluster-secret", "ours", "--transfer-encryption", "off"), "does not encrypt its connections"),
    ],
)
def test_who_is_no_member_is_told_why_and_logged(
    pair: tuple[Server, Elsewhere], secret: str, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    server, _ = pair
    places = {"ours": secret, "strange": written(tmp_path / "strange", os.urandom(32))}
    with elsewhere(server, *(places.get(flag, flag) for flag in flags), name="other") as other:
        assert other.process.wait(DEADLINE_S) in (1, 2)
        line = other.log().strip().splitlines()[-1]
    assert re.match(f"error: .*{words}", line), line
    assert "other" not in instances(server)
    if "member" in words or "signed" in words:
        assert any(f"by {THERE} is refused: " in line for line in server.warnings())
    assert len(complete(server)[0]) == 40


def test_another_secret_without_a_moment_of_refusal_and_a_gateway_that_comes_back(
    host: str, secret: str, tmp_path: Path
) -> None:
    """The instance has the old secret and the new one; the gateway the old one, and after its restart the new
    one first.  The instance joins again by itself."""
    new = written(tmp_path / "new", os.urandom(32))
    both = ("--cluster-secret", secret, "--cluster-secret", new)
    with gateway("--cluster-secret", secret) as first:
        port = first.url.rpartition(":")[2]
        with elsewhere(first, *both) as far:
            first.http.headers["Authorization"] = "Bearer boss"
            until(lambda: instances(first).get("far", {}).get("state") == "ready", "it joins")
            expected = complete(first, PROMPT)
            first.process.kill()
            first.process.wait()
            with gateway("--cluster-secret", new, "--cluster-secret", secret, "--port", port) as second:
                second.http.headers["Authorization"] = "Bearer boss"
                until(lambda: instances(second).get("far", {}).get("state") == "ready", "it joins again")
                before = handed_over(second)
                assert complete(second, PROMPT) == expected
                assert handed_over(second) == before + 1
                assert far.leave() == 0, far.log()
