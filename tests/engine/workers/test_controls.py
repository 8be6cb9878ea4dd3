"""New weights and profiles in the core: who waits for whom, what is refused, what fails the instance."""

import pytest

from baton.engine.workers.controls import CHECK_S, MAX_ARGUMENT, PREPARED_S
from baton.protocol.messages.commands import Admit, Control, Preempt
from baton.protocol.messages.reports import CloseReason, ControlDone
from baton.protocol.messages.requests import Cancel, Hello, Outputs, Query, QueryReply
from baton.protocol.weights import Weights
from tests.engine.test_core import Script
from tests.engine.world import World


def replies(script: Script) -> list[tuple[int, dict]]:
    return [(message.id, message.body) for message in script.take() if isinstance(message, QueryReply)]


def update(script: Script, number: int = 9, path: str = "/new", gateway: bytes = b"g"):
    return script.tell(Query(number, "update_weights", path), gateway)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_runs_gives_way_then_the_ranks_load_then_all_goes_on(ranks):
    script = Script(ranks=ranks)
    (first,) = script.submit(1)
    (second,) = script.submit(2, prompt=(7, 7, 7))
    script.tokens((first.slot, first.epoch, 50))
    preempts = update(script)
    assert {(command.slot, command.epoch) for command in preempts} == {(0, 1), (1, 1)}
    assert all(isinstance(command, Preempt) for command in preempts)
    assert script.submit(3) == [], "nothing is admitted meanwhile"
    assert script.close(first.slot, first.epoch, CloseReason.PREEMPTED) == []
    (control,) = script.close(second.slot, second.epoch, CloseReason.PREEMPTED)
    assert control == Control("update_weights", "/new", control.id)
    assert control.id
    for rank in range(ranks - 1, 0, -1):
        assert script.report(ControlDone(rank, control.id), rank) == []
    assert replies(script) == [], "one rank has not answered"
    admits = script.report(ControlDone(0, control.id), 0)
    assert [type(command) for command in admits] == [Admit] * 3
    assert [command.num_computed for command in admits] == [0, 0, 0]
    assert len(admits[0].tokens) == 4 * 6, "the prompt and the token that the client has"
    ((number, body),) = replies(script)
    assert number == 9
    assert (body["path"], body["preempted_requests"]) == ("/new", 2)


def test_a_block_computed_with_old_weights_is_never_found_again():
    """Neither one that was cached before, nor one that was being computed."""
    script = Script()
    prompt = tuple(range(1, 10))
    (admit,) = script.submit(1, prompt)
    script.tokens((admit.slot, admit.epoch, 50), closings=[])
    (again,) = script.submit(2, prompt)
    assert again.num_computed == 8, "the test needs a cache that hits"
    update(script)
    script.close(again.slot, again.epoch, CloseReason.PREEMPTED)
    (control,) = script.close(admit.slot, admit.epoch, CloseReason.PREEMPTED)
    admits = script.report(ControlDone(0, control.id))
    assert [command.num_computed for command in admits] == [0], "the other one waits for what this computes"
    assert script.core.scheduler.ledger.num_cached == 0


def test_refused_weights_leave_the_old_ones_and_what_was_cached():
    script = Script(ranks=2)
    prompt = tuple(range(1, 10))
    (admit,) = script.submit(1, prompt)
    script.tokens((admit.slot, admit.epoch, 50))
    update(script)
    (control,) = script.close(admit.slot, admit.epoch, CloseReason.PREEMPTED)
    script.report(ControlDone(1, control.id, "it does not fit"), 1)
    (again,) = script.report(ControlDone(0, control.id, "it does not fit"), 0)
    assert again.num_computed == 8
    assert replies(script) == [(9, {"error": "it does not fit", "code": "refused"})]
    assert script.core.failure is None


def test_ranks_with_different_weights_fail_the_instance():
    script = Script(ranks=2)
    (control,) = update(script)
    script.report(ControlDone(0, control.id), 0)
    script.report(ControlDone(1, control.id, "no such file"), 1)
    assert "only some ranks have the new weights: no such file" in script.core.failure


