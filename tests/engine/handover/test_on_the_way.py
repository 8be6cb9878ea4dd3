"""D fetches pages of prompts that are alike once.  Blocks are of 4 tokens, so 10 tokens have 2 full ones."""

from __future__ import annotations

import pytest

from baton.protocol.codec import pack_int32, unpack_int32
from baton.protocol.messages.commands import Admit, DropFetch, Fetch
from baton.protocol.messages.handover import Cancel, Handoff, Progress, Renew, Renewed, Reserved
from baton.protocol.messages.reports import CloseReason
from baton.protocol.messages.requests import Cancel as GatewayCancel
from baton.protocol.messages.requests import Hello
from tests.engine.peerscript import PeerScript

PAGES = {1: [40, 41, 42], 2: [40, 41, 52], 3: [40, 41, 62]}
"""P's blocks: it shares the full ones too."""


def handoff(number: int, attempt: int = 1, token: int = 7) -> Handoff:
    return Handoff(number, attempt, 0, pack_int32(PAGES[number]), pack_int32([token]), [], 0, 0.0)


def asked(count: int = 2, **changes) -> PeerScript:
    """So many requests of one prompt have room here."""
    d = PeerScript(**changes)
    for number in range(1, count + 1):
        d.ask("p", number)
    d.take()
    return d


def pages(orders) -> list[list[int]]:
    assert all(isinstance(one, Fetch) for one in orders), orders
    return [list(unpack_int32(one.pages)) for one in orders]


def table(d: PeerScript, number: int) -> list[int]:
    return list(d.core.scheduler.ledger.reserved(("from", "p", number, 1)))


def test_one_prompt_of_eight_requests_is_fetched_once():
    d = PeerScript(num_blocks=64, max_num_seqs=8)
    for number in range(1, 9):
        d.ask("p", number, prompt=range(1, 33))
        assert d.take() == [("p", Reserved(number, 1, 0, d.readers))]
    assert d.owned == (0, 0, 8 + 8 * 2), "its 8 pages once, and for each room to decode"
    d.hear("p", Progress(1, 1, 0, pack_int32(range(8)), 8))
    (fetch,) = d.orders()
    for number in range(1, 9):
        d.hear("p", Handoff(number, 1, 0, pack_int32(range(8)), pack_int32([7]), [], 0, 0.0))
    assert d.orders() == [], "the pages of one are the pages of all"
    assert d.take() == []
    d.fetched(fetch.id)
    admits = d.orders()
    assert len(admits) == 8
    assert {admit.num_computed for admit in admits} == {32}
    assert {admit.blocks[: 8 * 4] for admit in admits} == {fetch.blocks}
    assert sorted(message.id for _, message in d.take()) == list(range(1, 9)), "Taken, of each"
    assert (d.counters.fetches, d.counters.pages_shared) == (1, 7 * 8)


def test_each_fetches_what_is_its_own():
    d = asked()
    assert table(d, 1)[:2] == table(d, 2)[:2]
    assert not set(table(d, 1)[2:]) & set(table(d, 2)[2:])
    d.hear("p", handoff(1))
    d.hear("p", handoff(2))
    one, two = d.orders()
    assert pages([one, two]) == [[40, 41, 42], [52]]
    d.fetched(two.id)
    assert d.orders() == [], "its first pages are not here"
    d.fetched(one.id)
    assert len(d.orders()) == 2


@pytest.mark.parametrize("said", ["Progress", "Handoff"])
def test_pages_that_came_layer_by_layer_are_everybodys_when_p_says_that_they_are_final(said):
    """Then no fetch ends that would say so."""
    d = asked()
    d.hear("p", Progress(1, 1, 0, pack_int32(PAGES[1]), 0, 4))
    for fetch in d.orders():
        d.fetched(fetch.id)
    d.hear("p", handoff(2))
    (tail,) = d.orders()
    d.fetched(tail.id)
    assert d.orders() == [], "P has not said that they are final"
    d.hear("p", Progress(1, 1, 3, b"", 3, 4) if said == "Progress" else handoff(1))
    assert len(d.orders()) == 1 + (said == "Handoff")


