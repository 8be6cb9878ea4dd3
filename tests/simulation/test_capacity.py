"""Clusters on a cost model: what they bear, when instances die, and how many a trace needs."""

from __future__ import annotations

import json
from collections import Counter
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.gateway.arranging.slo import Slo
from baton.protocol.config import CostModel
from baton.simulation.capacity.cluster import Capacity
from baton.simulation.capacity.goodput import by_time, goodput
from baton.simulation.capacity.load import Asked, Hour, day
from baton.simulation.capacity.machine import Machine
from baton.simulation.capacity.planning import first_labels, plan_for, run_with, usage
from baton.simulation.capacity.plot import Line, Panel, svg
from baton.simulation.capacity.recorded import Seen, Sent, requests_of
from baton.simulation.capacity.trace import TraceError, read_trace

SLO = Slo(2.0, 0.05)
MACHINE = Machine(
    cost=CostModel(base=0.015, per_prefill_token=1e-4, per_decode_sequence=3e-4), itl_target_s=0.045
)
DOCUMENTS, CHAT = Hour("documents", 6.2, 3600, 60), Hour("chat", 7.5, 500, 420)


def splits(requests, instances=4):
    for number in range(1, instances):
        labels = ["prefill"] * number + ["decode"] * (instances - number)
        yield run_with(requests, labels, MACHINE, SLO, arranged=False)


def test_labels_that_follow_the_load_beat_every_fixed_split():
    requests = day([DOCUMENTS, CHAT, DOCUMENTS], 120.0)
    arranged = run_with(requests, first_labels(4), MACHINE, SLO)
    own = goodput(arranged.requests, SLO).share
    assert own > 0.9
    assert own > max(goodput(run.requests, SLO).share for run in splits(requests)) + 0.1
    assert arranged.changes


def test_a_load_that_stays_is_borne_as_by_the_best_split():
    for hour in (DOCUMENTS, CHAT):
        requests = day([hour] * 3, 60.0)
        own = by_time(run_with(requests, first_labels(4), MACHINE, SLO).requests, SLO, 60.0)[1:]
        best = max(
            sum(part.good for part in by_time(run.requests, SLO, 60.0)[1:]) for run in splits(requests)
        )
        assert sum(part.good for part in own) >= 0.98 * best, hour.name


def test_the_same_load_gives_the_same_run():
    requests = day([DOCUMENTS], 30.0)
    first, second = (run_with(requests, first_labels(3), MACHINE, SLO, [(7.0, 1)]) for _ in range(2))
    assert [one.ended_at for one in first.requests] == [one.ended_at for one in second.requests]
    assert first.changes == second.changes


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_ran_on_an_instance_that_died_ends_elsewhere(place):
    requests = day([DOCUMENTS._replace(per_s=2.0), CHAT._replace(per_s=2.0)], 30.0)
    run = Capacity(requests, ["prefill", "decode", "decode"], MACHINE, deaths=[(10.0, place), (45.0, place)])
    run.run()
    assert all(one.ended_at < float("inf") for one in run.requests)
    assert min(len(labels) for _, labels in run.history) <= 2
    assert len(run.history[-1][1]) == 3, "it came back"
    for member in run.members.values():
        assert not member.decodes
        assert member.unheard_blocks == 0
    assert not any(running.kv_used for running in run.running.values())


def test_nobody_serves_for_a_while():
    run = Capacity(
        [Asked(0.1 * number, 100, 10) for number in range(50)], ["mixed"], MACHINE, deaths=[(2.0, 0)]
    )
    run.run()
    assert all(one.ended_at < float("inf") for one in run.requests)
    assert max(one.ended_at for one in run.requests) > MACHINE.startup_s


def test_usage_is_weighted_by_time():
    run = Capacity([Asked(0.0, 10, 1), Asked(100.0, 10, 1)], ["prefill", "decode"], MACHINE)
    run.run()
    run.history.append((25.0, ("decode", "decode")))
    shares, most = usage(run)
    assert shares == {"prefill": pytest.approx(0.25), "mixed": 0.0, "decode": pytest.approx(1.75)}
    assert most == {"prefill": 1, "mixed": 0, "decode": 2}


def test_the_fewest_instances_that_are_enough():
    requests = day([DOCUMENTS, CHAT], 60.0)
    told = []
    plan = plan_for(requests, MACHINE, SLO, wanted=0.9, most=16, tell=told.append)
    chosen = plan.chosen.instances
    assert plan.enough
    assert plan.chosen.goodput.share >= 0.9
    assert {chosen - 1, chosen + 1} <= plan.runs.keys()
    assert plan.runs[chosen - 1].goodput.share < 0.9
    assert sorted(run.instances for run in told) == list(plan.runs)
    assert sum(plan.chosen.shares.values()) == pytest.approx(chosen)


def test_not_even_the_most_are_enough():
    plan = plan_for(day([DOCUMENTS], 30.0), MACHINE, SLO, wanted=0.9, most=2)
    assert not plan.enough
    assert plan.chosen.instances == 2


