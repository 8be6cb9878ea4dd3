"""The core against a worker that the test plays by hand, and against the simulated one."""

import logging
import math
import re

import msgspec
import pytest

from baton.engine.core import EngineCore
from baton.engine.standing import UNHEARD_S
from baton.engine.states import TRANSITIONS, Event, IllegalTransition, State
from baton.engine.workers.handshake import DYING_S
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.config import CostModel
from baton.protocol.messages.commands import Abort, Admit, Control, Grow, Pace, Preempt
from baton.protocol.messages.reports import (
    Closed,
    CloseReason,
    PromptLogprobs,
    StepReport,
    WorkerFailed,
    WorkerReady,
)
from baton.protocol.messages.requests import (
    Cancel,
    Failing,
    Hello,
    Outputs,
    Query,
    QueryReply,
    Submit,
    Welcome,
)
from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import LogitBias, Sampling, Stopping, TokenLogprobs
from baton.protocol.rules.fair_queue import Flow
from baton.protocol.rules.silence import LOOKS, MAX_VOIDS
from tests.engine.world import World


class Script:
    """One core; the test speaks for gateways and workers."""

    def __init__(self, *, ranks: int = 1, ready: bool = True, **changes):
        options = {
            "model": "",
            "max_model_len": 64,
            "block_size": 4,
            "max_num_seqs": 4,
            "step_timeout_s": 10.0,
            "load_interval_s": 0.0,
        }
        self.config = instance_config(**{**options, **changes})
        self.now = 0.0
        self.core = EngineCore(self.config, incarnation="i1", workers=list(range(1, ranks + 1)), now=0.0)
        self.step = 0
        self.submitted = 0
        self.outputs: list[tuple[bytes, object]] = []
        if ready:
            for rank in range(ranks):
                self.report(self.ready(rank), rank)
            self.tell(Hello("gate"))
            self.take()

    @staticmethod
    def ready(rank: int = 0, **changes) -> WorkerReady:
        values = {"num_blocks": 16, "block_size": 4, "tile": "t", "block_bytes": 64, "vocab_size": 100}
        return WorkerReady(rank, **{**values, **changes})

    def tell(self, message, gateway: bytes = b"g"):
        self.core.on_message(gateway, message, self.now)
        return self.flush()

    def report(self, report, rank: int = 0):
        self.core.on_report(rank, report, self.now)
        return self.flush()

    def flush(self):
        batch, messages, _ = self.core.flush(self.now)
        self.outputs += messages
        if self.core.ready:
            self.core.scheduler.ledger.check()
        return batch.commands if batch else []

    def wait_until(self, moment: float) -> None:
        """Time passes, and the clock is looked at whenever the core wants it."""
        while (deadline := self.core.next_deadline()) is not None and deadline <= moment:
            self.now = max(self.now, deadline)
            self.core.on_clock(self.now)
        self.now = moment

    def take(self) -> list:
        taken, self.outputs = [message for _, message in self.outputs], []
        return taken

    def submit(self, number: int, prompt=None, max_tokens: int = 4, gateway: bytes = b"g", **changes):
        """`prompt` None: five tokens, others each time, so that nobody waits for what another computes."""
        self.submitted += 1
        prompt = (self.submitted, 2, 3, 4, 5) if prompt is None else prompt
        sampling = changes.pop("sampling", Sampling(seed=0))
        stopping = changes.pop("stopping", Stopping(max_tokens=max_tokens))
        return self.tell(
            Submit(number, f"r{number}", pack_int32(prompt), sampling, stopping, **changes), gateway
        )

    def tokens(self, *rows, closings=(), **changes):
        """rows: (slot, epoch, token)."""
        self.step += 1
        columns = [pack_int32(column) for column in zip(*rows, strict=True)] or [b"", b"", b""]
        return self.report(StepReport(self.step, 0, *columns, closings=list(closings), **changes))

    def close(self, slot: int, epoch: int, reason: CloseReason, message: str = "", pooled: bytes = b""):
        return self.report(StepReport(0, 0, closings=[Closed(slot, epoch, reason, message, pooled)]))

    def finished(self):
        return [f for message in self.take() if isinstance(message, Outputs) for f in message.finished]

    @property
    def held(self) -> int:
        return self.core.scheduler.ledger.num_held


