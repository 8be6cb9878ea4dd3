"""The process of one instance: starts its workers, then is the engine.

    python -m baton.launch.instances.process '<InstanceLaunch as JSON>'

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
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec

from baton.ipc.children import Process
from baton.ipc.forking import fork_child, num_threads
from baton.ipc.process import ParentGone, die_with_parent
from baton.launch.instances.environment import worker_environment
from baton.observe.logs import configure_logging
from baton.protocol.config import InstanceConfig
from baton.protocol.rules.cluster_secret import SECRETS_VARIABLE, Secrets
from baton.protocol.rules.proof import SECRET_VARIABLE
from baton.worker.wiring import GroupWiring, WorkerWiring, worker_argv

log = logging.getLogger(__name__)

_WORKER_EXIT_DEADLINE_S = 1.0


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
    secrets = Secrets.load(os.environ.pop(SECRETS_VARIABLE, ""))
    config = launch.config
    rendezvous = Path(launch.directory) / f"rendezvous-{launch.incarnation}"
    group = GroupWiring(config, str(rendezvous))
    workers: list[Process] = []
    try:
        workers.append(_start(group.worker(0), forked))
        for rank in range(1, config.tensor_parallel_size):
            workers.append(_start(group.worker(rank, workers[0].pid), forked))
        group.close_worker_ends()
        from baton.engine.shell.loop import EngineLoop  # (now, while the workers import theirs)
        from baton.ipc.curve import Encryption

        loop = EngineLoop(
            config,
            incarnation=launch.incarnation,
            endpoint=launch.endpoint,
            commands=group.commands,
            transfers=group.transfers,
            reports=group.reports,
            doorbell=group.doorbell,
            worker_pids=[worker.pid for worker in workers],
            public=launch.public,
            registration_secret=secret,
            encryption=Encryption(secrets) if secrets and config.transfer_encryption else None,
        )
        os.write(launch.told_fd, f"{loop.endpoint} {loop.public}\n".encode())
        os.close(launch.told_fd)
        gc.collect()
        gc.freeze()  # what has been imported stays: the garbage collector need not walk it between steps
        return loop.run()
    finally:
        _end(workers)
        rendezvous.unlink(missing_ok=True)


def _start(wiring: WorkerWiring, forked: bool) -> Process:
    """Starts a rank."""
    if forked and num_threads() == 1:
        from baton.worker.main import run_worker

        work = partial(run_worker, wiring)
        return fork_child(work, worker_argv(wiring), worker_environment(), wiring.descriptors())
    return subprocess.Popen(
        worker_argv(wiring),
        pass_fds=wiring.descriptors(),
        stdin=subprocess.DEVNULL,
        env=worker_environment(),
    )


def _end(workers: list[Process]) -> None:
    """A process that has not left by now gets SIGTERM and a moment; then it is killed."""
    deadline = time.monotonic() + _WORKER_EXIT_DEADLINE_S
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    for rank, worker in enumerate(workers):
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("worker rank %d did not leave; killing it", rank)
            worker.kill()
            worker.wait()


def main(forked: bool = False) -> int:
    launch = msgspec.json.decode(sys.argv[1], type=InstanceLaunch)
    configure_logging(launch.config.log_level, launch.config.name)
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
