"""Steps that confirm several tokens of a slot: the slot machine with drafts against a model, and by hand."""

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.executor.base import StepResult
from baton.executor.simulated.executor import simulated_next_token, simulated_tokens
from baton.protocol.messages.commands import Abort, Preempt
from baton.protocol.messages.reports import Closed, CloseReason
from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import Sampling, TokenLogprobs
from tests.worker.model import VOCAB, admit
from tests.worker.slots.test_slots import Script, check_batch, check_decode_set, make


def ints(*values):
    return np.array(values, np.int32)


def true_run(tokens, drafts):
    """What an honest executor gives a row with these drafts."""
    run, tokens = [], list(tokens)
    for place in range(len(drafts) + 1):
        token = simulated_next_token(tokens, VOCAB)
        run.append(token)
        tokens.append(token)
        if place == len(drafts) or token != drafts[place]:
            return run
    raise AssertionError


class DraftingScript(Script):
    """As `Script`, with drafts that are right, wrong or too many, beside late and failing rows."""

    def __init__(self, data, size, budget):
        super().__init__(data, size, budget)
        self.drafts = {}

    def end(self, command, reason):
        super().end(command, reason)
        if command.slot not in self.model.open:  # the command may have named an epoch that was over
            self.drafts.pop(command.slot, None)

    def draw_drafts(self):
        found = {}
        for number, slot in self.model.open.items():
            if self.draw(st.booleans()):
                truth = simulated_tokens(slot.tokens, self.draw(st.integers(0, 5)), VOCAB)
                wrong = self.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
                found[number] = [*truth, *wrong]
        return found

    def do_step(self):
        self.step += 1
        rows = self.model.compose(self.drafts)
        batch = self.slots.compose(self.step)
        if not rows:
            assert batch is None
            return
        plain = [row for row in rows if not row.drafts]
        check_batch(batch, rows, self.step, len([row for row in plain if row.decode]))
        check_decode_set(self.slots)
        self.check_last_chunks(batch, rows)
        drafted = any(row.drafts for row in rows)
        assert (batch.drafts is not None) == drafted
        if drafted:
            assert batch.drafts.tolist() == [row.drafts for row in rows]
        assert batch.first_prompt == sum(row.decode for row in rows)
        sampling = [(index, row) for index, row in enumerate(rows) if row.samples]
        runs, entries, failed, late = {}, [], {}, []
        for index, row in sampling:
            drafts = row.tokens[len(row.tokens) - row.drafts :]
            run = true_run(self.model.open[row.slot].tokens, drafts)
            fate = self.draw(st.sampled_from(["", "", "", "late", "failed"]))
            if fate == "late":
                late.append(index)
                entries.append([-2])
                continue
            if fate == "failed":
                failed[index] = "it cannot"
                run = run[: self.draw(st.integers(0, len(run) - 1))]
            runs[row.slot] = run
            entries.append([*run, -1] if fate else run)
        result = StepResult(
            np.array([token for run in entries for token in run], np.int32),
            runs=np.array([len(run) for run in entries], np.int32) if drafted else None,
            failed=failed,
            late=late,
        )
        of_late = {rows[index].slot for index in late}
        of_failed = {rows[index].slot for index in failed}
        given_, closed = self.model.commit_runs(rows, runs, of_late, of_failed)
        self.drafts = self.draw_drafts()
        result.drafts = {slot: np.array(drafts, np.int32) for slot, drafts in self.drafts.items()}
        outcome = self.slots.commit(batch, result)
        report = outcome.report(self.step, 7, 0.5)
        columns = [array("i", packed) for packed in (report.slots, report.epochs, report.tokens)]
        assert list(zip(*columns, strict=True)) == given_
        assert sorted((end.slot, end.epoch, end.reason.value) for end in report.closings) == sorted(closed)
        self.check_progress(report, [row for row in rows if not row.decode], of_late)
        assert bool(report.speculation) == drafted
        self.stream += [("token", *entry) for entry in given_]
        self.stream += [("closed", *entry) for entry in closed]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), size=st.integers(1, 5), budget=st.integers(1, 24))
