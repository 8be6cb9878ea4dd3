"""The explorer visits what it should, finds nothing in the code as it is, and every defect put into it.

`python -m tests.simulation.test_explorer` visits all and writes the table of `docs/simulation.md` anew.
"""

import re
from array import array
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest

from baton.engine.dispatch import Dispatcher
from baton.engine.endings import finish
from baton.engine.intake import Intake
from baton.engine.scheduling.admission import Admissions
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.states import State
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Preempt
from baton.simulation.explorer.copying import clone, freeze
from baton.simulation.explorer.explored import Engine, Worker
from baton.simulation.explorer.explored_gateway import Ask
from baton.simulation.explorer.explored_world import SmallWorld
from baton.simulation.explorer.explorer import ExploreResult, _Search, explore, run_explore
from baton.simulation.explorer.scenarios import SCENARIOS, Scenario
from baton.worker.loop import WorkerLoop
from baton.worker.slots.slot_table import DECODE, FREE
from baton.worker.slots.slots import Slots

CONTAINS = {
    "queue": ("Closed(length)",),
    "preempt": ("Preempt", "Closed(preempted)", "Admit after preemption", "Grow"),
    "preempt_cancel": ("Preempt", "Abort", "Closed(aborted)", "Finished(aborted)"),
    "preempt_stop": ("Preempt", "Closed(preempted)", "Closed(stop)"),
    "three": ("Preempt", "Closed(preempted)", "Closed(length)"),
    "preempt_pause": ("Preempt", "Closed(preempted)", "Control"),
    "cancel_queued": ("Finished(aborted)",),
    "cancel_running": ("Abort", "Closed(aborted)", "Closed(length)"),
    "cancel_both": ("Abort", "Closed(aborted)"),
    "cancel_prefill": ("Abort", "Closed(aborted)"),
    "first_token_ends": ("Abort", "Closed(length)"),
    "priority": ("Preempt", "Closed(preempted)"),
    "prefix_shared": ("Admit with shared blocks", "Closed(aborted)"),
    "prefix_preempted": ("Admit with shared blocks", "Closed(preempted)"),
    "reset_prefix": ("Admit with shared blocks",),
    "pause": ("Control", "Closed(aborted)"),
    "crash_worker": ("Failing",),
    "crash_engine": ("Finished(length)",),
    "crash_preempt": ("Failing", "Preempt"),
    "crash_cancel": ("Failing", "Abort"),
    "crash_gateway": ("Abort", "Closed(aborted)"),
    "handover": ("Reserve", "Reserved", "Progress", "Fetch", "Handoff", "Taken", "Finished(handed_over)"),
    "handover_chunks": ("Progress", "Fetch", "Taken"),
    "handover_fetch": ("Taken", "Cancel", "Admit after preemption"),
    "handover_cancel": ("Cancel", "Cancelled", "DropFetch", "Closed(aborted)", "Finished(aborted)"),
    "handover_credit": ("Refused", "Credit", "Taken"),
    "handover_d_dies": ("Finished(lost)", "Finished(handed_over)", "Admit after preemption"),
    "handover_p_dies": ("DropFetch", "Admit after preemption", "Taken"),
}