def test_one_request_from_end_to_end():
    script = Script()
    script.now = 5.0
    (admit,) = script.submit(7)
    assert isinstance(admit, Admit)
    assert list(unpack_int32(admit.tokens)) == [1, 2, 3, 4, 5]
    assert (admit.num_prompt, admit.num_computed, len(unpack_int32(admit.blocks))) == (5, 0, 2)
    where = (admit.slot, admit.epoch)
    script.tokens((*where, 50))
    script.tokens((*where, 51), closings=[Closed(*where, CloseReason.STOP)])
    first, second = script.take()
    assert list(unpack_int64(first.ids)) == [7]
    assert list(unpack_int32(first.tokens)) == [50]
    assert not first.finished
    assert list(unpack_int32(second.tokens)) == [51]
    (end,) = second.finished
    assert (end.id, end.reason, end.code, end.num_cached) == (7, "stop", "", 0)
    assert script.held == 0
    stats = script.core.stats(6.0)
    assert stats["prompt_tokens"] == 5
    assert stats["generation_tokens"] == stats["steps"] == 2
    assert stats["finished"] == {"stop": 1}
    assert stats["uptime_s"] == 6.0


def test_outputs_go_to_the_gateway_that_asked_and_ids_are_its_own():
    script = Script()
    script.tell(Hello("other"), b"h")
    script.take()
    (one,), (two,) = script.submit(1), script.submit(1, gateway=b"h")
    script.tokens((two.slot, two.epoch, 22), (one.slot, one.epoch, 11))
    assert {gateway: list(unpack_int32(m.tokens)) for gateway, m in script.outputs} == {
        b"g": [11],
        b"h": [22],
    }


def test_several_reports_of_one_turn_become_one_message():
    script = Script()
    (admit,) = script.submit(1)
    for token in (5, 6):
        rows = [pack_int32([value]) for value in (admit.slot, admit.epoch, token)]
        script.core.on_report(0, StepReport(token, 0, *rows), 0.0)
    script.flush()
    (message,) = script.take()
    assert list(unpack_int32(message.tokens)) == [5, 6]


def test_logprobs_are_renumbered_for_each_gateway():
    script = Script()
    script.tell(Hello("other"), b"h")
    script.take()
    (one,), (two,) = script.submit(1), script.submit(1, gateway=b"h")
    found = TokenLogprobs(9, -0.5, 1)
    script.tokens((one.slot, one.epoch, 8), (two.slot, two.epoch, 9), logprobs=[(1, found)])
    messages = dict(script.outputs)
    assert messages[b"g"].logprobs == []
    assert messages[b"h"].logprobs == [(0, found)]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"prompt": ()}, "bad_request", "prompt: it is empty"),
        ({"prompt": (1, 100)}, "bad_request", "token id 100 is not in the vocabulary, 0 to 99"),
        ({"prompt": (-1, 3)}, "bad_request", "token id -1"),
        ({"max_tokens": 0}, "bad_request", "max_tokens: 0 must be at least 1"),
        ({"max_tokens": 60}, "never_fits", r"5 \+ 60 = 65 tokens, the context of this instance is 64"),
        ({"stopping": Stopping(4, min_tokens=5)}, "bad_request", "min_tokens: 5"),
        ({"stopping": Stopping(4, stop_token_ids=(100,))}, "bad_request", "stop_token_ids: token id 100"),
        ({"sampling": Sampling(seed=-1)}, "bad_request", "seed: -1"),
        ({"sampling": Sampling(seed=0, temperature=float("nan"))}, "bad_request", "temperature: nan"),
        ({"sampling": Sampling(seed=0, top_p=0.0)}, "bad_request", "top_p"),
        ({"sampling": Sampling(seed=0, logprobs=-2)}, "bad_request", "logprobs: -2"),
        (
            {"sampling": Sampling(seed=0, logit_bias=LogitBias.of({500: 1.0}))},
            "bad_request",
            "logit_bias: token id 500",
        ),
        (
            {"sampling": Sampling(0, logit_bias=LogitBias(b"\0" * 8, b"\0" * 4))},
            "bad_request",
            "logit_bias: 2 ids",
        ),
        (
            {"sampling": Sampling(0, logit_bias=LogitBias.of({5: math.nan}))},
            "bad_request",
            "logit_bias: every",
        ),
        ({"stopping": Stopping(4, 0, (7, 500))}, "bad_request", "stop_token_ids: token id 500"),
    ],
)
def test_what_cannot_be_served_is_answered_at_once_with_the_reason(changes, code, message):
    script = Script()
    assert script.submit(3, **changes) == []
    (end,) = script.finished()
    assert (end.id, end.reason, end.code) == (3, "rejected", code)
    assert re.search(message, end.message)
    assert script.core.stats(0.0)["rejected"] == {code: 1}