def test_ranks_that_refuse_for_different_reasons_are_all_heard():
    script = Script(ranks=2)
    (control,) = script.tell(Query(9, "start_profile", "/traces"))
    script.report(ControlDone(0, control.id), 0)
    script.report(ControlDone(1, control.id, "disk full"), 1)
    assert replies(script) == [(9, {"error": "disk full", "code": "refused"})]
    (control,) = script.tell(Query(10, "stop_profile"))
    script.report(ControlDone(0, control.id, "a"), 0)
    script.report(ControlDone(1, control.id, "b"), 1)
    assert replies(script)[0][1]["error"] == "rank 0: a; rank 1: b"
    assert script.core.failure is None


def test_a_profile_disturbs_nobody():
    script = Script()
    (admit,) = script.submit(1)
    (control,) = script.tell(Query(9, "start_profile", "/traces"))
    assert control == Control("start_profile", "/traces", control.id)
    script.tokens((admit.slot, admit.epoch, 50))
    assert replies(script) == []
    script.report(ControlDone(0, control.id))
    assert replies(script) == [(9, {"profiling": True})]
    (control,) = script.tell(Query(10, "stop_profile"))
    script.report(ControlDone(0, control.id))
    assert replies(script) == [(10, {"profiling": False})]
    assert script.core.stats(0.0)["preemptions"] == 0


def test_a_second_order_is_refused_while_one_is_under_way():
    script = Script()
    (admit,) = script.submit(1)
    update(script)
    for query in (Query(10, "update_weights", "/other"), Query(11, "stop_profile")):
        assert script.tell(query) == []
        ((_, body),) = replies(script)
        assert body["code"] == "busy"
        assert "update_weights is under way" in body["error"]
    (control,) = script.close(admit.slot, admit.epoch, CloseReason.PREEMPTED)
    assert control.argument == "/new"
    script.report(ControlDone(0, control.id))
    assert replies(script)[0][0] == 9
    assert script.core.stats(0.0)["under_way"] == ""


@pytest.mark.parametrize("argument", ["", "x" * (MAX_ARGUMENT + 1), "/a\0b"])
@pytest.mark.parametrize("what", ["update_weights", "start_profile"])
def test_an_argument_that_is_no_path_stops_nobody(what, argument):
    script = Script()
    script.submit(1)
    assert script.tell(Query(9, what, argument)) == []
    assert replies(script)[0][1]["code"] == "refused"


def test_before_ready_and_when_it_leaves():
    script = Script(ready=False)
    script.tell(Hello("gate"))
    update(script)
    assert replies(script)[0][1]["code"] == "loading"
    script.report(ControlDone(0, 1))
    assert script.core.counters.violations == 1
    script = Script()
    script.core.shut_down()
    script.flush()
    assert update(script) == []
    assert replies(script)[0][1]["code"] == "shutting_down"


def test_cancels_of_what_waits_and_of_what_is_being_closed():
    script = Script()
    (first,) = script.submit(1)
    (second,) = script.submit(2)
    update(script)
    script.close(first.slot, first.epoch, CloseReason.PREEMPTED)
    script.tell(Cancel(1))
    assert [end.id for end in script.finished()] == [1]
    script.tell(Cancel(2))
    (control,) = script.close(second.slot, second.epoch, CloseReason.PREEMPTED)
    assert control.action == "update_weights"
    assert [end.id for end in script.finished()] == [2]
    assert script.report(ControlDone(0, control.id)) == []
    assert script.held == 0


def test_a_request_that_ends_by_itself_while_draining_has_ended():
    script = Script()
    (admit,) = script.submit(1)
    update(script)
    (control,) = script.tokens((admit.slot, admit.epoch, 50), closings=[_closed(admit, CloseReason.STOP)])
    assert control.action == "update_weights"
    assert [end.reason for end in script.finished()] == ["stop"]


