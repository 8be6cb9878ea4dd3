"""`--autoscale`: what the cluster decides about the number of its instances is told to Ray's driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton.gateway.instances.client import ClusterClient
from baton.launch.placing.placement import Placement

log = logging.getLogger(__name__)


def begin_scaling(
    client: ClusterClient, placement: Placement, on_fatal: Callable[[str], None]
) -> asyncio.Task[None]:
    """Until cancelled.  `on_fatal` is called if it ends otherwise."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a defect: instances are not added or drained any more", exc_info=error)
            on_fatal(f"--autoscale: {error!r}")

    task = asyncio.create_task(_scale(client, placement), name="scaling")
    task.add_done_callback(ended)
    return task


async def _scale(client: ClusterClient, placement: Placement) -> None:
    roles = client.cluster.roles
    while True:
        await client.wait_for(lambda: roles.wants)
        for change in roles.take_wanted():
            if change.kind == "add":
                roles.named(change, placement.add(change.label))
            else:  # (it drains already; its process is told to end, which it does when nothing runs there)
                placement.remove(change.name)