def test_what_the_pool_can_never_hold_names_the_blocks():
    script = Script(ready=False, max_model_len=1000)
    script.report(script.ready())
    script.tell(Hello("gate"))
    script.take()
    script.submit(1, prompt=[1] * 60, max_tokens=5)  # 64 tokens are fed: exactly the pool
    assert script.finished() == []
    script.submit(2, prompt=[1] * 60, max_tokens=6)
    (end,) = script.finished()
    assert end.code == "never_fits"
    assert "17 KV blocks of 4 tokens, this instance has 16" in end.message


def test_a_prompt_that_is_no_packed_array_is_refused():
    script = Script()
    script.tell(Submit(1, "r", b"abc", Sampling(seed=0), Stopping(1)))
    assert "packed int32" in script.finished()[0].message


def test_an_id_in_use_is_refused_and_the_first_request_goes_on():
    script = Script()
    (admit,) = script.submit(1)
    script.submit(1)
    assert "never use one twice" in script.finished()[0].message
    script.tokens(
        (admit.slot, admit.epoch, 5), closings=[Closed(admit.slot, admit.epoch, CloseReason.LENGTH)]
    )
    assert [end.reason for end in script.finished()] == ["length"]


def test_the_queue_is_bounded_but_free_places_are_used_first():
    script = Script(max_num_seqs=2, max_waiting=1)
    for number in range(5):
        submit = Submit(number, "", pack_int32([1]), Sampling(seed=0), Stopping(2))
        script.core.on_message(b"g", submit, 0.0)
    script.flush()
    ends = script.finished()
    assert [(end.id, end.code) for end in ends] == [(3, "queue_full"), (4, "queue_full")]
    assert "1 requests are waiting and max_waiting is 1" in ends[0].message


def full_queue(**first) -> Script:
    """One request runs, two wait, and there is no place for another one."""
    script = Script(max_num_seqs=1, max_waiting=2)
    script.tell(Hello("first"))
    script.submit(1)
    script.submit(2, **first)
    script.submit(3, **first)
    script.take()
    return script


def test_a_better_priority_takes_the_place_of_the_worst_that_waits():
    script = full_queue(priority=1)
    script.submit(4, priority=0)
    assert [(end.id, end.reason, end.code) for end in script.finished()] == [(3, "rejected", "queue_full")]
    script.submit(5, priority=1)
    assert [(end.id, end.code) for end in script.finished()] == [(5, "queue_full")]
    script.submit(6, priority=0)
    assert [end.id for end in script.finished()] == [2]
    script.submit(7, priority=0)  # nobody makes place for an equal
    assert [end.id for end in script.finished()] == [7]
    stats = script.core.stats(0.0)
    assert (stats["waiting"], stats["displaced"], stats["rejected"]) == (2, 2, {"queue_full": 4})
    assert script.tell(Cancel(3)) == []  # it is gone: the gateway may say so later


def test_a_full_queue_of_one_user_has_a_place_for_another_one():
    script = full_queue(flow=Flow("key", "loud"))
    script.submit(4, flow=Flow("key", "quiet"))
    assert [end.id for end in script.finished()] == [3]
    script.submit(5, flow=Flow("other"))
    assert [end.id for end in script.finished()] == [2]  # of two of the key
    script.submit(6, flow=Flow("third"))
    assert [end.id for end in script.finished()] == [6]  # each has one place as it is


def test_who_has_tokens_or_ran_is_never_thrown_out():
    script = Script(max_num_seqs=1, max_waiting=1)
    (first,) = script.submit(1, priority=5)
    script.submit(2, priority=4, generated=pack_int32([7]))  # it goes on here after a loss
    script.take()
    script.submit(3, priority=0)
    assert [end.id for end in script.finished()] == [3]
    script.core.scheduler.pause(True)
    script.tell(Cancel(2))
    script.tokens((first.slot, first.epoch, 9))
    script.core.scheduler.drain()
    script.close(first.slot, first.epoch, CloseReason.PREEMPTED)
    assert script.core.scheduler.num_waiting == 1
    script.take()
    script.submit(4, priority=0)
    assert [end.id for end in script.finished()] == [4]


def test_what_goes_on_after_a_loss_takes_the_place_of_an_equal():
    script = full_queue()
    script.submit(4, generated=pack_int32([7]))
    assert [end.id for end in script.finished()] == [3]


def test_a_refusal_says_how_long_what_waits_will_take():
    script = full_queue()
    script.submit(4)
    assert [end.retry_after_s for end in script.finished()] == [0.0], "nothing is known yet"
    number = 4
    for second in range(1, 5):
        script.now = 2.0 * second  # one admission in two seconds
        (running,) = [request for request in script.core.scheduler.slots if request]
        script.close(running.slot, running.epoch, CloseReason.STOP)
        number += 1
        script.submit(number)
    script.take()
    script.submit(number + 1)
    (end,) = script.finished()
    assert end.retry_after_s == pytest.approx(2 * 2.0, rel=0.05)
    script.now += 20.0  # nothing moves for a while
    script.submit(number + 2)
    (end,) = script.finished()
    assert end.retry_after_s == pytest.approx(2 * (8 + 20.0) / 4, rel=0.1)


