"""What a ticket costs across a link, beside the link's round trip.  For `nodes.py`.

The command ring, link process, relay and rings are those of production.  This process plays engine and rank
0: it writes a ticket, sleeps until the other rank's report of it is there, and does so again.  The other
rank, in the namespace, is a process that takes tickets and reports each.  So a figure is the way of a ticket
there and of a report back, with each process on it woken once.

    python benchmarks/_tickets.py relay|rank|echo ...       # what runs in the namespace
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import Waiter, die_with_parent
from baton.ipc.ring import RingWriter
from baton.ipc.sockets.curve import Encryption, leader_keys
from baton.ipc.ticket import TicketReader, TicketWriter
from baton.launch.planning.instance_config import instance_config
from baton.protocol.config import InstanceConfig, Nodes
from baton.protocol.rules.cluster_secret import SECRETS_VARIABLE, Secrets
from baton.relay.node import Node
from baton.relay.relay_process import RelayProcess
from baton.worker.wiring import GroupWiring, WorkerWiring, link_argv

_PAUSE_S = 0.002
"""Between two tickets, as between two steps."""
_WARM = 50
_DEADLINE_S = 30.0
_BYTES = 64


def _config(nodes: Nodes) -> InstanceConfig:
    made: InstanceConfig = instance_config(
        model="",
        executor="simulated",
        tensor_parallel_size=2,
        max_model_len=256,
        block_size=8,
        num_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        vocab_size=1000,
        log_level="warning",
        nodes=nodes,
    )
    return made


def local_tickets(count: int) -> list[float]:
    """Seconds from a ticket to its report with both ranks on this host."""
    group = GroupWiring(_config(Nodes()), "")
    leader = group.worker(0)
    rank = group.worker(1, os.getpid())
    with _program("rank", msgspec.json.encode(rank).decode(), fds=rank.descriptors()) as process:
        try:
            return _measure(group, leader, count)
        finally:
            _end(process)


def tickets_across(namespace: str, leader: str, secrets: Secrets, count: int) -> list[float]:
    """The same with rank 1 in the namespace; `leader`: HOST:PORT here.  No secrets: in clear."""
    config = _config(Nodes(count=2, listen=f"tcp://{leader}", host=leader.rpartition(":")[0]))
    group = GroupWiring(config, "")
    wiring = group.link("bench")
    environment = {**os.environ, SECRETS_VARIABLE: secrets.dump()}
    with subprocess.Popen(link_argv(wiring), pass_fds=wiring.descriptors(), env=environment) as link:
        argument = msgspec.json.encode(config).decode()
        _connected(leader).close()  # (a relay connects once)
        with _program("relay", argument, namespace=namespace, env=environment) as relay:
            try:
                return _measure(group, group.worker(0), count)
            finally:
                _end(relay)
                _end(link)


def round_trips(namespace: str, address: str, count: int) -> list[float]:
    """Seconds of small messages over a plain TCP connection there and back."""
    with _program("echo", address, namespace=namespace) as echo:
        try:
            with _connected(address) as there:
                there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

                def once(_: int) -> None:
                    there.sendall(bytes(_BYTES))
                    if not there.recv(_BYTES, socket.MSG_WAITALL):
                        raise RuntimeError("the echo has ended")

                return _times(once, count)
        finally:
            _end(echo)


def _measure(group: GroupWiring, leader: WorkerWiring, count: int) -> list[float]:
    assert leader.tickets is not None
    writer = TicketWriter(leader.tickets, [Doorbell(fd) for fd in leader.follower_doorbells])
    reader, waiter = group.reports[1], Waiter((group.doorbell.fileno(),))

    def once(round_: int) -> None:
        writer.publish(round_, 0)
        end = time.monotonic() + _DEADLINE_S
        while True:
            group.doorbell.drain()
            if reader.read() is not None:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"no report of round {round_} within {_DEADLINE_S:g} s")
            waiter.wait(1.0)

    try:
        return _times(once, count)
    finally:
        writer.close()
        group.close()


def _times(once: Callable[[int], None], count: int) -> list[float]:
    """`once` gets numbers from 1."""
    found = []
    for number in range(1, _WARM + count + 1):
        time.sleep(_PAUSE_S)
        begin = time.perf_counter()
        once(number)
        found.append(time.perf_counter() - begin)
    return found[_WARM:]


# -- in the namespace


def _program(
    what: str,
    argument: str,
    *,
    namespace: str = "",
    fds: tuple[int, ...] = (),
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    command = [*prefix, sys.executable, str(Path(__file__)), what, argument]
    parent = os.getpid()
    return subprocess.Popen(command, pass_fds=fds, env=env, preexec_fn=lambda: die_with_parent(parent))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + _DEADLINE_S
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=_DEADLINE_S)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _relay(config: InstanceConfig) -> None:
    """The relay, whose only rank is another process of this program."""
    secrets = Secrets.taken_from(os.environ)
    group = GroupWiring(config, "", node=1)
    tickets = group.tickets()
    wiring = group.worker(1, os.getpid())
    with _program("rank", msgspec.json.encode(wiring).decode(), fds=wiring.descriptors()) as rank:
        group.close_worker_ends()
        node = Node(config, "bench", 1, "bench", config.command_ring_bytes, time.monotonic())
        key = leader_keys(secrets)[0] if secrets else b""
        encryption = Encryption(secrets) if secrets else None
        RelayProcess(node, config, group, tickets, [rank], encryption, key).run()
        _end(rank)


def _rank(wiring: WorkerWiring) -> None:
    """Takes each ticket and reports it."""
    assert wiring.tickets is not None
    assert wiring.leader_doorbell is not None
    own = Doorbell(wiring.doorbell)
    tickets = TicketReader(wiring.tickets, wiring.follower, own, {}, Doorbell(wiring.leader_doorbell))
    reports = RingWriter(wiring.report_ring, [Doorbell(wiring.engine_doorbell)])
    round_ = 0
    while True:
        round_ += 1
        tickets.wait(round_, timeout_s=None)
        reports.write(b"%d" % round_)


def _echo(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as door:
        there, _ = door.accept()
    with there:
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := there.recv(_BYTES):
            there.sendall(data)


def main() -> None:
    what, argument = sys.argv[1:]
    if what == "relay":
        _relay(msgspec.json.decode(argument, type=InstanceConfig))
    elif what == "rank":
        _rank(msgspec.json.decode(argument, type=WorkerWiring))
    else:
        _echo(argument)


if __name__ == "__main__":
    main()
