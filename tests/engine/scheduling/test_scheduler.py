"""The scheduler alone: the test plays the worker."""

from array import array

import pytest

from baton.engine.request import NEVER, Outbox, Request
from baton.engine.scheduling.ledger import Ledger
from baton.engine.scheduling.prefix import PrefixIndex
from baton.engine.scheduling.scheduler import Decisions, Headroom, Scheduler
from baton.engine.states import Event, State
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.fair_queue import EVERYBODY, Flow


class Bench:
    def __init__(
        self,
        num_blocks: int,
        *,
        slots: int = 8,
        caching: bool = False,
        headroom: int | None = None,
        prefill_ahead: int | None = None,
    ):
        self.ledger = Ledger(num_blocks, slots)
        self.scheduler = Scheduler(
            self.ledger,
            PrefixIndex(self.ledger) if caching else None,
            block_size=4,
            max_num_seqs=slots,
            max_model_len=4 * num_blocks,
            admission_headroom=headroom,
            prefill_ahead=prefill_ahead,
        )
        self._arrivals = 0

    def add(
        self, num_prompt: int, max_tokens: int, priority: int = 0, first: int = 0, flow: Flow = EVERYBODY
    ) -> Request:
        self._arrivals += 1
        tokens = array("i", range(first, first + num_prompt))
        request = Request(
            Outbox(b"g"),
            self._arrivals,
            f"r{self._arrivals}",
            tokens,
            Sampling(seed=0),
            Stopping(max_tokens=max_tokens),
            priority=priority,
            number=self._arrivals,
            arrived=0.0,
            flow=flow,
        )
        self.scheduler.enqueue(request)
        return request

    def decide(self):
        decisions = self.scheduler.decide()
        self.ledger.check()
        assert not self.scheduler.due
        again = self.scheduler.decide()
        assert again == Decisions()
        return decisions

    def grow(self, request: Request, count: int) -> None:
        """So many tokens were sampled."""
        for _ in range(count):
            request.tokens.append(7)
            if len(request.tokens) >= request.watermark:
                self.scheduler.progress(request)

    def close(self, request: Request, event: Event = Event.LENGTH) -> None:
        request.advance(event)
        self.scheduler.release(request)
        if request.state is State.WAITING:
            self.scheduler.enqueue(request)


def admitted(decisions) -> list[Request]:
    return [admission.request for admission in decisions.admitted]


def test_first_come_first_served_within_a_priority():
    bench = Bench(100, slots=3)
    low, first, second, urgent = (bench.add(4, 4, priority) for priority in (5, 0, 0, -1))
    assert admitted(bench.decide()) == [urgent, first, second]
    bench.close(first)
    assert admitted(bench.decide()) == [low]


def test_what_does_not_fit_blocks_what_is_behind_it():
    bench = Bench(10)
    bench.add(20, 4)
    big, small = bench.add(24, 4), bench.add(1, 1)
    assert len(bench.decide().admitted) == 1
    assert big.state is small.state is State.WAITING


def test_admission_gives_blocks_for_the_prompt_and_the_lookahead_but_never_beyond_the_limit():
    bench = Bench(100)
    long, short = bench.add(9, 100), bench.add(9, 2)
    bench.decide()
    assert len(bench.ledger.table(long.slot)) == 5  # 9 tokens and 8 ahead
    assert len(bench.ledger.table(short.slot)) == 3  # 9 and the first generated one; the second is never fed
    assert short.watermark == NEVER


def test_growth_is_sent_ahead_of_need_and_ends_at_the_limit():
    bench = Bench(100)
    request = bench.add(5, 20)
    bench.decide()
    sent = []
    while len(request.tokens) < 25:
        assert len(request.tokens) <= 4 * request.held
        bench.grow(request, 1)
        for owner, blocks in bench.decide().grown:
            assert owner is request
            sent.append(len(blocks))
            assert 4 * request.held - len(request.tokens) >= bench.scheduler.lookahead or request.held == 6
    assert request.held == 6  # 24 tokens are fed
    assert sum(sent) == 6 - 4


def starving(bench: Bench, *requests: Request) -> None:
    """All of them have grown as far as their blocks go."""
    bench.decide()
    for request in requests:
        bench.grow(request, 4 * request.held - len(request.tokens))


