"""P's side: every state of an attempt against everything that can happen to it.

Tests named `fastdeploy_…` are the points of its section on liveness: what goes wrong there when several
threads prepare requests at once.
"""

from __future__ import annotations

import typing

import pytest

from baton.protocol.codec import pack_int32, unpack_int32
from baton.protocol.messages.commands import Abort, Admit, Preempt
from baton.protocol.messages.handover import (
    Cancel,
    Cancelled,
    Credit,
    Handoff,
    PeerMessage,
    Progress,
    Refused,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Taken,
)
from baton.protocol.messages.reports import CloseReason, ControlDone
from baton.protocol.messages.requests import Cancel as GatewayCancel
from baton.protocol.messages.requests import Query
from baton.protocol.params.sampling import LISTED_LOGPROBS, Sampling
from baton.protocol.rules.fair_queue import Flow
from baton.protocol.rules.silence import LOOKS, MAX_VOIDS
from tests.engine.peerscript import LEASE_S, PeerScript


def prepared(p: PeerScript, number: int = 1, *decoders: str, **changes) -> Admit:
    """A request that d has room for, admitted here."""
    p.take()
    p.submit(number, *(decoders or ("d",)), **changes)
    (reserve,) = [m for _, m in p.take() if isinstance(m, Reserve)]
    p.hear((decoders or ("d",))[0], Reserved(reserve.id, reserve.attempt, 0))
    (admit,) = [command for command in p.orders() if isinstance(command, Admit)]
    return admit


def handed(p: PeerScript, **changes) -> Handoff:
    p.first_token(prepared(p, **changes))
    (handoff,) = [m for _, m in p.take() if isinstance(m, Handoff)]
    return handoff


def test_a_request_holds_nothing_until_there_is_room_for_it_elsewhere():
    p = PeerScript()
    p.submit(1, "d")
    ((to, reserve),) = p.take()
    assert to == "d"
    assert isinstance(reserve, Reserve)
    assert reserve.endpoint == "ipc://me"
    assert reserve.gateway == "gate"
    assert reserve.request == 1
    assert list(unpack_int32(reserve.prompt)) == list(range(1, 11))
    assert p.orders() == []
    assert p.owned == (0, 0, 0)
    p.hear("d", Reserved(reserve.id, reserve.attempt, 0))
    (admit,) = p.orders()
    assert admit.handover
    assert p.owned[0] > 0


def test_pages_are_named_as_they_are_computed_and_the_first_token_goes_with_the_rest():
    p = PeerScript()
    admit = prepared(p)
    blocks = list(unpack_int32(admit.blocks))
    assert [m.complete for _, m in p.take()] == [0], "said at once: it has begun"
    p.prefilled(admit, 6)
    ((_, progress),) = p.take()
    assert progress == Progress(1, 1, 0, pack_int32(blocks[:1]), 1)
    p.layers(admit, 2)
    ((_, progress),) = p.take()
    assert progress == Progress(1, 1, 1, pack_int32(blocks[1:3]), 1, 2)
    p.layers(admit, 2)
    assert p.take() == []
    p.first_token(admit, 9)
    ((to, handoff),) = p.take()
    assert to == "d"
    assert handoff == Handoff(1, 1, 3, b"", pack_int32([9]), [], 0, 0.0)
    assert p.tokens == []
    assert p.finished == [], "D streams, also the first token"
    assert p.owned == (0, 3, 0), "the pages of the prompt, and no block more"
    p.hear("d", Taken(1, 1))
    assert p.owned == (0, 0, 0)
    (end,) = p.finished
    assert (end.reason, end.message) == ("handed_over", "d"), "the gateway knows where it is"
    assert p.core.next_deadline() is None
    assert p.counters.taken == 1


def test_pages_from_the_prefix_cache_are_named_at_once():
    p = PeerScript()
    p.submit(1, prompt=range(1, 11))
    (admit,) = p.orders()
    p.first_token(admit, reason=CloseReason.STOP)
    admit = prepared(p, 2)
    ((_, progress),) = p.take()
    assert progress.complete == 2
    assert list(unpack_int32(progress.blocks)) == list(unpack_int32(admit.blocks))[:2]


