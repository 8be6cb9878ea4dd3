"""D's side: every stage of an arrival against everything that can happen to it.

Tests named `fastdeploy_…` are points of its section on liveness, or rows of its table of outcomes.
"""

from __future__ import annotations

import pytest

from baton.engine.handover.fetches import MAX_FETCH_PAGES
from baton.engine.handover.records import TRUST
from baton.protocol.codec import pack_int32, unpack_int32
from baton.protocol.messages.commands import Abort, Admit, Control, DropFetch, Fetch, Preempt
from baton.protocol.messages.handover import (
    Cancel,
    Cancelled,
    Credit,
    Handoff,
    Progress,
    Refused,
    Renew,
    Renewed,
    Reserved,
    Taken,
)
from baton.protocol.messages.reports import CloseReason, ControlDone
from baton.protocol.messages.requests import Cancel as GatewayCancel
from baton.protocol.messages.requests import Query
from baton.protocol.params.sampling import Stopping, TokenLogprobs
from baton.protocol.rules.fair_queue import Flow
from tests.engine.peerscript import LEASE_S, PeerScript, instance_source, pool_source, reserve

PAGES = pack_int32([40, 41, 42])
"""P's blocks of a prompt of 10 tokens."""
HANDOFF = Handoff(1, 1, 0, PAGES, pack_int32([7]), [], 4, 0.25)


def reserved(**changes) -> PeerScript:
    d = PeerScript(**changes)
    d.ask()
    assert d.take() == [("p", Reserved(1, 1, 0, d.readers))]
    return d


def fetching(**changes) -> tuple[PeerScript, Fetch]:
    """The first two pages are being fetched."""
    d = reserved(**changes)
    d.hear("p", Progress(1, 1, 0, pack_int32([40, 41]), 2))
    (fetch,) = d.orders()
    return d, fetch


def handed(**changes) -> tuple[PeerScript, Fetch]:
    """All pages are being fetched, and the request is D's."""
    d = reserved(**changes)
    d.hear("p", HANDOFF)
    (fetch,) = d.orders()
    return d, fetch


def test_a_reservation_is_answered_at_once_and_holds_blocks():
    d = reserved()
    assert d.owned == (0, 0, 5), "the pages of the prompt, and room to decode"
    assert d.orders() == []
    stats = d.query("stats")
    assert stats["arriving"] == 1
    assert stats["arrivals"]["reserved"] == 1
    assert stats["waiting"] == stats["running"] == 0


def test_pages_are_fetched_as_they_become_final_then_layers_then_the_rest():
    d = reserved()
    table = d.core.scheduler.ledger.reserved(("from", "p", 1, 1))
    d.hear("p", Progress(1, 1, 0, b"", 0))
    assert d.orders() == []
    d.hear("p", Progress(1, 1, 0, pack_int32([40]), 1))
    (one,) = d.orders()
    assert (one.pages, one.blocks) == (pack_int32([40]), pack_int32(table[:1]))
    assert (one.first_layer, one.num_layers) == (0, -1)
    assert one.source == instance_source()
    d.hear("p", Progress(1, 1, 1, pack_int32([41, 42]), 1, 2))
    (two,) = d.orders()
    assert (two.pages, two.blocks) == (pack_int32([41, 42]), pack_int32(table[1:3]))
    assert (two.first_layer, two.num_layers) == (0, 2)
    d.hear("p", Progress(1, 1, 3, b"", 1, 3))
    (three,) = d.orders()
    assert (three.first_layer, three.num_layers) == (2, 1)
    d.hear("p", Handoff(1, 1, 3, b"", pack_int32([7]), [], 4, 0.25))
    (four,) = d.orders()
    assert (four.pages, four.first_layer, four.num_layers) == (pack_int32([41, 42]), 3, -1)
    assert len({fetch.id for fetch in (one, two, three, four)}) == 4
    for fetch in (four, one, three):
        d.fetched(fetch.id)
    assert d.orders() == [], "one is missing"
    d.fetched(two.id)
    (admit,) = d.orders()
    assert isinstance(admit, Admit)
    assert not admit.handover
    assert list(unpack_int32(admit.tokens)) == [*range(1, 11), 7]
    assert (admit.num_prompt, admit.num_computed) == (10, 10)
    assert list(unpack_int32(admit.blocks)) == list(table)


