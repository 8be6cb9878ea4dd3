"""The simulator itself: the same seed is the same run, failures are made small and can be read."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from baton.executor.simulated.executor import simulated_tokens
from baton.protocol.params.sampling import Sampling, Stopping
from baton.simulation.checks.oracle import expected_tokens
from baton.simulation.events import Events, Party
from baton.simulation.plans.draw import draw_plan
from baton.simulation.plans.scenarios import SCENARIOS
from baton.simulation.report import explain_failure
from baton.simulation.runner import run_plan
from baton.simulation.shrink import named_in, shrink
from baton.simulation.wires.network import Channel, Delays
from baton.simulation.world import World
from tests.simulation.mutations import MUTATIONS

STANDARD = SCENARIOS["standard"]


def mutation(name):
    return next(one for one in MUTATIONS if one.name == name)


def timeline(seed, shape=STANDARD):
    _, world = run_plan(draw_plan(seed, shape), recording=True)
    return world.timeline.render()


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_is_one_run(seed):
    assert timeline(seed) == timeline(seed)
    assert draw_plan(seed, STANDARD) == draw_plan(seed, STANDARD)


def test_a_seed_is_one_run_in_another_process():
    """Whatever the hashes of strings are there."""
    code = (
        "from tests.simulation.test_world import timeline; import hashlib; "
        "print(hashlib.sha256(timeline(5).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_watching_changes_nothing():
    for seed in range(5):
        plan = draw_plan(seed, STANDARD)
        outcomes = [run_plan(plan, recording=recording)[0] for recording in (False, True)]
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_oracle_is_the_executors(temperature):
    for length in (1, 2, 7, 30):
        prompt = [(5 * i + length) % 40 for i in range(length)]
        sampling = Sampling(seed=2**63 + length, temperature=temperature)
        tokens, end = expected_tokens(prompt, sampling, Stopping(12), 48)
        assert end == "length"
        assert tokens == simulated_tokens(prompt, 12, 48, sampling.seed if temperature else None)


def test_the_oracle_stops_as_the_worker_does():
    prompt, sampling = [1, 2, 3], Sampling(seed=1, temperature=0.0)
    free, _ = expected_tokens(prompt, sampling, Stopping(8), 48)
    stop = free[2]
    first = free.index(stop)
    assert expected_tokens(prompt, sampling, Stopping(8, stop_token_ids=(stop,)), 48) == (
        free[: first + 1],
        "stop",
    )
    late, _ = expected_tokens(prompt, sampling, Stopping(8, min_tokens=first + 1, stop_token_ids=(stop,)), 48)
    assert len(late) > first + 1


def test_timers_of_the_dead_never_fire_and_those_of_the_stalled_wait():
    events, seen = Events(), []
    dead, slow, well = Party("dead"), Party("slow"), Party("well")
    for party in (dead, slow, well):
        events.after(1.0, party, seen.append, party.name)
    events.after(1.5, slow, seen.append, "slow again")
    dead.alive, slow.stalled_until = False, 3.0
    while (timer := events.next()) is not None:
        timer.action(*timer.args)
    assert seen == ["well", "slow", "slow again"]
    assert events.now == 3.0


def test_a_channel_keeps_its_order_and_loses_only_when_it_breaks():
    events, wire, seen = Events(), Party("wire"), []
    channel = Channel(events, wire, Delays(random.Random(1), 0.0, 1.0), seen.append)
    for number in range(50):
        channel.send(number)
    while (timer := events.next()) is not None:
        timer.action(*timer.args)
    assert seen == list(range(50))
    channel.send(50)
    wire.alive = False
    assert events.next() is None
    assert seen == list(range(50))


def first_failure(shape=STANDARD):
    for seed in range(200):
        violation = run_plan(draw_plan(seed, shape))[0].violation
        if violation is not None:
            return seed, violation
    raise AssertionError("nothing was found")


def test_a_failure_is_made_small(monkeypatch):
    mutation("Finished is sent twice").apply(monkeypatch)
    seed, first = first_failure()
    small = shrink(draw_plan(seed, STANDARD), first, limit_s=math.inf)
    assert small.violation.rule == first.rule
    assert len(small.plan.requests) == 1
    assert len(small.plan.faults) == 0
    again, _ = run_plan(small.plan)
    assert str(again.violation) == str(small.violation)


def test_making_a_failure_small_ends_when_its_time_is_over(monkeypatch):
    """By a clock of its own: the best plan so far is the answer, and it fails in the same way."""
    mutation("Finished is sent twice").apply(monkeypatch)
    seed, first = first_failure()
    plan, sizes = draw_plan(seed, STANDARD), []
    for limit_s in (0.0, 40.0, 160.0, 1e9):
        looks = itertools.count()
        small = shrink(plan, first, limit_s=limit_s, clock=lambda looks=looks: float(next(looks)))
        assert next(looks) <= limit_s + 200, "nothing goes on for long without a look at the clock"
        assert small.violation.rule == first.rule
        assert str(run_plan(small.plan)[0].violation) == str(small.violation)
        sizes.append(len(small.plan.requests) + len(small.plan.faults))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == len(plan.requests) + len(plan.faults)
    assert sizes[-1] == 1


def test_what_the_violation_names_is_tried_first(monkeypatch):
    mutation("a closing of a stale epoch is accepted by the engine").apply(monkeypatch)
    seed, first = first_failure()
    small = shrink(draw_plan(seed, STANDARD), first, limit_s=math.inf)
    assert small.whole
    assert small.runs < 300
    assert named_in("request 7 is not r12, as r7 said; slot r") == [7, 12]


def test_a_run_can_be_given_up():
    plan = draw_plan(1, SCENARIOS["small"])
    whole = run_plan(plan)[0]
    assert World(plan).run_until(whole.virtual_seconds / 2) is None
    assert World(plan).run_until(math.inf, lambda: True) is None
    assert World(plan).run_until(whole.virtual_seconds + 1.0) == whole


def test_a_failure_is_told(monkeypatch):
    mutation("Closed is not sent when no step runs").apply(monkeypatch)
    seed, _ = first_failure()
    text = explain_failure("standard", seed, last=60)
    assert f"seed {seed} breaks closing-3" in text
    assert f"--scenario standard --seed {seed} --timeline" in text
    assert "VIOLATION closing-3" in text


def test_a_stuck_request_says_who_waits_for_whom(monkeypatch):
    mutation("a request behind a cancelled head is not looked at").apply(monkeypatch)
    seed, violation = first_failure()
    assert violation.rule == "liveness"
    for part in ("waits for id", "the engine of ", "has it waiting", "asleep", "log applied up to"):
        assert part in violation.text
    text = explain_failure("standard", seed, max_runs=1)
    assert "┌" in text  # the life of the request that is stuck is marked


def test_the_trace_opens_in_perfetto(tmp_path):
    _, world = run_plan(draw_plan(1, SCENARIOS["calm"]), recording=True)
    path = tmp_path / "trace.json"
    world.timeline.write_chrome_trace(path)
    events = json.loads(path.read_bytes())["traceEvents"]
    begun = {event["id"] for event in events if event["ph"] == "b"}
    assert begun
    assert begun == {event["id"] for event in events if event["ph"] == "e"}
    assert {"gateway0", "m0.1.engine", "m0.1.rank0"} <= {
        event["args"]["name"] for event in events if event["ph"] == "M"
    }


def test_the_command_line(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from baton.cli.main import app

    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    good = runner.invoke(app, ["simulate", "--scenario", "small", "--seeds", "0:3"])
    assert good.exit_code == 0
    assert "3 seeds" in good.output
    assert "0 violations" in good.output
    shown = runner.invoke(app, ["simulate", "--scenario", "small", "--seed", "1", "--timeline"])
    assert shown.exit_code == 0
    assert "m0.1.engine" in shown.output
    assert (tmp_path / "simulate-small-1.json").exists()
    assert runner.invoke(app, ["simulate", "--scenario", "none such"]).exit_code == 2
    mutation("a token comes after its Closed").apply(monkeypatch)
    bad = runner.invoke(app, ["simulate", "--scenario", "small", "--seeds", "0:3"])
    assert bad.exit_code == 1
    assert "closing-2" in bad.output
    assert "made smaller" in bad.output
