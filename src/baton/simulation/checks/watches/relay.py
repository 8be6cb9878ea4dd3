"""What passes between the hosts of an instance is what was written there, in order, and once; and who is gone
is not waited for.

The watch keeps what each link has heard, from which connection and when on the link's own clock.  A link that
has read all that came gives a node up

* within two turns of the news that its connection is closed: in the first it writes to all, in the second it
  knows whose connection is gone;
* when it has not heard of it for `--node-timeout` and a quarter more, unless the link itself stood still.

What a relay says with its last words is why the instance fails: which rank died.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.protocol.messages.nodes import Bye, FromNode
from baton.protocol.messages.reports import REPORTS, WorkerReady
from baton.simulation.checks.books import Violation

if TYPE_CHECKING:
    from baton.simulation.parties.hosts import LinkProcess, NodeRings
    from baton.simulation.parties.instance import Instance

_RANK = re.compile(r"worker rank (\d+)")


_TURNS = 2
_LATE = 1.25
_STOOD_STILL = (
    "a relay or the link was stalled",
    "the instance was frozen",
    "it was stalled until its lease ended",
)
"""Faults after which a link may have been silent itself."""


@dataclass
class _Heard:
    """By a link of its nodes, by connection."""

    at: dict[bytes, float] = field(default_factory=dict)
    closed: dict[bytes, int] = field(default_factory=dict)
    """Turns since it was closed."""
    farewell: bool = False
    """A relay has said why it ends."""


class RelayWatch:
    """The rule `relay`."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = defaultdict(_Heard)
        """By incarnation."""
        self._tickets: dict[str, list[int]] = defaultdict(list)
        """By incarnation: up to which record each of the leader's tickets speaks."""
        self._reported: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        """What a rank of this incarnation wrote that has not come to the engine yet."""

    def leads(self, instance: Instance, sequence: int) -> None:
        """Rank 0 writes its next ticket."""
        self._tickets[instance.name].append(sequence)

    def reported(self, instance: Instance, rank: int, record: bytes) -> None:
        """A rank of another host writes a report."""
        waiting = self._reported[instance.name, rank]
        if isinstance(REPORTS.decode(record), WorkerReady):  # a new rank: its relay is new too
            waiting.clear()
        waiting.append(record)

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

    def reads(
        self, link: LinkProcess, identity: bytes, message: FromNode, now: float, *, known: bool
    ) -> None:
        """A link has read a message.  `known`: of a node that took part."""
        heard = self._heard[link.instance.name]
        heard.at[identity] = now
        heard.farewell = heard.farewell or (isinstance(message, Bye) and known)

    def closed(self, link: LinkProcess, identity: bytes) -> None:
        """A link is told that a connection is closed (not which)."""
        self._heard[link.instance.name].closed[identity] = 0

    def turned(self, link: LinkProcess, now: float, *, timed: bool) -> None:
        """A link has read all that came, and done what follows.  `timed`: it looks at its clock."""
        instance, heard = link.instance, self._heard[link.instance.name]
        if link.link.lost is not None:
            return
        for identity in heard.closed:
            heard.closed[identity] += 1
            if heard.closed[identity] > _TURNS and link.link.takes_part(identity):
                raise Violation(
                    "relay", f"{link.name} waits for {identity.decode()}, whose connection is closed"
                )
        patience_s = _LATE * instance.config.nodes.timeout_s
        if not timed or any(one in _STOOD_STILL for one in instance.excuses):
            return
        for identity, at in heard.at.items():
            if now - at > patience_s and link.link.takes_part(identity):
                raise Violation(
                    "relay",
                    f"{link.name} has not heard of {identity.decode()} for {now - at:.3f} s and waits",
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
            and (self._heard[instance.name].farewell or not reason.endswith(" has ended"))
            and (named is None or int(named[1]) != died)
        ):
            raise Violation("relay", f"rank {died} of {instance.name} died, and the engine says: {reason}")


def _match(excuse: str) -> int | None:
    found = re.match(r"rank (\d+) (?!was stalled)", excuse)
    return int(found[1]) if found is not None else None
