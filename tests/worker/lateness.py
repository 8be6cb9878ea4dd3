"""An engine that a test plays against the token loop of one worker, and random scripts for it.

Whatever is admitted, grown, preempted and aborted between rounds, each epoch gets the oracle's tokens and one
closing that is true; and its blocks may be written by anybody as soon as that was read.
"""

from array import array

import numpy as np
from hypothesis import strategies as st

from baton.executor.simulated.executor import SimulatedExecutor, simulated_tokens
from baton.executor.simulated.late import LateSimulatedExecutor
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Abort, Control, Grow, Preempt
from baton.protocol.messages.reports import REPORTS, LayersDone, StepReport
from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import Constraint, Sampling
from baton.worker.late_loop import loop_of, slots_of

from .model import VOCAB, admit

BLOCK, LENGTH, POOL, SIZE = 4, 40, 30, 4


class Log:
    """In place of the command log and of the rounds of a single rank."""

    def __init__(self):
        self.applied, self.waiting = 0, []

    def take(self, sequence):
        self.applied, taken, self.waiting = sequence, self.waiting, []
        return iter(taken)

    def enter(self, busy):
        return self.applied + bool(self.waiting) if busy or self.waiting else None


class Reports:
    """In place of the report ring.  What a report says must be true when it is written, and not only when the
    round is over: so `look` sees it there and then."""

    pending = False

    def __init__(self, look):
        self.found, self.look = [], look

    def write(self, record, ring=True):
        report = REPORTS.decode(record)
        self.look(report)
        self.found.append(report)

    def ring(self):
        pass

    def flush(self):
        return True