DOCUMENT = Path(__file__).parents[2] / "docs/simulation.md"
ROW = re.compile(r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \| (\d+) \|\n", re.MULTILINE)
STALE = 0.1
"""A row may differ from what is found by so much of it."""


def documented() -> dict[str, tuple[int, int]]:
    """By scenario: states and transitions, as the document says."""
    rows = ROW.findall(DOCUMENT.read_text())
    return {
        name: (int(states.replace(",", "")), int(transitions.replace(",", "")))
        for name, states, transitions, _ in rows
    }


def write_table(results: list[ExploreResult]) -> None:
    """Puts these rows into the place of those that the document has."""
    text = DOCUMENT.read_text()
    places = [match.span() for match in ROW.finditer(text)]
    rows = [f"| `{one.scenario}` | {one.states:,} | {one.transitions:,} | {one.depth} |\n" for one in results]
    DOCUMENT.write_text(text[: places[0][0]] + "".join(rows) + text[places[-1][1] :])


def test_every_scenario_says_what_it_must_contain():
    assert CONTAINS.keys() == SCENARIOS.keys()
    assert list(documented()) == list(SCENARIOS), "run `python -m tests.simulation.test_explorer`"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_violates_anything(name):
    result = explore(name)
    assert result.violation is None, str(result)
    assert result.complete
    assert result.terminal >= 1
    assert result.transitions >= result.states - 1
    for kind in CONTAINS[name]:
        assert result.events[kind], f"{name} contains no {kind}: {result.events}"
    found = (result.states, result.transitions)
    assert found == pytest.approx(documented()[name], rel=STALE), (
        f"the table of {DOCUMENT.name} is stale: run `python -m tests.simulation.test_explorer`"
    )


def test_the_number_of_states_does_not_depend_on_the_run():
    first, second = explore("preempt"), explore("preempt")
    assert (first.states, first.transitions, first.depth) == (second.states, second.transitions, second.depth)
    assert first.states > 500


def test_a_limit_of_states_is_said_and_is_no_success():
    result = explore("preempt", max_states=100)
    assert not result.complete
    assert "NOT COMPLETE" in str(result)
    assert "every run ends" not in str(result)


def test_the_command_prints_and_returns_an_exit_code(capsys):
    assert run_explore("queue") == 0
    assert "no violation" in capsys.readouterr().out
    assert run_explore("nothing") == 2
    assert "preempt" in capsys.readouterr().out
    with pytest.raises(ValueError, match="preempt_cancel"):
        explore("nothing")


# -- defects


def free_before_closed(patch):
    original = Intake.cancel

    def cancel(self, request, now):
        original(self, request, now)
        if request.state is State.ABORTING:
            self._scheduler.release(request)

    patch.setattr(Intake, "cancel", cancel)


def closed_forgotten_without_a_step(patch):
    original = WorkerLoop._apply

    def apply(self, sequence):
        emit, kept = self.emit, []
        self.emit = kept.append
        original(self, sequence)
        del self.emit
        if self.slots.compose(0) is not None:
            for report in kept:
                emit(report)

    patch.setattr(WorkerLoop, "_apply", apply)


def cancel_lost_while_queued(patch):
    original = Intake.cancel

    def cancel(self, request, now):
        if request.state is not State.WAITING:
            original(self, request, now)

    patch.setattr(Intake, "cancel", cancel)


def cancel_lost_while_preempting(patch):
    original = Intake.cancel

    def cancel(self, request, now):
        if request.state is not State.PREEMPTING:
            original(self, request, now)

    patch.setattr(Intake, "cancel", cancel)


def indexed_before_computed(patch):
    original = Admissions._seat

    def seat(self, request, shared, fresh):
        admission = original(self, request, shared, fresh)
        self.index(request, len(request.tokens))
        return admission

    patch.setattr(Admissions, "_seat", seat)


def generated_tokens_forgotten(patch):
    original = Dispatcher._admit

    def admit(self, admission, now):
        request = admission.request
        del request.tokens[request.num_prompt :]
        return original(self, admission, now)

    patch.setattr(Dispatcher, "_admit", admit)


def nobody_gives_way(patch):
    patch.setattr(Scheduler, "_give_way", lambda self, decisions: None)


def preempted_twice(patch):
    """A `Preempt` of a slot that is free closes it again."""
    original = Slots._is_open

    def is_open(self, command):
        if isinstance(command, Preempt) and self.table.phase[command.slot] == FREE:
            self.table.phase[command.slot] = DECODE
            return True
        return original(self, command)

    patch.setattr(Slots, "_is_open", is_open)


def finished_twice(patch):
    original = Intake.cancel

    def cancel(self, request, now):
        original(self, request, now)
        if request.state is State.ABORTING:
            finish(self._outboxes, self._counters, request, "aborted")

    patch.setattr(Intake, "cancel", cancel)


@pytest.mark.parametrize(
    ("defect", "scenario", "said"),
    [
        (free_before_closed, "cancel_running", "closing-4"),
        (closed_forgotten_without_a_step, "cancel_running", "closing-3"),
        (closed_forgotten_without_a_step, "preempt", "closing-3"),
        (cancel_lost_while_queued, "cancel_queued", "cancel: B was cancelled and is waiting"),
        (cancel_lost_while_preempting, "preempt_cancel", "cancel: B was cancelled and is preempting"),
        (indexed_before_computed, "prefix_shared", "closing-5"),
        (generated_tokens_forgotten, "preempt", "tokens: B got"),
        (nobody_gives_way, "preempt", "stuck: nobody has anything to do, and A, B still wait"),
        (preempted_twice, "preempt_stop", "closing-1"),
        (finished_twice, "cancel_running", "answer: request 2 ended twice"),
    ],
)
def test_a_defect_is_found_with_a_shortest_path(defect, scenario, said, monkeypatch):
    defect(monkeypatch)
    result = explore(scenario)
    assert result.violation is not None
    assert result.violation.startswith(said)
    assert 1 <= len(result.path) <= 30
    text = str(result)
    assert "VIOLATION" in text
    assert "engine reads Submit(A as id 2)" in text
    assert text.splitlines()[-1].strip() == result.violation


def test_an_exception_of_production_code_is_a_violation(monkeypatch, capsys):
    def decide(self):
        raise KeyError("nothing here")

    monkeypatch.setattr(Scheduler, "decide", decide)
    assert run_explore("queue") == 1
    assert "defect: KeyError: 'nothing here'" in capsys.readouterr().out


def test_a_run_that_can_go_round_for_ever_is_found():
    search = _Search(SCENARIOS["queue"], 1000)
    search.run()
    assert search._find_cycle() is None
    search._edges[0].append(len(search._order) - 1)
    search._edges[1].append(0)
    assert search._find_cycle().startswith("endless")


# -- copies


def an_engine():
    scenario = Scenario("one", "", (Ask((1, 2, 3), 4),), prefix_caching=True)
    world = SmallWorld(scenario)
    state = world.initial()
    return world._engines.contents[state.engine], world._messages.data[state.inbox[0]], world._config


def test_a_copy_goes_its_own_way_and_does_the_same():
    engine, submit, config = an_engine()
    before = freeze(engine)
    copies = [clone(engine), clone(engine)]
    assert freeze(copies[0]) == before
    assert hash(freeze(copies[0])) == hash(before)
    sent = []
    for copy in copies:
        assert isinstance(copy, Engine)
        copy.message(submit)
        assert freeze(copy) != before
        sent.append(copy.flush(True))
    assert sent[0] == sent[1] != ([], [])
    assert freeze(copies[0]) == freeze(copies[1])
    assert freeze(engine) == before
    workers = [Worker(config)]
    workers.append(clone(workers[0]))
    assert workers[0].round(sent[0][0]) == workers[1].round(sent[0][0])
    assert freeze(workers[0]) == freeze(workers[1])
    assert freeze(workers[0]) != freeze(Worker(config))


def test_two_names_of_one_object_stay_two_names_of_one_object():
    inner = [1]
    copy = clone({"a": inner, "b": inner, "c": deque([inner])})
    copy["a"].append(2)
    assert copy["b"] == [1, 2] == copy["c"][0]
    assert inner == [1]
    assert freeze([inner, inner]) != freeze([inner, [1]])


def test_all_kinds_of_content_count():
    for one, other in (
        (array("i", [1]), array("i", [2])),
        (np.zeros(3), np.ones(3)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (bytearray(b"a"), bytearray(b"b")),
        ({1}, {2}),
        (Ask((1,), 2), Ask((1,), 3)),
        (pack_int32([1]), pack_int32([2])),
    ):
        assert freeze(one) == freeze(clone(one))
        assert freeze(one) != freeze(other)


def test_views_of_an_array_are_views_of_its_copy():
    cells = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    things = [cells.reshape(-1), cells, cells[:, 1, ::2], np.int64(5)]
    flat, whole, part, number = clone(things)
    flat[:] = 7
    assert (whole == 7).all()
    assert part.tolist() == [[7, 7], [7, 7]]
    assert number == 5
    assert cells[0, 0, :3].tolist() == [0, 1, 2]
    assert freeze(things) == freeze(clone(things))


def test_what_cannot_be_copied_is_said():
    with pytest.raises(TypeError, match="does not know how to copy a"):
        clone([iter(())])
    with pytest.raises(TypeError, match="does not know how to copy a"):
        freeze(object())


if __name__ == "__main__":
    write_table([explore(name) for name in SCENARIOS])