def test_a_flow_from_the_wire_is_checked():
    script = Script()
    script.submit(1, flow=Flow("k", "u", -1.0))
    (end,) = script.finished()
    assert end.code == "bad_request"
    assert "weight" in end.message


def test_nobody_hurries_while_only_tokens_are_awaited():
    script = Script(max_num_seqs=2)
    assert not Script(ready=False).core.unhurried
    (first,) = script.submit(1)
    script.submit(2)
    assert script.core.unhurried
    script.submit(3)
    assert not script.core.unhurried, "the third one waits for a slot"
    script.close(first.slot, first.epoch, CloseReason.STOP)
    assert script.core.unhurried
    script.tell(Query(1, "start_profile", "/tmp"))
    assert not script.core.unhurried, "somebody waits for an order to be done"


def test_cancel_while_queued_is_answered_at_once():
    script = Script(max_num_seqs=1)
    script.submit(1)
    script.submit(2)
    assert script.tell(Cancel(2)) == []
    assert [(end.id, end.reason) for end in script.finished()] == [(2, "aborted")]
    assert script.core.scheduler.num_waiting == 0


@pytest.mark.parametrize("reason", list(CloseReason))
def test_cancel_while_running_frees_on_the_closing_whatever_it_says(reason):
    script = Script()
    (admit,) = script.submit(1)
    (abort,) = script.tell(Cancel(1))
    assert abort == Abort(admit.slot, admit.epoch)
    assert script.tell(Cancel(1)) == [], "asked once is enough"
    assert script.held > 0, "the worker may still write"
    script.tokens((admit.slot, admit.epoch, 9))
    assert script.take() == [], "no output is wanted"
    script.close(admit.slot, admit.epoch, reason)
    assert [end.reason for end in script.finished()] == ["aborted"]
    assert script.held == 0
    assert script.core.stats(0.0)["violations"] == 0


def test_cancel_after_the_end_and_of_nothing_is_ignored():
    script = Script()
    (admit,) = script.submit(1)
    script.close(admit.slot, admit.epoch, CloseReason.STOP)
    script.take()
    assert script.tell(Cancel(1)) == []
    assert script.tell(Cancel(99)) == []
    assert script.take() == []


def hungry(script: Script) -> tuple[Admit, Admit]:
    """Two requests, of which the younger has been preempted for the older one's sake."""
    (old,) = script.submit(1, max_tokens=40)
    (young,) = script.submit(2, max_tokens=40)
    commands: list = []
    for _ in range(40):
        if commands:
            break
        rows = [(admit.slot, admit.epoch, 9) for admit in (old, young)]
        commands = [c for c in script.tokens(*rows) if not isinstance(c, Grow)]
    assert commands == [Preempt(young.slot, young.epoch)]
    return old, young


def rash() -> Script:
    """Admits whatever fits at the moment."""
    return Script(admission_headroom=0)


def test_a_preempted_request_goes_on_with_all_of_its_tokens():
    script = rash()
    old, young = hungry(script)
    script.tokens((young.slot, young.epoch, 77))  # sampled before the worker read Preempt
    commands = script.close(young.slot, young.epoch, CloseReason.PREEMPTED)
    commands += script.close(old.slot, old.epoch, CloseReason.STOP)
    (again,) = [command for command in commands if isinstance(command, Admit)]
    tokens = list(unpack_int32(again.tokens))
    assert tokens[:5] == [2, 2, 3, 4, 5]
    assert tokens[-1] == 77
    assert again.num_prompt == 5
    assert (again.slot, again.epoch) != (young.slot, young.epoch)
    assert again.num_computed < len(tokens)
    script.close(again.slot, again.epoch, CloseReason.LENGTH)
    end = script.finished()[-1]
    assert (end.id, end.reason, end.num_preemptions) == (2, "length", 1)
    assert script.held == 0


def test_a_request_that_stopped_before_it_read_preempt_is_finished():
    script = rash()
    _, young = hungry(script)
    script.close(young.slot, young.epoch, CloseReason.STOP)
    assert [(end.id, end.reason) for end in script.finished()] == [(2, "stop")]
    assert script.core.counters.preemptions == 0


