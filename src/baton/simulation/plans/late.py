"""Plans of instances whose executor is one step late."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace as replace_in

from baton.protocol.config import InstanceConfig
from baton.simulation.plans.drafts import draw_drafts
from baton.simulation.plans.hosts import draw_hosts
from baton.simulation.plans.plan import Shape


def draw_steps(seed: int, place: int, instance: InstanceConfig, shape: Shape) -> InstanceConfig:
    """Of the instance at this place of a plan: over how many hosts it is, and whether its steps have drafts,
    or are read late."""
    spread = draw_hosts(Random((seed << 8) + 128 + place), instance, shape)
    drafting = draw_drafts(Random((seed << 8) + 64 + place), spread)
    return draw_late(Random((seed << 8) + 192 + place), drafting, shape.late)


def draw_late(random: Random, instance: InstanceConfig, share: float) -> InstanceConfig:
    """So large a share of the instances is; they draft nothing."""
    if random.random() >= share:
        return instance
    return replace_in(instance, overlap_steps=True, speculation=None)