def test_all_layers_before_the_first_token_leave_nothing_to_fetch():
    d = reserved()
    d.hear("p", Progress(1, 1, 0, PAGES, 0, 4))
    (fetch,) = d.orders()
    d.fetched(fetch.id)
    d.hear("p", Handoff(1, 1, 3, b"", pack_int32([7]), [], 0, 0.0))
    (admit,) = d.orders()
    assert admit.num_computed == 10


def test_the_first_token_is_streamed_at_once_with_all_that_goes_with_it():
    d = reserved()
    logprobs = TokenLogprobs(7, -0.5, 1)
    d.hear("p", Handoff(1, 1, 0, PAGES, pack_int32([7]), [logprobs], 4, 0.25))
    assert d.tokens == [(101, 7)]
    (fetch,) = d.orders()
    assert d.take() == [], "Taken only when the pages are here"
    d.fetched(fetch.id, num_bytes=192, seconds=0.5)
    assert d.take() == [("p", Taken(1, 1))]
    (admit,) = d.orders()
    d.first_token(admit, 8, CloseReason.LENGTH)
    assert d.tokens == [(101, 7), (101, 8)]
    (end,) = d.finished
    assert (end.reason, end.num_cached, end.queued_s) == ("length", 4, 0.25)
    assert d.owned == (0, 0, 0)
    assert d.core.next_deadline() is None
    assert (d.counters.fetched_bytes, d.counters.fetch_seconds) == (192, 0.5)
    assert d.counters.fetched_by == {"unknown": 192}


def test_every_rank_must_have_every_page():
    d, fetch = handed(ranks=3)
    d.fetched(fetch.id, 2)
    d.fetched(fetch.id, 0)
    assert d.orders() == d.take() == []
    d.fetched(fetch.id, 0)
    assert d.core.counters.violations == 1
    assert d.orders() == [], "said twice by one is not said by all"
    d.fetched(fetch.id, 1)
    assert isinstance(d.orders()[0], Admit)


def test_cached_pages_are_not_fetched_and_fetched_ones_are_cached_when_seated():
    d, fetch = handed()
    assert d.counts["cached"] == 0
    d.fetched(fetch.id)
    (admit,) = d.orders()
    d.first_token(admit, 8, CloseReason.LENGTH)
    assert d.counts["cached"] == 2
    d.ask(number=2)
    assert d.take()[-1] == ("p", Reserved(2, 1, 2, d.readers))
    d.hear("p", Handoff(2, 1, 0, PAGES, pack_int32([7]), [], 0, 0.0))
    (fetch,) = d.orders()
    assert fetch.pages == pack_int32([42])


def test_a_prompt_that_is_here_to_its_last_token_needs_no_fetch():
    d = PeerScript()
    d.submit(1, prompt=range(1, 13))
    (admit,) = d.orders()
    d.first_token(admit, 7, CloseReason.STOP)
    d.ask(prompt=range(1, 13))
    assert d.take() == [("p", Reserved(1, 1, 3, d.readers))]
    d.hear("p", HANDOFF)
    (admit,) = d.orders()
    assert admit.num_computed == 12
    assert d.take() == [("p", Taken(1, 1))]


