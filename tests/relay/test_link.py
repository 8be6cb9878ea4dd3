"""A leader's link and the nodes' relays: what the rings of each host get, in every order of events."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from baton.protocol.config import InstanceConfig, Nodes
from baton.protocol.messages.nodes import (
    FROM_LEADER,
    FROM_NODE,
    VERSION,
    Bye,
    Down,
    Hello,
    Refused,
    Up,
    Welcome,
)
from baton.relay.link import Link
from baton.relay.node import Node
from tests.worker.group import make_config

WINDOW = 200


def config(hosts: int = 2, ranks: int = 2) -> InstanceConfig:
    made: InstanceConfig = make_config(
        tensor_parallel_size=hosts * ranks, nodes=Nodes(count=hosts, listen="tcp://x:1", timeout_s=8.0)
    )
    return made


class Host:
    """A node, its connection to the link, and what its rings have got."""

    def __init__(self, site: Site, number: int, launcher: str = "") -> None:
        self.identity = f"{number}{launcher}".encode()
        self.core = Node(site.config, "now", number, launcher or f"l{number}", WINDOW, site.now)
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.commands: list[bytes] = []
        self.transfers: list[bytes] = []
        self.tickets: list[tuple[int, int]] = []
        self.waiting: deque[bytes] = deque()
        """Records that have no space in the ring yet."""


class Site:
    """All hosts of an instance.  Each step one of them does something."""

    def __init__(self, hosts: int = 2, seed: int = 0) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.config = config(hosts)
        self.link = Link(self.config, "now", WINDOW)
        self.hosts = [Host(self, number) for number in range(1, hosts)]
        self.records: deque[bytes] = deque()
        self.moves: deque[bytes] = deque()
        self.tickets: deque[tuple[int, int]] = deque()
        self.written = 0
        self.rounds = 0
        self.most = 0
        """Bytes on the way to a node, at most."""

    def write(self) -> None:
        """The engine and rank 0 go on."""
        for _ in range(self.random.randrange(4)):
            self.written += 1
            self.records.append(b"record %d " % self.written * self.random.choice((1, 1, 30)))
        if self.random.random() < 0.3:
            self.moves.append(b"move %d" % self.random.getrandbits(30))
        if self.random.random() < 0.7:
            self.rounds += 1
            self.tickets.append((self.rounds, self.written))

    def pump(self) -> None:
        """As the link's process does; a record may be published and not be visible yet."""
        link = self.link
        while link.room and self.tickets:
            link.ticket(*self.tickets.popleft())
        while link.room and self.records and self.random.random() < 0.9:
            link.command(self.records.popleft())
        while link.room and self.moves:
            link.transfer(self.moves.popleft())

    def flush_link(self) -> None:
        for identity, message in self.link.flush(self.now):
            for host in self.hosts:
                if host.identity == identity:
                    host.down.append(FROM_LEADER.encode(message))

    def host_turn(self, host: Host) -> None:
        core = host.core
        for _ in range(min(len(host.down), self.random.randrange(4))):
            core.on_message(FROM_LEADER.decode(host.down.popleft()), self.now)
        host.waiting += core.commands
        host.transfers += core.transfers
        core.commands, core.transfers = [], []
        for _ in range(min(len(host.waiting), self.random.randrange(6))):
            host.commands.append(host.waiting.popleft())
        if not host.waiting:
            host.tickets += core.tickets
            core.tickets = []
            core.done()
            assert all(sequence <= len(host.commands) for _, sequence in host.tickets)
        host.up += [FROM_NODE.encode(message) for message in core.flush(self.now)]

    def step(self, write: bool = True) -> None:
        what = self.random.randrange(5)
        if what == 0 and write:
            self.write()
        elif what == 1:
            self.pump()
        elif what == 2:
            self.flush_link()
        elif what == 3:
            self.host_turn(self.random.choice(self.hosts))
        else:
            host = self.random.choice(self.hosts)
            if host.up:
                self.link.on_message(host.identity, FROM_NODE.decode(host.up.popleft()), self.now)
        for host in self.hosts:
            on_the_way = [FROM_LEADER.decode(data) for data in host.down]
            size = sum(
                len(record)
                for frame in on_the_way
                if isinstance(frame, Down)
                for record in (*frame.commands, *frame.transfers)
            )
            self.most = max(self.most, size + sum(map(len, host.waiting)))

    def attach(self) -> None:
        for _ in range(4):
            self.flush_link()
            for host in self.hosts:
                self.host_turn(host)
                while host.up:
                    self.link.on_message(host.identity, FROM_NODE.decode(host.up.popleft()), self.now)