def _closed(admit, reason):
    from baton.protocol.messages.reports import Closed

    return Closed(admit.slot, admit.epoch, reason)


def test_a_lost_gateway_takes_nothing_back_and_is_told_nothing():
    script = Script()
    script.tell(Hello("other"), b"h")
    (admit,) = script.submit(1, gateway=b"h")
    update(script)
    update(script, 1, gateway=b"h")
    script.take()
    script.core.gateway_lost(b"g")
    script.flush()
    (control,) = script.close(admit.slot, admit.epoch, CloseReason.PREEMPTED)
    script.outputs.clear()
    (again,) = script.report(ControlDone(0, control.id))
    assert isinstance(again, Admit)
    ((told, message),) = script.outputs
    assert (told, message.weights.path) == (b"h", "/new"), "the others hear what the instance has now"


@pytest.mark.parametrize("phase", ["draining", "sent"])
def test_silence_is_bounded_and_has_a_reason(phase):
    script = Script(ranks=2, startup_timeout_s=10.0)
    script.now = 100.0
    if phase == "draining":
        script.submit(1)
    update(script)
    if phase == "sent":
        script.wait_until(105.0)
        script.report(ControlDone(0, 1), 0)
    script.wait_until(109.9)
    assert script.core.failure is None
    script.wait_until(110.1)  # it is not put off by the others
    expected = "nothing was reported" if phase == "draining" else "ranks 1 have not answered update_weights"
    assert expected in script.core.failure


def test_paused_stays_paused_and_the_pause_does_not_hold_the_update_up():
    script = Script()
    (admit,) = script.submit(1)
    script.tell(Query(5, "pause"))
    (preempt,) = update(script)
    assert isinstance(preempt, Preempt)
    (control,) = script.close(admit.slot, admit.epoch, CloseReason.PREEMPTED)
    assert script.report(ControlDone(0, control.id)) == []
    (resume, again) = script.tell(Query(6, "resume"))
    assert (resume.action, type(again)) == ("resume", Admit)


def test_answers_that_nobody_waits_for_are_violations():
    script = Script(ranks=2)
    script.report(ControlDone(0, 1), 0)
    (control,) = update(script)
    script.report(ControlDone(0, control.id + 1), 0)
    script.report(ControlDone(0, control.id), 0)
    script.report(ControlDone(0, control.id), 0)
    assert script.core.counters.violations == 3
    assert script.core.stats(0.0)["under_way"] == "update_weights"
    script.report(ControlDone(1, control.id), 1)
    assert script.core.stats(0.0)["under_way"] == ""


@pytest.mark.parametrize("seed", range(4))
def test_updates_at_any_moment_change_no_answer(seed):
    """The real slots; the simulated executor's tokens depend on what they read, not on weights."""
    import random

    rng = random.Random(seed)
    world = World()
    world.hello()
    answered = 0
    for number in range(40):
        prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        client = world.submit(prompt, rng.randrange(1, 12))
        for _ in range(rng.randrange(6)):
            rng.choice([world.apply, world.read_reports, world.step])()
        if rng.random() < 0.1 and client.finished is None:
            world.cancel(client)
        if number % 4 == 0:
            world.core.on_message(b"g", Query(100 + number, "update_weights", "/w"), world.now)
            world.flush()
            for _ in range(200):
                world.apply()
                world.step()
                world.read_reports()
                order = world.core._controls._order
                if order is not None and order.id and not world.commands:
                    assert not world.slots.open_slots()
                    world.core.on_report(0, ControlDone(0, order.id), world.now)
                    world.flush()
                    break
            answered += world.replies[-1].id == 100 + number
    world.drain()
    world.check_end()
    assert answered == 10
    assert world.core.stats(world.now)["preemptions"] > 0
    assert not any(isinstance(reply.body, Outputs) for reply in world.replies)


# -- all instances or none


def check(script: Script, number: int = 8, gateway: bytes = b"g") -> Control | None:
    orders = script.tell(Query(number, "check_weights", "/new"), gateway)
    return orders[0] if orders else None


