"""The process of a relay: starts the ranks of its host, then passes on between them and the leader.

    python -m baton.launch.instances.processes.relay '<RelayLaunch as JSON>'

As an engine's process (`instance.py`) it is the parent of its workers, watches them, and outlives nobody.
Exit code 0 when the leader has ended the incarnation, 1 when it was lost.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time

import msgspec

from baton.ipc.processes.children import Process
from baton.ipc.processes.process import ParentGone, die_with_parent
from baton.launch.instances.processes.workers import end_workers, start_worker
from baton.observe.logs import configure_logging
from baton.protocol.config import InstanceConfig
from baton.protocol.rules.cluster_secret import NO_SECRETS, Secrets
from baton.relay.node import Node
from baton.worker.wiring import GroupWiring

log = logging.getLogger(__name__)


class RelayLaunch(msgspec.Struct, frozen=True):
    """What the launcher tells a relay."""

    config: InstanceConfig
    """As this host needs it."""
    incarnation: str
    node: int
    launcher: str
    key: str
    """The leader's public key, as hexadecimal digits; "": the connection is in clear."""
    parent_pid: int


def run_relay(launch: RelayLaunch, *, forked: bool = False) -> int:
    """Runs until the incarnation is over.  No worker is alive afterwards."""
    secrets = Secrets.taken_from(os.environ)
    config = launch.config
    of_pages = secrets if config.transfer_encryption else NO_SECRETS
    group = GroupWiring(config, "", node=launch.node)
    tickets = group.tickets()
    workers: list[Process] = []
    try:
        for rank in group.ranks:
            one = start_worker(group.worker(rank, os.getpid()), forked, of_pages)
            workers.append(one)
        group.close_worker_ends()
        from baton.ipc.sockets.curve import Encryption  # (now, while the workers import theirs)
        from baton.relay.relay_process import RelayProcess

        node = Node(
            config,
            launch.incarnation,
            launch.node,
            launch.launcher,
            config.command_ring_bytes,
            time.monotonic(),
        )
        encryption = Encryption(secrets) if launch.key else None
        relay = RelayProcess(node, config, group, tickets, workers, encryption, bytes.fromhex(launch.key))
        gc.collect()
        gc.freeze()
        why = relay.run()
        log.log(logging.INFO if node.ended_well else logging.ERROR, "%s", why or "the ranks have left")
        return 0 if node.ended_well else 1
    finally:
        end_workers(workers)


def main(forked: bool = False) -> int:
    launch = msgspec.json.decode(sys.argv[1], type=RelayLaunch)
    configure_logging(
        launch.config.log_level, f"{launch.config.name}/node-{launch.node}", launch.config.log_format
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        die_with_parent(launch.parent_pid)
    except ParentGone as error:
        log.error("%s", error)
        return 1
    try:
        return run_relay(launch, forked=forked)
    except Exception:
        log.exception("the relay failed")
        return 1


if __name__ == "__main__":
    sys.exit(main())
