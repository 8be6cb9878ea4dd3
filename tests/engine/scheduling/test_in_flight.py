"""Prompts that are being computed are shared at once.  The test plays the worker; blocks are of 4 tokens."""

from array import array

import pytest

from baton.engine.request import Outbox, Request
from baton.engine.scheduling.in_flight import WORTH_TOKENS, InFlight
from baton.engine.scheduling.ledger import Ledger
from baton.engine.scheduling.prefix import PrefixIndex, root_key
from baton.engine.scheduling.scheduler import Decisions, Scheduler
from baton.engine.states import Event, State
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.fair_queue import EVERYBODY, Flow

SYSTEM = range(100, 116)
"""Four blocks."""


class Bench:
    def __init__(self, num_blocks: int = 100, *, slots: int = 8, **options):
        self.ledger = Ledger(num_blocks, slots)
        self.prefix = PrefixIndex(self.ledger)
        self.scheduler = Scheduler(
            self.ledger,
            self.prefix,
            block_size=4,
            max_num_seqs=slots,
            max_model_len=4 * num_blocks,
            **options,
        )
        self.gateways = {}
        self._arrivals = 0

    def add(
        self,
        prompt,
        max_tokens=4,
        *,
        priority=0,
        salt="",
        gateway="g",
        flow=EVERYBODY,
        patient=False,
        **sampling,
    ):
        self._arrivals += 1
        outbox = self.gateways.setdefault(gateway, Outbox(gateway.encode()))
        outbox.name = gateway
        request = Request(
            outbox,
            self._arrivals,
            f"r{self._arrivals}",
            array("i", prompt),
            Sampling(seed=0, **sampling),
            Stopping(max_tokens=max_tokens),
            priority=priority,
            number=self._arrivals,
            arrived=0.0,
            cache_salt=salt,
            root=root_key(salt),
            flow=flow,
            patient=patient,
        )
        self.scheduler.enqueue(request)
        return request

    def decide(self) -> Decisions:
        decisions = self.scheduler.decide()
        self.ledger.check()
        assert self.scheduler.decide() == Decisions(), "deciding twice decides nothing the second time"
        for admission in decisions.admitted:
            admission.request.begun = True
        return decisions

    def admits(self) -> dict[Request, int]:
        """Who the worker is told of, with so many tokens computed."""
        return {one.request: one.num_computed for one in self.decide().admitted}

    def computed(self, request: Request, num_tokens: int) -> None:
        self.scheduler.computed(request, num_tokens)

    def grow(self, request: Request, count: int) -> None:
        for _ in range(count):
            request.tokens.append(7)
            if len(request.tokens) >= request.watermark:
                self.scheduler.progress(request)

    def close(self, request: Request, event: Event) -> None:
        request.advance(event)
        self.scheduler.release(request)
        if request.state is State.WAITING:
            self.scheduler.enqueue(request)

    def cancel_follower(self, request: Request) -> None:
        request.advance(Event.CANCEL)
        self.scheduler.release(request)

    def table(self, request: Request) -> list[int]:
        return list(self.ledger.table(request.slot))


def states(*requests: Request) -> str:
    return " ".join(request.state.value for request in requests)


def test_the_same_prompt_eight_times_is_computed_once():
    bench = Bench(num_blocks=200)
    first, *others = [bench.add(range(33), 8) for _ in range(8)]
    assert bench.admits() == {first: 0}
    assert all(other.state is State.FOLLOWING for other in others)
    shared = bench.table(first)[:8]
    assert all(bench.table(other)[:8] == shared for other in others)
    assert len(bench.table(first)) == 10, "33 tokens, and 7 that follow"
    assert bench.ledger.num_held == 10 + 7 * 2
    assert bench.scheduler.admissions._uncomputed == 33 + 7 * 1
    bench.computed(first, 31)
    assert bench.admits() == {}
    bench.computed(first, 33)
    assert bench.admits() == dict.fromkeys(others, 32)
    assert bench.scheduler.num_following == 0


def test_who_shares_a_beginning_goes_on_as_soon_as_that_is_computed():
    bench = Bench()
    first = bench.add([*SYSTEM, *range(40)])
    bench.decide()
    late = bench.add([*SYSTEM, 1, 2, 3])
    assert bench.decide().following == [late]
    bench.computed(first, 15)
    assert bench.admits() == {}
    bench.computed(first, 16)
    assert bench.admits() == {late: 16}
    assert first.state is State.RUNNING
    assert len(bench.prefix) == 4


