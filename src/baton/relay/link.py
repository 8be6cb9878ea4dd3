"""The leader's end of an instance over several hosts: what goes to the nodes, and what comes from them.

Theory.  The link reads the command log, the transfer ring and the tickets of its host as one more follower,
and passes all of it on to every node, in order.  A ticket is held until the records that it speaks of have
been read, so on no host a rank sees a ticket before them.  Nothing is read while a node has no room for it:
then the rings fill as with any slow reader.

One link is one incarnation.  A node takes part in it once, with one connection; a second relay of the same
launcher says that the first one is gone, and with it its ranks and their slots: the incarnation has failed.

| what happens | what follows |
| --- | --- |
| a launcher asks | `Welcome`: the incarnation and its configuration |
| a relay says `Hello` for this incarnation | it takes part |
| somebody says `Hello` for another one, or a node twice | `Refused` |
| a frame is missing; a node is silent; its connection is gone; `Bye` with a reason | the incarnation fails |
| `Bye` without a reason, of every node | the link has nothing left to do |
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from baton.protocol.config import InstanceConfig
from baton.protocol.messages.nodes import (
    VERSION,
    Bye,
    Down,
    FromLeader,
    FromNode,
    Hello,
    Refused,
    Up,
    Welcome,
)
from baton.relay.lane import Lane, LaneBroken
from baton.relay.meeting import Meeting


class Lost(NamedTuple):
    """Why the incarnation fails."""

    rank: int
    """Whose fault it is: the one named, or the first of the node."""
    reason: str


class _Node:
    """One that takes part."""

    def __init__(self, number: int, identity: bytes, launcher: str, lane: Lane, ranks: range) -> None:
        self.number = number
        self.identity = identity
        self.launcher = launcher
        self.lane = lane
        self.ranks = ranks
        self.left = False


class Link:
    """`window`: bytes on the way to each node, and from it, at most."""

    def __init__(self, config: InstanceConfig, incarnation: str, window: int) -> None:
        self._config = config
        self._incarnation = incarnation
        self._window = window
        self._nodes: dict[int, _Node] = {}
        self._outgoing: list[tuple[bytes, FromLeader]] = []
        self._commands: list[bytes] = []
        self._transfers: list[bytes] = []
        self._tickets: deque[tuple[int, int]] = deque()
        self._collected = 0
        self._bytes = 0
        self._fresh: list[tuple[str, bytes]] = []
        self._probe = False
        self.meeting = Meeting()
        self.reports: list[tuple[int, bytes]] = []
        """What the nodes' ranks reported; the shell takes it."""
        self.lost: Lost | None = None

    # -- what the nodes are

    @property
    def missing(self) -> list[int]:
        """Nodes that have not come yet."""
        return [number for number in range(1, self._config.nodes.count) if number not in self._nodes]

    def nodes(self) -> dict[int, range]:
        """Those that take part, with their ranks."""
        return {number: node.ranks for number, node in self._nodes.items()}

    def takes_part(self, identity: bytes) -> bool:
        """Whether this connection is that of a node that is there."""
        return self._of(identity) is not None

    @property
    def over(self) -> bool:
        """Every node has left as it should."""
        return not self.missing and all(node.left for node in self._nodes.values())

    # -- from the rings

    @property
    def room(self) -> bool:
        """Whether more may be read from the rings."""
        if self.missing or self.lost is not None:
            return False
        return all(node.left or node.lane.room > self._bytes for node in self._nodes.values())

    def command(self, record: bytes) -> None:
        """The next record of the command log."""
        self._collected += 1
        self._commands.append(record)
        self._bytes += len(record)

    def transfer(self, record: bytes) -> None:
        self._transfers.append(record)
        self._bytes += len(record)

    def ticket(self, round_: int, sequence: int) -> None:
        """The leader's, of the next round."""
        self._tickets.append((round_, sequence))

    def say(self, key: str, value: bytes) -> None:
        """A rank of this host says where it is met."""
        if self.meeting.say(key, value):
            self._fresh.append((key, value))

    # -- from the nodes

    def on_message(self, identity: bytes, message: FromNode, now: float) -> None:
        if isinstance(message, Hello):
            self._hello(identity, message, now)
            return
        node = self._of(identity)
        if node is None:
            refused = Refused(f"this connection takes no part in incarnation {self._incarnation}")
            self._outgoing.append((identity, refused))
        elif isinstance(message, Bye):
            node.left = True
            if message.reason:
                rank = message.rank if message.rank in node.ranks else node.ranks[0]
                self._lose(rank, f"node {node.number}: {message.reason}")
        else:
            self._frame(node, message, now)

    def on_lost(self, identity: bytes) -> None:
        """There is no connection of this name any more."""
        node = self._of(identity)
        if node is not None:
            self._lose(node.ranks[0], f"the relay of node {node.number} has closed its connection")

    def on_clock(self, now: float) -> None:
        for node in self._nodes.values():
            if not node.left and node.lane.silent(now):
                self._lose(
                    node.ranks[0],
                    f"node {node.number} has not been heard of for {self._config.nodes.timeout_s:g} s "
                    "(--node-timeout)",
                )

    def next_deadline(self) -> float | None:
        return min((node.lane.deadline for node in self._nodes.values() if not node.left), default=None)

    def done(self, number: int) -> None:
        """All that this node's ranks reported is in their rings."""
        if number in self._nodes:
            self._nodes[number].lane.done()

    # -- to the nodes

    def probe(self) -> None:
        """Some connection has been closed: the next flush writes to all that take part."""
        self._probe = True

    def flush(self, now: float) -> list[tuple[bytes, FromLeader]]:
        """What is to be sent, each to its identity, in order."""
        ready = []
        while self._tickets and self._tickets[0][1] <= self._collected:
            ready.append(self._tickets.popleft())
        something = bool(self._commands or self._transfers or ready or self._fresh)
        for node in self._nodes.values():
            if node.left or not (something or self._probe or node.lane.due(now)):
                continue
            number, ack = node.lane.stamp(self._bytes, now)
            frame = Down(number, ack, self._commands, self._transfers, ready, self._fresh)
            self._outgoing.append((node.identity, frame))
        self._probe = False
        if something:
            self._commands, self._transfers, self._fresh, self._bytes = [], [], [], 0
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def leave(self, reason: str) -> None:
        """This side ends: says so to all."""
        for node in self._nodes.values():
            if not node.left:
                node.left = True
                self._outgoing.append((node.identity, Bye(reason)))

    # -- inside

    def _of(self, identity: bytes) -> _Node | None:
        found = (one for one in self._nodes.values() if one.identity == identity and not one.left)
        return next(found, None)

    def _hello(self, identity: bytes, hello: Hello, now: float) -> None:
        refusal = self._why_not(hello)
        node = self._nodes.get(hello.node)
        if node is not None and node.launcher == hello.launcher and node.identity != identity:
            self._lose(node.ranks[0], f"the relay of node {node.number} has ended")
        if refusal is not None:
            self._outgoing.append((identity, refusal))
        elif not hello.incarnation:
            self._outgoing.append((identity, Welcome(self._incarnation, self._config)))
        else:
            here = self._config.ranks_per_host
            ranks = range(hello.node * here, (hello.node + 1) * here)
            lane = Lane(self._config.nodes.timeout_s, self._window, now)
            self._nodes[hello.node] = _Node(hello.node, identity, hello.launcher, lane, ranks)
            number, ack = lane.stamp(0, now)
            self._outgoing.append((identity, Down(number, ack, met=self.meeting.known())))

    def _why_not(self, hello: Hello) -> Refused | None:
        count = self._config.nodes.count
        if hello.version != VERSION:
            return Refused("it runs another version of Baton; install the same on all hosts")
        if not 0 < hello.node < count:
            return Refused(f"--node {hello.node}: the instance has --nodes {count}; give 1 to {count - 1}")
        if self.lost is not None or hello.node in self._nodes:
            return Refused(f"node {hello.node} of incarnation {self._incarnation} has a relay", later=True)
        if hello.incarnation not in ("", self._incarnation):
            return Refused(f"incarnation {hello.incarnation} is over", later=True)
        return None

    def _frame(self, node: _Node, frame: Up, now: float) -> None:
        size = sum(len(record) for _, record in frame.reports)
        try:
            node.lane.take(frame.number, frame.ack, size, now)
        except LaneBroken as error:
            self._lose(node.ranks[0], f"the connection to node {node.number} is broken: {error}")
            return
        for rank, record in frame.reports:
            if rank not in node.ranks:
                self._lose(node.ranks[0], f"node {node.number} reports for rank {rank}, which it has not")
                return
            self.reports.append((rank, record))
        for key, value in frame.met:
            self.say(key, value)

    def _lose(self, rank: int, reason: str) -> None:
        if self.lost is None:
            self.lost = Lost(rank, reason)