@pytest.mark.parametrize("reason", [CloseReason.STOP, CloseReason.LENGTH])
def test_a_first_token_that_ends_the_request_ends_it_here(reason):
    p = PeerScript()
    admit = prepared(p)
    p.prefilled(admit, 6)
    p.take()
    p.first_token(admit, 9, reason)
    assert p.tokens == [(1, 9)]
    assert [end.reason for end in p.finished] == [reason.value]
    ((to, cancel),) = p.take()
    assert to == "d"
    assert isinstance(cancel, Cancel)
    assert cancel.by_p
    assert p.owned == (0, 1, 0), "D may be reading the page that was named"
    p.hear("d", Cancelled(1, 1, by_p=True))
    assert p.owned == (0, 0, 0)
    assert p.core.next_deadline() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 1},
        {"generated": pack_int32([5] * 7)},
        {"sampling": Sampling(seed=0, logprobs=LISTED_LOGPROBS + 1)},
    ],
    ids=["one token", "one token is left", "more log-probabilities than a message should hold"],
)
def test_what_cannot_be_handed_over_asks_nobody(changes):
    p = PeerScript()
    p.submit(1, "d", **changes)
    assert p.take() == []
    assert not p.orders()[0].handover


def test_an_instance_decodes_itself_what_would_be_handed_to_itself():
    p = PeerScript()
    p.submit(1, "me")
    assert p.take() == []
    assert not p.orders()[0].handover


def test_tokens_that_the_client_has_travel_and_count():
    p = PeerScript()
    p.submit(1, "d", generated=pack_int32([50, 51]))
    ((_, reserve),) = p.take()
    assert list(unpack_int32(reserve.generated)) == [50, 51]
    p.hear("d", Reserved(1, 1, 0))
    (admit,) = p.orders()
    assert admit.num_prompt == 10
    assert len(admit.tokens) // 4 == 12


# -- who has no room


def test_the_next_decoder_is_asked_and_then_the_request_stays():
    p = PeerScript()
    p.submit(1, "d", "e")
    ((_, first),) = p.take()
    p.hear("d", Refused(first.id, 1, "no_room", ""))
    ((to, second),) = p.take()
    assert to == "e"
    assert second.attempt == 2
    p.hear("e", Refused(first.id, 2, "incompatible", ""))
    (admit,) = p.orders()
    assert not admit.handover
    assert dict(p.counters.stayed) == {"refused": 1}
    p.first_token(admit, reason=CloseReason.STOP)
    assert p.tokens == [(1, 7)]


def test_who_stays_for_want_of_room_leaves_a_slot_to_who_departs():
    """Else whole answers take every slot, and the room that others have reserved elsewhere stays idle."""
    p = PeerScript(max_num_seqs=8, num_blocks=200, max_preparing=100)
    for number in range(1, 11):
        p.submit(number, "d", prompt=range(number, number + 10))
    reserves = [m for _, m in p.take() if isinstance(m, Reserve)]
    assert len(reserves) == 10
    for reserve in reserves[:9]:
        p.hear("d", Refused(reserve.id, 1, "bad_request", ""))
    staying = [command for command in p.orders() if isinstance(command, Admit)]
    assert [admit.handover for admit in staying] == [False] * 7
    p.hear("d", Reserved(reserves[9].id, 1, 0))
    (admit,) = [command for command in p.orders() if isinstance(command, Admit)]
    assert admit.handover
    p.first_token(admit)
    p.hear("d", Taken(reserves[9].id, 1))
    (last,) = [command for command in p.orders() if isinstance(command, Admit)]
    assert not last.handover, "nobody wants to depart any more: no slot is kept"


def test_fastdeploy_4_7_no_answer_and_the_next_decoder_is_asked_and_the_silent_one_told():
    """There, after 30 s the client gets an error and D keeps what it may have allocated."""
    p = PeerScript()
    p.submit(1, "d", "e")
    p.take()
    p.wait(0.4)
    assert p.take() == []
    p.wait(0.2)
    (one, cancel), (two, reserve) = p.take()
    assert one == "d"
    assert cancel.attempt == 1
    assert cancel.by_p
    assert two == "e"
    assert reserve.attempt == 2