def test_cancel_while_preempting_ends_it():
    script = rash()
    _, young = hungry(script)
    script.take()
    assert script.tell(Cancel(2)) == [Abort(young.slot, young.epoch)]
    script.close(young.slot, young.epoch, CloseReason.PREEMPTED)
    assert [(end.id, end.reason) for end in script.finished()] == [(2, "aborted")]
    assert script.core.scheduler.num_waiting == 0


def test_an_error_of_the_worker_is_the_requests_answer():
    script = Script()
    (admit,) = script.submit(1)
    script.close(admit.slot, admit.epoch, CloseReason.ERROR, "no such thing")
    (end,) = script.finished()
    assert (end.reason, end.code, end.message) == ("error", "internal", "no such thing")


@pytest.mark.parametrize("reason", [CloseReason.PREEMPTED, CloseReason.ABORTED])
def test_a_closing_that_nobody_asked_for_ends_the_request_and_leaks_nothing(reason, caplog):
    script = Script()
    (admit,) = script.submit(1)
    script.close(admit.slot, admit.epoch, reason)
    (end,) = script.finished()
    assert (end.reason, end.code) == ("error", "internal")
    assert "unasked" in end.message
    assert script.held == 0
    assert "while running" in caplog.text


def test_stale_slots_and_epochs_are_logged_with_their_sender_and_dropped(caplog):
    script = Script()
    (admit,) = script.submit(1)
    where = (admit.slot, admit.epoch)
    with caplog.at_level(logging.ERROR):
        script.tokens((admit.slot, admit.epoch + 1, 5), (3, 1, 6), (*where, 7))
        script.close(2, 9, CloseReason.STOP)
        script.close(-1, 1, CloseReason.STOP)
        script.close(1000, 1, CloseReason.STOP)
    assert "protocol violation by worker rank 0" in caplog.text
    assert script.core.stats(0.0)["violations"] == 4
    (message,) = script.take()
    assert list(unpack_int32(message.tokens)) == [7]


@pytest.mark.parametrize(
    "report",
    [
        StepReport(1, 0, slots=b"abc"),
        StepReport(1, 0, slots=pack_int32([0]), epochs=b"", tokens=b""),
        StepReport(1, 0, prefill_slots=pack_int32([0])),
        StepReport(1, 0, slots=pack_int32([-1]), epochs=pack_int32([1]), tokens=pack_int32([1])),
        StepReport(1, 0, slots=pack_int32([4]), epochs=pack_int32([1]), tokens=pack_int32([1])),
    ],
)
def test_a_report_that_cannot_be_read_fails_the_instance(report):
    script = Script()
    commands = script.report(report)
    assert script.core.failure is not None
    assert commands == [Control("shutdown")]
    (message,) = script.take()
    assert isinstance(message, Failing)
    assert "cannot be read" in message.message


def test_silence_of_the_worker_fails_the_instance_but_only_when_something_runs():
    script = Script()
    assert script.core.next_deadline() is None
    script.now = 100.0
    script.core.on_clock(script.now)
    (admit,) = script.submit(1)
    assert 100.0 < script.core.next_deadline() < 110.0
    script.now = 105.0
    script.tokens((admit.slot, admit.epoch, 1))
    script.wait_until(114.9)
    assert script.core.failure is None
    script.wait_until(115.0)
    assert "1 requests run and nothing was reported for 10.0 s" in script.core.failure
    assert script.core.next_deadline() is None


def test_a_paused_instance_may_be_silent_unless_it_owes_a_closing():
    script = Script()
    script.submit(1)
    assert script.tell(Query(1, "pause")) == [Control("pause")]
    assert script.core.next_deadline() is None
    script.now = 1000.0
    script.tell(Cancel(1))
    assert 1000.0 < script.core.next_deadline() < 1010.0
    script.close(0, 1, CloseReason.ABORTED)
    assert script.core.next_deadline() is None
    assert script.submit(2) == []
    (control, admit) = script.tell(Query(1, "resume"))
    assert (control, type(admit)) == (Control("resume"), Admit)
    assert 1000.0 < script.core.next_deadline() < 1010.0
    assert script.tell(Query(1, "resume")) == []


def test_an_engine_that_was_away_does_not_take_its_worker_for_hanging():
    """All of the instance was stopped, its workers too; one that hangs is found all the same."""
    script = Script()
    (admit,) = script.submit(1)
    for _ in range(3):
        script.now += 50.0
        script.core.on_clock(script.now)
        assert script.core.failure is None
        script.tokens((admit.slot, admit.epoch, 1))
    for _ in range((MAX_VOIDS + 1) * LOOKS):
        if script.core.failure is None:
            script.core.on_clock(script.core.next_deadline() + 50.0)
    assert "nothing was reported" in script.core.failure


