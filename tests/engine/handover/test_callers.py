"""Who is believed to be which peer, and that a page is only taken from who was named."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from baton.engine.handover.callers import Callers
from baton.engine.scheduling.ledger import Ledger
from baton.engine.scheduling.prefix import PrefixIndex
from baton.protocol.codec import pack_int32, unpack_int32
from baton.protocol.messages.commands import Admit, Extend, Grant, Revoke
from baton.protocol.messages.handover import (
    PEER,
    Cancel,
    Cancelled,
    Handoff,
    Progress,
    Refused,
    Renew,
    Reserve,
    Reserved,
    Taken,
)
from baton.protocol.messages.reports import CloseReason
from baton.protocol.messages.requests import Cancel as gateway_cancel
from baton.protocol.messages.requests import Hello, Submit
from baton.protocol.params.sampling import Stopping
from baton.protocol.rules.passes import gateway_key, pair_key, plan_pass
from tests.engine.peerscript import LEASE_S, SAMPLING, PeerScript, instance_source, reserve
from tests.engine.shell.test_peers import side  # noqa: F401 (a fixture)

SECRET = b"of d"
KEY = pair_key(gateway_key(SECRET), "p")


def caller(number=1, secret=b"of p", key=KEY, name="p", to="d"):
    """The routing id of a connection."""
    return Callers(name, secret).introduce(to, key, number)


def test_the_peer_s_next_connection_takes_the_place_of_the_one_before():
    d = Callers("d", SECRET)
    assert d.hear(caller(1)) == ("p", False, "", False)
    assert d.hear(caller(1)).peer == "p"
    assert d.hear(caller(2)) == ("p", True, "", False)
    stale = d.hear(caller(1))
    assert (stale.peer, stale.stranger) == ("", False)
    assert "another connection since" in stale.refusal, "it is told"
    assert d.hear(caller(1)) == ("", False, "", False), "once"
    assert d.hear(caller(2)).peer == "p"


@pytest.mark.parametrize(
    "stranger",
    [
        b"p/99999999",
        b"p/99999999/session/00",
        b"p/99999999/" + caller(1).split(b"/")[2] + b"/00",
        caller(99999999, secret=b"of another"),
        caller(99999999, key=b"a guess"),
        caller(99999999, secret=b"of another", name="p", to="x"),
        b"nonsense",
    ],
)
def test_a_stranger_takes_nobody_s_place(stranger):
    """Before: the largest number ever seen was the peer's, for good."""
    d = Callers("d", SECRET)
    assert d.hear(caller(3)).peer == "p"
    heard = d.hear(stranger)
    assert (heard.peer, heard.reconnected, heard.stranger) == ("", False, True)
    assert heard.refusal
    assert d.hear(caller(3)).peer == "p"
    assert d.hear(caller(4)).reconnected, "and the peer can connect again"


def test_a_peer_proves_itself_also_by_what_this_engine_has_told_it():
    """D answers P: P knows the pair's key from its gateway, not by itself."""
    p, answering = Callers("p", b"of p"), Callers("d", SECRET).introduce("p", KEY, 1)
    assert p.hear(answering).stranger
    p = Callers("p", b"of p")
    p.know("d", KEY)
    assert p.hear(answering).peer == "d"


@pytest.mark.parametrize(
    "forged",
    [
        Taken(666, 1),
        Handoff(1, 1, first=0, blocks=b"", tokens=pack_int32([7]), logprobs=[], num_cached=0, queued_s=0.0),
    ],
)
def test_what_a_stranger_sends_is_answered_and_the_peer_goes_on(side, forged):  # noqa: F811
    """Its messages are lost, its connection is closed by itself; nothing of the real one is."""
    p, d = side("p"), side("d")
    p.send(d, Taken(1, 1))
    d.until(lambda: d.messages, p)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, b"p/99999999/0123456789abcdef/00")
    stranger.connect(d.peers.endpoint)
    stranger.send(PEER.encode(forged))
    d.until(lambda: d.violations, p)
    assert d.refusals == [("peer", 1)]
    ((sender, why),) = d.violations
    assert sender.startswith("peer b'p/99999999/")
    assert "not read" in why
    if d.peers.endpoint.startswith("tcp"):
        assert sender.endswith(" at 127.0.0.1")
    assert stranger.poll(60_000), "it is told"
    stranger.close(0)
    context.term()
    for number in range(2, 20):
        p.send(d, Taken(number, 1))
    d.until(lambda: len(d.messages) == 19, p)
    assert d.messages == [("p", Taken(number, 1)) for number in range(1, 20)]
    assert (d.lost, p.lost) == ([], [])