def test_what_is_longer_fetches_the_rest():
    d = asked(1)
    d.ask("p", 2, prompt=range(1, 19))
    d.hear("p", Progress(2, 1, 0, pack_int32([40, 41, 43, 44, 45]), 4))
    d.hear("p", handoff(1))
    assert sorted(pages(d.orders())) == [[40, 41, 43, 44], [42]], "P began with the longer one: it fetches"
    d = asked(1)
    d.hear("p", Progress(1, 1, 0, pack_int32([40, 41]), 2))
    d.ask("p", 2, prompt=range(1, 19))
    d.hear("p", Progress(2, 1, 0, pack_int32([40, 41, 43, 44, 45]), 4))
    assert pages(d.orders()) == [[40, 41], [43, 44]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"prompt": range(2, 12)}),
        ({"priority": 1}, {"priority": 0}),
        ({}, {"gateway": "other"}),
        ({}, {"peer": "q"}),
    ],
    ids=["salt", "tokens", "worse priority", "gateway", "instance"],
)
def test_who_awaits_nobody(first, second):
    d = PeerScript()
    d.core.on_message(b"o", Hello("other"), d.now)
    d.flush()
    d.ask(**{"peer": "p", "number": 1, **first})
    d.ask(**{"peer": "p", "number": 2, **second})
    assert [type(message) for _, message in d.take()] == [Reserved, Reserved]
    assert d.owned == (0, 0, 10)
    assert d.counters.pages_shared == 0


def test_nobody_awaits_what_was_to_be_forgotten_or_where_nothing_is_cached():
    d = asked(1)
    d.query("reset_prefix_cache")
    d.ask("p", 2)
    assert d.owned == (0, 0, 10)
    assert asked(2, enable_prefix_caching=False).owned == (0, 0, 10)


def test_when_p_begins_with_the_other_one_they_change_their_parts():
    d = asked(3)
    d.hear("p", Progress(2, 1, 0, pack_int32([40, 41]), 2))
    (fetch,) = d.orders()
    assert pages([fetch]) == [[40, 41]]
    d.hear("p", handoff(2))
    (tail,) = d.orders()
    d.fetched(fetch.id)
    d.fetched(tail.id)
    (admit,) = d.orders()
    assert admit.blocks[:8] == fetch.blocks
    d.hear("p", handoff(1))
    d.hear("p", handoff(3))
    orders = d.orders()
    assert pages(orders) == [[42], [62]], "the rest is here"
    for order in orders:
        d.fetched(order.id)
    assert len(d.orders()) == 2


GOES = {
    "cancelled by P": lambda d: d.hear("p", Cancel(1, 1, by_p=True, reason="")),
    "cancelled by the client": lambda d: d.tell(GatewayCancel(101)),
    "P does not know it": lambda d: d.hear("p", Renewed(d.now, [(1, 1)])),
    "a fetch fails": lambda d: None,
}


@pytest.mark.parametrize("why", GOES)
@pytest.mark.parametrize("began", [False, True], ids=["P has not begun with the others", "P has"])
def test_when_the_fetcher_goes_another_one_fetches(why, began):
    d = asked(3)
    d.hear("p", Progress(1, 1, 0, pack_int32([40, 41]), 2))
    (fetch,) = d.orders()
    if began:
        d.hear("p", Progress(2, 1, 0, pack_int32([40, 41]), 1))
        d.hear("p", Progress(3, 1, 0, pack_int32([40, 41]), 1))
    GOES[why](d)
    if why == "a fetch fails":
        d.fetched(fetch.id, error="broken")
    else:
        (drop,) = d.orders()
        assert isinstance(drop, DropFetch)
    d.hear("p", Progress(2, 1, 2 * began, pack_int32([40, 41][2 * began :]), 2))
    if why != "a fetch fails":
        assert d.orders() == [], "an old page could still be written over a new one"
        d.fetched(fetch.id, dropped=True)
    (again,) = d.orders()
    assert pages([again]) == [[40, 41]]
    assert again.blocks == fetch.blocks
    for number in (2, 3):
        d.hear("p", handoff(number))
    tails = d.orders()
    assert pages(tails) == [[52], [62]]
    for tail in tails:
        d.fetched(tail.id)
    assert d.orders() == []
    d.fetched(again.id)
    admits = d.orders()
    assert [type(admit) for admit in admits] == [Admit, Admit]
    d.take()
    for admit in admits:
        d.first_token(admit, 8, CloseReason.STOP)
    assert d.owned == (0, 0, 0)
    assert d.core.next_deadline() is None


