"""The process of one instance: starts its workers, then is the engine.

    python -m baton.launch.instances.processes.instance '<InstanceLaunch as JSON>'

or a fork of the fork server (`fork_server.py`), which has imported everything; then its workers are forks of
itself, made before it has threads.

The engine is the parent of its workers and watches each through a pidfd; a worker that dies takes the
instance down with the reason, and the supervisor starts a new one.  Exit code 0 after SIGTERM, 1 when
the instance failed.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from baton.ipc.processes.children import Process
from baton.ipc.processes.process import ParentGone, die_with_parent
from baton.launch.instances.processes.workers import end_workers, start_link, start_worker
from baton.observe.logs import configure_logging
from baton.protocol.config import InstanceConfig
from baton.protocol.rules.cluster_secret import NO_SECRETS, Secrets
from baton.protocol.rules.proof import SECRET_VARIABLE
from baton.worker.wiring import GroupWiring

log = logging.getLogger(__name__)


class InstanceLaunch(msgspec.Struct, frozen=True):
    """What the supervisor tells an instance."""

    config: InstanceConfig
    incarnation: str
    endpoint: str
    """ZeroMQ endpoint on which the engine listens for its supervisor and for gateways of this host."""
    directory: str
    """Private to this server; it outlives the instance."""
    parent_pid: int
    told_fd: int
    """A pipe: the two endpoints as they turned out are written here, with a space between them."""
    public: str = ""
    """Where gateways of other hosts reach it, "" if none shall; a port of 0 takes a free one."""


def run_instance(launch: InstanceLaunch, *, forked: bool = False) -> int:
    """Runs until SIGTERM or failure; returns the exit code.  No worker is alive afterwards.  `forked`: this
    process has imported what its workers need."""
    secret = os.environ.pop(SECRET_VARIABLE, "")  # not for the workers
    secrets = Secrets.taken_from(os.environ)
    config = launch.config
    if not config.transfer_encryption:
        secrets = NO_SECRETS  # of signatures: those are the launcher's
    rendezvous = Path(launch.directory) / f"rendezvous-{launch.incarnation}"
    group = GroupWiring(config, str(rendezvous))
    workers: list[Process] = []
    try:
        workers.append(start_worker(group.worker(0), forked, secrets))
        for rank in range(1, config.ranks_per_host):
            workers.append(start_worker(group.worker(rank, workers[0].pid), forked, secrets))
        elsewhere = config.tensor_parallel_size - config.ranks_per_host
        if elsewhere:  # one process stands for all ranks on other hosts
            workers.append(start_link(group.link(launch.incarnation), forked, secrets))
        group.close_worker_ends()
        from baton.engine.shell.loop import EngineLoop  # (now, while the workers import theirs)
        from baton.ipc.sockets.curve import Encryption

        loop = EngineLoop(
            config,
            incarnation=launch.incarnation,
            endpoint=launch.endpoint,
            commands=group.commands,
            transfers=group.transfers,
            reports=group.reports,
            doorbell=group.doorbell,
            worker_pids=[worker.pid for worker in workers] + [workers[-1].pid] * (elsewhere - 1),
            link_doorbell=group.link_doorbell,
            public=launch.public,
            registration_secret=secret,
            encryption=Encryption(secrets) if secrets else None,
        )
        os.write(launch.told_fd, f"{loop.endpoint} {loop.public}\n".encode())
        os.close(launch.told_fd)
        gc.collect()
        gc.freeze()  # what has been imported stays: the garbage collector need not walk it between steps
        return loop.run()
    finally:
        end_workers(workers)
        rendezvous.unlink(missing_ok=True)


def main(forked: bool = False) -> int:
    launch = msgspec.json.decode(sys.argv[1], type=InstanceLaunch)
    configure_logging(launch.config.log_level, launch.config.name, launch.config.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # (`stty tostop` would stop who logs in the background)
    try:
        die_with_parent(launch.parent_pid)
    except ParentGone as error:
        log.error("%s", error)
        return 1
    try:
        return run_instance(launch, forked=forked)
    except Exception:
        log.exception("the engine failed")
        return 1


if __name__ == "__main__":
    sys.exit(main())