@pytest.mark.parametrize("seed", range(30))
def test_every_host_gets_exactly_the_leaders_log_in_order(seed: int) -> None:
    site = Site(2 + seed % 3, seed)
    written: list[bytes] = []
    moved: list[bytes] = []
    tickets: list[tuple[int, int]] = []
    for _ in range(600):
        before = len(site.records), len(site.moves), len(site.tickets)
        site.step()
        written += list(site.records)[before[0] :]
        moved += list(site.moves)[before[1] :]
        tickets += list(site.tickets)[before[2] :]
    for _ in range(6000):
        site.step(write=False)
    assert site.link.lost is None
    assert all(host.core.over is None for host in site.hosts)
    assert len(written) > 100
    for host in site.hosts:
        assert host.commands == written
        assert host.transfers == moved
        assert host.tickets == tickets
    longest = max(map(len, written))
    assert site.most <= WINDOW + 2 * longest, "what is on the way is bounded, whoever is slow"


def attached(hosts: int = 2) -> Site:
    site = Site(hosts)
    site.attach()
    assert site.link.missing == []
    return site


def test_nothing_is_read_before_all_nodes_are_there() -> None:
    site = Site(3)
    assert not site.link.room
    site.link.on_message(b"1", Hello(1, "l1", "now"), 0.0)
    assert site.link.missing == [2]
    assert not site.link.room
    site.link.on_message(b"2", Hello(2, "l2", "now"), 0.0)
    assert site.link.room


def test_a_launcher_is_told_what_to_compute_and_takes_no_part_by_that() -> None:
    site = Site()
    site.link.on_message(b"x", Hello(1, "l1"), 0.0)
    ((_, welcome),) = site.link.flush(0.0)
    assert welcome == Welcome("now", site.config)
    assert site.link.missing == [1]


@pytest.mark.parametrize(
    ("hello", "words", "later"),
    [
        (Hello(1, "other", "now"), "has a relay", True),
        (Hello(1, "other"), "has a relay", True),
        (Hello(2, "l2", "now"), "--node 2: the instance has --nodes 2; give 1 to 1", False),
        (Hello(0, "l0"), "--node 0", False),
        (Hello(1, "other", "now", VERSION + 1), "another version", False),
    ],
)
def test_who_cannot_take_part_is_told_why(hello: Hello, words: str, later: bool) -> None:
    site = attached()
    site.link.on_message(b"x", hello, 0.0)
    ((identity, refused),) = site.link.flush(0.0)
    assert identity == b"x"
    assert isinstance(refused, Refused)
    assert words in refused.reason
    assert refused.later is later
    assert site.link.lost is None


def test_nothing_of_another_incarnation_is_taken() -> None:
    site = Site()
    site.link.on_message(b"old", Hello(1, "l1", "before"), 0.0)
    ((_, refused),) = site.link.flush(0.0)
    assert isinstance(refused, Refused)
    assert "incarnation before is over" in refused.reason
    site.link.on_message(b"old", Up(1, 0, [(2, b"report")]), 0.0)
    site.link.on_message(b"old", Bye("I die"), 0.0)
    assert site.link.reports == []
    assert site.link.lost is None
    assert site.link.missing == [1]