def test_a_slow_decoder_is_asked_by_one_request_at_a_time_until_it_answers_in_time():
    p = PeerScript(max_waiting=100)
    for number in range(1, 5):
        p.submit(number, "d")
    assert len(p.take()) == 4
    p.wait(0.6)
    assert {type(m) for _, m in p.take()} == {Cancel}
    for number in range(5, 9):
        p.submit(number, "d", "e")
    asked = [to for to, m in p.take() if isinstance(m, Reserve)]
    assert asked == ["d", "e", "e", "e"]
    p.hear("d", Reserved(5, 1, 0))
    for number in range(9, 12):
        p.submit(number, "d", "e")
    asked = [to for to, m in p.take() if isinstance(m, Reserve)]
    assert asked == ["d", "d", "e"], "twice as many"


def test_refused_by_all_a_request_waits_for_credit_and_holds_nothing():
    p = PeerScript()
    p.submit(1, "d", "e")
    p.hear("d", Refused(1, 1, "no_room", "", credit=True))
    p.hear("e", Refused(1, 2, "no_room", "", credit=True))
    p.take()
    p.wait(0.5)
    assert p.orders() == []
    assert p.owned == (0, 0, 0)
    p.hear("e", Credit(1, 2))
    ((to, reserve),) = p.take()
    assert to == "e"
    assert reserve.attempt == 3
    p.hear("e", Reserved(1, 3, 0))
    (one, cancel), (two, progress) = p.take()
    assert (one, cancel) == ("d", Cancel(1, 1, True, cancel.reason)), "d need not remember it"
    assert two == "e"
    assert isinstance(progress, Progress)
    assert p.orders()[0].handover
    assert p.counters.credits == 1


def test_without_credit_in_time_a_request_decodes_here_and_says_so():
    p = PeerScript()
    p.submit(1, "d")
    p.hear("d", Refused(1, 1, "no_room", "", credit=True))
    p.take()
    p.wait(0.9)
    assert p.orders() == []
    p.wait(0.2)
    assert not p.orders()[0].handover
    ((to, cancel),) = p.take()
    assert to == "d"
    assert cancel.attempt == 1
    assert cancel.by_p
    p.hear("d", Credit(1, 1))
    ((_, answer),) = p.take()
    assert isinstance(answer, Cancel), "a credit that crossed is answered, so that its room is free"


def test_credit_while_another_one_is_asked_is_answered_at_once():
    p = PeerScript()
    p.submit(1, "d", "e")
    p.hear("d", Refused(1, 1, "no_room", "", credit=True))
    p.take()
    p.hear("d", Credit(1, 1))
    ((to, answer),) = p.take()
    assert to == "d"
    assert isinstance(answer, Cancel)
    assert answer.attempt == 1
    p.hear("e", Reserved(1, 2, 0))
    assert p.orders()[0].handover


def test_those_who_wait_for_credit_take_no_place():
    p = PeerScript(max_preparing=1)
    p.submit(1, "d")
    p.submit(2, "e")
    assert [to for to, _ in p.take()] == ["d"]
    p.hear("d", Refused(1, 1, "no_room", "", credit=True))
    assert [to for to, _ in p.take()] == ["e"]


@pytest.mark.parametrize("limit", [1, 5])
def test_so_many_prepare_at_once(limit):
    p = PeerScript(max_preparing=limit)
    for number in range(1, 9):
        p.submit(number, "d", priority=-number)
    asked = [m.request for _, m in p.take()]
    assert len(asked) == limit
    p.hear("d", Reserved(1, 1, 0))
    ((_, reserve), *_) = [(to, m) for to, m in p.take() if isinstance(m, Reserve)]
    assert reserve.request == 8, "by rank"
    waiting = p.query("ledger")["handovers"]["queued"]
    assert waiting == 8 - limit - 1


def test_preparing_requests_count_as_waiting():
    p = PeerScript(max_waiting=2)
    p.submit(1, "d")
    p.submit(2, "d")
    p.submit(3, "d")
    assert [end.code for end in p.finished] == ["queue_full"]
    assert p.query("stats")["waiting"] == 2


def test_a_request_that_is_prepared_makes_place_and_its_reservation_is_given_back():
    p = PeerScript(max_waiting=2)
    p.submit(1, "d", priority=1)
    p.submit(2, "d", priority=1)
    p.hear("d", Reserved(2, 1, 0))  # (it is admitted at once)
    p.submit(3, "d", priority=1)
    assert p.query("stats")["waiting"] == 2
    p.take()
    p.submit(4, "d")
    assert [(end.id, end.code) for end in p.finished] == [(3, "queue_full")]
    cancel, reserve = [message for _, message in p.take()]
    assert isinstance(cancel, Cancel)
    assert cancel.id == 3
    assert isinstance(reserve, Reserve)
    assert reserve.request == 4