def test_traces(tmp_path):
    lines = tmp_path / "trace.jsonl"
    lines.write_text(
        '{"timestamp": 5000, "input_length": 30, "output_length": 7, "hash_ids": [1]}\n\n'
        '{"timestamp": 4500.5, "input_length": 20, "output_length": 0}\n'
    )
    assert read_trace(lines) == [Asked(0.0, 20, 1), Asked(pytest.approx(0.4995), 30, 7)]
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"input_lens": [3, 4], "output_lens": [5, 6], "start_times": [10.5, 10.0]}))
    assert read_trace(bench) == [Asked(0.0, 4, 6), Asked(0.5, 3, 5)]


def test_what_gateways_sent_is_what_clients_asked():
    """Refused and sent again, lost before the first token, continued after a loss, several sequences."""

    def sent(
        at: float, number: int, name: str = "a", prompt: int = 5, generated: int = 0, gateway: str = "g"
    ):
        return Sent(at, (gateway, number), (name, bytes(prompt)), prompt, generated)

    seen = Seen(
        sent=[
            sent(3.5, 7, "d"),  # (two engines' recordings are read one after the other)
            sent(1.0, 1, "a"),
            sent(1.2, 2, "a"),  # 1 was refused
            sent(2.0, 3, "b"),
            sent(2.0, 4, "b"),
            sent(2.9, 5, "b", generated=4),  # goes on from 4
            sent(3.0, 6, "c", prompt=9),
            sent(3.0, 6, "c", prompt=9, gateway="h"),
        ],
        tokens=Counter({("g", 2): 3, ("g", 3): 9, ("g", 4): 6, ("g", 5): 2, ("g", 6): 1}),
        cached={("g", 6): 8},
        pooled={("h", 6)},
    )
    assert requests_of(seen) == [
        Asked(1.2, 5, 3),
        Asked(2.0, 5, 9),
        Asked(2.0, 5, 6),  # 4 that its client had, of the 6 that were sent, and 2 more
        Asked(3.0, 1, 1),
        Asked(3.0, 9, 1),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "has no request"),
        ("hello\n", "line 1: is no JSON"),
        ('{"timestamp": 1, "input_length": 2}\n{"a": 1}\n', "line 1: give an object with timestamp"),
        ('{"timestamp": "now", "input_length": 2, "output_length": 3}', "its time 'now' is no number"),
        ('{"timestamp": 1, "input_length": -2, "output_length": 3}', "its prompt has '-2' tokens"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 1e99}', "its answer has '1e+99' tokens"),
        ('{"input_lens": [1], "output_lens": [1, 2], "start_times": [1]}', "of one length"),
    ],
)
def test_traces_that_are_none(tmp_path, text, what):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=what.replace("+", r"\+")):
        read_trace(path)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "other")


def asked_of_plan(path, *flags):
    given = ("--trace", str(path), "--step-cost", "0.015,1e-4,3e-4", *flags)
    return CliRunner().invoke(
        app, ["plan", *(("--slo", "ttft:2000 itl:50") if "--slo" not in flags else ()), *given]
    )


def test_the_command(tmp_path):
    """Four times the load needs more instances; fewer than are needed is an error's exit code."""
    path, out = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    rows = [{"timestamp": 400 * n, "input_length": 3600, "output_length": 60} for n in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for load in ("1", "4"):
        result = asked_of_plan(path, "--out", str(out), "--load", load)
        assert result.exit_code == 0, result.output
        plan = json.loads(out.read_text())
        found.append(plan["instances"])
        assert f"{plan['instances']} instance" in result.output
        assert [run["good"] >= 0.99 for run in plan["runs"]] == [
            run["instances"] >= plan["instances"] for run in plan["runs"]
        ]
        assert sum(run["late"] for run in plan["runs"] if run["instances"] < plan["instances"])
    assert found[0] < found[1]
    assert plan["best_fixed_split"]["good"] <= 1.0
    few = asked_of_plan(path, "--load", "4", "--most", "1")
    assert few.exit_code == 1
    assert "not enough: 1 instance answer" in few.output


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--slo", "fast"), "'fast' is no objective"),
        (("--step-cost", "0"), "more than 0 seconds"),
        (("--kv-tokens", "64"), "more than 64"),
        (("--step-cost", "many"), "give up to four numbers"),
    ],
)
def test_what_the_command_refuses(tmp_path, flags, what):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "output_length": 10}')
    result = asked_of_plan(path, *flags)
    assert result.exit_code == 2
    assert what in " ".join(result.output.replace("│", " ").split())


def test_the_picture_is_a_picture():
    lines = [Line("a & b", [1.0, 2.0, 0.0]), Line("c", [3.0, 0.0, 1.0])]
    root = ElementTree.fromstring(svg("<Day>", [Panel("x", "", lines, stacked=True), Panel("y", "%", lines)]))
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("polygon") == 2
    assert names.count("polyline") == 2
    assert "a & b" in [element.text for element in root.iter()]