def test_long_prompts_are_fetched_in_parts():
    pages = MAX_FETCH_PAGES + 3
    tokens = 4 * pages
    d = PeerScript(num_blocks=pages + 8, max_model_len=tokens + 20)
    d.ask(prompt=[1] * tokens)
    d.hear("p", Progress(1, 1, 0, pack_int32(range(pages)), pages))
    assert [len(fetch.pages) // 4 for fetch in d.orders()] == [MAX_FETCH_PAGES, 3]


def test_tokens_that_the_client_has_are_part_of_it():
    d = PeerScript()
    d.ask(generated=pack_int32([50, 51]))
    d.hear("p", HANDOFF)
    (fetch,) = d.orders()
    d.fetched(fetch.id)
    (admit,) = d.orders()
    assert list(unpack_int32(admit.tokens))[10:] == [50, 51, 7]
    assert (admit.num_prompt, admit.num_computed) == (10, 12)
    assert d.tokens == [(101, 7)], "what the client has is not sent again"


# -- refusals


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"source": instance_source(tile="other")}, "incompatible", "tile is 'other' there and 't' here"),
        ({"source": instance_source(block_size=8)}, "incompatible", "block_size"),
        ({"source": instance_source(weights="/new")}, "incompatible", "weights"),
        ({"source": instance_source(ranks=[])}, "incompatible", "no ranks"),
        ({"source": instance_source(ranks=[pool_source(num_layers=3)])}, "incompatible", "num_layers is 3"),
        (
            {"source": instance_source(ranks=[pool_source(total_kv_heads=1)])},
            "incompatible",
            "total_kv_heads",
        ),
        ({"gateway": "stranger"}, "unknown_gateway", "'stranger' is not connected"),
        ({"stopping": Stopping(max_tokens=60)}, "never_fits", "the context of this instance is 64"),
        ({"prompt": pack_int32([500])}, "bad_request", "token id 500"),
        ({"prompt": b""}, "bad_request", "it is empty"),
        ({"generated": pack_int32([1] * 8)}, "bad_request", "nothing is left to generate"),
        ({"lease_s": 0.0}, "bad_request", "lease_s"),
    ],
)
def test_what_can_never_be_is_refused_without_credit(changes, code, text):
    d = PeerScript()
    d.hear("p", reserve("p", **changes))
    ((to, refused),) = d.take()
    assert (to, refused.code, refused.credit) == ("p", code, False)
    assert text in refused.message
    assert d.owned == (0, 0, 0)
    assert dict(d.counters.refusals) == {code: 1}


def test_an_instance_that_leaves_refuses():
    d = PeerScript()
    d.core.shut_down()
    d.ask()
    assert d.take()[0][1].code == "shutting_down"


def test_a_request_that_is_here_already_is_refused():
    d = PeerScript()
    d.submit(101)
    d.ask()
    assert d.take()[0][1].code == "bad_request"


@pytest.mark.parametrize("why", ["blocks", "slots", "growth", "waiting", "paused", "draining"])
def test_no_room(why):
    d = PeerScript(
        num_blocks=16,
        max_num_seqs=1 if why in ("slots", "waiting") else 4,
        admission_headroom=64 if why == "growth" else 0,
    )
    if why == "blocks":
        d.submit(1, prompt=range(1, 50))
    elif why == "slots":
        d.submit(1)
    elif why == "growth":
        d.submit(1, max_tokens=50)
    elif why == "waiting":
        d.submit(1)
        d.submit(2)
    elif why == "paused":
        d.query("pause")
    else:
        d.submit(1)
        d.tell(Query(5, "update_weights", "/w"))
    d.ask()
    ((_, refused),) = d.take()
    assert (refused.code, refused.credit) == ("no_room", True)
    assert d.owned[2] == 0


def test_a_reservation_takes_the_slot_and_the_blocks_from_those_who_come_later():
    d = reserved(max_num_seqs=1)
    d.submit(1)
    assert d.orders() == []
    assert d.query("stats")["waiting"] == 1
    d.hear("p", Cancel(1, 1, by_p=True))
    assert isinstance(d.orders()[0], Admit)


# -- credit


def full() -> PeerScript:
    """One slot, which is taken."""
    d = PeerScript(max_num_seqs=1)
    d.submit(1, prompt=range(60, 70))
    return d


def test_credit_is_given_in_order_and_room_is_not_promised_twice():
    d = full()
    (admit,) = d.orders()
    d.ask("p", 1)
    d.ask("q", 1)
    assert all(m.credit for _, m in d.take())
    d.first_token(admit, reason=CloseReason.STOP)
    assert d.take() == [("p", Credit(1, 1))], "to the first, and not to both"
    d.submit(2)
    assert d.orders() == [], "promised is promised"
    d.ask("p", 1, attempt=2)
    assert d.take() == [("p", Reserved(1, 2, 0, d.readers))]


def test_the_line_is_ordered_by_priority():
    d = full()
    (admit,) = d.orders()
    d.ask("p", 1, priority=1)
    d.ask("q", 1, priority=0)
    d.take()
    d.first_token(admit, reason=CloseReason.STOP)
    assert d.take() == [("q", Credit(1, 1))]