def test_who_comes_in_the_middle_waits_for_what_is_left():
    bench = Bench()
    first = bench.add(range(24))
    bench.decide()
    bench.computed(first, 8)
    second = bench.add(range(24))
    (following,) = bench.decide().following
    assert following is second
    bench.computed(first, 24)
    (admission,) = bench.decide().admitted
    assert (admission.num_computed, admission.num_followed) == (20, 12)


@pytest.mark.parametrize(
    "event", [Event.ABORTED, Event.PREEMPTED, Event.ERROR, Event.STOP, Event.HANDED_OVER]
)
def test_when_the_first_goes_the_next_one_goes_on_where_it_was(event):
    bench = Bench()
    first, second, third = [bench.add(range(33)) for _ in range(3)]
    bench.decide()
    bench.computed(first, 18)
    wanted = {Event.ABORTED: Event.CANCEL, Event.PREEMPTED: Event.PREEMPT}.get(event)
    if wanted is not None:
        first.advance(wanted)
        bench.scheduler.stop_running(first)
    assert bench.decide() == Decisions(), "the worker may be computing it still"
    bench.close(first, event)
    if event is Event.PREEMPTED:
        assert bench.admits() == {first: 16}
        assert states(second, third) == "following following"
        bench.close(first, Event.STOP)
    bench.decide()
    assert states(second, third) == "running following"
    assert second.computed == 16
    bench.computed(second, 33)
    assert bench.admits() == {third: 32}


def test_what_the_first_computes_while_it_is_being_closed_counts():
    bench = Bench()
    first, second = bench.add(range(33)), bench.add(range(33))
    bench.decide()
    first.advance(Event.CANCEL)
    bench.scheduler.stop_running(first)
    bench.computed(first, 20)
    bench.close(first, Event.ABORTED)
    assert bench.admits() == {second: 20}


def test_one_that_follows_is_followed_and_leaves():
    bench = Bench()
    root = bench.add([*SYSTEM, 1])
    branch = bench.add([*SYSTEM, *range(16), 2])
    leaf = bench.add([*SYSTEM, *range(16), 3])
    bench.decide()
    assert states(root, branch, leaf) == "running following following"
    assert bench.table(leaf)[:8] == bench.table(branch)[:8]
    bench.cancel_follower(branch)
    bench.decide()
    assert states(root, branch, leaf) == "running gone following"
    bench.computed(root, 17)
    assert bench.admits() == {leaf: 16}


def test_two_branches_of_one_beginning_wait_for_each_their_own():
    bench = Bench()
    root = bench.add([*SYSTEM, 1])
    branch = bench.add([*SYSTEM, *range(16), 2])
    leaf = bench.add([*SYSTEM, *range(16), 3])
    bench.decide()
    bench.computed(root, 17)
    assert bench.admits() == {branch: 16}
    bench.computed(branch, 30)
    assert bench.admits() == {}, "of its own part the last block is missing"
    bench.computed(branch, 33)
    assert bench.admits() == {leaf: 32}


def test_when_all_of_a_chain_leave_nothing_is_held():
    bench = Bench()
    requests = [bench.add([*SYSTEM, *range(4 * length), 1]) for length in range(6)]
    bench.decide()
    assert [request.state for request in requests].count(State.FOLLOWING) == 5
    for request in requests[3:] + requests[1:3]:
        request.advance(Event.CANCEL)
        bench.scheduler.withdraw(request) if request.slot < 0 else bench.scheduler.release(request)
        bench.decide()
    bench.close(requests[0], Event.ERROR)
    assert bench.ledger.num_held == 0
    flight = bench.scheduler._in_flight
    assert (flight._fillers, flight._followers, flight._behind) == ({}, {}, {})


def test_other_salts_and_other_gateways_word_and_prompt_logprobs_are_computed_apart():
    bench = Bench()
    bench.add(range(33), salt="a")
    other = bench.add(range(33), salt="b")
    thorough = bench.add(range(33), salt="a", prompt_logprobs=0)
    assert set(bench.admits()) >= {other, thorough}


