"""Collects messages for other engines between two flushes (`Courier`); an alarm for many deadlines."""

from __future__ import annotations

import math
from collections import OrderedDict

from baton.protocol.messages.handover import PeerMessage
from baton.protocol.messages.requests import Target

_MAX_KNOWN = 4096
"""Peers whose addresses are remembered; each restart of one is another."""


class Courier:
    """Messages to other engines, in order."""

    def __init__(self, incarnation: str, endpoint: str) -> None:
        self.incarnation = incarnation
        self.endpoint = endpoint
        """Where this engine can be reached by its peers; "" if it cannot be."""
        self._messages: list[tuple[Target, PeerMessage]] = []
        self._known: OrderedDict[str, Target] = OrderedDict()

    def know(self, peer: Target) -> None:
        """Remembers where a peer listens."""
        self._known[peer.incarnation] = peer
        self._known.move_to_end(peer.incarnation)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def send(self, to: Target, message: PeerMessage) -> None:
        self._messages.append((to, message))

    def answer(self, peer: str, message: PeerMessage) -> None:
        """To the sender of something about a hand-over that is not known any more.  One that was never heard
        of cannot be answered; what it holds ends with its lease."""
        to = self._known.get(peer)
        if to is not None:
            self._messages.append((to, message))

    def take(self) -> list[tuple[Target, PeerMessage]]:
        messages, self._messages = self._messages, []
        return messages


def earliest(one: float | None, other: float | None) -> float | None:
    """The earlier of two deadlines; None is none."""
    if one is None or other is None:
        return other if one is None else one
    return one if one <= other else other


class Alarm:
    """The earliest of many deadlines, never too late; one at infinity is none.

    A deadline that moves to a later time leaves the alarm where it is: then it goes off once for nothing,
    and its owner sets it to the deadline that is the earliest now.
    """

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at: float | None = None

    def note(self, deadline: float | None) -> None:
        if deadline is not None and deadline < (math.inf if self.at is None else self.at):
            self.at = deadline

    def due(self, now: float) -> bool:
        return self.at is not None and now >= self.at