def decide(script: Script, number: int = 9, generation: int = 1, gateway: bytes = b"g"):
    return script.tell(Query(number, "update_weights", "/new", Weights(generation, "n", "/new")), gateway)


def test_a_check_disturbs_nobody_and_locks_the_instance_for_who_asked():
    script = Script(ranks=2)
    script.tell(Hello("other"), b"h")
    script.take()
    (admit,) = script.submit(1)
    control = check(script)
    assert control == Control("check_weights", "/new", control.id)
    script.tokens((admit.slot, admit.epoch, 50))
    script.report(ControlDone(0, control.id, value="n"), 0)
    script.report(ControlDone(1, control.id, value="n"), 1)
    assert replies(script) == [(8, {"path": "/new", "weights": "n"})]
    assert script.core.stats(0.0)["preemptions"] == 0
    for number, what in ((1, "check_weights"), (2, "update_weights"), (3, "start_profile")):
        script.tell(Query(number, what, "/other"), b"h")
        assert replies(script)[0][1]["code"] == "busy"
    script.tell(Query(10, "release_weights"))
    script.take()
    assert check(script, 4, b"h") is not None


@pytest.mark.parametrize("end", ["deadline", "gateway lost"])
def test_nobody_stays_locked_for_a_gateway_that_is_gone(end):
    script = Script()
    script.tell(Hello("other"), b"h")
    control = check(script)
    script.report(ControlDone(0, control.id))
    if end == "deadline":
        script.now += PREPARED_S - 0.1
        assert check(script, 4, b"h") is None
        script.now += 0.2
    else:
        script.core.gateway_lost(b"g")
    assert check(script, 5, b"h") is not None


def test_what_was_prepared_is_given_back_when_nothing_comes_of_it():
    """And only by who had it prepared, as long as there is somebody."""
    script = Script()
    script.tell(Hello("other"), b"h")
    released, release = [Control("release_weights")], Query(20, "release_weights")
    control = check(script)
    assert script.tell(release, b"h") == []
    script.report(ControlDone(0, control.id))
    assert script.tell(release, b"h") == []
    assert script.tell(release) == released
    assert script.tell(release, b"h") == released, "a rank may have prepared what another one refused"
    control = check(script, 5, b"h")
    script.core.gateway_lost(b"h")
    assert script.flush() == released, "while they are at it"
    script.report(ControlDone(0, control.id, "it was given up"))
    script.tell(Hello("other"), b"h")
    control = check(script, 6, b"h")
    script.report(ControlDone(0, control.id))
    script.core.gateway_lost(b"h")
    assert script.flush() == released


def test_what_was_prepared_goes_when_the_lock_is_over():
    """Nobody may ever ask again: its gateway stands still.  One that asks again has its lock for longer."""
    script = Script()
    script.report(ControlDone(0, check(script).id, value="n"))
    script.now += PREPARED_S - 1
    script.report(ControlDone(0, check(script).id, value="n"))
    script.take()
    script.now += PREPARED_S - 1
    script.core.on_clock(script.now)
    assert script.flush() == []
    assert script.core.next_deadline() == pytest.approx(script.now + 1)
    script.now += 1
    script.core.on_clock(script.now)
    assert script.flush() == [Control("release_weights")]
    assert script.core.next_deadline() is None
    script.core.on_clock(script.now + 1)
    assert script.flush() == [], "once"


def test_a_lock_that_ends_while_its_gateway_checks_again_takes_nothing_away():
    script = Script()
    script.report(ControlDone(0, check(script).id, value="n"))
    script.now += PREPARED_S - 1
    control = check(script)
    script.now += 2
    script.core.on_clock(script.now)
    assert script.flush() == []
    script.report(ControlDone(0, control.id, value="n"))
    script.core.on_clock(script.now)
    assert script.flush() == []
    script.now += PREPARED_S
    script.core.on_clock(script.now)
    assert script.flush() == [Control("release_weights")]