def test_what_rests_on_another_gateways_word_is_followed_by_that_gateway_alone():
    bench = Bench()
    first = bench.add(range(33), gateway="one")
    bench.decide()
    first.origin = "one"
    same, stranger = bench.add(range(33), gateway="one"), bench.add(range(33), gateway="two")
    decisions = bench.decide()
    assert decisions.following == [same]
    assert same.origin == "one"
    assert [(one.request, one.num_computed) for one in decisions.admitted] == [(stranger, 0)]
    assert stranger.origin == ""


def test_one_that_wants_prompt_logprobs_is_followed_where_nobody_was_before():
    bench = Bench()
    root = bench.add([*SYSTEM, 1])
    thorough = bench.add([*SYSTEM, *range(16), 2], prompt_logprobs=0)
    leaf = bench.add([*SYSTEM, *range(16), 3])
    bench.decide()
    assert states(root, thorough, leaf) == "running running following"
    assert bench.table(leaf)[:4] == bench.table(root)[:4]
    assert bench.table(leaf)[4:8] == bench.table(thorough)[4:8]
    bench.computed(thorough, 33)
    assert bench.admits() == {}, "the beginning is shared with another one"
    bench.close(root, Event.ERROR)
    assert bench.admits() == {leaf: 32}, "which is gone, and the other one has computed all of it"


def test_nobody_follows_whom_the_worker_may_choose_later():
    bench = Bench(num_blocks=400, in_order=False)
    low = bench.add(range(33), priority=1)
    bench.decide()
    ran = bench.add(range(33))
    ran.num_prompt = 32  # it has a token: the worker computes it before those that have none
    also = bench.add(range(33))
    decisions = bench.decide()
    assert [one.request for one in decisions.admitted] == [ran]
    assert decisions.following == [also]
    assert bench.table(also)[:8] == bench.table(ran)[:8] != bench.table(low)[:8]
    long, short = bench.add([*SYSTEM, *range(100)]), bench.add([*SYSTEM, 1])
    assert list(bench.admits()) == [long, short]
    assert states(low, ran, also, long, short).count("running") == 4


# -- priority is lent


def urgencies(*requests: Request) -> list[tuple[int, bool]]:
    """Of each request, the priority by which it is computed, and whether somebody waits for its tokens."""
    return [(request.urgency[0], request.hurried) for request in requests]


@pytest.mark.parametrize("in_order", [True, False])
def test_who_computes_for_one_of_better_priority_is_as_urgent(in_order):
    """Until that is computed, and not longer."""
    bench = Bench(num_blocks=400, in_order=in_order)
    low = bench.add([*SYSTEM, *range(17)], priority=5)
    assert bench.decide().lent == []
    high = bench.add([*SYSTEM, 1], priority=-1)
    decisions = bench.decide()
    assert (decisions.following, decisions.lent) == ([high], [low])
    assert low.urgency == high.rank
    bench.computed(low, 12)
    assert bench.decide().lent == []
    bench.computed(low, 16)
    decisions = bench.decide()
    assert [one.request for one in decisions.admitted] == [high]
    assert decisions.lent == [low]
    assert low.urgency == low.rank == (5, low.number)


@pytest.mark.parametrize("event", [Event.CANCEL, Event.GIVE_UP])
def test_what_was_lent_goes_with_the_one_that_lent_it(event):
    bench = Bench(num_blocks=400)
    low = bench.add([*SYSTEM, 1], priority=5)
    bench.decide()
    middle, high = bench.add([*SYSTEM, 2], priority=3), bench.add([*SYSTEM, 3], priority=0)
    bench.decide()
    assert urgencies(low, middle, high) == [(0, True), (3, True), (0, True)]
    high.advance(event)
    bench.scheduler.release(high)
    assert bench.decide().lent == [low]
    assert urgencies(low, middle) == [(3, True), (3, True)]


def test_one_that_follows_hands_on_what_it_is_lent():
    """`second` follows `first` and is followed; what it hands on goes when the last one goes."""
    bench = Bench(num_blocks=400)
    first = bench.add([*SYSTEM, 1], priority=7)
    bench.decide()
    second = bench.add([*SYSTEM, *range(16), 2], priority=6)
    bench.decide()
    third = bench.add([*SYSTEM, *range(16), 3], priority=2)
    bench.decide()
    assert [one.urgency[0] for one in (first, second, third)] == [2, 2, 2]
    bench.computed(first, 16)
    decisions = bench.decide()
    assert [one.request for one in decisions.admitted] == [second]
    assert set(decisions.lent) == {first}  # (what `second` is lent stands in its `Admit`)
    assert [one.urgency[0] for one in (first, second, third)] == [7, 2, 2]
    bench.computed(second, 32)
    assert bench.decide().lent == [second]
    assert second.urgency[0] == 6