def test_the_victim_is_the_youngest_of_the_lowest_priority():
    bench = Bench(16, headroom=8)
    old, precious, cheap = bench.add(8, 40), bench.add(8, 40, -1), bench.add(8, 40, 3)
    starving(bench, precious)
    assert [r.state for r in (old, precious, cheap)] == [State.RUNNING] * 3
    bench.grow(old, 8)
    bench.decide()
    bench.grow(old, 4 * old.held - len(old.tokens))
    bench.grow(precious, 4 * precious.held - len(precious.tokens))
    assert bench.decide().preempted == [cheap]


def two_hungry(headroom: int = 8) -> tuple[Bench, Request, Request]:
    bench = Bench(8, headroom=headroom)
    old, young = bench.add(8, 20), bench.add(8, 20)
    starving(bench, old, young)
    return bench, old, young


def test_blocks_stay_the_victims_until_it_is_closed_and_are_waited_for():
    bench, old, young = two_hungry()
    held = list(bench.ledger.table(young.slot))
    assert bench.decide().preempted == [young]
    assert list(bench.ledger.table(young.slot)) == held
    bench.grow(old, 0)
    bench.scheduler.progress(old)  # still no room: the need must not choose a second victim
    assert not bench.decide().preempted
    assert old.state is State.RUNNING
    bench.close(young, Event.PREEMPTED)
    decisions = bench.decide()
    assert [owner for owner, _ in decisions.grown] == [old]
    assert not decisions.admitted


def test_one_need_does_not_preempt_two():
    bench = Bench(12, headroom=8)
    requests = [bench.add(8, 20) for _ in range(3)]
    bench.decide()
    bench.grow(requests[0], 8)
    assert bench.decide().preempted == [requests[2]]


def test_the_one_that_wants_gives_way_itself_if_it_is_the_youngest():
    bench = Bench(8, headroom=8)
    old, young = bench.add(8, 20), bench.add(8, 20)
    starving(bench, young)
    assert bench.decide().preempted == [young]
    assert old.state is State.RUNNING


def test_a_want_that_is_not_urgent_preempts_nobody():
    bench = Bench(8, headroom=8)
    old, _ = bench.add(8, 20), bench.add(8, 20)
    bench.decide()
    bench.grow(old, 4)
    assert not bench.decide().preempted
    bench.grow(old, 2)
    assert not bench.decide().preempted
    bench.grow(old, 1)
    assert len(bench.decide().preempted) == 1


def test_what_is_being_closed_anyway_is_waited_for_and_not_chosen():
    bench, old, young = two_hungry()
    young.advance(Event.CANCEL)
    bench.scheduler.stop_running(young)
    assert not bench.decide().preempted
    bench.close(young, Event.ABORTED)
    assert len(bench.decide().grown) == 1
    assert old.state is State.RUNNING


def test_a_preempted_request_is_ahead_of_its_class_and_keeps_its_tokens():
    bench, old, young = two_hungry()
    later, urgent = bench.add(1, 1), bench.add(1, 1, -1)
    bench.decide()
    length = len(young.tokens)
    bench.close(young, Event.PREEMPTED)
    order = admitted(bench.decide())
    bench.close(old, Event.STOP)
    order += admitted(bench.decide())
    assert order == [urgent, young, later]
    assert len(young.tokens) == length


def test_wants_are_served_by_rank():
    bench = Bench(13, headroom=8)
    old, young, last = bench.add(8, 30), bench.add(8, 30), bench.add(8, 30)
    bench.decide()
    bench.grow(young, 4)
    bench.grow(old, 4)
    decisions = bench.decide()
    assert [owner for owner, _ in decisions.grown] == [old]
    bench.close(last, Event.STOP)
    assert [owner for owner, _ in bench.decide().grown] == [young]


def test_nobody_is_admitted_while_somebody_wants_blocks():
    bench = Bench(8, headroom=8)
    old, young = bench.add(8, 20), bench.add(8, 20)
    bench.decide()
    bench.grow(old, 5)
    bench.decide()
    bench.add(1, 1, -5)
    assert not bench.decide().admitted
    bench.close(young, Event.STOP)
    assert admitted(bench.decide())