def test_who_asks_next_is_chosen_fairly_and_the_flow_goes_along():
    p = PeerScript(max_preparing=1)
    for number in (1, 2, 3):
        p.submit(number, "d", flow=Flow("flood"))
    p.submit(4, "d", flow=Flow("other", weight=2.0))
    p.submit(5, "d", priority=-1)
    asked = []
    for departure in range(1, 6):
        asked += [(m.request, m.flow) for _, m in p.take() if isinstance(m, Reserve)]
        p.hear("d", Refused({1: 1, 2: 5, 3: 2, 4: 4, 5: 3}[departure], 1, "never_fits", ""))
    assert [request for request, _ in asked] == [1, 5, 2, 4, 3]
    flow = dict(asked)[4]
    assert (flow.key, flow.user, flow.weight) == ("other", "", 2.0)
    assert flow.gateway == dict(asked)[1].gateway != ""


def test_those_who_stay_let_those_pass_who_need_a_slot_for_a_moment_only():
    p = PeerScript(max_num_seqs=1, max_waiting=8)
    p.submit(1)
    (running,) = p.orders()
    for number in (2, 3):
        p.submit(number, "full")
        p.hear("full", Refused(number - 1, 1, "no_room", ""))
    p.submit(4)
    p.submit(5, "d")
    p.hear("d", Reserved(3, 1, 0))
    order = []
    for _ in range(4):
        p.first_token(running, reason=CloseReason.STOP)
        (running,) = [command for command in p.orders() if isinstance(command, Admit)]
        order.append(p.core.scheduler.slots[running.slot].id)
    assert order == [4, 5, 2, 3]


def test_those_who_stay_do_not_let_everybody_pass():
    p = PeerScript(max_num_seqs=1, max_waiting=3)
    p.submit(1)
    (running,) = p.orders()
    p.submit(2, "full")
    p.hear("full", Refused(1, 1, "no_room", ""))
    for number in range(3, 9):
        p.submit(number)
        p.first_token(running, reason=CloseReason.STOP)
        (running,) = p.orders()
        if p.core.scheduler.slots[running.slot].id == 2:
            break
    assert number == 6, "three that came later, and no more"


# -- D is lost, or gives up, before the hand-over


def test_another_decoder_is_found_while_the_prompt_is_computed():
    p = PeerScript()
    admit = prepared(p, 1, "d", "e")
    p.prefilled(admit, 9)
    p.take()
    p.lose("d")
    ((to, reserve),) = p.take()
    assert to == "e"
    p.hear("e", Reserved(reserve.id, reserve.attempt, 0))
    ((_, progress),) = p.take()
    assert (progress.first, progress.complete) == (0, 2), "e is told everything"
    p.first_token(admit)
    ((to, handoff),) = p.take()
    assert to == "e"
    assert isinstance(handoff, Handoff)
    assert p.owned == (0, 3, 0)
    p.hear("e", Taken(handoff.id, handoff.attempt))
    assert p.owned == (0, 2, 0), "a connection is lost, not d: it may be reading what it was told of"
    p.wait(LEASE_S)
    assert p.owned == (0, 0, 0)


def test_pages_named_to_a_dead_process_are_free_at_once():
    p = PeerScript()
    handed(p)
    p.lose("d")
    assert [end.reason for end in p.finished] == ["lost"]
    assert p.owned == (0, 3, 0)
    p.lose("d", dead=True)
    assert p.owned == (0, 0, 0)
    assert p.core.next_deadline() is None


def test_a_request_whose_decoder_gave_up_goes_on_here_with_its_token():
    p = PeerScript()
    admit = prepared(p)
    p.prefilled(admit, 6)
    p.take()
    p.hear("d", Cancel(1, 1, by_p=False, reason="why not"))
    assert p.take() == [("d", Cancelled(1, 1, by_p=False))]
    p.first_token(admit, 9)
    assert p.tokens == [(1, 9)]
    (again,) = p.orders()
    assert not again.handover
    assert list(unpack_int32(again.tokens))[-1] == 9
    assert again.num_prompt == 10
    assert p.finished == []
    p.first_token(again, 8, CloseReason.STOP)
    assert p.tokens == [(1, 9), (1, 8)]
    assert p.owned == (0, 0, 0)


