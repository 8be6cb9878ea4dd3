"""Deliberate defects in what passes between the hosts of an instance; see `mutations.py`."""

from __future__ import annotations

from baton.protocol.messages.nodes import Bye, Down, Hello, Up
from baton.relay.lane import Lane
from baton.relay.link import Link
from baton.relay.node import Node
from tests.simulation.mutations import Patch, mutation


@mutation("a command is passed twice after a connection was closed", "relay", scenario="relay")
def passed_twice(patch: Patch) -> None:
    flush = Link.flush

    def wrong(self, now):
        again = self._probe
        sent = flush(self, now)
        commands = [one for _, frame in sent if isinstance(frame, Down) for one in frame.commands]
        if commands:
            self.sent_last = commands[-1:]
        elif again and self.lost is None:
            self._commands = list(getattr(self, "sent_last", []))
        return sent

    patch.setattr(Link, "flush", wrong)


@mutation("of two commands in one frame only the first is passed", "relay", "failure", scenario="relay")
def left_out(patch: Patch) -> None:
    command = Link.command

    def wrong(self, record):
        command(self, record)
        if len(self._commands) > 1:
            self._commands.pop()

    patch.setattr(Link, "command", wrong)


@mutation("a report of an old incarnation is passed", "relay", scenario="relay", start=22)
def old_reports(patch: Patch) -> None:
    on_message = Link.on_message

    def wrong(self, identity, message, now):
        known = any(node.identity == identity for node in self._nodes.values())
        if isinstance(message, Up) and not known:
            self.reports += message.reports
        else:
            on_message(self, identity, message, now)

    patch.setattr(Link, "on_message", wrong)


@mutation(
    "a relay of an old incarnation takes part",
    "relay",
    "liveness",
    "failure",
    "crash",
    scenario="relay",
    start=35,
)
def old_relay(patch: Patch) -> None:
    why_not = Link._why_not

    def wrong(self, hello):
        known = hello.incarnation and self._incarnation
        return why_not(self, Hello(hello.node, hello.launcher, known, hello.version))

    patch.setattr(Link, "_why_not", wrong)


@mutation("a lost rank is not told to the leader", "relay", "liveness", scenario="relay")
def lost_rank(patch: Patch) -> None:
    patch.setattr(Node, "leave", lambda self, reason, rank=-1: None)


@mutation("the leader is told that a node ends, and not which rank died", "relay", scenario="relay")
def nameless_rank(patch: Patch) -> None:
    leave = Node.leave
    patch.setattr(Node, "leave", lambda self, reason, rank=-1: leave(self, "a rank died"))


@mutation("nobody says that it is there while there is nothing to say", "failure", scenario="relay")
def no_beats(patch: Patch) -> None:
    patch.setattr(Lane, "due", lambda self, now: False)


@mutation("a lost frame is not noticed", "relay", "liveness", "failure", scenario="relay")
def lost_frame(patch: Patch) -> None:
    take = Lane.take

    def wrong(self, number, ack, size, now):
        self._received = number - 1
        take(self, number, ack, size, now)

    patch.setattr(Lane, "take", wrong)


@mutation("a ticket is passed before the records that it speaks of", "failure", scenario="relay")
def early_tickets(patch: Patch) -> None:
    flush = Link.flush

    def wrong(self, now):
        collected, self._collected = self._collected, 1 << 40
        sent = flush(self, now)
        self._collected = collected
        return sent

    patch.setattr(Link, "flush", wrong)


@mutation("a ticket waits for records that it does not speak of", "failure", "liveness", scenario="relay")
def late_tickets(patch: Patch) -> None:
    ticket = Link.ticket
    patch.setattr(Link, "ticket", lambda self, round_, sequence: ticket(self, round_, sequence + 1))


@mutation(
    "a second relay of a host takes part beside the first",
    "relay",
    "failure",
    "liveness",
    scenario="relay",
    start=32,
)
def two_relays(patch: Patch) -> None:
    hello_ = Link._hello

    def wrong(self, identity, hello, now):
        node = self._nodes.pop(hello.node, None)
        hello_(self, identity, hello, now)
        if node is not None and hello.node not in self._nodes:
            self._nodes[hello.node] = node

    patch.setattr(Link, "_hello", wrong)


@mutation("a node's room is not given back", "failure", "liveness", scenario="relay")
def no_room(patch: Patch) -> None:
    patch.setattr(Lane, "done", lambda self: None)


@mutation(
    "a leader that ends says nothing, and its node believes that all is well", "liveness", scenario="relay"
)
def unheard_end(patch: Patch) -> None:
    on_message = Node.on_message

    def wrong(self, message, now):
        if not isinstance(message, Bye):
            on_message(self, message, now)

    patch.setattr(Node, "on_message", wrong)
    patch.setattr(Node, "on_lost", lambda self: None)
    patch.setattr(Node, "on_clock", lambda self, now: None)


@mutation("a node whose connection is closed is waited for", "relay", scenario="relay")
def closed_connection(patch: Patch) -> None:
    patch.setattr(Link, "on_lost", lambda self, identity: None)


@mutation("a silent node is waited for", "relay", scenario="relay")
def silent_node(patch: Patch) -> None:
    patch.setattr(Link, "on_clock", lambda self, now: None)


@mutation("a silent leader is waited for", "liveness", scenario="relay")
def silent_leader(patch: Patch) -> None:
    patch.setattr(Node, "on_clock", lambda self, now: None)


@mutation("a node whose rank died leaves as if its ranks had ended as they should", "relay", scenario="relay")
def died_as_it_should(patch: Patch) -> None:
    leave = Node.leave
    patch.setattr(Node, "leave", lambda self, reason, rank=-1: leave(self, "", rank))