def test_nobody_overtakes_those_in_the_line():
    d = full()
    (admit,) = d.orders()
    d.ask("p", 1)
    d.first_token(admit, reason=CloseReason.STOP)
    d.take()
    d.ask("q", 5)
    ((_, refused),) = d.take()
    assert refused.code == "no_room"
    d.hear("p", Cancel(1, 1, by_p=True))
    assert d.take() == [("p", Cancelled(1, 1, by_p=True)), ("q", Credit(5, 1))]


def test_those_who_wait_for_credit_get_it_fairly():
    d = full()
    (admit,) = d.orders()
    for number in (1, 2, 3):
        d.ask("p", number, flow=Flow("flood"))
    d.ask("q", 1, flow=Flow("other"))
    d.take()
    d.first_token(admit, reason=CloseReason.STOP)
    order = []
    while sent := [(peer, m.id) for peer, m in d.take() if isinstance(m, Credit)]:
        order += sent
        d.hear(sent[0][0], Cancel(sent[0][1], 1, by_p=True))
    assert order == [("p", 1), ("q", 1), ("p", 2), ("p", 3)]


@pytest.mark.parametrize("how", ["silence", "cancel", "lost", "incompatible"])
def test_a_promise_that_is_not_used_costs_a_second_at_most(how):
    d = full()
    (admit,) = d.orders()
    d.ask("p", 1)
    d.ask("q", 1)
    d.first_token(admit, reason=CloseReason.STOP)
    d.take()
    if how == "silence":
        d.wait(0.9)
        assert d.take() == []
        d.wait(0.2)
    elif how == "cancel":
        d.hear("p", Cancel(1, 1, by_p=True))
    elif how == "incompatible":  # P or D has got other weights meanwhile
        d.hear("p", reserve("p", 1, attempt=2, source=instance_source(weights="others")))
    else:
        d.lose("p")
    assert d.take()[-1] == ("q", Credit(1, 1))


def test_who_waits_for_credit_no_more_is_forgotten():
    d = full()
    d.ask("p", 1)
    d.ask("p", 2)
    d.ask("q", 1)
    d.hear("p", Cancel(1, 1, by_p=True))
    d.lose("q")
    assert d.query("stats")["arrivals"]["waiting_for_credit"] == 1
    d.wait(61)
    assert d.query("stats")["arrivals"]["waiting_for_credit"] == 0
    assert d.core.scheduler.num_occupied == 1


# -- leases


def test_leases_are_renewed_together_each_third():
    d = reserved()
    d.ask(number=2)
    d.ask("q", number=3)
    d.take()
    start = d.now
    d.wait(LEASE_S / 3 + 0.01)
    said = d.take()
    assert said == [
        ("p", Renew(said[0][1].stamp, [(1, 1), (2, 1)])),
        ("q", Renew(said[1][1].stamp, [(3, 1)])),
    ]
    assert said[0][1].stamp == pytest.approx(start + LEASE_S / 3)


def test_a_fetch_that_ends_after_the_lease_is_not_believed():
    d, fetch = fetching()
    d.now += TRUST * LEASE_S + 0.001
    d.fetched(fetch.id)
    ((to, cancel),) = [sent for sent in d.take() if isinstance(sent[1], Cancel)]
    assert (to, cancel.id, cancel.attempt, cancel.by_p) == ("p", 1, 1, False)
    assert d.owned == (0, 0, 0)
    assert d.counts["cached"] == 0


def test_a_fetch_that_ends_within_a_renewed_lease_is_believed():
    d, fetch = fetching()
    for _ in range(7):
        d.wait(LEASE_S / 3)
        ((_, renew),) = d.take()
        d.hear("p", Renewed(renew.stamp))
    d.fetched(fetch.id)
    d.hear("p", Handoff(1, 1, 2, pack_int32([42]), pack_int32([7]), [], 0, 0.0))
    (fetch,) = d.orders()
    d.fetched(fetch.id)
    assert isinstance(d.orders()[0], Admit)