class Engine:
    """One that owns the blocks, and scribbles on those that `Closed` gives back."""

    def __init__(self, executor, budget=16, size=SIZE, composition=None):
        self.executor = executor
        self.log, self.reports = Log(), Reports(self.look_at)
        self.slots = slots_of(
            self.executor,
            max_num_seqs=size,
            max_num_batched_tokens=budget,
            max_model_len=LENGTH,
            composition=composition,
        )
        self.loop = loop_of(self.executor)(
            rank=0,
            slots=self.slots,
            executor=self.executor,
            commands=self.log,
            rounds=self.log,
            reports=self.reports,
            observer=self.look,
        )
        self.free = list(range(POOL))
        self.blocks, self.requests, self.tokens, self.closed, self.computed = {}, {}, {}, {}, {}
        self.epochs, self.commanded = [0] * size, {}

    def look(self, applied, batch):
        """No row computes what `max_tokens` leaves out."""
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
            prompt, _, _, options = self.requests[slot, self.epochs[slot]]
            assert start + count < len(prompt) + options.get("max_tokens", 5)

    def send(self, *commands):
        self.log.waiting += commands

    def admit(self, slot, prompt, generated=0, sampling=None, more=0, **options):
        """Into a free slot.  The oracle's first `generated` tokens are there already.  None: no room."""
        sampling = sampling or Sampling(seed=0, temperature=0.0)
        tokens = [*prompt, *self.oracle(prompt, sampling, options, generated)]
        needed = -(-len(tokens) // BLOCK) + more
        if slot in self.blocks or needed > len(self.free):
            return None
        self.epochs[slot] += 1
        key = slot, self.epochs[slot]
        self.blocks[slot] = [self.free.pop() for _ in range(needed)]
        self.requests[key] = prompt, generated, sampling, options
        command = admit(*key, tokens, self.blocks[slot], num_prompt=len(prompt), sampling=sampling, **options)
        self.send(command)
        return key

    def oracle(self, prompt, sampling, options, count):
        if sampling.constraint is None:
            return simulated_tokens(prompt, count, VOCAB)
        alone = SimulatedExecutor(num_blocks=1, block_size=64, max_num_seqs=1, vocab_size=VOCAB)
        stopping = admit(0, 0, prompt, [0], **options).stopping
        alone.admit(0, np.array(prompt, np.int32), len(prompt), sampling, stopping)
        return alone._following(0, list(prompt), count)

    def grow(self, slot):
        if slot in self.blocks and self.free and len(self.blocks[slot]) < LENGTH // BLOCK:
            self.blocks[slot].append(self.free.pop())
            self.send(Grow(slot, self.epochs[slot], pack_int32(self.blocks[slot][-1:])))

    def end(self, slot, kind):
        if self.epochs[slot]:
            self.commanded.setdefault((slot, self.epochs[slot]), set()).add(
                "preempted" if kind is Preempt else "aborted"
            )
            self.send(kind(slot, self.epochs[slot]))

    def round(self):
        """One of the loop; reads what it reports."""
        went_on = self.loop.run_once()
        found, self.reports.found = self.reports.found, []
        for report in found:
            if isinstance(report, StepReport):
                self.read(report)
        return went_on

    def look_at(self, report):
        """It is written just now."""
        if isinstance(report, LayersDone):
            for slot, epoch in zip(array("i", report.slots), array("i", report.epochs), strict=True):
                self.check_layers(slot, epoch, report.layers)

    def read(self, report):
        columns = [array("i", packed) for packed in (report.slots, report.epochs, report.tokens)]
        for slot, epoch, token in zip(*columns, strict=True):
            assert (slot, epoch) not in self.closed, "a token after its closing"
            self.tokens.setdefault((slot, epoch), []).append(token)
        columns = (report.prefill_slots, report.prefill_epochs, report.prefill_computed)
        for slot, epoch, computed in zip(*(array("i", packed) for packed in columns), strict=True):
            assert computed >= self.computed.get((slot, epoch), 0)
            self.computed[slot, epoch] = computed
            self.check_pages(slot, epoch, computed)
        for end in report.closings:
            key = end.slot, end.epoch
            assert key in self.requests
            assert key not in self.closed, "closed twice"
            self.closed[key] = end
            given_up = self.blocks.pop(end.slot)
            self.scribble(given_up)
            self.free += given_up

    def scribble(self, blocks):
        """Whoever has them next writes there at once."""
        self.executor._tokens.cells[blocks] = 77

    def check_layers(self, slot, epoch, layers):
        """What is said to be final of a prompt is there.  (The simulated one has one layer to show.)"""

    def check_pages(self, slot, epoch, computed):
        """What is said to be computed is there."""
        prompt, generated, sampling, options = self.requests[slot, epoch]
        tokens = [*prompt, *self.oracle(prompt, sampling, options, generated)][:computed]
        found = [token for block in self.blocks[slot] for token in self.executor.tokens_in(block)]
        assert found[:computed] == tokens

    def settle(self):
        """Until nothing runs."""
        for _ in range(400):
            if not self.round():
                return
            for slot in list(self.blocks):
                self.grow(slot)
        raise AssertionError("it never rests")

    def check(self):
        """Every epoch has its tokens and one closing, and nobody holds anything."""
        assert set(self.closed) == set(self.requests)
        assert self.slots.open_slots() == []
        assert sorted(self.free) == list(range(POOL))
        for key, (prompt, generated, sampling, options) in self.requests.items():
            reason, given_ = self.closed[key].reason.value, self.tokens.get(key, [])
            answer = self.oracle(prompt, sampling, options, generated + len(given_))[generated:]
            assert given_ == answer
            if sampling.pooling is not None:
                assert not given_
                assert reason == "pooled" or reason in self.commanded[key]
                continue
            stops, least = options.get("stop_token_ids", ()), options.get("min_tokens", 0)
            places = range(generated + 1, generated + len(given_) + 1)
            ends = [token in stops and place > least for place, token in zip(places, given_, strict=True)]
            assert not any(ends[:-1]), "tokens after a stop token"
            if ends and ends[-1]:
                assert reason == "stop"
            elif generated + len(given_) == options.get("max_tokens", 5):
                assert reason == "length"
            elif options.get("handover"):
                assert reason == ("handed_over" if given_ else reason)
                assert given_ or reason in self.commanded[key]
            else:
                assert reason in self.commanded[key]


def simulated_engine(late, budget=16, composition=None):
    make = LateSimulatedExecutor if late else SimulatedExecutor
    executor = make(num_blocks=POOL, block_size=BLOCK, max_num_seqs=SIZE, vocab_size=VOCAB)
    return Engine(executor, budget, composition=composition)


class Script:
    """Random commands between rounds."""

    least = 0
    """Of them."""

    def __init__(self, data, engine):
        self.draw = data.draw
        self.engine = engine

    def run(self):
        actions = [
            self.admit,
            self.admit,
            self.grow,
            self.end,
            self.round,
            self.round,
            self.round,
            self.pause,
        ]
        for action in self.draw(st.lists(st.sampled_from(actions), min_size=self.least, max_size=60)):
            action()
        engine = self.engine
        engine.send(Control("resume"))
        engine.settle()
        for slot in range(SIZE):
            engine.end(slot, Abort)
        engine.settle()
        engine.check()

    def slot(self):
        return self.draw(st.integers(0, SIZE - 1))

    def admit(self):
        prompt = self.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14))
        kind = self.draw(st.sampled_from(["", "", "", "constrained", "handover", "pooled", "scored"]))
        generated = self.draw(st.sampled_from([0, 0, 3])) if kind in ("", "constrained") else 0
        options = {
            "max_tokens": generated + self.draw(st.integers(1, 12)),
            "stop_token_ids": tuple(self.draw(st.sets(st.integers(0, VOCAB - 1), max_size=3))),
            "min_tokens": self.draw(st.sampled_from([0, 0, 2])),
        }
        sampling = None
        if kind == "constrained" or (kind == "handover" and self.draw(st.booleans())):
            options["min_tokens"] = 0
            grammar = f"residues {self.draw(st.integers(1, 3))}, late {self.draw(st.integers(0, 3))}"
            sampling = Sampling(0, 0.0, constraint=Constraint(grammar, 0, True))
        if kind == "pooled":
            options = {"max_tokens": 1}
            sampling = Sampling(0, 0.0, pooling=Pooling("mean"))
        if kind == "scored":
            sampling = Sampling(0, 0.0, logprobs=1, prompt_logprobs=0)
        if kind == "handover":
            options["handover"] = True
        self.engine.admit(self.slot(), prompt, generated, sampling, self.draw(st.integers(0, 3)), **options)

    def grow(self):
        self.engine.grow(self.slot())

    def end(self):
        self.engine.end(self.slot(), self.draw(st.sampled_from([Preempt, Abort])))

    def round(self):
        self.engine.round()

    def pause(self):
        self.engine.send(Control(self.draw(st.sampled_from(["pause", "resume"]))))