def test_what_is_lent_reaches_those_that_are_waited_for_by_way_of_others():
    """`high` waits for `brief`, which took the first blocks over, and `second`, which waits for `first`."""
    bench = Bench(num_blocks=400, in_order=False)
    first = bench.add([*SYSTEM, *range(60)], priority=7)
    bench.decide()
    second = bench.add([*SYSTEM, *range(200, 236)], priority=6)
    bench.decide()
    brief = bench.add([*SYSTEM, 1], priority=5)
    assert list(bench.admits()) == [brief]
    high = bench.add([*SYSTEM, *range(200, 216), 2], priority=0)
    assert set(bench.decide().lent) == {brief, first}
    assert bench.table(high)[:4] == bench.table(brief)[:4] != bench.table(second)[:4]
    assert urgencies(first, second, brief, high) == [(0, True)] * 4
    high.advance(Event.CANCEL)
    bench.scheduler.release(high)
    assert set(bench.decide().lent) == {brief, first}
    assert [one.urgency[0] for one in (first, second, brief)] == [6, 6, 5]


def test_haste_is_lent_too():
    bench = Bench(num_blocks=400)
    whole = bench.add([*SYSTEM, 1], patient=True)
    bench.decide()
    also = bench.add([*SYSTEM, 2], patient=True)
    assert bench.decide().lent == []
    stream = bench.add([*SYSTEM, 3])
    assert bench.decide().lent == [whole]
    assert urgencies(whole, also, stream) == [(0, True), (0, False), (0, True)]


def test_many_that_wait_for_each_other_cost_little(monkeypatch):
    """Each turn of a conversation follows all before it: what is lent goes through each of them once."""
    calls = []
    lend = InFlight._lend
    monkeypatch.setattr(InFlight, "_lend", lambda self, *args: (calls.append(1), lend(self, *args)))
    bench = Bench(num_blocks=2000, slots=24)
    prompt = []
    for turn in range(24):
        prompt = [*prompt, *range(100 * turn, 100 * turn + 16)]
        bench.add([*prompt, -1 - turn], priority=24 - turn)
        bench.decide()
    assert bench.scheduler.num_following == 23
    assert len(calls) <= 24**3


def test_who_is_lent_priority_gives_way_as_late_as_the_one_that_lent_it():
    """And after it: while it waits, its blocks are of no use."""
    bench, old, middle, dear, cheap = contested()
    while not (decisions := bench.decide()).preempted:
        bench.grow(old, 1)
    assert (decisions.preempted, decisions.gave_up) == ([middle], [])
    bench.close(middle, Event.PREEMPTED)
    while not (decisions := bench.decide()).gave_up:
        bench.grow(old, 1)
    assert (decisions.preempted, decisions.gave_up) == ([], [cheap])
    while not (decisions := bench.decide()).preempted:
        bench.grow(old, 1)
    assert decisions.preempted == [dear]


def contested() -> tuple[Bench, Request, Request, Request, Request]:
    """`old` will want blocks; `cheap`, of better priority than `middle`, follows `dear`, of a worse one."""
    bench = Bench(14, admission_headroom=0)
    old, middle = bench.add(range(8), 49), bench.add(range(30, 37), 1, priority=2)
    dear = bench.add(range(50, 67), 1, priority=3)
    bench.decide()
    cheap = bench.add(range(50, 67), 1, priority=1)
    assert bench.decide().lent == [dear]
    assert states(old, middle, dear, cheap) == "running running running following"
    return bench, old, middle, dear, cheap