def test_the_lease_counts_from_when_the_renewal_was_sent():
    d, fetch = fetching()
    start = d.now
    d.wait(LEASE_S / 3)
    ((_, renew),) = d.take()
    d.wait(LEASE_S / 3 - 0.01)  # P's answer takes its time
    d.hear("p", Renewed(renew.stamp))
    d.now = start + LEASE_S / 3 + TRUST * LEASE_S + 0.01
    d.fetched(fetch.id)
    assert any(isinstance(m, Cancel) for _, m in d.take())


def test_an_answer_to_a_renewal_from_before_says_nothing_of_a_later_arrival():
    d = PeerScript()
    d.ask(number=7)
    d.wait(LEASE_S / 3)
    ((_, stale),) = [sent for sent in d.take() if isinstance(sent[1], Renew)]
    d.now += 0.5
    d.ask(number=1)
    d.take()
    d.hear("p", Renewed(stale.stamp + 100))
    arrival = d.core._handovers.arrivals._arrivals["p", 1, 1]
    assert arrival.lease_from is None


@pytest.mark.parametrize("when", ["reserved", "fetching", "handed"])
def test_without_answers_the_lease_ends(when):
    d = {"reserved": reserved, "fetching": lambda: fetching()[0], "handed": lambda: handed()[0]}[when]()
    d.wait(LEASE_S + 0.01)
    orders = d.orders()
    drops = [command for command in orders if isinstance(command, DropFetch)]
    assert drops == ([DropFetch([1])] if when != "reserved" else [])
    if when != "reserved":
        assert d.owned[2] > 0, "a rank may still write"
        assert not any(isinstance(m, (Cancel, Taken)) for _, m in d.take())
        d.fetched(1, dropped=True)
    said = [m for _, m in d.take() if isinstance(m, (Cancel, Taken))]
    assert [type(m) for m in said] == [Taken if when == "handed" else Cancel]
    if when == "handed":
        (admit,) = [command for command in orders if isinstance(command, Admit)]
        assert admit.num_computed == 0
        assert list(unpack_int32(admit.tokens))[-1] == 7
    else:
        assert d.owned == (0, 0, 0)


def test_what_p_does_not_know_is_given_up():
    d, fetch = fetching()
    d.wait(LEASE_S / 3)
    ((_, renew),) = d.take()
    d.hear("p", Renewed(renew.stamp, [(1, 1)]))
    assert d.orders() == [DropFetch([fetch.id])]
    d.fetched(fetch.id)
    assert d.owned == (0, 0, 0)
    assert d.counters.given_up["P does not hold it"] == 1


def test_an_idle_reservation_gives_way_to_those_who_wait():
    d = reserved(max_num_seqs=1)
    for _ in range(8):
        d.wait(LEASE_S / 3)
        for _, renew in d.take():
            d.hear("p", Renewed(renew.stamp))
    assert d.owned[2] > 0, "nobody needs it"
    d.submit(1)
    d.wait(LEASE_S / 3)
    assert isinstance(d.orders()[0], Admit)
    assert isinstance(d.take()[0][1], Cancel)


# -- cancellation and loss


@pytest.mark.parametrize(
    ("when", "who"),
    [
        *[(when, who) for who in ("gateway", "gateway lost") for when in ("reserved", "fetching", "handed")],
        ("reserved", "p"),
        ("fetching", "p"),
    ],
)
def test_fastdeploy_4_7_the_client_leaves_while_the_request_arrives(when, who):
    d = {"reserved": reserved, "fetching": lambda: fetching()[0], "handed": lambda: handed()[0]}[when]()
    if who == "gateway":
        d.tell(GatewayCancel(101))
    elif who == "p":
        d.hear("p", Cancel(1, 1, by_p=True))
    else:
        d.core.gateway_lost(b"g")
        d.flush()
    if when != "reserved":
        assert isinstance(d.orders()[-1], DropFetch)
        assert d.take() == []
        assert d.owned[2] > 0, "nothing is freed under a fetch"
        d.fetched(1)
    ((_, answer),) = d.take()
    expected = Cancelled if who == "p" else Taken if when == "handed" else Cancel
    assert type(answer) is expected
    assert d.owned == (0, 0, 0)
    ends = ["aborted"] if when == "handed" and who != "gateway lost" else []
    assert [end.reason for end in d.finished] == ends
    assert d.orders() == []
    assert d.core.next_deadline() is None