def test_any_script_behaves_as_the_model_does(data, size, budget):
    script = DraftingScript(data, size, budget)
    script.run()
    script.check_rules()


def running(count=1, blocks=4, **stopping):
    """Slots 0, 1, …: each has a prompt of three tokens and one token, 9."""
    slots = make(budget=24)
    for slot in range(count):
        own = [blocks * slot + index for index in range(blocks)]
        slots.apply(admit(slot, 1, [5, 6, 7], own, **{"max_tokens": 12, **stopping}))
    slots.commit(slots.compose(1), StepResult(np.full(count, 9, np.int32)))
    return slots


def with_drafts(slots, drafts, step=2):
    """The step after one that proposed them."""
    batch = slots.compose(step)
    count = len(batch.slots)
    drafts = {slot: np.array(tokens, np.int32) for slot, tokens in drafts.items()}
    slots.commit(batch, StepResult(np.full(count, 9, np.int32), drafts=drafts))
    return slots.compose(step + 1)


def test_rows_with_drafts_follow_those_without():
    slots = running(3)
    batch = with_drafts(slots, {0: [1, 2], 2: [3]})
    assert batch.slots.tolist() == [1, 0, 2]
    assert batch.counts.tolist() == [1, 3, 2]
    assert batch.tokens.tolist() == [9, 9, 1, 2, 9, 3]
    assert batch.drafts.tolist() == [0, 2, 1]
    assert (batch.num_decodes, batch.first_prompt) == (1, 3)
    result = StepResult(ints(8, 1, 2, 4, 5), runs=ints(1, 3, 1))
    outcome = slots.commit(batch, result)
    assert outcome.slots.tolist() == [1, 0, 0, 0, 2]
    assert outcome.tokens.tolist() == [8, 1, 2, 4, 5]
    assert outcome.speculation == [2, 3, 1, 1]
    batch = slots.compose(4)
    assert batch.drafts is None
    assert batch.slots.tolist() == [0, 1, 2]
    assert batch.starts.tolist() == [7, 5, 5]
    assert batch.tokens.tolist() == [4, 8, 5]


def test_each_token_of_a_run_has_its_log_probabilities():
    slots = running(2)
    batch = with_drafts(slots, {1: [1, 2]})
    found = [TokenLogprobs(token, -1.0, 1) for token in (1, 2, 3)]
    outcome = slots.commit(batch, StepResult(ints(8, 1, 2, 3), {1: found}, runs=ints(1, 3)))
    assert outcome.logprobs == [(1, found[0]), (2, found[1]), (3, found[2])]


@pytest.mark.parametrize(
    ("drafts", "options", "kept"),
    [
        ([1, 2, 3], {"max_tokens": 4}, [1]),  # two were given: two more, the last of which is sampled
        ([1, 2, 3], {"max_tokens": 3}, None),
        ([1, 2, 3], {"stop_token_ids": (2,)}, [1]),
        ([1, 2, 3], {"stop_token_ids": (2, *range(20, 30))}, [1]),
        ([2, 3], {"stop_token_ids": (2,)}, None),
        ([1, 2, 3, 4], {"blocks": 2}, [1, 2, 3]),
        ([1, 2, 3] * 10, {"max_tokens": 30, "blocks": 10}, ([1, 2, 3] * 10)[:23]),  # the step has 24
    ],
)
def test_drafts_are_cut(drafts, options, kept):
    batch = with_drafts(running(1, **options), {0: drafts})
    if kept is None:
        assert batch.drafts is None
        assert batch.tokens.tolist() == [9]
    else:
        assert batch.tokens.tolist() == [9, *kept]


def test_a_run_that_goes_on_behind_the_end_is_refused():
    slots = running(1, stop_token_ids=(4,))
    batch = with_drafts(slots, {0: [1, 2]})
    with pytest.raises(RuntimeError, match="go too far"):
        slots.commit(batch, StepResult(ints(1, 4, 3), runs=ints(3)))
    slots = running(1)
    batch = with_drafts(slots, {0: [1, 2]})
    with pytest.raises(RuntimeError, match="go too far"):
        slots.commit(batch, StepResult(ints(1, 2, 3, 4), runs=ints(4)))


