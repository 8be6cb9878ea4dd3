"""The slot machine: against a model with random scripts, and each rule by hand."""

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.executor.base import StepResult
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Abort, Control, Grow, Preempt, Reprioritize
from baton.protocol.messages.reports import Closed, CloseReason
from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import Sampling, TokenLogprobs
from baton.worker.slots.decode_set import LEFT, DecodeSet
from baton.worker.slots.outcome import Admitted
from baton.worker.slots.slot_table import DECODE
from baton.worker.slots.slots import Slots
from baton.worker.slots.stop_tokens import MAX_TOKEN, NO_STOP
from baton.worker.slots.violations import ProtocolViolation
from tests.worker.model import VOCAB, Model, admit, result_of, sample

BLOCK, LENGTH, POOL = 4, 40, 64


def make(size=4, budget=16, length=LENGTH):
    return Slots(
        max_num_seqs=size,
        max_num_batched_tokens=budget,
        max_model_len=length,
        block_size=BLOCK,
        num_blocks=POOL,
    )


def check_batch(batch, rows, step, num_decodes=None):
    """The composed batch says exactly what the model's rows say.  `num_decodes` None: all that decode."""
    assert batch.step == step
    assert batch.slots.tolist() == [row.slot for row in rows]
    assert batch.starts.tolist() == [row.start for row in rows]
    assert batch.counts.tolist() == [len(row.tokens) for row in rows]
    assert batch.tokens.tolist() == [token for row in rows for token in row.tokens]
    assert batch.samples.tolist() == [row.samples for row in rows]
    assert batch.num_decodes == (sum(row.decode for row in rows) if num_decodes is None else num_decodes)
    for array_ in (batch.slots, batch.starts, batch.counts, batch.tokens, batch.block_tables):
        assert array_.dtype == np.int32
    for index, row in enumerate(rows):
        needed = -(-(row.start + len(row.tokens)) // BLOCK)
        assert batch.block_tables[index, :needed].tolist() == row.blocks[:needed]


def check_decode_set(slots):
    """What is kept from step to step is what a set made of nothing would be."""
    kept, n = slots.table.decode, len(slots.table.decode.slots)
    assert sorted(kept.slots.tolist()) == (slots.table.phase == DECODE).nonzero()[0].tolist()
    assert kept.row_of[kept.slots].tolist() == list(range(n))
    assert (kept.row_of >= 0).sum() == n
    assert kept.counters.tolist() == slots.table.counters[kept.slots].tolist()
    assert kept.starts.tolist() == slots.table.computed[kept.slots].tolist()
    assert kept.epochs.tolist() == slots.table.epoch[kept.slots].tolist()
    assert kept.stops.tolist() == slots.table.stops.columns[kept.slots][:, : kept.stops.shape[1]].tolist()
    assert (slots.table.stops.columns[kept.slots][:, kept.stops.shape[1] :] == NO_STOP).all()
    assert kept.longest == kept.starts.max(initial=0)
    assert kept.left == kept.counters[:, LEFT].min(initial=MAX_TOKEN)
    room = int((slots.table.capacity[kept.slots] - kept.starts).min(initial=MAX_TOKEN))
    assert kept.room <= max(room, 0)
    for row, slot in enumerate(kept.slots.tolist()):
        blocks = slots.table.capacity[slot] // BLOCK
        assert kept.tables[row, :blocks].tolist() == slots.table.blocks[slot, :blocks].tolist()


class Script:
    """Draws commands and steps, applies them to both machines, keeps the stream of reports."""

    def __init__(self, data, size, budget):
        self.data, self.size = data, size
        self.slots, self.model = make(size, budget), Model(size, budget, BLOCK)
        self.stream, self.admits, self.step = [], [], 0

    def draw(self, strategy):
        return self.data.draw(strategy)

    def pick(self):
        """A slot and an epoch that is known: open, or over."""
        if not self.admits:
            return None
        return self.draw(st.sampled_from(self.admits))

    def run(self):
        actions = [self.do_admit, self.do_grow, self.do_end, self.do_step, self.do_step, self.do_pause]
        for action in self.draw(st.lists(st.sampled_from(actions), max_size=40)):
            action()
        self.slots.apply(Control("resume"))
        self.model.paused = False
        for slot, epoch in self.admits:
            self.end(Abort(slot, epoch), "aborted")

    def do_admit(self):
        slot = self.draw(st.integers(0, self.size - 1))
        if slot in self.model.open:
            return
        tokens = self.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        num_prompt = self.draw(st.integers(1, len(tokens)))
        generated = len(tokens) - num_prompt
        computed = self.draw(st.integers(0, len(tokens) - 1))
        needed = -(-len(tokens) // BLOCK)
        blocks = self.draw(st.lists(st.integers(0, POOL - 1), min_size=needed, max_size=LENGTH // BLOCK))
        command = admit(
            slot,
            self.model.last_epoch.get(slot, -1) + self.draw(st.integers(1, 3)),
            tokens,
            blocks,
            num_prompt=num_prompt,
            num_computed=computed,
            max_tokens=self.draw(st.integers(generated + 1, LENGTH - num_prompt)),
            min_tokens=self.draw(st.integers(0, 6)),
            stop_token_ids=tuple(self.draw(st.sets(st.integers(0, VOCAB - 1), max_size=11))),
            handover=self.draw(st.sampled_from([False, False, True])),
        )
        effect = self.slots.apply(command)
        assert isinstance(effect, Admitted)
        assert effect.tokens.tolist() == tokens
        self.model.admit(command, tokens, blocks)
        self.admits.append((slot, command.epoch))
        assert self.slots.apply(command) is None  # seen before

    def do_grow(self):
        known = self.pick()
        if known is None:
            return
        slot, epoch = known
        opened = self.model.open.get(slot)
        current = opened is not None and opened.epoch == epoch
        room = LENGTH // BLOCK - (len(opened.blocks) if current else 0)
        blocks = self.draw(st.lists(st.integers(0, POOL - 1), max_size=min(room, 2)))
        assert self.slots.apply(Grow(slot, epoch, pack_int32(blocks))) is None
        if current:
            opened.blocks.extend(blocks)

    def do_end(self):
        known = self.pick()
        if known is not None:
            kind, reason = self.draw(st.sampled_from([(Preempt, "preempted"), (Abort, "aborted")]))
            self.end(kind(*known), reason)

    def end(self, command, reason):
        closed = self.slots.apply(command)
        opened = self.model.open.get(command.slot)
        if opened is None or opened.epoch != command.epoch:
            assert closed is None
            return
        assert closed == Closed(command.slot, command.epoch, CloseReason(reason))
        del self.model.open[command.slot]
        self.stream.append(("closed", command.slot, command.epoch, reason))

    def do_pause(self):
        self.model.paused = self.draw(st.booleans())
        self.slots.apply(Control("pause" if self.model.paused else "resume"))

    def do_step(self):
        self.step += 1
        rows = self.model.compose()
        batch = self.slots.compose(self.step)
        if not rows:
            assert batch is None
            return
        check_batch(batch, rows, self.step)
        check_decode_set(self.slots)
        self.check_last_chunks(batch, rows)
        tokens = sample(rows, self.model)
        sampling = [row.slot for row in rows if row.samples]
        late = (
            self.draw(st.sets(st.sampled_from(sampling))) if sampling and self.draw(st.booleans()) else set()
        )
        result = result_of(
            [-2 if slot in late else token for slot, token in zip(sampling, tokens, strict=True)]
        )
        result.late = [index for index, row in enumerate(rows) if row.slot in late]
        outcome = self.slots.commit(batch, result)
        given, closed = self.model.commit(rows, tokens, late)
        report = outcome.report(self.step, 7, 0.5)
        columns = [array("i", packed) for packed in (report.slots, report.epochs, report.tokens)]
        assert list(zip(*columns, strict=True)) == given
        assert [(end.slot, end.epoch, end.reason.value) for end in report.closings] == closed
        self.check_progress(report, [row for row in rows if not row.decode], late)
        self.stream += [("token", *entry) for entry in given]
        self.stream += [("closed", *entry) for entry in closed]

    def check_last_chunks(self, batch, rows):
        open_ = self.model.open
        assert self.slots.hands_over == any(slot.handover for slot in open_.values())
        last = [row.slot for row in rows if row.samples and open_[row.slot].handover]
        last = [slot for slot in last if not open_[slot].repeated]
        assert self.slots.last_chunks(batch) == (last, [open_[slot].epoch for slot in last])

    def check_progress(self, report, rows, late):
        packed = (report.prefill_slots, report.prefill_epochs, report.prefill_computed)
        expected = [
            (row.slot, self.model.last_epoch[row.slot], row.start + len(row.tokens) - (row.slot in late))
            for row in rows
        ]
        assert list(zip(*(array("i", column) for column in packed), strict=True)) == expected

    def check_rules(self):
        over = set()
        for kind, slot, epoch, _ in self.stream:
            assert (slot, epoch) not in over  # rules 1 and 2: nothing follows a closing
            if kind == "closed":
                over.add((slot, epoch))
        assert over == set(self.admits)  # rule 1: one for each admission
        assert self.slots.open_slots() == []
        assert self.slots.compose(self.step + 1) is None


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from([1, 3, 8, 64]))
def test_random_scripts_follow_the_model_and_the_rules(data, size, budget):
    script = Script(data, size, budget)
    script.run()
    script.check_rules()


def step(slots, tokens, number=1):
    batch = slots.compose(number)
    assert batch is not None
    return batch, slots.commit(batch, result_of(tokens))


def test_a_hand_over_closes_with_its_first_token_unless_that_ends_the_request():
    slots = make()
    slots.apply(admit(0, 1, [1, 2, 3], [5], max_tokens=9, handover=True))
    slots.apply(admit(1, 1, [1, 2], [6], max_tokens=9, handover=True, stop_token_ids=(8,)))
    slots.apply(admit(2, 1, [1, 2], [7], max_tokens=1, handover=True))
    slots.apply(admit(3, 1, [1, 2], [8], max_tokens=9))
    _, outcome = step(slots, [7, 8, 9, 6])
    assert outcome.tokens.tolist() == [7, 8, 9, 6]
    reasons = [(end.slot, end.reason) for end in outcome.closings]
    handed = CloseReason.HANDED_OVER
    assert reasons == [(0, handed), (1, CloseReason.STOP), (2, CloseReason.LENGTH)]
    assert slots.open_slots() == [3]
    # The slot's next request stays.
    slots.apply(admit(0, 2, [1, 2, 3], [5], max_tokens=9))
    assert not slots.hands_over
    _, outcome = step(slots, [6, 7], 2)
    assert outcome.closings == []


def test_a_chunk_beside_a_late_row_is_not_the_last_one_again():
    """Of a request that is handed over; somebody else's token was late."""
    slots = make(budget=3)
    slots.apply(admit(0, 1, [1], [5], max_tokens=9))
    slots.apply(admit(1, 1, [1, 2, 3], [6], max_tokens=9, handover=True))
    batch = slots.compose(1)
    assert batch.counts.tolist() == [1, 2]
    result = result_of([-2])
    result.late = [0]
    slots.commit(batch, result)
    batch = slots.compose(2)
    assert batch.counts.tolist() == [1, 1]
    assert slots.last_chunks(batch) == ([1], [1])
    result = result_of([7, -2])
    result.late = [1]
    slots.commit(batch, result)
    assert slots.last_chunks(slots.compose(3)) == ([], [])  # (it was told)


def test_a_slot_without_a_block_skips_while_the_others_go_on():
    slots = make()
    slots.apply(admit(0, 1, [1, 2, 3, 4], [5], max_tokens=9))
    slots.apply(admit(1, 1, [1, 2], [6, 7], max_tokens=9))
    step(slots, [9, 9])
    batch, _ = step(slots, [9], 2)
    assert batch.slots.tolist() == [1]
    slots.apply(Grow(0, 1, pack_int32([8])))
    batch, _ = step(slots, [9, 9], 3)
    assert batch.slots.tolist() == [0, 1]
    assert batch.block_tables[0].tolist() == [5, 8]
    slots.apply(Preempt(1, 1))
    for number in range(4, 7):
        step(slots, [9], number)
    assert slots.compose(7) is None  # full again: nothing runs, and the engine's word ends it
    assert slots.apply(Preempt(0, 1)) == Closed(0, 1, CloseReason.PREEMPTED)


def test_a_prompt_that_somebody_waits_for_is_told_of_at_once():
    """As long as somebody does: before, and when it decodes afterwards, nobody waits for its tokens."""
    slots = make(budget=4)
    slots.apply(admit(0, 1, list(range(12)), [0, 1, 2, 3], patient=True))
    assert step(slots, [])[1].patient
    slots.apply(Reprioritize(0, 1, -1, patient=False))
    assert not step(slots, [], 2)[1].patient
    assert not step(slots, [9], 3)[1].patient
    slots.apply(Reprioritize(0, 1, 0, patient=True))
    assert step(slots, [9], 4)[1].patient
    check_decode_set(slots)


def test_a_new_patience_counts_whoever_leaves_before_the_next_step():
    slots = make()
    slots.apply(admit(0, 1, [1, 2], [5], max_tokens=9, patient=True))
    step(slots, [9])
    slots.apply(admit(1, 1, [1, 2], [6], max_tokens=9, patient=True))
    assert step(slots, [9, 9], 2)[1].patient
    slots.apply(Reprioritize(0, 1, 0, patient=False))
    slots.apply(Abort(1, 1))  # it has decoded in no step yet
    assert not step(slots, [9], 3)[1].patient


def test_closings_do_not_need_a_step():
    slots = make()
    for slot in range(4):
        slots.apply(admit(slot, 3, [1], [slot]))
    slots.apply(Control("pause"))
    assert slots.compose(1) is None
    for slot in range(4):
        assert slots.apply(Preempt(slot, 3)) == Closed(slot, 3, CloseReason.PREEMPTED)
        assert slots.apply(Preempt(slot, 3)) is None
        assert slots.apply(Abort(slot, 3)) is None
        assert slots.apply(Grow(slot, 3, pack_int32([1]))) is None
        assert slots.apply(Reprioritize(slot, 3, 0, patient=True)) is None
    assert isinstance(slots.apply(admit(0, 4, [1], [0])), Admitted)
    assert slots.compose(1) is None
    slots.apply(Control("resume"))
    assert slots.compose(1) is not None


def test_stop_wins_over_length_and_min_tokens_over_stop():
    slots = make()
    slots.apply(admit(0, 0, [1], [0], max_tokens=1, stop_token_ids=(7,)))
    slots.apply(admit(1, 0, [1], [1], max_tokens=3, min_tokens=1, stop_token_ids=(7,)))
    slots.apply(admit(2, 0, [1, 7, 7], [2], num_prompt=1, max_tokens=4, min_tokens=3, stop_token_ids=(7,)))
    _, outcome = step(slots, [7, 7, 7])
    assert outcome.closings == [Closed(0, 0, CloseReason.STOP)]
    _, outcome = step(slots, [7, 7], 2)
    assert outcome.closings == [Closed(1, 0, CloseReason.STOP), Closed(2, 0, CloseReason.STOP)]


def test_stop_ids_that_no_token_can_have_are_harmless():
    slots = make()
    slots.apply(admit(0, 0, [1], [0], stop_token_ids=(-5, 1 << 40, 3)))
    _, outcome = step(slots, [3])
    assert outcome.closings == [Closed(0, 0, CloseReason.STOP)]


def test_logprobs_travel_with_their_tokens():
    slots = make(budget=3)
    wants = Sampling(seed=0, prompt_logprobs=0, logprobs=0)
    slots.apply(admit(0, 5, [10, 11, 12, 13], [0], sampling=wants))
    slots.apply(admit(1, 6, [20, 21], [1]))
    batch = slots.compose(1)
    assert {row: targets.tolist() for row, targets in batch.prompt_logprob_targets.items()} == {
        0: [11, 12, 13]
    }
    found = [TokenLogprobs(token, -1.0, 1) for token in (11, 12, 13)]
    outcome = slots.commit(batch, StepResult(np.array([], np.int32), prompt_logprobs={0: found}))
    assert outcome.prompt_logprobs[0].first == 1
    assert outcome.prompt_logprobs[0].positions == found
    assert (outcome.prompt_logprobs[0].slot, outcome.prompt_logprobs[0].epoch) == (0, 5)
    batch = slots.compose(2)
    assert batch.slots.tolist() == [0, 1]
    assert batch.prompt_logprob_targets == {}
    lp = TokenLogprobs(8, -0.5, 1)
    outcome = slots.commit(batch, StepResult(np.array([7, 8], np.int32), logprobs={1: [lp]}))
    assert outcome.logprobs == [(1, lp)]
    slots = make()
    again = admit(0, 6, [10, 11, 12], [0], num_prompt=2, sampling=wants)
    slots.apply(again)
    assert slots.compose(1).prompt_logprob_targets == {}  # an earlier epoch has reported them


def test_few_tokens_a_step_where_many_log_probabilities_of_each_are_wanted(monkeypatch):
    monkeypatch.setattr("baton.worker.slots.composition.LOGPROBS_A_STEP", 600)
    slots = make()
    for slot, wanted in enumerate((300, 1000, None)):
        sampling = Sampling(seed=0, prompt_logprobs=wanted)
        slots.apply(admit(slot, slot, [10, 11, 12, 13, 14], [2 * slot, 2 * slot + 1], sampling=sampling))
    steps = []
    while sum(step.get(1, 0) for step in steps) < 5:
        batch = slots.compose(1)
        steps.append(dict(zip(batch.slots.tolist(), batch.counts.tolist(), strict=True)))
        slots.commit(batch, StepResult(np.array([7] * int(batch.samples.sum()), np.int32)))
    # The third prompt waits for nobody; the second one for the first, and then a token a step.
    assert [step.get(2) for step in steps[:2]] == [5, 1]
    assert [step.get(0) for step in steps[:3]] == [2, 2, 1]
    assert [step.get(1, 0) for step in steps] == [0, 0, 0, 1, 1, 1, 1, 1]


def test_a_request_that_cannot_fit_is_closed_with_an_error():
    slots = make()
    closed = slots.apply(admit(0, 1, [1], [0], max_tokens=LENGTH))
    assert closed.reason is CloseReason.ERROR
    assert "lower max_tokens" in closed.message
    assert slots.open_slots() == []
    assert slots.apply(Abort(0, 1)) is None
    assert isinstance(slots.apply(admit(0, 2, [1], [0], max_tokens=LENGTH - 1)), Admitted)
    assert slots.fail(0, "why") == Closed(0, 2, CloseReason.ERROR, "why")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (admit(4, 1, [1], [0]), r"slots 0 to 3 \(max_num_seqs\)"),
        (Preempt(-1, 1), "slots 0 to 3"),
        (admit(0, 9, [1], [0]), r"occupied \(slot 0 is in decode, epoch 5\)"),
        (admit(1, 1, [1, 2], [0], num_computed=2), "num_computed must be from 0 to 1"),
        (admit(1, 1, [1, 2], [0], num_prompt=3), "num_prompt must be from 1 to the 2 tokens"),
        (admit(1, 1, [1] * 5, [0]), "blocks hold 4 of 5 tokens"),
        (admit(1, 1, [1, 2, 3], [0], num_prompt=1, max_tokens=2), "leave 0 of max_tokens"),
        (admit(1, 1, [1], [POOL]), "outside the pool of 64"),
        (admit(1, 1, [1], list(range(11))), "more than the 10 blocks"),
        (Grow(0, 5, pack_int32([1] * 10)), "more than the 10 blocks"),
        (Grow(0, 5, b"abc"), "blocks: packed"),
        (Grow(0, 6, b""), "never admitted"),
        (Reprioritize(0, 6, 0, patient=True), "never admitted"),
        (Preempt(1, 0), "never admitted .*slot 1 is in free"),
        (Abort(0, 6), "Abort of slot 0, epoch 6"),
    ],
)
def test_violations_name_the_state_and_the_command(command, problem):
    slots = make()
    slots.apply(admit(0, 5, [1], [3]))
    step(slots, [2])
    with pytest.raises(ProtocolViolation, match=problem):
        slots.apply(command)


def test_a_wrong_number_of_tokens_is_refused():
    slots = make()
    slots.apply(admit(0, 5, [1], [3]))
    batch = slots.compose(1)
    with pytest.raises(RuntimeError, match="samples 1 rows, the executor gave 2"):
        slots.commit(batch, result_of([1, 2]))


def test_unchanged_decode_sets_reuse_their_arrays():
    slots = make()
    slots.apply(admit(0, 0, [1], [3, 4], max_tokens=6))
    step(slots, [2])
    first, _ = step(slots, [2], 2)
    second, _ = step(slots, [2], 3)
    assert first.slots is second.slots
    assert first.counts is second.counts
    assert second.starts.tolist() == [2]
    assert first.starts.tolist() == [1]


class Work:
    """Counts the rows whose tables are written or moved, and how often the set is gathered anew."""

    def __init__(self, monkeypatch):
        self.laid = self.moved = self.gathered = 0
        lay, move_up, gather = DecodeSet.lay, DecodeSet._move_up, DecodeSet._gather

        def counted_lay(kept, slots, row, columns):
            self.laid += len(slots)
            lay(kept, slots, row, columns)

        def counted_move_up(kept, first, stay, columns):
            self.moved += int(stay[first:].sum())
            move_up(kept, first, stay, columns)

        def counted_gather(kept, slots):
            self.gathered += 1
            gather(kept, slots)

        monkeypatch.setattr(DecodeSet, "lay", counted_lay)
        monkeypatch.setattr(DecodeSet, "_move_up", counted_move_up)
        monkeypatch.setattr(DecodeSet, "_gather", counted_gather)

    def take(self):
        taken = self.laid, self.moved, self.gathered
        self.laid = self.moved = self.gathered = 0
        return taken


def decoding(count, work, **changes):
    """So many slots that decode, and two that are free."""
    slots = make(size=count + 2, budget=count + 4, **changes)
    for slot in range(count):
        slots.apply(admit(slot, 0, [slot % VOCAB], range(slot % 20, slot % 20 + 10), max_tokens=30))
    step(slots, [1] * count)
    step(slots, [1] * count, 2)
    work.take()
    return slots


@pytest.mark.parametrize("count", [3, 30])
def test_a_step_with_a_piece_of_a_prompt_touches_no_row_that_decodes(monkeypatch, count):
    work = Work(monkeypatch)
    slots = decoding(count, work)
    slots.apply(admit(count, 0, [1] * 20, range(10), max_tokens=5))
    for number in range(3, 7):  # 4 tokens a step, and the fifth piece is the last
        batch, _ = step(slots, [2] * count, number)
        assert batch.num_decodes == count
        assert np.shares_memory(batch.block_tables, slots.table.decode.tables)
        assert work.take() == (1, 0, 0)
    step(slots, [2] * (count + 1), 7)
    assert work.take() == (1, 0, 0)
    batch, _ = step(slots, [2] * (count + 1), 8)
    assert batch.slots.tolist() == list(range(count + 1))
    assert work.take() == (1, 0, 1), "the one that entered"
    step(slots, [2] * (count + 1), 9)
    assert work.take() == (0, 0, 0)


def test_whoever_leaves_moves_the_rows_behind_it_and_no_other(monkeypatch):
    work = Work(monkeypatch)
    slots = decoding(30, work)
    slots.apply(Abort(29, 0))
    slots.apply(Abort(20, 0))
    slots.apply(Abort(25, 0))
    step(slots, [2] * 27, 3)
    assert work.take() == (0, 7, 1)
    check_decode_set(slots)


def test_a_slot_that_grows_lays_no_table_anew_and_the_others_are_not_asked(monkeypatch):
    work = Work(monkeypatch)
    slots = make(size=8)
    for slot in range(3):
        slots.apply(admit(slot, 0, [slot], [slot, slot + 10], max_tokens=20))
    step(slots, [1] * 3)
    step(slots, [1] * 3, 2)
    work.take()
    room = slots.table.decode.room
    slots.apply(Grow(1, 0, pack_int32([30, 31])))
    assert slots.table.decode.room == room > 0
    assert slots.table.decode.tables[1, :4].tolist() == [1, 11, 30, 31]
    check_decode_set(slots)
    for number in range(3, 3 + room):
        batch, _ = step(slots, [1] * 3, number)
    assert batch.slots.tolist() == [0, 1, 2]
    batch, _ = step(slots, [1], 9)
    assert batch.slots.tolist() == [1], "the others have no block for their token"
    assert work.take() == (0, 0, 0)


def test_a_request_of_one_token_never_enters(monkeypatch):
    work = Work(monkeypatch)
    slots = decoding(3, work)
    slots.apply(admit(3, 0, [1], [1], max_tokens=1))
    _, outcome = step(slots, [2] * 4, 3)
    assert outcome.closings == [Closed(3, 0, CloseReason.LENGTH)]
    step(slots, [2] * 3, 4)
    assert work.take() == (1, 0, 0)


def test_a_slot_that_leaves_and_is_admitted_again_before_the_next_step():
    slots = make()
    slots.apply(admit(0, 0, [1], [1, 2], max_tokens=6))
    slots.apply(admit(1, 0, [1], [3, 4], max_tokens=6))
    step(slots, [2, 2])
    step(slots, [2, 2], 2)
    slots.apply(Preempt(0, 0))
    slots.apply(admit(0, 1, [1], [5], max_tokens=6))
    slots.apply(Grow(0, 1, pack_int32([6])))
    batch, _ = step(slots, [3, 3], 3)
    assert batch.slots.tolist() == [1, 0]
    assert batch.block_tables[:, 0].tolist() == [3, 5]
    batch, _ = step(slots, [3, 3], 4)
    assert batch.slots.tolist() == [1, 0]
    check_decode_set(slots)


def test_rows_are_in_order_of_admission_and_the_budget_serves_the_oldest():
    slots = make(budget=2)
    for slot in (2, 0, 3):
        slots.apply(admit(slot, 0, [slot], [slot], max_tokens=4))
    step(slots, [5, 5])
    batch, _ = step(slots, [6, 6], 2)
    assert batch.slots.tolist() == [2, 0]
    slots.apply(Abort(2, 0))
    batch, _ = step(slots, [7, 7], 3)
    assert batch.slots.tolist() == [0, 3]
    assert batch.num_decodes == 1
    slots.apply(admit(1, 0, [1], [1]))
    slots.apply(admit(2, 1, [2], [2]))
    slots.apply(Abort(0, 0))
    step(slots, [8, 8], 4)
    slots.apply(Abort(3, 0))
    step(slots, [8, 8], 5)
    batch, _ = step(slots, [9, 9], 6)
    assert batch.slots.tolist() == [1, 2]


def test_many_stop_tokens_and_a_slot_that_forgets_them():
    slots = make()
    slots.apply(admit(0, 0, [1], [0], stop_token_ids=tuple(range(20, 40))))
    _, outcome = step(slots, [19])
    assert outcome.closings == []
    _, outcome = step(slots, [33], 2)
    assert outcome.closings == [Closed(0, 0, CloseReason.STOP)]
    slots.apply(admit(0, 1, [1], [0], stop_token_ids=(5,)))
    _, outcome = step(slots, [33], 3)
    assert outcome.closings == []
    _, outcome = step(slots, [5], 4)
    assert outcome.closings == [Closed(0, 1, CloseReason.STOP)]


def test_a_pooled_prompt_closes_without_a_token():
    """In pieces, beside one that decodes; it fills the context, and its result is in the closing."""
    slots = make(budget=30)
    slots.apply(admit(1, 1, [7, 8], [20, 21], max_tokens=9))
    first = slots.compose(1)
    slots.commit(first, result_of([3]))
    pooling = Sampling(0, 0.0, pooling=Pooling("mean"))
    assert slots.apply(admit(0, 1, range(LENGTH), range(10), sampling=pooling, max_tokens=1)) is not None
    batch = slots.compose(2)
    assert (batch.samples.tolist(), batch.pooled) == ([True, False], {1: False})
    assert slots.commit(batch, StepResult(np.array([3], np.int32))).closings == []
    batch = slots.compose(3)
    assert (batch.samples.tolist(), batch.pooled) == ([True, False], {1: True})
    outcome = slots.commit(batch, StepResult(np.array([3], np.int32), pooled={1: b"\0\0\0\0"}))
    assert outcome.closings == [Closed(0, 1, CloseReason.POOLED, pooled=b"\0\0\0\0")]
    assert outcome.slots.tolist() == [1]
    assert slots.open_slots() == [1]
    check_decode_set(slots)
    slots.apply(admit(0, 2, [5], [0], max_tokens=3))  # the slot's next request decodes again
    batch = slots.compose(4)
    assert (batch.samples.tolist(), batch.pooled) == ([True, True], {})


@pytest.mark.parametrize("decoding", [False, True])
def test_a_row_without_a_token_ends_alone(decoding):
    """What an executor cannot choose a token for ends with its reason; the other rows do not see it."""
    slots = make()
    for slot in range(3):
        slots.apply(admit(slot, 1, [5, 6, 7], blocks=[2 * slot, 2 * slot + 1], max_tokens=4))
    if decoding:
        batch = slots.compose(1)
        slots.commit(batch, StepResult(np.array([9, 9, 9], np.int32)))
    batch = slots.compose(2)
    found = TokenLogprobs(8, -0.5, 1)
    result = StepResult(np.array([9, -1, 8], np.int32), {2: [found]}, failed={1: "it cannot"})
    outcome = slots.commit(batch, result)
    assert outcome.slots.tolist() == [0, 2]
    assert outcome.tokens.tolist() == [9, 8]
    assert len(outcome.epochs) == 2
    assert outcome.logprobs == [(1, found)]
    assert outcome.closings == [Closed(1, 1, CloseReason.ERROR, "it cannot")]
    assert slots.open_slots() == [0, 2]
    batch = slots.compose(3)
    check_decode_set(slots)
    assert dict(zip(batch.slots.tolist(), batch.tokens.tolist(), strict=True)) == {0: 9, 2: 8}


def test_a_row_that_is_late_makes_no_other_wait_and_is_computed_again():
    """A prompt's last token, and the token of a row that decodes; what the others get is theirs."""
    slots = make()
    slots.apply(admit(0, 1, [5, 6, 7], [0, 1], max_tokens=4))
    slots.apply(admit(1, 1, [5, 6], [2, 3], max_tokens=4, handover=True))
    batch = slots.compose(1)
    assert slots.last_chunks(batch) == ([1], [1])
    outcome = slots.commit(batch, StepResult(np.array([9, -2], np.int32), late=[1]))
    assert (outcome.slots.tolist(), outcome.tokens.tolist()) == ([0], [9])
    assert outcome.prefill == [(0, 1, 3), (1, 1, 1)]
    batch = slots.compose(2)
    assert (batch.slots.tolist(), batch.starts.tolist(), batch.tokens.tolist()) == ([0, 1], [3, 1], [9, 6])
    assert batch.samples.all()
    assert slots.last_chunks(batch) == ([], [])  # (told before)
    outcome = slots.commit(batch, StepResult(np.array([-2, 4], np.int32), late=[0]))
    assert (outcome.slots.tolist(), outcome.tokens.tolist()) == ([1], [4])
    assert outcome.closings == [Closed(1, 1, CloseReason.HANDED_OVER)]
    batch = slots.compose(3)
    check_decode_set(slots)
    assert (batch.slots.tolist(), batch.starts.tolist(), batch.tokens.tolist()) == ([0], [3], [9])
    outcome = slots.commit(batch, StepResult(np.array([-2], np.int32), late=[0]))
    assert outcome.tokens.tolist() == []
    batch = slots.compose(4)
    outcome = slots.commit(batch, StepResult(np.array([8], np.int32)))
    assert outcome.tokens.tolist() == [8]
