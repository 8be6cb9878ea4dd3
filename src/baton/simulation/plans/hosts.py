"""Plans of instances whose ranks are on several hosts."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace as replace_in

from baton.protocol.config import InstanceConfig, Nodes
from baton.simulation.plans.plan import Shape


def draw_hosts(random: Random, instance: InstanceConfig, shape: Shape) -> InstanceConfig:
    """Its ranks on several hosts.  What may be on the way between them is as little as a record, or much."""
    if not shape.hosts:
        return instance
    count = random.choice(shape.hosts)
    return replace_in(
        instance,
        tensor_parallel_size=count * random.choice((1, 1, 2)),
        command_ring_bytes=random.choice((60, 500, 1 << 20)),
        nodes=Nodes(count=count, listen="sim", timeout_s=random.choice((0.4, 1.0, 3.0))),
    )