def test_a_handed_request_that_d_gives_back_is_ours_again():
    p = PeerScript()
    handoff = handed(p)
    p.hear("d", Cancel(handoff.id, handoff.attempt, by_p=False))
    assert p.tokens == [(1, 7)]
    assert p.finished == []
    (again,) = p.orders()
    assert not again.handover
    p.hear("d", Taken(handoff.id, handoff.attempt))
    assert p.finished == [], "late, and of no effect"
    p.first_token(again, 8, CloseReason.LENGTH)
    assert p.tokens == [(1, 7), (1, 8)]
    assert [end.reason for end in p.finished] == ["length"]
    assert p.owned == (0, 0, 0)


def test_a_preempted_prefill_begins_anew_there_and_keeps_what_is_being_read():
    p = PeerScript(num_blocks=8, max_num_seqs=2)
    p.submit(1, prompt=range(1, 9), max_tokens=16, priority=-1)
    (local,) = p.orders()
    p.submit(2, "d", prompt=range(20, 28))
    p.hear("d", Reserved(1, 1, 0))
    (admit,) = p.orders()
    p.prefilled(admit, 4)
    p.take()
    request = p.core.scheduler.slots[admit.slot]
    for token in range(1, 16):  # until the local one wants blocks that are not there
        p.token(local, token)
        if any(isinstance(command, Preempt) for command in p.commands):
            break
    (preempt,) = [command for command in p.orders() if isinstance(command, Preempt)]
    assert (preempt.slot, preempt.epoch) == (admit.slot, admit.epoch)
    p.close(admit, CloseReason.PREEMPTED)
    (_, cancel), (_, again) = p.take()
    assert isinstance(cancel, Cancel)
    assert cancel.attempt == 1
    assert isinstance(again, Reserve)
    assert again.attempt == 2
    assert p.owned[1] == 1, "the page that was named"
    assert request.state.value == "waiting"
    p.hear("d", Cancelled(1, 1, by_p=True))
    assert p.owned[1] == 0


# -- leases


def test_the_lease_counts_from_the_last_renewal_that_was_received():
    p = PeerScript()
    handoff = handed(p)
    for _ in range(4):
        p.wait(LEASE_S * 0.8)
        p.hear("d", Renew(77.5, [(handoff.id, handoff.attempt), (9, 9)]))
        ((to, renewed),) = p.take()
        assert to == "d"
        assert renewed == Renewed(77.5, [(9, 9)])
    assert p.owned == (0, 3, 0)
    p.wait(LEASE_S - 0.01)
    assert p.owned == (0, 3, 0)
    assert p.finished == []
    p.wait(0.02)
    assert p.owned == (0, 0, 0)
    assert [end.reason for end in p.finished] == ["lost"]
    p.take()
    p.hear("d", Renew(78.5, [(handoff.id, handoff.attempt)]))
    assert p.take()[0][1].unknown == [(handoff.id, handoff.attempt)]


def test_a_renewal_that_arrives_after_the_lease_renews_nothing():
    p = PeerScript()
    handoff = handed(p)
    p.wait(LEASE_S + 1)
    p.hear("d", Renew(1.0, [(handoff.id, handoff.attempt)]))
    assert p.take()[-1][1].unknown == [(handoff.id, handoff.attempt)]
    assert p.owned == (0, 0, 0)


def test_an_engine_that_was_away_takes_no_lease_for_over():
    """It stood still for longer than the lease; what D said meanwhile is still in its socket."""
    p = PeerScript()
    handoff = handed(p)
    for _ in range(3):
        p.now += 2 * LEASE_S
        p.core.on_clock(p.now)
        p.flush()
        p.hear("d", Renew(1.0, [(handoff.id, handoff.attempt)]))
        assert p.take()[-1][1].unknown == []
        assert p.owned == (0, 3, 0)
    for _ in range((MAX_VOIDS + 1) * LOOKS):  # D is dead, and this engine stands still again and again
        if p.owned == (0, 3, 0):
            p.now = p.core.next_deadline() + LEASE_S
            p.core.on_clock(p.now)
            p.flush()
    assert p.owned == (0, 0, 0)
    assert [end.reason for end in p.finished] == ["lost"]


