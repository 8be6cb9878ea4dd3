"""A slow, obvious model of the slots, to compare the real ones with."""

from dataclasses import dataclass, field

import numpy as np

from baton.executor.base import StepResult
from baton.executor.simulated.executor import simulated_next_token
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Admit
from baton.protocol.params.sampling import Sampling, Stopping

VOCAB = 13


def admit(
    slot,
    epoch,
    tokens,
    blocks,
    *,
    num_prompt=None,
    num_computed=0,
    sampling=None,
    handover=False,
    patient=False,
    **stopping,
):
    stopping.setdefault("max_tokens", 5)
    return Admit(
        slot=slot,
        epoch=epoch,
        tokens=pack_int32(tokens),
        num_prompt=len(tokens) if num_prompt is None else num_prompt,
        num_computed=num_computed,
        blocks=pack_int32(blocks),
        sampling=sampling or Sampling(seed=0, temperature=0.0),
        stopping=Stopping(**stopping),
        handover=handover,
        patient=patient,
    )


@dataclass
class ModelSlot:
    epoch: int
    tokens: list
    num_prompt: int
    computed: int
    blocks: list
    stopping: Stopping
    order: int
    given: int
    """Tokens that it was admitted with."""
    handover: bool = False
    repeated: bool = False


@dataclass
class Row:
    slot: int
    start: int
    tokens: list
    samples: bool
    blocks: list
    decode: bool
    drafts: int = 0
    """Of its tokens, at the end."""


@dataclass
class Model:
    """One dict of open slots and a straight reading of the rules."""

    size: int
    budget: int
    block_size: int
    open: dict = field(default_factory=dict)
    last_epoch: dict = field(default_factory=dict)
    paused: bool = False
    admissions: int = 0

    def admit(self, command, tokens, blocks):
        self.admissions += 1
        self.last_epoch[command.slot] = command.epoch
        self.open[command.slot] = ModelSlot(
            command.epoch,
            list(tokens),
            command.num_prompt,
            command.num_computed,
            list(blocks),
            command.stopping,
            self.admissions,
            len(tokens),
            command.handover,
        )

    def compose(self, drafts=None):
        """`drafts`: by slot."""
        if self.paused:
            return []
        rows, left = [], self.budget
        by_order = sorted(self.open.items(), key=lambda item: item[1].order)
        for decode in (True, False):
            for number, slot in by_order:
                if decode != (len(slot.tokens) > slot.given) or left == 0:
                    continue
                todo = slot.tokens[slot.computed :][:left]
                if slot.computed + len(todo) > len(slot.blocks) * self.block_size:
                    assert decode
                    continue
                samples = slot.computed + len(todo) == len(slot.tokens)
                rows.append(Row(number, slot.computed, todo, samples, slot.blocks, decode))
                left -= len(todo)
        for row in rows:
            slot = self.open[row.slot]
            for draft in (drafts or {}).get(row.slot, []) if row.decode else ():
                generated = len(slot.tokens) - slot.num_prompt + row.drafts + 2  # (one more is sampled)
                place = row.start + len(row.tokens)
                full = place >= len(slot.blocks) * self.block_size
                if full or left == 0 or draft in slot.stopping.stop_token_ids:
                    break
                if generated > slot.stopping.max_tokens:
                    break
                row.tokens.append(draft)
                row.drafts += 1
                left -= 1
        return sorted(rows, key=lambda row: 2 if not row.decode else 1 if row.drafts else 0)

    def commit_runs(self, rows, runs, late=(), failed=()):
        """As `commit`, of steps with drafts; `runs`: by slot.  `failed`: slots that end with an error."""
        given, closed = [], []
        for row in rows:
            slot = self.open[row.slot]
            if not row.samples:
                slot.computed += len(row.tokens)
                continue
            slot.computed += len(row.tokens) - row.drafts - (row.slot in late)
            slot.repeated |= row.slot in late
            if row.slot in late:
                continue
            for place, token in enumerate(runs[row.slot]):
                slot.computed += place > 0
                slot.tokens.append(token)
                given.append((row.slot, slot.epoch, token))
                generated = len(slot.tokens) - slot.num_prompt
                if token in slot.stopping.stop_token_ids and generated > slot.stopping.min_tokens:
                    closed.append((row.slot, slot.epoch, "stop"))
                elif generated == slot.stopping.max_tokens:
                    closed.append((row.slot, slot.epoch, "length"))
                elif slot.handover:
                    closed.append((row.slot, slot.epoch, "handed_over"))
                else:
                    continue
                assert token is runs[row.slot][-1] or token == runs[row.slot][-1]
                del self.open[row.slot]
                break
            if row.slot in failed:
                closed.append((row.slot, slot.epoch, "error"))
                del self.open[row.slot]
        return given, closed

    def commit(self, rows, tokens, late=()):
        """Returns (tokens by slot and epoch, closings by slot and epoch); `late`: slots without one."""
        sampling = [row.slot for row in rows if row.samples]
        return self.commit_runs(
            rows, {slot: [token] for slot, token in zip(sampling, tokens, strict=True)}, late
        )


def sample(rows, model):
    """What an honest executor samples for these rows."""
    return [simulated_next_token(model.open[row.slot].tokens, VOCAB) for row in rows if row.samples]


def result_of(tokens):
    return StepResult(tokens=np.array(tokens, np.int32))