def test_headroom_keeps_room_for_the_growth_of_what_runs():
    bench = Bench(40, headroom=64)
    first, second = bench.add(4, 100), bench.add(4, 100)
    assert admitted(bench.decide()) == [first, second]  # 17 blocks each, in 64 tokens
    third = bench.add(4, 100)
    assert not bench.decide().admitted
    bench.close(first, Event.STOP)
    assert admitted(bench.decide()) == [third]


def test_headroom_never_stops_the_only_request():
    bench = Bench(10, headroom=10_000)
    request = bench.add(20, 21)  # exactly the pool: 40 tokens are fed
    assert admitted(bench.decide()) == [request]


def test_headroom_reacts_once_to_what_follows_from_one_admission():
    headroom = Headroom(8, 1_000_000)
    start = headroom.tokens
    headroom.on_admission()
    for _ in range(5):
        headroom.on_preemption()
    assert headroom.tokens == 2 * start
    headroom.on_admission()
    headroom.on_preemption()
    assert headroom.tokens == 4 * start


def test_headroom_shrinks_with_success_and_stays_in_its_bounds():
    headroom = Headroom(8, 500)
    for _ in range(1000):
        headroom.on_finish()
    assert headroom.tokens == 8
    for _ in range(20):
        headroom.on_admission()
        headroom.on_preemption()
    assert headroom.tokens == 500
    assert Headroom(32, 16).tokens == 32


def test_a_prefix_is_shared_after_it_was_reported_and_never_covers_the_last_token():
    bench = Bench(40, caching=True)
    first = bench.add(8, 4)
    bench.decide()
    second = bench.add(8, 4)
    assert bench.decide().following == [second], "nothing was reported"
    bench.scheduler.computed(first, 8)
    third, longer = bench.add(8, 4), bench.add(9, 4)
    shares = {admission.request: admission for admission in bench.decide().admitted}
    assert shares[third].num_computed == 4
    assert shares[longer].num_computed == 8
    assert shares[longer].blocks[:2] == list(bench.ledger.table(first.slot))[:2]
    assert shares[third].blocks[1] != shares[longer].blocks[1]


def test_generated_blocks_enter_the_index_when_their_last_token_was_fed():
    bench = Bench(40, caching=True)
    request = bench.add(4, 20)
    bench.decide()
    bench.scheduler.computed(request, 4)
    bench.grow(request, 4)
    bench.scheduler.progress(request)
    assert len(bench.scheduler.prefix) == 1, "the eighth token was sampled, not fed"
    bench.grow(request, 1)
    assert len(bench.scheduler.prefix) == 2


def test_after_a_reset_nothing_computed_before_enters_the_index():
    bench = Bench(40, caching=True)
    request = bench.add(4, 20)
    bench.decide()
    bench.scheduler.computed(request, 4)
    assert bench.scheduler.reset_prefix() == 1
    bench.grow(request, 10)
    assert len(bench.scheduler.prefix) == 0


def test_paused_nobody_is_admitted_or_preempted():
    bench, _, young = two_hungry()
    bench.scheduler.pause(True)
    waiting = bench.add(1, 1)
    decisions = bench.decide()
    assert not decisions.preempted
    assert waiting.state is State.WAITING
    bench.scheduler.pause(False)
    assert bench.decide().preempted == [young]


def test_withdrawn_requests_leave_no_trace_in_the_queue():
    bench = Bench(100, slots=1)
    bench.add(4, 4)
    bench.decide()
    for _ in range(200):
        request = bench.add(4, 4)
        request.advance(Event.CANCEL)
        bench.scheduler.withdraw(request)
    assert bench.scheduler.num_waiting == 0
    assert not list(bench.scheduler.waiting_requests())


def test_a_request_behind_a_cancelled_head_is_looked_at():
    bench = Bench(10)
    bench.add(30, 4)
    bench.decide()
    head = bench.add(30, 4)
    bench.decide()
    head.advance(Event.CANCEL)
    bench.scheduler.withdraw(head)
    bench.decide()
    small = bench.add(1, 1)
    assert bench.scheduler.due
    assert admitted(bench.decide()) == [small]