def test_a_first_token_after_the_lease_is_not_handed_over():
    p = PeerScript()
    admit = prepared(p)
    p.take()
    p.wait(LEASE_S + 1)
    p.first_token(admit, 9)
    assert not [m for _, m in p.take() if isinstance(m, Handoff)]
    assert p.tokens == [(1, 9)]


def test_pages_of_an_ended_attempt_are_kept_for_a_lease_at_most():
    p = PeerScript()
    admit = prepared(p)
    p.prefilled(admit, 9)
    p.tell(GatewayCancel(1))
    assert [type(m) for _, m in p.take()][-1] is Cancel
    p.close(admit, CloseReason.ABORTED)
    assert [end.reason for end in p.finished] == ["aborted"]
    assert p.owned == (0, 2, 0)
    p.hear("d", Renew(1.0, [(1, 1)]))
    assert p.take()[0][1].unknown == [(1, 1)]
    p.wait(LEASE_S)
    assert p.owned == (0, 0, 0)


def test_the_answer_may_come_before_the_slot_is_closed():
    p = PeerScript()
    admit = prepared(p)
    p.prefilled(admit, 9)
    p.tell(GatewayCancel(1))
    assert isinstance(p.orders()[-1], Abort)
    p.hear("d", Cancelled(1, 1, by_p=True))
    assert p.owned[0] > 0, "the worker may still write"
    p.close(admit, CloseReason.ABORTED)
    assert p.owned == (0, 0, 0)


# -- gateways and orders


@pytest.mark.parametrize("stage", ["asking", "credit", "waiting", "handed"])
def test_a_cancelled_request_ends_everywhere(stage):
    p = PeerScript(max_num_seqs=1)
    if stage == "handed":
        handed(p)
    else:
        p.submit(9)  # takes the slot
        p.submit(1, "d")
        if stage == "credit":
            p.hear("d", Refused(1, 1, "no_room", "", credit=True))
        if stage == "waiting":
            p.hear("d", Reserved(1, 1, 0))
    p.take()
    p.tell(GatewayCancel(1))
    assert [end.reason for end in p.finished] == ["aborted"]
    ((to, cancel),) = p.take()
    assert to == "d"
    assert isinstance(cancel, Cancel)
    assert cancel.by_p
    assert p.owned[1] == (3 if stage == "handed" else 0)
    p.hear("d", Cancelled(1, 1, by_p=True))
    assert p.owned[1] == 0


def test_a_lost_gateway_cancels_its_departures():
    p = PeerScript()
    p.submit(1, "d")
    handed(p, number=2)
    p.take()
    p.core.gateway_lost(b"g")
    p.flush()
    assert {type(m) for _, m in p.take()} == {Cancel}
    p.hear("d", Cancelled(2, 1, by_p=True))
    assert p.owned == (0, 0, 0)


def test_new_weights_make_all_stay_that_were_not_handed_over():
    p = PeerScript()
    p.submit(1, "d", prompt=range(2, 12))
    admit = prepared(p, 2)
    p.prefilled(admit, 9)
    p.take()
    p.orders()
    p.tell(Query(5, "update_weights", "/w"))
    cancels = [m.id for _, m in p.take() if isinstance(m, Cancel)]
    assert sorted(cancels) == [1, 2]
    assert isinstance(p.orders()[0], Preempt)
    p.close(admit, CloseReason.PREEMPTED)
    assert p.owned == (0, 2, 0), "d may still be reading, though it will not use it"
    (control,) = p.orders()
    assert control.action == "update_weights"
    p.report(ControlDone(0, control.id))
    assert [admit.handover for admit in p.orders()] == [False, False]
    p.submit(3, "d")
    ((_, reserve),) = p.take()
    assert reserve.source.weights == "/w"


# -- the eight points of fastdeploy.md 4.6, as far as they are P's


def test_fastdeploy_1_surplus_is_visible_abortable_and_in_order():
    """There, threads fetch more requests than there is room for, and these are invisible to everybody."""
    p = PeerScript(max_preparing=1, max_num_seqs=1)
    for number in range(1, 6):
        p.submit(number, "d")
    assert p.query("stats")["waiting"] == 5
    p.tell(GatewayCancel(3))
    assert [end.id for end in p.finished] == [3]
    asked = []
    for _ in range(3):
        asked += [m for _, m in p.take() if isinstance(m, Reserve)]
        p.hear("d", Refused(asked[-1].id, asked[-1].attempt, "never_fits", ""))
    assert [m.request for m in asked] == [1, 2, 4], "in order"


