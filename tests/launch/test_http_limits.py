"""The table of connections: who has used up its time, and who is closed for others."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import pytest

from baton.launch.http.limits import PROGRESS_BYTES, Connections
from baton.launch.options import HttpOptions

LIMITS = HttpOptions(timeout_head=10.0, timeout_body=30.0, timeout_write=60.0, timeout_keep_alive=5.0)


@dataclass(eq=False)
class One:
    name: str
    received: int = 0
    waits: int = 0
    is_paused: bool = False
    has_key: bool = False

    def paused(self) -> bool:
        return self.is_paused

    def proven(self) -> bool:
        return self.has_key

    def unsent(self) -> int:
        return self.waits


class Table:
    """The real one with a clock that ticks as the server's does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.of: Connections[One] = Connections(LIMITS, 0.0)

    def open(self, name: str) -> One:
        one = One(name)
        self.of.comes()
        self.of.opened(one, self.now)
        return one

    def after(self, seconds: float) -> list[tuple[str, str]]:
        """Lets time pass, a sweep a second.  Who was overdue meanwhile?  They are gone afterwards."""
        found = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            for one, why in self.of.overdue(self.now):
                found.append((one.name, why))
                self.of.gone(one)
        return found

    def dispensable(self) -> str | None:
        one = self.of.dispensable(self.now)
        return one.name if one else None


def test_each_stage_has_its_time():
    table = Table()
    silent, slow, idle, busy = (table.open(name) for name in ("silent", "slow", "idle", "busy"))
    assert table.after(4) == []
    table.of.head(slow, table.now)
    table.of.body(idle, table.now)
    table.of.idle(idle, table.now)
    table.of.body(busy, table.now)
    table.of.busy(busy)
    assert table.after(4) == []
    assert table.after(1) == [("idle", "idle")]
    assert table.after(1) == [("silent", "head")]
    assert table.after(3) == []
    assert table.after(1) == [("slow", "head")]
    assert table.after(1000) == []
    assert table.of.count == 1
    assert silent is not busy


def test_a_body_makes_progress_or_ends():
    table = Table()
    upload, drip, own = (table.open(name) for name in ("upload", "drip", "own"))
    for one in (upload, drip, own):
        table.of.body(one, table.now)
    own.is_paused = True  # nobody asks it for more
    for _ in range(29):
        upload.received += PROGRESS_BYTES // 10
        drip.received += 1
        assert table.after(1) == []
    assert table.after(1) == [("drip", "body")]
    assert table.after(31) == [("upload", "body")]
    own.is_paused = False
    assert table.after(29) == []
    assert table.after(2) == [("own", "body")]


def test_a_reader_makes_progress_or_is_cut():
    table = Table()
    reader, stuck, done = (table.open(name) for name in ("reader", "stuck", "done"))
    for one in (reader, stuck, done):
        one.waits = 100_000
        table.of.busy(one)
        table.of.unread(one, table.now)
    done.waits = 0
    assert table.after(50) == []
    reader.waits -= PROGRESS_BYTES
    stuck.waits -= 10
    assert table.after(10) == [("stuck", "unread")]
    table.of.read(reader)
    assert table.after(200) == []


def test_a_sweep_that_was_away_judges_nobody():
    table = Table()
    table.open("first")
    table.now = 100.0
    assert table.of.overdue(table.now) == [], "what the client sent lies in the socket"
    assert table.after(1) == [("first", "head")], "it had sent nothing"


def test_who_goes_first_when_there_is_no_room():
    table = Table()
    served = table.open("served")
    table.of.busy(served)
    assert table.dispensable() is None
    trusted, upload, fresh, idle = (table.open(name) for name in ("trusted", "upload", "fresh", "idle"))
    trusted.has_key = True
    table.of.body(trusted, table.now)
    table.of.body(upload, table.now)
    table.of.idle(idle, table.now)
    young = table.open("young")
    table.now += 0.1
    order = []
    for one in (fresh, young, idle):
        order.append(table.dispensable())
        table.of.gone(one)
    assert order == ["fresh", "young", "idle"]
    assert table.dispensable() is None, "uploads that go on"
    table.now += 0.2
    assert table.dispensable() == "upload"
    table.now += 2.0
    assert table.dispensable() == "upload", "the one without a key first"
    table.of.more(upload, table.now)
    assert table.dispensable() == "trusted"
    table.of.gone(trusted)
    assert table.dispensable() is None


def test_clients_give_idle_connections_up_before_the_server_does():
    """Else a request comes while the server closes its connection, and its client has no answer."""
    kept_by_go = 90.0
    kept = httpx.Limits().keepalive_expiry
    assert kept is not None
    assert HttpOptions().timeout_keep_alive > max(kept, kept_by_go)


def test_flags():
    for wrong in (
        {"h11_max_incomplete_event_size": 10},
        {"h11_max_header_count": 0},
        {"limit_concurrency": -1},
        {"max_body_memory": 5},
        {"timeout_head": 0.0},
        {"timeout_body": float("nan")},
        {"timeout_write": float("inf")},
        {"timeout_keep_alive": -1.0},
    ):
        with pytest.raises(ValueError, match="--"):
            HttpOptions(**wrong)  # type: ignore[arg-type]
