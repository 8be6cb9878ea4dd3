"""A node's end of an instance over several hosts: what the leader's rings hold goes into those of this host.

Theory.  The relay writes the rings and tickets of its host exactly as the leader's are, in order, and nothing
else; it decides nothing.  What it takes from the connection it takes whole: a record whose frame has come is
written before anything that came later, a ticket after the records of its frame and of all before.

It belongs to one incarnation and to one connection.  Whatever ends one of them ends the relay, and its ranks
with it: the leader gone or silent, a frame missing, a rank that died.  Its launcher then asks for the next
incarnation.
"""

from __future__ import annotations

from baton.protocol.config import InstanceConfig
from baton.protocol.messages.nodes import Bye, Down, FromLeader, FromNode, Hello, Refused, Up
from baton.relay.lane import Lane, LaneBroken
from baton.relay.meeting import Meeting


class Node:
    """The relay of node `number` in one incarnation, from its `Hello` on."""

    def __init__(
        self,
        config: InstanceConfig,
        incarnation: str,
        number: int,
        launcher: str,
        window: int,
        now: float,
    ) -> None:
        self._lane = Lane(config.nodes.timeout_s, window, now)
        self._timeout_s = config.nodes.timeout_s
        self._outgoing: list[FromNode] = [Hello(number, launcher, incarnation)]
        self._reports: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._fresh: list[tuple[str, bytes]] = []
        self._attached = False
        self._collected = 0
        self.meeting = Meeting()
        self.commands: list[bytes] = []
        """Records for the command ring; the shell takes these three."""
        self.transfers: list[bytes] = []
        self.tickets: list[tuple[int, int]] = []
        """(round, sequence), to be written after `commands`."""
        self.over: str | None = None
        """Why this relay ends; "": its ranks have left."""
        self.ended_well = False
        """The leader, or its ranks, ended it as they should."""

    # -- from the ranks

    @property
    def room(self) -> bool:
        """Whether more reports may be read."""
        return self._attached and self.over is None and self._lane.room > self._bytes

    def report(self, rank: int, record: bytes) -> None:
        self._reports.append((rank, record))
        self._bytes += len(record)

    def say(self, key: str, value: bytes) -> None:
        """A rank of this host says where it is met."""
        if self.meeting.say(key, value):
            self._fresh.append((key, value))

    def leave(self, reason: str, rank: int = -1) -> None:
        """The ranks have ended (reason "": as they were told to), or one has died."""
        if self.over is None:
            self._flush_frame(0.0, bool(self._reports or self._fresh))
            self._outgoing.append(Bye(reason, rank))
            self.over, self.ended_well = reason, not reason

    # -- from the leader

    def on_message(self, message: FromLeader, now: float) -> None:
        if self.over is not None:
            return
        if isinstance(message, Bye | Refused):
            self.over = message.reason or "the leader has ended the instance"
            self.ended_well = not message.reason
        elif isinstance(message, Down):
            self._frame(message, now)

    def on_lost(self) -> None:
        """The connection is gone."""
        if self.over is None:
            self.over = "the connection to the leader is gone"

    def on_clock(self, now: float) -> None:
        if self._lane.silent(now) and self.over is None:
            self.over = f"the leader has not been heard of for {self._timeout_s:g} s (--node-timeout)"

    def next_deadline(self) -> float:
        return self._lane.deadline

    def done(self) -> None:
        """All that came is in the rings of this host."""
        self._lane.done()

    def flush(self, now: float) -> list[FromNode]:
        """What is to be sent, in order."""
        if self._attached and self.over is None:
            self._flush_frame(now, bool(self._reports or self._fresh) or self._lane.due(now))
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    # -- inside

    def _flush_frame(self, now: float, wanted: bool) -> None:
        if wanted and self._attached:
            number, ack = self._lane.stamp(self._bytes, now)
            self._outgoing.append(Up(number, ack, self._reports, self._fresh))
            self._reports, self._fresh, self._bytes = [], [], 0

    def _frame(self, frame: Down, now: float) -> None:
        size = sum(map(len, frame.commands)) + sum(map(len, frame.transfers))
        try:
            self._lane.take(frame.number, frame.ack, size, now)
        except LaneBroken as error:
            self.over = f"the connection to the leader is broken: {error}"
            return
        self._attached = True
        self._collected += len(frame.commands)
        early = next((sequence for _, sequence in frame.tickets if sequence > self._collected), None)
        if early is not None:
            self.over = f"a ticket speaks of record {early}, and {self._collected} have come"
            return
        self.commands += frame.commands
        self.transfers += frame.transfers
        self.tickets += frame.tickets
        for key, value in frame.met:
            self.meeting.say(key, value)