def test_queries_are_answered():
    script = Script()
    script.submit(1)
    script.take()
    script.tell(Query(5, "ledger"))
    (reply,) = script.take()
    assert isinstance(reply, QueryReply)
    assert reply.id == 5
    assert reply.body["held_by"] == {"slot 0: r1": 2}
    script.tell(Query(6, "stats"))
    (reply,) = script.take()
    assert reply.body["running"] == 1
    assert reply.body["blocks"] == {
        "total": 16,
        "free": 14,
        "cached": 0,
        "held": 2,
        "exported": 0,
        "reserved": 0,
    }
    script.tell(Query(7, "reset_prefix_cache"))
    assert script.take()[0].body == {"forgotten_blocks": 0}


def test_ranks_must_agree_and_the_smallest_pool_counts():
    script = Script(ranks=2, ready=False)
    script.tell(Hello("early"))
    script.report(script.ready(1, num_blocks=9), 1)
    assert script.take() == []
    script.submit(1)
    assert "submit nothing before Welcome" in script.finished()[0].message
    script.report(script.ready(0))
    (welcome,) = script.take()
    assert isinstance(welcome, Welcome)
    assert (welcome.num_blocks, welcome.workers, welcome.incarnation) == (9, [1, 2], "i1")
    script.tell(Hello("late"), b"late")
    assert welcome.first
    assert script.outputs == [(b"late", msgspec.structs.replace(welcome, first=False))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": "other"}, "tile is 't' on rank 0 and 'other' on rank 1"),
        ({"block_size": 8}, "block_size is 4 on rank 0 and 8 on rank 1"),
        ({"num_blocks": 0}, "holds no block"),
        ({"rank": 0}, "the worker on ring 1 says that it is rank 0"),
    ],
)
def test_ranks_that_do_not_fit_together_fail_the_instance(change, message):
    script = Script(ranks=2, ready=False)
    script.tell(Hello("g"))
    script.report(script.ready(0), 0)
    rank = change.pop("rank", 1)
    script.report(script.ready(rank, **change), 1)
    assert message in script.core.failure
    assert isinstance(script.take()[0], Failing)


def test_a_block_size_other_than_configured_fails_the_instance():
    script = Script(ready=False, block_size=32)
    script.report(script.ready())
    assert "4 in the workers, 32 as configured" in script.core.failure


def test_a_worker_that_failed_and_does_not_die_fails_the_instance_anyway():
    script = Script()
    script.report(WorkerFailed(0, "out of memory"))
    assert script.core.next_deadline() == DYING_S
    assert script.core.failure is None, "its exit status is worth a moment"
    script.core.on_clock(DYING_S)
    assert script.core.failure == "worker rank 0 failed: out of memory"
    script.flush()
    script.take()
    script.submit(1)
    assert script.finished()[0].code == "shutting_down"


def failed_alone() -> Script:
    """A core that failed while it loaded, before anybody said `Hello`."""
    script = Script(ready=False)
    script.tell(Query(1, "stats"), b"stranger")
    script.take()
    script.now = 20.0
    script.core.fail("vocab_size does not fit")
    assert script.flush() == [Control("shutdown")]
    assert script.take() == []
    assert not script.core.over
    assert script.core.next_deadline() == 20.0 + UNHEARD_S
    return script


def test_an_instance_that_fails_before_anybody_came_tells_the_first_that_does():
    script = failed_alone()
    script.now += 1.0
    script.tell(Query(2, "stats"), b"stranger")
    script.take()
    assert not script.core.over, "only a `Hello` counts"
    script.tell(Hello("supervisor"))
    assert script.take() == [Failing("vocab_size does not fit")]
    assert script.core.over
    assert script.core.next_deadline() is None


def test_an_instance_that_failed_alone_waits_no_longer_than_it_must(caplog):
    script = failed_alone()
    script.wait_until(20.0 + UNHEARD_S - 0.1)
    assert not script.core.over
    script.wait_until(20.0 + UNHEARD_S)
    assert script.core.over
    assert script.core.next_deadline() is None
    assert "nobody came to be told why: vocab_size does not fit" in caplog.text


def test_an_instance_that_failed_alone_leaves_when_it_is_told_to():
    script = failed_alone()
    script.core.shut_down()
    assert script.flush() == []
    assert script.core.over
    assert script.core.failure == "vocab_size does not fit"


@pytest.mark.parametrize("gone", [False, True])
def test_an_instance_that_somebody_came_to_leaves_at_once(gone):
    script = Script(ready=False)
    script.tell(Hello("supervisor"))
    if gone:
        script.core.gateway_lost(b"g")
    script.core.fail("the worker died")
    script.flush()
    assert script.take() == ([] if gone else [Failing("the worker died")])
    assert script.core.over
    assert script.core.next_deadline() is None