def test_little_is_not_waited_for():
    bench = Bench(num_blocks=400)
    bench.add(range(4 * WORTH_TOKENS // 4))
    bench.decide()
    short = bench.add([*range(8), *range(500, 540)])
    long = bench.add([*range(WORTH_TOKENS), *range(500, 500 + 1000)], 1)
    decisions = bench.decide()
    assert [one.request for one in decisions.admitted] == [short]
    assert decisions.following == [long]


def hungry() -> tuple[Bench, Request, Request, Request]:
    """`old` will want the blocks of the others, of which `cheap` follows `dear`."""
    bench = Bench(14, admission_headroom=0)
    old = bench.add(range(8), 49)
    dear, cheap = bench.add(range(50, 67), 1, priority=1), bench.add(range(50, 67), 1, priority=2)
    bench.decide()
    assert states(old, dear, cheap) == "running running following"
    assert bench.ledger.available == 14 - (4 + 5 + 1)
    while bench.ledger.available:
        bench.grow(old, 1)
        bench.decide()
    return bench, old, dear, cheap


def test_one_that_follows_gives_way_at_once():
    bench, old, dear, cheap = hungry()
    while bench.scheduler.admissions.line.head() is None:
        bench.grow(old, 1)
        decisions = bench.decide()
    assert decisions.gave_up == [cheap]
    assert not decisions.preempted
    assert [(request, len(blocks)) for request, blocks in decisions.grown] == [(old, 1)]
    assert states(old, dear, cheap) == "running running waiting"
    assert bench.ledger.num_held == 14


def test_blocks_that_a_follower_has_too_do_not_come_with_the_first():
    """So when the first gives way, the one that follows it does too, if only that is enough."""
    bench, old, dear, cheap = hungry()
    dear.rank = dear.urgency = (3, dear.number)  # (as if nothing were lent)
    cheap.rank = cheap.urgency = (2, cheap.number)
    while dear.state is State.RUNNING:
        bench.grow(old, 1)
        decisions = bench.decide()
    assert (decisions.preempted, decisions.gave_up) == ([dear], [])
    assert bench.ledger.yield_of([dear.slot]) == 1
    bench.close(dear, Event.PREEMPTED)
    decisions = bench.decide()
    assert [request for request, _ in decisions.grown] == [old]
    assert states(old, dear, cheap) == "running waiting waiting"


def test_paused_nobody_begins():
    bench = Bench()
    first, second = bench.add(range(33)), bench.add(range(33))
    bench.decide()
    bench.scheduler.pause(True)
    bench.computed(first, 33)
    assert bench.admits() == {}
    bench.scheduler.pause(False)
    assert bench.admits() == {second: 32}


def test_for_new_weights_those_that_follow_wait_again_at_once():
    bench = Bench()
    first, second, third = [bench.add(range(33)) for _ in range(3)]
    bench.decide()
    assert bench.scheduler.drain() == [first]
    assert states(first, second, third) == "preempting waiting waiting"
    assert bench.scheduler.num_occupied == 1
    bench.close(first, Event.PREEMPTED)
    bench.scheduler.reset_prefix()
    bench.scheduler.end_drain()
    assert bench.admits() == {first: 0}
    assert states(second, third) == "following following"


def test_after_a_reset_nobody_new_follows():
    bench = Bench()
    first, second = bench.add(range(33)), bench.add(range(33))
    bench.decide()
    bench.scheduler.reset_prefix()
    third, fourth = bench.add(range(33)), bench.add(range(33))
    assert bench.admits() == {third: 0}
    assert bench.table(fourth)[0] == bench.table(third)[0] != bench.table(second)[0]
    bench.computed(first, 33)
    assert bench.admits() == {second: 32}
    assert len(bench.prefix) == 0
    bench.computed(third, 33)
    assert bench.admits() == {fourth: 32}


def test_a_flow_pays_for_what_its_request_computes_instead_of_another():
    bench = Bench(slots=2)
    one, two = Flow("one"), Flow("two")
    first, second = bench.add(range(33), flow=one), bench.add(range(33), flow=two)
    bench.add(range(200, 210), flow=one)
    bench.add(range(300, 310), flow=two)
    bench.decide()
    assert states(first, second) == "running following"
    assert second.charged == 1
    before = second.share.parent.parent.tag
    bench.close(first, Event.ERROR)
    bench.decide()
    assert second.charged == 33
    assert second.share.parent.parent.tag == before + 32


def test_reports_cost_nothing_while_nobody_follows_and_each_block_once():
    """Counted: looks at keys."""
    bench = Bench(num_blocks=3000)
    first = bench.add(range(8000), 100)
    bench.decide()
    looks = 0

    class Counting(dict):
        def get(self, key, default=None):
            nonlocal looks
            looks += 1
            return super().get(key, default)

    flight = bench.scheduler._in_flight
    flight._fillers = Counting(flight._fillers)
    for end in range(80, 8001, 80):
        bench.computed(first, end)
    assert looks == 2000
    bench.grow(first, 4)
    assert looks == 2000, "generated tokens are nobody's to wait for"
    assert not flight._fillers