# -- who may hand over


def test_a_reserve_is_taken_only_from_the_instance_that_the_gateway_named():
    """A fake P: it knows gateway and request, and that requests are handed over here."""
    d = PeerScript()
    key = gateway_key(b"")
    honest = reserve()
    for proof in (
        b"x",
        plan_pass(key, "gate", honest.request, "other"),
        plan_pass(key, "gate", honest.request + 1, "p"),
        plan_pass(key, "elsewhere", honest.request, "p"),
        plan_pass(b"a guess", "gate", honest.request, "p"),
    ):
        d.hear("p", msgspec.structs.replace(honest, plan_pass=proof))
        ((to, refused),) = d.take()
        assert (to, type(refused), refused.code) == ("p", Refused, "not_named")
        d.hear("p", Progress(1, 1, 0, pack_int32([40, 41]), 2))
        d.hear("p", Handoff(1, 1, 0, pack_int32([40, 41, 42]), pack_int32([7]), [], 0, 0.0))
        assert {type(message) for _, message in d.take()} == {Cancel}
        assert not d.orders()
    d.hear("p", msgspec.structs.replace(honest, plan_pass=plan_pass(key, "gate", honest.request, "p")))
    assert d.take() == [("p", Reserved(1, 1, 0, d.readers))]


def test_welcome_says_nothing_with_which_pages_can_be_read():
    source = instance_source()
    places = {"shared_memory": "1:2:3:4", "tcp": "10.0.0.1:1", "nixl": b"agent", "host": "h"}
    ranks = [msgspec.structs.replace(source.ranks[0], **places)]
    stripped = msgspec.structs.replace(source, ranks=ranks).without_places()
    assert (stripped.tile, stripped.block_size) == (source.tile, source.block_size)
    (rank,) = stripped.ranks
    assert (rank.shared_memory, rank.tcp, rank.nixl, rank.host) == ("", "", b"", "")
    script = PeerScript()
    welcome = script.core._announced.welcome
    assert welcome.source == welcome.source.without_places()


def test_pages_of_one_gateway_s_word_are_for_its_requests_only():
    """Before: the next honest user got the answer to the attacker's text."""
    ledger = Ledger(8, 2)
    index = PrefixIndex(ledger)
    keys = [bytes([number]) * 16 for number in range(3)]
    (own, evil, private, computed) = ledger.claim(0, [], 4)
    assert index.insert(keys[0], own)
    assert index.insert(keys[1], evil, "evil")
    assert index.match(keys, 3, "evil") == [own, evil]
    assert index.match(keys, 3, "honest") == [own]
    assert index.origin([own, evil]) == "evil", "what is computed on top is no better"
    assert index.origin([own]) == ""
    assert not index.insert(keys[0], private, "evil"), "what was computed here stays"
    assert index.match(keys, 3, "honest") == [own]
    assert index.insert(keys[1], computed), "and takes the place of what was not"
    assert index.match(keys, 3, "honest") == [own, computed]
    assert index.match(keys, 3, "evil") == [own, computed]
    ledger.release(0)
    ledger.check()
    assert ledger.counts()["cached"] == 2
    index.clear()
    ledger.check()