def test_fastdeploy_2_bad_requests_stop_nobody():
    """There, N requests for a full decode instance stop N threads, and with them the instance."""
    p = PeerScript(max_preparing=2, max_num_seqs=1)
    for number in range(1, 5):
        p.submit(number, "full")
    p.submit(5, "d")
    while asked := [m for to, m in p.take() if isinstance(m, Reserve) and to == "full"]:
        for reserve in asked:
            p.hear("full", Refused(reserve.id, reserve.attempt, "no_room", "", credit=True))
    assert p.core.next_deadline() is not None
    p.hear("d", Reserved(5, 1, 0))
    assert p.orders()[0].handover, "while four wait for credit"


def test_fastdeploy_3_an_answer_to_an_earlier_try_has_no_effect():
    """There, a late answer to try 1 satisfies try 2 and brings the wrong blocks, or leaks."""
    p = PeerScript()
    p.submit(1, "d", "d")
    p.wait(0.6)
    assert [type(m) for _, m in p.take()] == [Reserve, Cancel, Reserve]
    p.hear("d", Reserved(1, 1, 0))
    ((to, answer),) = p.take()
    assert to == "d"
    assert isinstance(answer, Cancel)
    assert answer.attempt == 1
    assert p.orders() == [], "attempt 2 was not answered"
    p.hear("other", Reserved(1, 2, 0))
    assert p.orders() == [], "nor was it this one that was asked"
    p.hear("d", Reserved(1, 2, 0))
    assert p.orders()[0].handover


def test_fastdeploy_4_no_request_is_lost_between_two_queues(monkeypatch):
    """There, an exception between fetching and adding loses the request: no answer, and a slot leaked."""
    p = PeerScript()
    scheduler = p.core.scheduler
    monkeypatch.setattr(scheduler, "enqueue", lambda request: (_ for _ in ()).throw(RuntimeError("defect")))
    p.submit(1, "d")
    with pytest.raises(RuntimeError):
        p.hear("d", Reserved(1, 1, 0))
    monkeypatch.undo()
    p.core.fail("a defect in the engine")  # as the loop does: whoever waits for an answer hears of it
    messages = p.core.flush(p.now).gateways
    assert [type(message).__name__ for _, message in messages] == ["Failing"]


def test_fastdeploy_7_a_silent_decoder_stops_nobody():
    """There, one missing task stops the send thread, then the token thread, then the instance."""
    p = PeerScript()
    handed(p, number=1)
    handed(p, number=2)
    p.hear("d", Taken(2, 1))
    assert p.owned == (0, 3, 0)
    p.submit(3)
    (admit,) = [command for command in p.orders() if isinstance(command, Admit) and not command.handover]
    p.first_token(admit, 5, CloseReason.STOP)
    assert (3, 5) in p.tokens


def test_every_wait_is_shown_with_its_end():
    p = PeerScript()
    handed(p, number=1)
    p.submit(2, "e")
    shot = p.query("ledger")
    assert shot["exported"] == 3
    ((name, blocks),) = shot["exported_by"].items()
    assert blocks == 3
    assert "r1 to d" in name
    assert "handed" in name
    assert "3.0 s left" in name
    rows = shot["handovers"]["departures"]
    assert [(row["request"], row["state"], row["peer"]) for row in rows] == [
        ("r1", "handed", "d"),
        ("r2", "asking", "e"),
    ]
    assert all(row["seconds_left"] > 0 for row in rows)
    assert p.query("stats")["departures"]["handed"] == 1


def test_fastdeploy_8_nothing_that_is_sent_can_be_edited():
    """There, dicts are edited in place while another thread serialises them."""
    for kind in typing.get_args(PeerMessage):
        assert kind.__struct_config__.frozen, kind


def test_a_peer_that_talks_nonsense_changes_nothing():
    p = PeerScript()
    prepared(p)
    p.take()
    p.hear("d", Taken(1, 1))
    assert p.core.counters.violations == 1
    for message in (Taken(5, 1), Cancelled(5, 1, by_p=True), Cancelled(1, 1, by_p=False)):
        p.hear("d", message)
    assert p.take() == []
    p.hear("stranger", Refused(4, 4, "no_room", ""))
    p.hear("stranger", Renew(1.0, [(1, 1)]))
    assert p.take() == [], "its address is not known"
    assert p.owned[0] > 0
