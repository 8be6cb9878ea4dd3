"""What passes between the hosts of an instance is what was written there, in order, and once."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from baton.simulation.checks.books import Violation

if TYPE_CHECKING:
    from baton.simulation.parties.hosts import NodeRings
    from baton.simulation.parties.instance import Instance

_RANK = re.compile(r"worker rank (\d+)")


class RelayWatch:
    """The rule `relay`."""

    def __init__(self) -> None:
        self._tickets: dict[str, list[int]] = defaultdict(list)
        """By incarnation: up to which record each of the leader's tickets speaks."""
        self._reported: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        """What a rank of this incarnation wrote that has not come to the engine yet."""

    def leads(self, instance: Instance, sequence: int) -> None:
        """Rank 0 writes its next ticket."""
        self._tickets[instance.name].append(sequence)

    def reported(self, instance: Instance, rank: int, record: bytes) -> None:
        """A rank of another host writes a report."""
        self._reported[instance.name, rank].append(record)

    def passed_down(self, instance: Instance, rings: NodeRings, record: bytes) -> None:
        """A relay is about to write a record."""
        place = len(rings.records)
        if place >= len(instance.records) or instance.records[place] != record:
            raise Violation("relay", f"record {place + 1} of a host of {instance.name} is not the leader's")

    def ticket(self, instance: Instance, rings: NodeRings, round_: int, sequence: int) -> None:
        """A relay is about to write a ticket."""
        told = self._tickets[instance.name]
        if round_ != rings.tickets.last + 1 or round_ > len(told) or told[round_ - 1] != sequence:
            raise Violation(
                "relay",
                f"ticket {round_} of a host of {instance.name}, after {rings.tickets.last}, says {sequence}: "
                "the leader wrote another one",
            )
        if sequence > len(rings.records):
            raise Violation(
                "relay",
                f"ticket {round_} of a host of {instance.name} speaks of record {sequence}, and there are "
                f"{len(rings.records)}",
            )

    def passed_up(self, instance: Instance, rank: int, record: bytes) -> None:
        """The link is about to write a report for the engine."""
        waiting = self._reported[instance.name, rank]
        if not waiting or waiting.pop(0) != record:
            raise Violation(
                "relay", f"a report for rank {rank} of {instance.name} that it did not write, or not then"
            )

    def failed(self, instance: Instance, reason: str | None) -> None:
        """The engine leaves.  A rank whose death is all that happened is named, unless the launcher's next
        question, on another connection, overtakes what the relay said."""
        if reason is None or instance.config.nodes.count == 1 or len(instance.excuses) != 1:
            return
        died = _match(instance.excuses[0])
        named = _RANK.search(reason)
        if (
            died is not None
            and not reason.endswith(" has ended")
            and (named is None or int(named[1]) != died)
        ):
            raise Violation("relay", f"rank {died} of {instance.name} died, and the engine says: {reason}")


def _match(excuse: str) -> int | None:
    found = re.match(r"rank (\d+) (?!was stalled)", excuse)
    return int(found[1]) if found is not None else None
