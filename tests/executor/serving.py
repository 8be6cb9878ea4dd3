"""Plays engine and worker around one executor, with the real slots, few blocks and preemptions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from baton.drafting.planted import PlantedDrafter
from baton.executor.base import Executor
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Admit, Grow, Preempt
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from baton.worker.slots.outcome import Admitted
from baton.worker.slots.slots import Slots


@dataclass
class Request:
    prompt: list[int]
    sampling: Sampling
    stopping: Stopping
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    routes: bytes = b""
    pooled: bytes = b""
    reason: str = ""
    slot: int = -1
    epoch: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def answer(self) -> tuple:
        return self.tokens, self.logprobs, self.reason, self.routes, self.pooled


class Serving:
    """`preempts`: the chance of a preemption after a step.  Blocks come late, some too late."""

    def __init__(self, executor: Executor, *, slots: int, budget: int, longest: int, seed: int, preempts=0.1):
        info = executor.info
        self.executor, self.size, self.preempts = executor, info.block_size, preempts
        self.chance = random.Random(seed)
        self.slots = Slots(
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_model_len=longest,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
        )
        self.free = list(range(info.num_blocks))
        self.chance.shuffle(self.free)
        self.on: dict[int, Request] = {}
        self.epochs = 0
        self.steps = self.drafts = self.right = self.mixed = 0

    def run(self, requests: list[Request]) -> list[tuple]:
        waiting = list(requests)
        while waiting or self.on:
            while waiting and len(self.on) < self.slots.max_num_seqs:
                self.admit(waiting.pop(0))
            for request in self.on.values():
                self.grow(request)
            self.step()
            if self.on and self.chance.random() < self.preempts:
                request = self.on[self.chance.choice(sorted(self.on))]
                self.slots.apply(Preempt(request.slot, request.epoch))
                self.leave(request)
                waiting.insert(0, request)
        return [request.answer for request in requests]

    def admit(self, request: Request) -> None:
        self.epochs += 1
        request.slot = next(slot for slot in range(self.slots.max_num_seqs) if slot not in self.on)
        request.epoch = self.epochs
        tokens = request.prompt + request.tokens
        request.blocks = [self.free.pop() for _ in range(-(-len(tokens) // self.size))]
        command = Admit(
            request.slot,
            request.epoch,
            pack_int32(tokens),
            len(request.prompt),
            0,
            pack_int32(request.blocks),
            request.sampling,
            request.stopping,
            salt=b"of all requests.",
        )
        effect = self.slots.apply(command)
        assert isinstance(effect, Admitted)
        self.executor.admit(*effect)
        self.on[request.slot] = request

    def grow(self, request: Request) -> None:
        room = len(request.blocks) * self.size - len(request.prompt) - len(request.tokens)
        most = -(-(len(request.prompt) + request.stopping.max_tokens) // self.size)
        if room < self.chance.choice((0, 2, 9)) and len(request.blocks) < most:
            block = self.free.pop()
            request.blocks.append(block)
            self.slots.apply(Grow(request.slot, request.epoch, pack_int32([block])))

    def step(self) -> None:
        batch = self.slots.compose(self.steps + 1)
        if batch is None:
            return
        self.steps += 1
        self.mixed += bool(batch.pooled) and batch.drafts is not None
        outcome = self.slots.commit(batch, self.executor.execute(batch))
        for slot, _, run in outcome.routes:
            request = self.on[slot]
            first = request.sampling.routes_from or 0
            told = first + len(request.routes) // max(len(run.ids) // (run.stop - run.first), 1)
            if (fresh := run.since(told)) is not None:  # (after a preemption the first ones come again)
                request.routes += fresh.ids
        for slot, token in zip(outcome.slots.tolist(), outcome.tokens.tolist(), strict=True):
            self.on[slot].tokens.append(token)
        for index, found in outcome.logprobs:
            self.on[int(outcome.slots[index])].logprobs.append(found)
        if outcome.speculation:
            self.drafts += outcome.speculation[1]
            self.right += sum(outcome.speculation[2:])
        for closed in outcome.closings:
            request = self.on[closed.slot]
            request.reason = closed.reason.value + closed.message
            request.pooled = closed.pooled
            self.leave(request)

    def leave(self, request: Request) -> None:
        self.executor.release(request.slot)
        del self.on[request.slot]
        self.free += request.blocks


def plant(
    serving: Serving, requests: list[Request], answers: list[tuple], most: int, vocab: int, right: float
):
    """A drafter that knows these answers of these requests."""
    known = {id(request): answer[0] for request, answer in zip(requests, answers, strict=True)}

    def answer(slot: int, tokens, count: int) -> list[int]:
        request = serving.on[slot]
        place = len(tokens) - len(request.prompt)
        return (known[id(request)] + [1, 2, 3])[place : place + count]

    return PlantedDrafter(answer, most=most, right=right, vocab_size=vocab, varied=True)


def ints(*values: int):
    return np.array(values, np.int32)