def test_a_request_that_arrived_is_cached_for_its_gateway_only():
    d = PeerScript()
    d.core.on_message(b"h", Hello("honest"), d.now)
    d.ask()
    d.take()
    d.hear("p", Handoff(1, 1, 0, pack_int32([40, 41, 42]), pack_int32([7]), [], 0, 0.0))
    for fetch in d.orders():
        d.fetched(fetch.id)
    assert any(isinstance(command, Admit) for command in d.orders())
    prompt = pack_int32(range(1, 11))
    found = {}
    for gateway, number in ((b"g", 7), (b"h", 8)):
        submit = Submit(number, "r", prompt, SAMPLING, Stopping(max_tokens=4))
        d.core.on_message(gateway, submit, d.now)
        d.flush()
        (admit,) = (command for command in d.orders() if isinstance(command, Admit))
        found[gateway] = admit.num_computed
    assert found == {b"g": 8, b"h": 0}


# -- grants


def test_p_grants_the_pages_of_the_request_to_its_decoder_until_it_is_over():
    p = PeerScript()
    p.submit(1, "d")
    ((_, asked),) = p.take()
    assert isinstance(asked, Reserve)
    assert len(asked.grant) == 16
    assert p.core.take_grants() == []
    keys = [b"of rank 0", b"of rank 1"]
    p.hear("d", Reserved(asked.id, 1, 0, keys))
    (admit,) = p.orders()
    p.prefilled(admit, 4)
    (grant,) = p.core.take_grants()
    assert grant == Grant(asked.grant, "d", keys, pack_int32(unpack_int32(admit.blocks)[:3]), LEASE_S)
    p.prefilled(admit, 8)
    assert p.core.take_grants() == [], "one of all pages of the request"
    p.hear("d", Renew(1.0, [(asked.id, 1)]))
    assert p.core.take_grants() == [Extend([asked.grant], LEASE_S)]
    p.hear("d", Cancel(asked.id, 1, by_p=False))
    assert p.core.take_grants() == [Revoke([asked.grant])]


@pytest.mark.parametrize("keys", [[b"k"] * 2000, [bytes(33)]])
def test_keys_of_readers_that_make_no_sense_open_nothing(keys):
    """They would fill the command ring of P's workers."""
    p = PeerScript()
    p.submit(1, "d")
    ((_, asked),) = p.take()
    p.hear("d", Reserved(asked.id, 1, 0, keys))
    (admit,) = p.orders()
    p.prefilled(admit, 4)
    (grant,) = p.core.take_grants()
    assert grant.keys == []
    assert p.core.counters.violations == 1


def test_pages_that_were_not_named_are_nobodys_to_read_once_the_slot_is_released():
    """The grant is of all pages of the request, and only those that were named stay."""
    p = PeerScript()
    p.submit(1, "d")
    ((_, asked),) = p.take()
    p.hear("d", Reserved(asked.id, 1, 0))
    (admit,) = p.orders()
    p.prefilled(admit, 4)
    p.core.take_grants()
    p.tell(gateway_cancel(1))
    assert p.core.take_grants() == [], "the blocks are the request's until its slot is closed"
    p.close(admit, CloseReason.ABORTED)
    assert p.owned == (0, 1, 0)
    assert p.core.take_grants() == [Revoke([asked.grant])], "two of three blocks are free"
    p.hear("d", Renew(1.0, [(asked.id, 1)]))
    p.hear("d", Cancelled(asked.id, 1, by_p=True))
    assert p.core.take_grants() == []
    assert p.owned == (0, 0, 0)


def test_all_pages_of_a_request_that_is_handed_over_stay_granted():
    p = PeerScript()
    p.submit(1, "d")
    ((_, asked),) = p.take()
    p.hear("d", Reserved(asked.id, 1, 0))
    (admit,) = p.orders()
    p.first_token(admit)
    (grant,) = p.core.take_grants()
    assert grant.pages == pack_int32(unpack_int32(admit.blocks)[:3])
    assert p.owned == (0, 3, 0)
    p.lose("d")
    assert p.core.take_grants() == [], "it may have heard of the request, and fetch"


def test_another_attempt_is_another_grant():
    p = PeerScript()
    p.submit(1, "d", "e")
    ((_, first),) = p.take()
    p.hear("d", Refused(first.id, 1, "no_room", ""))
    ((_, second),) = p.take()
    assert first.grant != second.grant