@pytest.mark.parametrize("seed", range(3))
def test_admitting_and_preempting_in_turn_comes_to_an_end(seed):
    """Every request uses all of its max_tokens: preemptions must be few, whatever H was at first."""
    bench = Bench(120, slots=32)
    alive = [bench.add(4 + (i + seed) % 9, 100) for i in range(200)]
    preemptions = finished = 0
    for _ in range(20_000):
        decisions = bench.decide()
        preemptions += len(decisions.preempted)
        for victim in decisions.preempted:
            bench.close(victim, Event.PREEMPTED)
        for request in [r for r in alive if r.state is State.RUNNING]:
            if len(request.tokens) < 4 * request.held + 1:
                bench.grow(request, 1)
            if request.num_generated == 100:
                bench.scheduler.headroom.on_finish()
                bench.close(request)
                alive.remove(request)
                finished += 1
        if not alive:
            break
    assert finished == 200
    assert preemptions <= 200 / 10


def test_newcomers_are_admitted_fairly_by_flow():
    bench = Bench(100, slots=1)
    flood = [bench.add(8, 4, flow=Flow("a")) for _ in range(5)]
    assert admitted(bench.decide()) == flood[:1]
    late = bench.add(8, 4, flow=Flow("b"))
    order = []
    while bench.scheduler.num_waiting:
        running = next(request for request in bench.scheduler.slots if request)
        bench.close(running)
        order += admitted(bench.decide())
    assert order == [flood[1], late, *flood[2:]]


def test_what_runs_is_charged_for_what_it_generates_while_others_wait():
    bench = Bench(100, slots=2)
    talker = bench.add(4, 200, flow=Flow("a"))
    other = bench.add(4, 4, flow=Flow("b"))
    bench.decide()
    waits_a, waits_b = bench.add(4, 4, flow=Flow("a")), bench.add(4, 4, flow=Flow("b"))
    bench.decide()
    bench.grow(talker, 100)
    bench.close(other)
    assert admitted(bench.decide()) == [waits_b]
    bench.close(waits_b)
    assert admitted(bench.decide()) == [waits_a]


def test_what_was_generated_while_nobody_waited_is_free():
    bench = Bench(100, slots=2)
    talker = bench.add(4, 300, flow=Flow("a"))
    other = bench.add(4, 4, flow=Flow("b"))
    bench.decide()
    bench.grow(talker, 200)
    bench.decide()
    first, second = bench.add(4, 4, flow=Flow("a")), bench.add(4, 4, flow=Flow("b"))
    bench.decide()
    bench.close(other)
    assert admitted(bench.decide()) == [first]
    bench.close(first)
    assert admitted(bench.decide()) == [second]


def test_what_ran_before_comes_before_every_newcomer():
    bench = Bench(100, slots=1)
    first = bench.add(8, 40, flow=Flow("a"))
    bench.decide()
    bench.grow(first, 20)
    bench.add(8, 4, flow=Flow("b"))
    bench.decide()
    first.advance(Event.PREEMPT)
    bench.scheduler.stop_running(first)
    bench.close(first, Event.PREEMPTED)
    assert admitted(bench.decide()) == [first]


def test_the_worker_is_given_no_more_prompts_than_it_needs_to_stay_busy():
    bench = Bench(1000, slots=50, prefill_ahead=64)
    flood = [bench.add(20, 4, flow=Flow("a")) for _ in range(40)]
    assert admitted(bench.decide()) == flood[:4]  # 60 tokens are less than 64, 80 are not
    late = bench.add(20, 4, flow=Flow("b"))
    bench.scheduler.computed(flood[0], 16)
    assert not bench.scheduler.due
    bench.scheduler.computed(flood[0], 17)
    assert bench.scheduler.due
    assert admitted(bench.decide()) == flood[4:5]
    bench.scheduler.computed(flood[1], 20)
    assert admitted(bench.decide()) == [late]
    for request in flood[:5]:  # what is closed has nothing left to compute
        request.advance(Event.CANCEL)
        bench.scheduler.stop_running(request)
    assert bench.scheduler.due
    assert len(admitted(bench.decide())) == 3


def test_a_prompt_that_is_longer_than_all_that_is_given_ahead_runs():
    bench = Bench(1000, slots=4, prefill_ahead=8)
    long = bench.add(100, 4)
    assert admitted(bench.decide()) == [long]
