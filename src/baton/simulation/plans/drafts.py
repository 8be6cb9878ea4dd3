"""Plans of instances whose steps confirm drafts."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace as replace_in

from baton.protocol.config import InstanceConfig, Speculation


def draw_drafts(random: Random, instance: InstanceConfig) -> InstanceConfig:
    """Half of the instances have drafts, some of them right."""
    if random.random() < 0.5:
        return instance
    speculation = Speculation(
        method="planted",
        num_speculative_tokens=random.choice((1, 2, 4, 7)),
        planted_right=random.choice((0.0, 0.3, 0.7, 0.95)),
    )
    return replace_in(instance, speculation=speculation)


def most_drafts(instance: InstanceConfig) -> int:
    """Of a slot in a step."""
    return instance.speculation.num_speculative_tokens if instance.speculation else 0