def test_a_second_relay_of_the_same_launcher_says_that_the_first_is_gone() -> None:
    site = attached()
    site.link.on_message(b"again", Hello(1, "l1"), 0.0)
    assert site.link.lost is not None
    assert "the relay of node 1 has ended" in site.link.lost.reason
    assert site.link.lost.rank == 2
    ((_, answer),) = [one for one in site.link.flush(0.0) if one[0] == b"again"]
    assert isinstance(answer, Refused)
    assert answer.later


def test_a_rank_that_died_is_named() -> None:
    site = attached()
    (host,) = site.hosts
    host.core.report(3, b"its last report")
    host.core.leave("worker rank 3 (process 7) was killed by SIGKILL", 3)
    host.up += [FROM_NODE.encode(message) for message in host.core.flush(0.0)]
    while host.up:
        site.link.on_message(host.identity, FROM_NODE.decode(host.up.popleft()), 0.0)
    assert site.link.reports == [(3, b"its last report")]
    assert site.link.lost == (3, "node 1: worker rank 3 (process 7) was killed by SIGKILL")


def test_when_all_ranks_have_left_as_told_the_link_is_over() -> None:
    site = attached(3)
    for host in site.hosts:
        assert not site.link.over
        host.core.leave("")
        for message in host.core.flush(0.0):
            site.link.on_message(host.identity, message, 0.0)
        assert host.core.ended_well
    assert site.link.over
    assert site.link.lost is None


def test_a_lost_frame_ends_the_incarnation_on_both_sides() -> None:
    site = attached()
    (host,) = site.hosts
    site.link.on_message(host.identity, Up(9, 0), 0.0)
    assert site.link.lost is not None
    assert "lost some" in site.link.lost.reason
    host.core.on_message(Down(9, 0), 0.0)
    assert host.core.over is not None
    assert "lost some" in host.core.over
    assert not host.core.ended_well


def test_a_ticket_before_its_records_ends_the_relay() -> None:
    site = attached()
    (host,) = site.hosts
    host.core.on_message(Down(2, 0, commands=[b"one"], tickets=[(1, 2)]), 0.0)
    assert host.core.over == "a ticket speaks of record 2, and 1 have come"
    assert host.core.tickets == []


def test_a_report_for_a_rank_of_another_host_is_not_believed() -> None:
    site = attached()
    (host,) = site.hosts
    site.link.on_message(host.identity, Up(1, 0, [(1, b"tokens")]), 0.0)
    assert site.link.reports == []
    assert site.link.lost is not None


def test_silence_ends_it_on_both_sides_and_a_closed_connection_at_once() -> None:
    site = attached()
    (host,) = site.hosts
    now = 0.0
    while site.link.lost is None:
        now = site.link.next_deadline() or now
        site.link.on_clock(now)
        site.link.flush(now)
    assert 8.0 <= now < 9.0
    assert "node 1 has not been heard of for 8 s" in site.link.lost.reason
    now = 0.0
    while host.core.over is None:
        now = host.core.next_deadline()
        host.core.on_clock(now)
        host.core.flush(now)
    assert 8.0 <= now < 9.0

    site = attached()
    site.link.on_lost(b"somebody")
    assert site.link.lost is None
    site.link.on_lost(site.hosts[0].identity)
    assert site.link.lost is not None
    site.hosts[0].core.on_lost()
    assert site.hosts[0].core.over == "the connection to the leader is gone"


def test_ranks_find_each_other_also_those_that_come_late() -> None:
    site = Site(3)
    site.link.say("0", b"at 0")
    site.attach()
    first, second = site.hosts
    first.core.say("2", b"at 2")
    for _ in range(3):
        site.attach()
    for host in site.hosts:
        host.core.meeting.ask(7, "0")
        host.core.meeting.ask(8, "2")
        host.core.meeting.ask(9, "4")
        assert host.core.meeting.answers() == [(7, b"at 0"), (8, b"at 2")]
    second.core.say("4", b"at 4")
    for _ in range(3):
        site.attach()
    assert first.core.meeting.answers() == [(9, b"at 4")]