def test_p_takes_its_pages_away_after_the_hand_over_and_the_request_goes_on():
    """P does so when it loses the gateway, or believes us lost: neither is a reason to end what is ours."""
    d, fetch = handed()
    d.hear("p", Cancel(1, 1, by_p=True))
    drop, admit = sorted(d.orders(), key=lambda command: isinstance(command, Admit))
    assert drop == DropFetch([fetch.id])
    assert admit.num_computed == 0
    assert d.take() == []
    d.fetched(fetch.id, dropped=True)
    assert d.take() == [("p", Cancelled(1, 1, by_p=True))]
    assert d.finished == []


def test_p_cancels_what_is_here_already():
    d, fetch = handed()
    d.query("pause")
    d.fetched(fetch.id)
    d.take()
    d.hear("p", Cancel(1, 1, by_p=True))
    assert d.take() == [("p", Cancelled(1, 1, by_p=True))]
    d.orders()
    d.query("resume")
    assert d.orders()[-1].num_computed == 10


def test_p_cancels_what_is_being_closed():
    d, fetch = fetching()
    d.tell(GatewayCancel(101))
    d.hear("p", Cancel(1, 1, by_p=True))
    assert d.take() == []
    d.fetched(fetch.id, dropped=True)
    assert d.take() == [("p", Cancelled(1, 1, by_p=True))]


def test_a_hand_over_that_crosses_a_cancel_is_not_taken():
    d, fetch = fetching()
    d.tell(GatewayCancel(101))
    d.hear("p", Handoff(1, 1, 2, pack_int32([42]), pack_int32([7]), [], 0, 0.0))
    assert d.tokens == []
    d.fetched(fetch.id)
    ((_, answer),) = d.take()
    assert isinstance(answer, Cancel)
    d.hear("p", HANDOFF)
    ((_, answer),) = d.take()
    assert (type(answer), answer.by_p) == (Cancel, False)
    assert d.tokens == []


@pytest.mark.parametrize("message", [Progress(9, 1, 0, b"", 0), Handoff(9, 1, 0, b"", b"", [], 0, 0.0)])
def test_what_is_unknown_is_answered_with_cancel(message):
    d = reserved()
    d.hear("p", message)
    ((to, answer),) = d.take()
    assert (to, type(answer), answer.id, answer.by_p) == ("p", Cancel, 9, False)
    d.hear("p", Cancel(9, 1, by_p=True))
    assert d.take() == [("p", Cancelled(9, 1, by_p=True))]
    d.hear("p", Cancelled(9, 1, by_p=False))
    assert d.take() == []


def test_p_is_lost_before_the_hand_over():
    d, fetch = fetching()
    d.lose("p")
    assert d.orders() == [DropFetch([fetch.id])]
    d.fetched(fetch.id, error="broken")
    assert d.take() == []
    assert d.owned == (0, 0, 0)
    assert d.tokens == d.finished == []


def test_p_is_lost_after_the_hand_over_and_the_request_is_computed_again():
    d, fetch = handed()
    d.lose("p", dead=True)
    (drop, admit) = d.orders()
    assert isinstance(drop, DropFetch)
    assert admit.num_computed == 0
    assert list(unpack_int32(admit.tokens)) == [*range(1, 11), 7]
    assert d.owned[2] > 0
    d.fetched(fetch.id, error="broken")
    assert d.take() == []
    assert d.owned[2] == 0
    d.first_token(admit, 8, CloseReason.LENGTH)
    assert d.tokens == [(101, 7), (101, 8)]
    assert d.counters.recomputed["peer lost"] == 1


def test_fastdeploy_4_7_a_copy_that_fails_is_told_and_the_request_goes_another_way():
    """There, P and D both answer with an error."""
    d, fetch = fetching()
    d.fetched(fetch.id, error="no such file")
    ((_, cancel),) = d.take()
    assert isinstance(cancel, Cancel)
    assert "fetch failed" in cancel.reason
    assert d.owned == (0, 0, 0)


def test_a_fetch_that_stalls_is_computed_again():
    d, fetch = handed()
    for _ in range(30):
        d.wait(LEASE_S / 10)
        for _, message in d.take():
            if isinstance(message, Renew):
                d.hear("p", Renewed(message.stamp))
    d.wait(0.01)
    assert d.counters.recomputed["fetch stalled"] == 1
    d.fetched(fetch.id, dropped=True)
    assert d.take() == [("p", Taken(1, 1))]