def test_an_old_decision_does_not_end_the_lock_of_another_gateway():
    script = Script()
    script.tell(Hello("other"), b"h")
    (update,) = decide(script)
    script.report(ControlDone(0, update.id))
    script.report(ControlDone(0, check(script, 5, b"h").id, value="m"))
    decide(script, 10)
    script.take()
    assert check(script, 6) is None
    script.core.gateway_lost(b"h")
    assert script.flush() == [Control("release_weights")]


def test_a_check_that_fails_says_why_and_locks_nothing():
    """What a rank may have prepared goes."""
    script = Script(ranks=2)
    script.tell(Hello("other"), b"h")
    for errors, values, said in (
        (("no such file", "no such file"), ("", ""), "no such file"),
        (("", "disk"), ("n", ""), "disk"),
        (("", ""), ("n", "m"), "different files"),
    ):
        script.take()
        control = check(script)
        for rank in range(2):
            script.report(ControlDone(rank, control.id, errors[rank], values[rank]), rank)
        ((_, body),) = replies(script)
        assert (body["code"], said in body["error"]) == ("refused", True)
        assert script.core.failure is None
    assert check(script, 3, b"h") is not None


def test_a_check_that_takes_too_long_costs_nothing():
    script = Script(ranks=2)
    control = check(script)
    script.report(ControlDone(0, control.id), 0)
    script.wait_until(max(CHECK_S, script.config.startup_timeout_s) + 1)
    script.flush()
    ((_, body),) = replies(script)
    assert (body["code"], "worker ranks 1 have not answered" in body["error"]) == ("timeout", True)
    script.report(ControlDone(1, control.id), 1)
    assert (script.core.failure, script.core.counters.violations) == (None, 0)


def test_what_was_decided_is_not_refused_while_another_order_is_under_way():
    """Nothing is admitted from the moment that it comes, so what follows it is computed with new weights."""
    script = Script()
    (admit,) = script.submit(1)
    (profile,) = script.tell(Query(7, "start_profile", "/traces"))
    (preempt,) = decide(script)
    assert isinstance(preempt, Preempt)
    assert script.submit(2) == []
    assert script.close(admit.slot, admit.epoch, CloseReason.PREEMPTED) == [], "the profile is not begun yet"
    (control,) = script.report(ControlDone(0, profile.id))
    assert control == Control("update_weights", "/new", control.id)
    assert replies(script) == [(7, {"profiling": True})]
    assert [type(command) for command in script.report(ControlDone(0, control.id))] == [Admit, Admit]
    welcome, reply = sorted(script.take(), key=lambda message: isinstance(message, QueryReply))[-2:]
    assert (reply.body["weights"], welcome.weights) == ("n", Weights(1, "n", "/new"))
    assert decide(script) == [], "it has them"
    ((_, body),) = replies(script)
    assert (body["weights"], "error" in body) == ("n", False)


def test_an_instance_that_cannot_load_what_was_decided_fails():
    script = Script(ranks=2)
    (control,) = decide(script)
    for rank in range(2):
        script.report(ControlDone(rank, control.id, "the file is gone"), rank)
    assert "the weights that all instances get cannot be loaded: the file is gone" in script.core.failure


def test_of_two_decisions_the_newer_one_holds_in_any_order():
    ends = []
    for first, second in ((1, 2), (2, 1)):
        script = Script()
        script.tell(Hello("other"), b"h")
        (control,) = decide(script, 1, first)
        assert decide(script, 2, second, b"h") == []
        for command in script.report(ControlDone(0, control.id)):
            script.report(ControlDone(0, command.id))
        assert not script.core.scheduler.draining
        assert {number for number, _ in replies(script)} == {1, 2}
        ends.append(script.core._controls.weights.generation)
    assert ends == [2, 2]


def test_loading_is_not_bounded_by_the_time_of_a_step():
    script = Script(startup_timeout_s=1000.0)
    decide(script)
    script.wait_until(900.0)
    assert script.core.failure is None
    script.wait_until(1001.0)
    assert "takes longer than --startup-timeout" in script.core.failure
