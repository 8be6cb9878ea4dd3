"""The instances that one server runs: a supervisor for each, and when all of them together have failed.

Each instance is restarted by itself and disturbs no other.  A first start that fails ends the server, because
then an option or the checkpoint is wrong, and a person is there to read why.  One that dies too often
later is given up, and the others go on; when none is left, the server ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from baton.gateway.instances.client import ClusterClient
from baton.launch.instances.processes.starting import Starter
from baton.launch.instances.supervisor import InstanceFailed, Supervisor
from baton.launch.planning.cluster_options import InstancePlan
from baton.observe.memory import child_processes
from baton.protocol.rules.cluster_secret import Secrets
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)


class Fleet:
    """Registers the instances with the gateway's client at once, and runs them while `run` runs."""

    def __init__(
        self,
        instances: Sequence[InstancePlan],
        client: ClusterClient,
        *,
        max_restarts: int,
        cluster_secrets: Secrets | None = None,
    ) -> None:
        self._starters = {
            executor: Starter(executor, form)
            for executor, form in {(one.config.executor, one.config.log_format) for one in instances}
        }
        self.supervisors = {
            plan.config.name: Supervisor(
                plan.config,
                client.add(plan.config.name, plan.label),
                max_restarts=max_restarts,
                cluster_secrets=cluster_secrets,
                starter=self._starters[plan.config.executor],
            )
            for plan in instances
        }

    async def spawned(self) -> None:
        """Returns when each instance is being started, by another process than this one; not at all if one
        never is: then `run` ends."""
        for supervisor in self.supervisors.values():
            await supervisor.spawned.wait()

    async def run(self) -> None:
        """Until cancelled.  Raises `InstanceFailed` when an instance cannot be started, or none is left."""
        if not self.supervisors:  # a gateway whose instances all join from elsewhere
            await asyncio.Event().wait()
        running = {
            asyncio.create_task(supervisor.run(), name=f"supervisor of {name}"): name
            for name, supervisor in self.supervisors.items()
        }
        try:
            while True:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._gave_up(running.pop(task), task, left=len(running))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for starter in self._starters.values():
                starter.close()

    def processes(self) -> dict[str, int]:
        """The process ids of this server's processes by what they are; those of an instance begin with its
        name."""
        found = {"gateway": os.getpid()}
        for starter in self._starters.values():
            if starter.fork_server is not None:
                found["fork server"] = starter.fork_server
        for name, supervisor in self.supervisors.items():
            if supervisor.pid is not None:
                found[f"{name} engine"] = supervisor.pid
                ranks = enumerate(child_processes(supervisor.pid))
                found |= {f"{name} rank {rank}": pid for rank, pid in ranks}
        known = set(found.values())
        helpers = [pid for pid in child_processes(os.getpid()) if pid not in known]
        helpers += [pid for parent in helpers for pid in child_processes(parent)]
        return found | {f"helper {number}": pid for number, pid in enumerate(helpers)}

    def use_weights(self, weights: Weights) -> None:
        """The instances are to have other weights: later incarnations load them from the start."""
        for supervisor in self.supervisors.values():
            supervisor.use_weights(weights)

    def kill(self) -> None:
        """Ends every instance at once, without waiting for anything."""
        for supervisor in self.supervisors.values():
            supervisor.kill()

    def _gave_up(self, name: str, task: asyncio.Task[None], *, left: int) -> None:
        """Raises `InstanceFailed` unless the others can go on without it."""
        error = task.exception() or InstanceFailed("its supervisor left without a reason")
        if len(self.supervisors) == 1 or not isinstance(error, InstanceFailed):
            raise error
        if not self.supervisors[name].has_served or left == 0:
            raise InstanceFailed(f"{name}: {error}") from error
        log.critical("%s is given up, %d other instances go on: %s", name, left, error)