def test_ranks_that_do_not_end_a_fetch_fail_the_instance():
    d, fetch = fetching(step_timeout_s=20.0, ranks=2)
    d.fetched(fetch.id, 0)
    d.lose("p")
    d.wait(19.9)
    assert d.core.failure is None
    d.wait(0.2)
    assert "worker ranks [1] have not ended fetches from p" in d.core.failure


def test_pages_of_another_size_of_prompt_are_a_violation():
    d = reserved()
    d.hear("p", Progress(1, 1, 0, pack_int32([1, 2, 3, 4]), 4))
    assert d.core.counters.violations == 1
    assert isinstance(d.take()[0][1], Cancel)
    d.ask(number=2)
    d.hear("p", Progress(2, 1, 0, pack_int32([1]), 2))
    assert d.core.counters.violations == 2
    d.ask(number=3)
    d.hear("p", Handoff(3, 1, 0, PAGES, b"", [], 0, 0.0))
    d.ask(number=4)
    d.hear("p", Handoff(4, 1, 0, PAGES, pack_int32([-1]), [], 0, 0.0))
    d.ask(number=5)
    d.hear("p", Handoff(5, 1, 0, pack_int32([1]), pack_int32([7]), [], 0, 0.0))
    assert d.core.counters.violations == 5
    assert d.tokens == []
    assert d.owned == (0, 0, 0)


# -- orders


def test_a_paused_instance_seats_nobody_until_it_is_resumed():
    d, fetch = handed()
    d.query("pause")
    d.orders()
    d.fetched(fetch.id)
    assert d.take() == [("p", Taken(1, 1))], "P's pages are needed no more"
    assert d.orders() == []
    assert d.query("stats")["arrivals"]["ready"] == 1
    d.query("resume")
    kinds = [type(command) for command in d.orders()]
    assert kinds == [Control, Admit]


@pytest.mark.parametrize("when", ["reserved", "handed", "ready"])
def test_new_weights_and_pages_of_old_ones(when):
    d = reserved() if when == "reserved" else handed()[0]
    if when == "ready":
        d.query("pause")
        d.fetched(1)
        d.query("resume")  # seated, so it gives way as everything that runs
        assert isinstance(d.orders()[-1], Admit)
    d.take()
    d.orders()
    d.tell(Query(5, "update_weights", "/w"))
    if when == "reserved":
        assert isinstance(d.take()[0][1], Cancel)
        return
    if when == "ready":
        (preempt,) = d.orders()
        assert isinstance(preempt, Preempt)
        return
    (drop, control) = d.orders()
    assert isinstance(drop, DropFetch)
    assert isinstance(control, Control)
    d.fetched(1)
    assert d.take() == [("p", Taken(1, 1))]
    d.report(ControlDone(0, control.id))
    (admit,) = d.orders()
    assert admit.num_computed == 0
    d.ask(number=2)
    assert "weights is '' there and '/w' here" in d.take()[0][1].message


def test_reset_prefix_cache_keeps_pages_on_their_way_out_of_it():
    d, fetch = handed()
    d.query("reset_prefix_cache")
    d.fetched(fetch.id)
    (admit,) = d.orders()
    d.first_token(admit, 8, CloseReason.STOP)
    assert d.counts["cached"] == 0


def test_a_seated_request_is_like_any_other():
    d, fetch = handed()
    d.fetched(fetch.id)
    (admit,) = d.orders()
    d.tell(GatewayCancel(101))
    assert d.orders() == [Abort(admit.slot, admit.epoch)]
    d.close(admit, CloseReason.ABORTED)
    assert [end.reason for end in d.finished] == ["aborted"]
    assert d.owned == (0, 0, 0)


def test_every_wait_is_shown_with_its_end():
    d, _ = fetching()
    shot = d.query("ledger")
    ((name, blocks),) = shot["reserved_by"].items()
    assert blocks == 5
    assert "r1 from p" in name
    assert "fetching" in name
    (row,) = shot["handovers"]["arrivals"]
    assert (row["request"], row["state"], row["pages"], row["pages_asked"]) == ("r1", "fetching", 3, 2)
    assert 0 < row["seconds_left"] <= LEASE_S