def test_the_last_token_of_a_run_may_stop():
    slots = running(1, stop_token_ids=(4,))
    batch = with_drafts(slots, {0: [1, 2]})
    outcome = slots.commit(batch, StepResult(ints(1, 4), runs=ints(2)))
    assert outcome.tokens.tolist() == [1, 4]
    assert outcome.closings == [Closed(0, 1, CloseReason.STOP)]


@pytest.mark.parametrize("end", [Preempt, Abort])
def test_drafts_are_not_those_of_the_next_epoch(end):
    slots = running(1)
    batch = slots.compose(2)
    slots.commit(batch, StepResult(ints(9), drafts={0: ints(1, 2)}))
    slots.apply(end(0, 1))
    slots.apply(admit(0, 2, [5, 6, 7, 8], [0, 1, 2], num_prompt=3, max_tokens=12))
    assert slots.compose(3).drafts is None
    slots.commit(slots.compose(3), StepResult(ints(9)))
    assert slots.compose(4).tokens.tolist() == [9]


def test_a_late_row_computes_its_token_again_and_drafts_nothing():
    slots = running(2)
    batch = with_drafts(slots, {0: [1, 2], 1: [3]})
    outcome = slots.commit(batch, StepResult(ints(-2, 3, 4), runs=ints(1, 2), late=[0]))
    assert outcome.slots.tolist() == [1, 1]
    assert (outcome.prefill, outcome.speculation) == ([], [1, 1, 1])
    batch = slots.compose(4)
    assert (batch.starts.tolist(), batch.tokens.tolist(), batch.drafts) == ([4, 6], [9, 4], None)


def test_drafts_are_for_one_step():
    slots = running(1)
    batch = with_drafts(slots, {0: [1, 2]})
    slots.commit(batch, StepResult(ints(5), runs=ints(1)))
    assert slots.compose(4).drafts is None


def test_a_prompt_goes_before_drafts():
    slots = running(1)
    batch = slots.compose(2)
    slots.commit(batch, StepResult(ints(9), drafts={0: ints(1, 2, 3, 4, 5)}))
    slots.apply(admit(1, 1, list(range(20)), [8, 9, 10, 11, 12, 13]))
    batch = slots.compose(3)
    assert batch.counts.tolist() == [4, 20]
    assert batch.drafts.tolist() == [3, 0]
    assert (batch.num_decodes, batch.first_prompt) == (0, 1)
    slots.commit(batch, StepResult(ints(1, 7, 6), runs=ints(2, 1)))
    assert slots.compose(4).starts.tolist() == [6, 20]


def test_a_pooled_prompt_leaves_the_drafts_of_others_alone():
    """In two pieces, the second of which ends it."""
    slots = running(2)
    drafts = {0: ints(1, 2), 1: ints(3)}
    slots.commit(slots.compose(2), StepResult(ints(9, 9), drafts=drafts))
    pooling = Sampling(0, 0.0, pooling=Pooling("last"))
    slots.apply(admit(2, 1, list(range(28)), list(range(30, 37)), sampling=pooling, max_tokens=1))
    batch = slots.compose(3)
    assert (batch.slots.tolist(), batch.counts.tolist()) == ([0, 1, 2], [1, 1, 22])
    assert (batch.drafts, batch.pooled) == (None, {2: False})  # a prompt goes before drafts
    slots.commit(batch, StepResult(ints(9, 9), drafts=drafts))
    batch = slots.compose(4)
    assert (batch.slots.tolist(), batch.counts.tolist()) == ([0, 1, 2], [3, 2, 6])
    assert (batch.drafts.tolist(), batch.pooled) == ([2, 1, 0], {2: True})
    assert batch.samples.tolist() == [True, True, False]
    result = StepResult(ints(1, 2, 5, 8), pooled={2: b"\0\0\0\0"}, runs=ints(3, 1))
    outcome = slots.commit(batch, result)
    assert (outcome.slots.tolist(), outcome.tokens.tolist()) == ([0, 0, 0, 1], [1, 2, 5, 8])
    assert outcome.closings == [Closed(2, 1, CloseReason.POOLED, pooled=b"\0\0\0\0")]
    assert slots.compose(5).starts.tolist() == [8, 6]