@pytest.mark.parametrize("leave", [lambda core: core.fail("the worker died"), lambda core: core.shut_down()])
def test_failing_is_the_last_word_after_the_tokens_and_ends_of_the_same_turn(leave):
    script = Script()
    (admit,) = script.submit(1)
    where = (admit.slot, admit.epoch)
    columns = [pack_int32([value]) for value in (*where, 50)]
    report = StepReport(1, 1, *columns, closings=[Closed(*where, CloseReason.LENGTH)])
    script.core.on_report(0, report, script.now)
    leave(script.core)
    script.flush()
    outputs, last = script.take()
    assert isinstance(last, Failing)
    assert outputs.finished[0].reason == "length", "what was computed is not lost"


def test_a_lost_gateway_has_its_requests_cancelled():
    script = Script(max_num_seqs=1)
    (admit,) = script.submit(1)
    script.submit(2)
    script.core.gateway_lost(b"g")
    assert script.flush() == [Abort(admit.slot, admit.epoch)]
    script.close(admit.slot, admit.epoch, CloseReason.ABORTED)
    assert script.take() == []
    assert script.held == script.core.scheduler.num_waiting == 0
    script.core.gateway_lost(b"never heard of")


def test_another_gateway_behind_the_same_connection_starts_anew():
    script = Script()
    (admit,) = script.submit(1)
    assert script.tell(Hello("gate")) == [], "the same one may say it again"
    assert script.tell(Hello("new")) == [Abort(admit.slot, admit.epoch)]
    (_, second) = script.submit(1), script.submit(2)
    script.take()
    script.close(admit.slot, admit.epoch, CloseReason.ABORTED)
    assert script.take() == []
    assert second[0].slot != admit.slot


def test_shutting_down_tells_everybody_and_takes_nothing_new():
    script = Script()
    script.submit(1)
    script.core.shut_down()
    assert script.flush() == [Control("shutdown")]
    (message,) = script.take()
    assert "shutting down" in message.message
    script.submit(2)
    assert script.finished()[0].code == "shutting_down"
    assert script.core.next_deadline() is None


def test_prompt_logprobs_are_passed_on_once_though_the_prompt_is_computed_twice():
    script = Script()
    prompt = list(range(1, 10))
    (admit,) = script.submit(1, prompt, sampling=Sampling(seed=0, prompt_logprobs=0))
    positions = [TokenLogprobs(token, -1.0, 1) for token in prompt]

    def run(first: int, last: int) -> StepReport:
        part = PromptLogprobs(admit.slot, admit.epoch, first, positions[first:last])
        return StepReport(1, 0, prompt_logprobs=[part])

    got = []
    for first, last in ((1, 4), (1, 3), (3, 6), (6, 9)):
        script.report(run(first, last))
        got += [(r.first, len(r.positions)) for m in script.take() for _, r in m.prompt_logprobs]
    assert got == [(1, 3), (4, 2), (6, 3)]
    script.report(
        StepReport(1, 0, prompt_logprobs=[PromptLogprobs(admit.slot, admit.epoch, 12, positions[:1])])
    )
    assert script.core.stats(0.0)["violations"] == 1


def test_a_prefix_hit_is_told_with_the_first_token():
    script = Script()
    (first,) = script.submit(1, range(9), max_tokens=1)
    where = (first.slot, first.epoch)
    chunk = dict(zip(("prefill_slots", "prefill_epochs", "prefill_computed"), (*where, 9), strict=True))
    packed = {name: pack_int32([value]) for name, value in chunk.items()}
    script.tokens((*where, 50), closings=[Closed(*where, CloseReason.LENGTH)], **packed)
    script.take()
    (second,) = script.submit(2, range(9), max_tokens=3)
    assert second.num_computed == 8
    assert not script.take()  # it is no reason for a message
    script.tokens((second.slot, second.epoch, 50))
    script.tokens((second.slot, second.epoch, 50))
    assert [outputs.cached for outputs in script.take()] == [[(2, 8)], []]


def test_the_worker_is_told_who_is_patient():
    script = Script()
    (patient,) = script.submit(1, patient=True)
    (usual,) = script.submit(2)
    assert (patient.patient, usual.patient) == (True, False)


