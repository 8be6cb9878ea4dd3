"""The sockets of the table "Who may reach what" of docs/security.md: as nobody, user, operator and member.

Two hosts, one of which is a network namespace (`test_members.py`).  The routes are tried in
`tests/gateway/http/test_rights.py` and `test_members.py`, the link of an instance on several hosts in
`test_nodes.py`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from zmq.utils import z85

from baton.ipc.sockets.curve import Encryption, Place
from baton.ipc.sockets.zeromq import terminate
from baton.launch.planning.cluster_secret import read_secrets
from baton.protocol.codec import pack_int32
from baton.protocol.messages.handover import PEER, Handoff
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Hello, Submit, Welcome
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.cluster_secret import (
    CURVE_CLIENT,
    CURVE_LEADER,
    PAGE_KNOCKS,
    PAGE_MEMBERS,
    REGISTRATION,
    SIGNATURES,
    Secrets,
)
from baton.protocol.rules.proof import answer, claim
from baton.transfer.transports.page_stream import MAGIC, REQUEST
from tests.e2e.server import Server, child_pids, is_engine
from tests.e2e.test_cluster import DEADLINE_S, complete, handed_over, until
from tests.e2e.test_members import (  # noqa: F401 (some are fixtures)
    HERE,
    THERE,
    Capture,
    Elsewhere,
    host,
    listening_ports,
    page_ports,
    pair,
    refusals,
    secret,
    socket_inodes,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
TRIED = {
    "`/health`, `/ready`": "tests/gateway/http/test_rights.py",
    "`/v1/*`, rankings": "tests/gateway/http/test_rights.py",
    "`/pause`, `/update_weights`": "tests/gateway/http/test_rights.py",
    "`GET`, `POST`, `DELETE /cluster/instances": "tests/gateway/http/test_members.py",
    "`PUT /cluster/instances/NAME`": "tests/gateway/http/test_members.py",
    "engine's socket for gateways of this host": "test_sockets_of_this_host_are_of_the_user_who_runs_them",
    "engine's socket for gateways (`tcp://`)": "test_the_socket_for_gateways",
    "engine's socket for engines (`tcp://`)": "test_the_socket_for_engines",
    "page servers of workers": "test_page_servers",
    "NIXL agents": "",
    "link's socket for relays": "tests/e2e/test_nodes.py",
    "between ranks on several hosts": "",
}
"""The beginning of each row, and what tries it; "": the table says that it is open."""


def test_every_row_of_the_table_is_tried():
    table = DOCUMENT.read_text().partition("## Who may reach what")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(TRIED)
    for row, (begins, tried) in zip(rows, TRIED.items(), strict=True):
        assert row.startswith(f"| {begins}"), row
        if not tried:
            assert "see below" in row, "who relies on the network is told so"
        elif tried.startswith("test_"):
            assert tried in globals(), tried
        else:
            assert (DOCUMENT.parents[1] / tried).is_file(), tried


@pytest.fixture(scope="module")
def keys(secret: str) -> Secrets:  # noqa: F811
    return read_secrets([secret])


class Registered(NamedTuple):
    """What the instance there says of itself, signed and in clear: everybody on the network knows it."""

    endpoint: str
    incarnation: str
    salt: str
    request: bytes
    """All of it, as it was sent."""


@pytest.fixture(scope="module")
def registered(pair: tuple[Server, Elsewhere]) -> Registered:  # noqa: F811
    with Capture() as capture:
        until(lambda: b'"salt"' in capture.text(), "it renews its registration")
    sent = re.search(rb'PUT /cluster/instances/far [^{]*\{[^{}]*"salt"[^{}]*\}', capture.text())
    assert sent is not None
    found = json.loads(sent[0][sent[0].index(b"{") :])
    return Registered(found["endpoint"], found["incarnation"], found["salt"], sent[0])


def test_a_join_that_is_repeated_is_refused(
    pair: tuple[Server, Elsewhere],  # noqa: F811
    registered: Registered,
) -> None:
    """Byte for byte what the instance has sent, by somebody else."""
    server, _ = pair
    port = int(server.url.rpartition(":")[2])
    counted = 'baton:member_refusals_total{code="replayed"'
    before = count_of(server, counted)
    with socket.create_connection((HERE, port), timeout=DEADLINE_S) as connection:
        connection.sendall(registered.request)
        assert b" 401 " in connection.recv(4096).partition(b"\r\n")[0]
    assert count_of(server, counted) == before + 1
    assert any(f"by {HERE} is refused: " in line for line in server.warnings())
    assert complete(server)[0], "the cluster goes on"


def count_of(server: Server, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextmanager
def dealer(endpoint: str, encryption: Encryption | None, routing_id: bytes = b"") -> Iterator[Any]:
    """Connected there, and its monitor."""
    place, context = Place.parse(endpoint), zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.RECONNECT_IVL, -1)
    if routing_id:
        made.setsockopt(zmq.ROUTING_ID, routing_id)
    if encryption is not None:
        encryption.connect(made, place.key)
    monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    made.connect(place.address)
    try:
        yield made, monitor
    finally:
        made.disable_monitor()
        terminate(context, 5.0)


class Stranger(Encryption):
    """Has drawn a key, and knows no secret."""

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()


def is_let_in(endpoint: str, encryption: Encryption | None) -> bool:
    with dealer(endpoint, encryption) as (made, monitor):
        made.send(b"hello")
        assert monitor.poll(DEADLINE_S * 1000)
        event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
        assert event == zmq.EVENT_HANDSHAKE_SUCCEEDED or not made.poll(0)
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def told(place: tuple[str, int], data: bytes) -> bytes:
    """All that is answered to this until the connection is closed."""
    with socket.create_connection(place, timeout=DEADLINE_S) as connection:
        found = b""
        try:
            connection.sendall(data)
            while part := connection.recv(4096):
                found += part
        except ConnectionError:
            pass
        return found


def with_key(key: str) -> bytes:
    """A user's, or an operator's, request."""
    return f"POST /pause HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


def tells_nothing(place: tuple[str, int]) -> None:
    """To who has a key of HTTP, of whatever kind: ZeroMQ's greeting, or an alert of TLS, at most."""
    for key in ("user", "boss"):
        assert len(told(place, with_key(key))) <= 64
    assert len(told(place, b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04\x05READY")) <= 64


def place_of(endpoint: str) -> tuple[str, int]:
    there, _, port = Place.parse(endpoint).address.removeprefix("tcp://").rpartition(":")
    return there, int(port)


def test_the_socket_for_gateways(
    pair: tuple[Server, Elsewhere],  # noqa: F811
    registered: Registered,
    keys: Secrets,
) -> None:
    """Nobody, users, operators: nothing.  A member that does not know the registration: is not read."""
    tells_nothing(place_of(registered.endpoint))
    assert not is_let_in(registered.endpoint, None)
    assert not is_let_in(registered.endpoint, Stranger())
    assert is_let_in(registered.endpoint, Encryption(keys))
    welcome = welcomed(registered, keys)
    assert welcome.incarnation == registered.incarnation
    assert complete(pair[0])[0], "the cluster goes on"


def welcomed(registered: Registered, keys: Secrets) -> Welcome:
    """As a gateway with which it registered, after others on the same connection."""
    knows = keys.first.key(REGISTRATION, registered.salt).hex()
    with dealer(registered.endpoint, Encryption(keys)) as (made, _):
        submit = Submit(1, "stranger's", pack_int32([300, 301]), Sampling(seed=1), Stopping(3))
        for message in (
            submit,
            Hello("g"),
            Hello("g", b"first".ljust(16), bytes(32)),
            Hello(
                "g", b"other".ljust(16), claim("another registration's secret", b"other".ljust(16), "g", "x")
            ),
            submit,
            Hello("g", b"right".ljust(16), claim(knows, b"right".ljust(16), "g", registered.incarnation)),
        ):
            made.send(TO_ENGINE.encode(message))
        assert made.poll(DEADLINE_S * 1000)
        found = FROM_ENGINE.decode(made.recv())
        assert isinstance(found, Welcome), "and nothing of the requests before"
        assert found.proof == answer(knows, b"right".ljust(16), "g", registered.incarnation)
        return found


def test_the_socket_for_engines(
    pair: tuple[Server, Elsewhere],  # noqa: F811
    registered: Registered,
    keys: Secrets,
) -> None:
    """A member whom no gateway has named forges a `Handoff`: it is told to leave, and counted."""
    server, _ = pair
    endpoint = welcomed(registered, keys).peer_endpoint
    tells_nothing(place_of(endpoint))
    assert not is_let_in(endpoint, None)
    assert not is_let_in(endpoint, Stranger())
    before = refusals(server, "peer", "far")
    with dealer(endpoint, Encryption(keys), b"prefill-0.1/1/" + b"5" * 32 + b"/" + b"7" * 32) as (made, _):
        made.send(PEER.encode(Handoff(1, 1, 0, b"", pack_int32([300]), [], 0, 0.0)))
        assert made.poll(DEADLINE_S * 1000)
        assert made.recv() == b"", "which is all that a stranger is told"
    until(lambda: refusals(server, "peer", "far") > before, "it is counted")
    assert "prefill-0.1" in pair[1].log(), "and logged with the name that it took"
    handed = handed_over(server)
    complete(server, list(range(400, 460)))
    assert handed_over(server) == handed + 1, "and who is named hands over"


def test_page_servers(pair: tuple[Server, Elsewhere]) -> None:  # noqa: F811
    """(Members with grants of others, and without any: `tests/transfer/test_encryption.py`.)"""
    server, _ = pair
    engine = next(filter(is_engine, child_pids(server.process.pid)))
    (port,) = page_ports(engine)
    before = refusals(server, "page_connection")
    tells_nothing((HERE, port))
    question = REQUEST.pack(MAGIC, bytes(16), 1, 0, 1, 0, 1, 0) + pack_int32([1])
    assert len(told((HERE, port), question)) < 16
    until(lambda: refusals(server, "page_connection") == before + 4, "each is counted")


def test_every_port_of_an_engine_is_one_of_these(
    pair: tuple[Server, Elsewhere],  # noqa: F811
    registered: Registered,
    keys: Secrets,
) -> None:
    """Nothing else listens."""
    _, far = pair
    expected = {place_of(one)[1] for one in (registered.endpoint, welcomed(registered, keys).peer_endpoint)}
    assert listening_ports(far.engine()) == expected
    assert len(page_ports(far.engine())) == 1


def sockets_of(pid: int) -> set[Path]:
    """Listening sockets of the file system, of one process."""
    inodes = socket_inodes(pid)
    rows = [row.split() for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    listens = 0x10000
    return {
        Path(row[7])
        for row in rows
        if row[6] in inodes and len(row) > 7 and int(row[3], 16) & listens and row[7].startswith("/")
    }


def test_sockets_of_this_host_are_of_the_user_who_runs_them(pair: tuple[Server, Elsewhere]) -> None:  # noqa: F811
    """Another user of the machine cannot even see them."""
    server, _ = pair
    (engine,) = filter(is_engine, child_pids(server.process.pid))
    found = sockets_of(engine)
    assert found, "its gateway reaches it so"
    for path in found:
        mode = path.parent.stat()
        assert stat.S_IMODE(mode.st_mode) == 0o700
        assert mode.st_uid == os.getuid()
        code = (
            "import os, socket, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
            "except PermissionError: print('refused')"
        )
        said = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
        assert said.stdout == "refused\n", said
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(str(path))


def test_a_key_for_another_listener_opens_nothing(registered: Registered, keys: Secrets) -> None:
    """Who connects knows that the very process answers that was named."""
    other = str(Place(Place.parse(registered.endpoint).address, z85.decode(zmq.curve_keypair()[0])))
    assert not is_let_in(other, Encryption(keys))


def test_the_secret_is_in_no_argument_no_log_and_no_answer(
    pair: tuple[Server, Elsewhere],  # noqa: F811
    registered: Registered,
    keys: Secrets,
) -> None:
    """Nor is what is made of it.  (The environment of its processes is for this user's eyes alone.)"""
    server, far = pair
    purposes = (CURVE_CLIENT, CURVE_LEADER, PAGE_KNOCKS, PAGE_MEMBERS, SIGNATURES)
    made = [keys.first.key(purpose) for purpose in purposes]
    made.append(keys.first.key(REGISTRATION, registered.salt))
    words = [keys.first.text, *(one.hex() for one in made), *(z85.encode(one).decode() for one in made)]
    found = {"the gateway's log": server.log(), "the instance's log": far.log()}
    for path in ("/server_info", "/stats", "/metrics", "/cluster/instances", "/debug/requests", "/version"):
        found[path] = server.http.get(path).raise_for_status().text
    processes = [*descendants(server.process.pid), *descendants(far.process.pid)]
    assert len(processes) > 6, "gateway, launcher, engines, workers"
    for pid in processes:
        found[f"arguments of {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert stat.S_IMODE(Path(f"/proc/{pid}/environ").stat().st_mode) == 0o400
    assert [(what, word) for what, text in found.items() for word in words if word in text] == []


def descendants(pid: int) -> list[int]:
    return [pid, *(below for child in child_pids(pid) for below in descendants(child))]
