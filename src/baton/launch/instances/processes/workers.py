"""Starting and ending the processes that compute, as children of this one: an engine's or a relay's."""

from __future__ import annotations

import logging
import subprocess
import time
from functools import partial

from baton.ipc.processes.children import Process
from baton.ipc.processes.forking import fork_child, num_threads
from baton.launch.instances.processes.environment import worker_environment
from baton.protocol.rules.cluster_secret import Secrets
from baton.worker.wiring import LinkWiring, WorkerWiring, link_argv, worker_argv

log = logging.getLogger(__name__)

_WORKER_EXIT_DEADLINE_S = 1.0


def start_worker(wiring: WorkerWiring, forked: bool, secrets: Secrets) -> Process:
    """Starts a rank.  `secrets`: with which its pages are encrypted on their way to other hosts."""
    if forked and num_threads() == 1:
        from baton.worker.main import run_worker

        work = partial(run_worker, wiring)
        return fork_child(work, worker_argv(wiring), worker_environment(secrets), wiring.descriptors())
    return subprocess.Popen(
        worker_argv(wiring),
        pass_fds=wiring.descriptors(),
        stdin=subprocess.DEVNULL,
        env=worker_environment(secrets),
    )


def start_link(wiring: LinkWiring, forked: bool, secrets: Secrets) -> Process:
    """Starts the process that stands for the ranks of other hosts.  `secrets`: of its connections to them."""
    if forked and num_threads() == 1:
        from baton.relay.link_process import run_link

        work = partial(run_link, wiring)
        return fork_child(work, link_argv(wiring), worker_environment(secrets), wiring.descriptors())
    return subprocess.Popen(
        link_argv(wiring),
        pass_fds=wiring.descriptors(),
        stdin=subprocess.DEVNULL,
        env=worker_environment(secrets),
    )


def end_workers(workers: list[Process]) -> None:
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