# -- what goes wrong elsewhere


def test_fastdeploy_3_asked_twice_is_allocated_once():
    """There, a request asked twice gets two slots and two sets of blocks, and the first ones leak."""
    d = reserved()
    owned = d.owned
    d.ask()
    assert d.take() == [("p", Reserved(1, 1, 0, d.readers))]
    assert d.owned == owned
    d.ask(attempt=2)
    assert [type(m) for _, m in d.take()] == [Cancel, Reserved]
    assert d.owned == owned


def test_fastdeploy_4_7_late_messages_of_an_earlier_attempt_do_nothing():
    d = reserved()
    d.ask(attempt=2)
    d.take()
    d.hear("p", Progress(1, 1, 0, PAGES, 3))
    ((_, answer),) = d.take()
    assert (type(answer), answer.attempt) == (Cancel, 1)
    assert d.orders() == []
    d.hear("p", Cancel(1, 1, by_p=True))
    d.take()
    assert d.query("stats")["arrivals"]["reserved"] == 1


def test_fastdeploy_5_a_failure_at_p_is_told_and_frees_at_once():
    """There, P recycles after a failed download, and D keeps what it allocated."""
    d = reserved()
    d.hear("p", Cancel(1, 1, by_p=True, reason="anything"))
    assert d.take() == [("p", Cancelled(1, 1, by_p=True))]
    assert d.owned == (0, 0, 0)


def test_fastdeploy_4_7_p_dies_after_d_has_allocated():
    """There, the blocks are held for a watchdog of 600 s."""
    d = reserved()
    d.lose("p", dead=True)
    assert d.owned == (0, 0, 0)


def test_fastdeploy_4_7_p_says_nothing_after_d_has_allocated():
    d = reserved()
    d.wait(LEASE_S)
    assert d.owned == (0, 0, 0)


def test_fastdeploy_6_a_slot_used_again_is_not_mistaken():
    """There, a task left over in a slot that is used again ships to the wrong request."""
    d, old = fetching()
    d.hear("p", Cancel(1, 1, by_p=True))
    d.take()
    d.orders()
    d.ask(number=2, prompt=range(50, 60))
    d.hear("p", Progress(2, 1, 0, pack_int32([50, 51]), 2))
    (new,) = d.orders()
    mine = set(unpack_int32(new.blocks))
    assert not mine & set(unpack_int32(old.blocks)), "the old fetch may still write into its own"
    d.take()
    d.fetched(old.id, dropped=True)
    assert d.query("stats")["arrivals"]["fetching"] == 1
    assert d.take() == [("p", Cancelled(1, 1, by_p=True))]


def test_fastdeploy_4_7_d_short_says_so_at_once_and_p_need_not_ask_again():
    """There, P asks each 50 ms for ever and holds its blocks, or the client waits for its timeout."""
    d = full()
    d.ask()
    ((_, refused),) = d.take()
    assert isinstance(refused, Refused)
    assert refused.credit


def test_fastdeploy_4_7_preempted_while_it_decodes_goes_on_by_itself():
    """There, slot and blocks are dropped and the gateway has to start the request anew."""
    d = PeerScript(num_blocks=11)
    d.submit(1, prompt=range(20, 32), max_tokens=30)
    (local,) = d.orders()
    d.ask()
    d.hear("p", HANDOFF)
    (fetch,) = d.orders()
    d.fetched(fetch.id)
    (admit,) = d.orders()
    d.token(admit, 8)
    for token in range(1, 30):
        d.token(local, token)
        if any(isinstance(command, Preempt) for command in d.commands):
            break
    assert d.orders()[-1] == Preempt(admit.slot, admit.epoch)
    d.close(admit, CloseReason.PREEMPTED)
    d.orders()
    d.tell(GatewayCancel(1))
    d.close(local, CloseReason.ABORTED)
    (again,) = [command for command in d.orders() if isinstance(command, Admit)]
    assert list(unpack_int32(again.tokens)) == [*range(1, 11), 7, 8]
    assert again.num_prompt == 10
    assert [token for number, token in d.tokens if number == 101] == [7, 8]