def test_prompt_logprobs_take_no_prefix_from_the_cache():
    world = World(num_blocks=30)
    world.hello()
    prompt = list(range(20))
    world.submit(prompt, 2)
    world.drain()
    hit = world.submit(prompt, 2)
    asking = world.submit(prompt, 2, prompt_logprobs=0)
    world.drain()
    world.check_end()
    assert hit.finished.num_cached == 16
    assert asking.finished.num_cached == 0


def test_every_state_answers_every_event_with_a_state_or_names_both():
    world = World()
    request = None
    world.hello()
    world.submit([1], 1)
    request = world.core.scheduler.slots[0]
    for state in State:
        for event in Event:
            request.state = state
            if event in TRANSITIONS[state]:
                assert request.advance(event) is TRANSITIONS[state][event]
            else:
                with pytest.raises(IllegalTransition, match=f"'{event.value}' while {state.value}"):
                    request.advance(event)
                assert request.state is state


# -- what steps take


COST = CostModel(base=0.01, per_prefill_token=0.001, per_decode_sequence=0.0005)


def watch(world: World) -> list[object]:
    """The commands that the worker is given from now on."""
    given: list[object] = []
    flush = world.core.flush

    def watched(now: float) -> object:
        out = flush(now)
        given.extend(out.batch.commands if out.batch else ())
        return out

    world.core.flush = watched
    return given


def test_the_worker_is_told_what_steps_take_and_composes_by_it():
    world = World(auto_step_tokens=True, cost=COST, max_num_batched_tokens=60, num_blocks=60)
    given = watch(world)
    streams = [world.submit([number] * 5, 40) for number in range(3)]
    for _ in range(8):
        world.apply()
        world.step()
        world.read_reports()
    late = world.submit(list(range(20)), 4)
    world.drain()
    world.check_end()
    told = [command for command in given if isinstance(command, Pace)]
    assert told[-1].with_prompts(5, 0, 0, 0) == pytest.approx(0.015, rel=0.3)
    assert told[-1].shortest == pytest.approx(0.0115, rel=0.1)
    assert world.slots.table.composition.pace == told[-1]
    assert all(client.finished.reason == "length" for client in (*streams, late))
    stats = world.core.stats(world.now)
    assert set(stats["step_cost"]) == set(Pace.__struct_fields__)
    assert stats["step_prompt_tokens"]["sum"] == 15 + 20


def test_with_a_number_nobody_is_told():
    world = World(cost=COST)
    given = watch(world)
    world.submit([1, 2, 3], 20)
    world.drain()
    assert not any(isinstance(command, Pace) for command in given)
    assert world.core.stats(world.now)["step_cost"] == {}
    assert world.slots.table.composition is None


def test_the_worker_knows_priorities_and_how_long_one_has_waited():
    world = World(auto_step_tokens=True, max_num_seqs=1)
    given = watch(world)
    world.submit([1, 2, 3], 2)
    world.submit([4, 5, 6], 2, priority=7)
    world.now += 2.0
    world.drain()
    admits = [command for command in given if isinstance(command, Admit)]
    assert [(one.priority, one.waited) for one in admits] == [(0, 0.0), (7, 2.0)]


def test_a_pooled_request_ends_with_its_result_and_with_nothing_else():
    pooling = Sampling(0, 0.0, pooling=Pooling("mean"))
    script = Script()
    (admit,) = script.submit(1, sampling=pooling, max_tokens=1)
    script.close(admit.slot, admit.epoch, CloseReason.POOLED, pooled=b"\0\0\x80\x3f")
    (end,) = script.finished()
    assert (end.reason, end.pooled) == ("pooled", b"\0\0\x80\x3f")
    assert script.held == 0
    (admit,) = script.submit(2, sampling=pooling, max_tokens=1)
    script.close(admit.slot, admit.epoch, CloseReason.LENGTH)
    (end,) = script.finished()
    assert end.reason == "error"
    (admit,) = script.submit(3, max_tokens=1)
    script.close(admit.slot, admit.epoch, CloseReason.POOLED)
    (end,) = script.finished()
    assert end.reason == "error"
    assert script.core.stats(0.0)["violations"] == 2


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"max_tokens": 2}, "pooling"),
        ({"dimensions": -1}, "dimensions"),
        ({"labels": (10**6,)}, "labels"),
        ({"length": 65}, "prompt"),
    ],
)
def test_what_cannot_be_pooled_is_refused(more, field):
    more = dict(more)
    length, max_tokens = more.pop("length", 3), more.pop("max_tokens", 1)
    script = Script()
    sampling = Sampling(0, 0.0, pooling=Pooling("last", **more))
    assert script.submit(1, [5] * length, sampling=sampling, max_tokens=max_tokens) == []
    (end,) = script.finished()
    assert end.reason == "rejected"
    assert end.message.startswith(field)