def test_pages_that_came_are_never_fetched_again():
    """One that shares the first page runs on it, when another one takes over what the fetcher had begun."""
    long = range(1, 11)
    d = asked(1)
    d.ask("p", 2, prompt=[1, 2, 3, 4, 9, 9])
    d.ask("p", 3, prompt=long)
    d.hear("p", Progress(1, 1, 0, pack_int32([40]), 1))
    d.hear("p", Handoff(2, 1, 0, pack_int32([40, 51]), pack_int32([7]), [], 0, 0.0))
    for fetch in d.orders():
        d.fetched(fetch.id)
    (admit,) = d.orders()
    d.hear("p", Progress(1, 1, 1, pack_int32([41]), 2))
    (second,) = d.orders()
    d.ask("p", 4, prompt=long)
    d.fetched(second.id, error="broken")
    d.hear("p", Handoff(3, 1, 0, pack_int32([40, 41, 62]), pack_int32([7]), [], 0, 0.0))
    d.hear("p", Handoff(4, 1, 0, pack_int32([40, 41, 72]), pack_int32([7]), [], 0, 0.0))
    fetches = d.orders()
    assert sorted(pages(fetches)) == [[41, 62], [72]]
    written = {block for fetch in fetches for block in unpack_int32(fetch.blocks)}
    assert not written & set(unpack_int32(admit.blocks))


def test_what_awaits_can_go_at_any_time():
    d = asked(3)
    d.hear("p", handoff(1))
    (fetch,) = d.orders()
    d.tell(GatewayCancel(102))
    d.hear("p", handoff(3))
    (tail,) = d.orders()
    d.tell(GatewayCancel(103))
    assert isinstance(d.orders()[0], DropFetch)
    d.fetched(tail.id, dropped=True)
    assert d.owned == (0, 0, 5)
    d.fetched(fetch.id)
    assert len(d.orders()) == 1


def test_a_lost_peer_or_new_weights_end_all_and_nothing_is_fetched_again():
    for end in (lambda d: d.lose("p"), lambda d: d.core._handovers.end_all("new weights", d.now)):
        d = asked(3)
        d.hear("p", Progress(1, 1, 0, pack_int32([40, 41]), 2))
        (fetch,) = d.orders()
        d.hear("p", handoff(2))
        d.orders()
        end(d)
        d.flush()
        d.orders()
        d.fetched(fetch.id, dropped=True)
        for number in list(d.core._handovers.arrivals.fetches._under_way):
            d.fetched(number, dropped=True)
        assert not [one for one in d.orders() if isinstance(one, Fetch)]
        assert d.counts["reserved"] == 0


def renewed(d: PeerScript, seconds: float) -> None:
    """Time passes, and P answers each `Renew`."""
    for _ in range(int(seconds)):
        d.wait(1.0)
        for _, message in d.take():
            if isinstance(message, Renew):
                d.hear("p", Renewed(message.stamp, []))


def test_who_awaits_is_timed_from_the_fetchers_last_page():
    d = asked(2, lease_s=3.0)
    d.hear("p", Progress(1, 1, 0, pack_int32([40]), 1))
    d.hear("p", handoff(2))
    first, tail = d.orders()
    d.fetched(tail.id)
    renewed(d, 2)
    d.fetched(first.id)
    renewed(d, 2)
    assert d.counters.recomputed == {}, "a page came 2 s ago"
    renewed(d, 2)
    assert d.counters.recomputed == {"fetch stalled": 1}
    (admit,) = d.orders()
    assert admit.num_computed == 0
