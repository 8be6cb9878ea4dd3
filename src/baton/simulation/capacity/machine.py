"""One instance on a cost model: steps that decode everybody and compute prompts beside.

A step takes all sequences that decode, and so many tokens of prompts as `--itl-target` allows beside them,
or as fit if nobody decodes; it takes what the `CostModel` says.  A sequence that is decoded here holds the
KV of its prompt and what it has of its answer; it waits while there is no slot, or no room for its prompt.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from baton.engine.loads import Speeds
from baton.protocol.config import CostModel
from baton.protocol.messages.requests import Load
from baton.simulation.capacity.load import Asked

_LEAST_TOKENS = 32
"""Of prompts that a step computes if any wait, whatever the target."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What every instance is like."""

    cost: CostModel
    slots: int = 256
    kv_tokens: int = 200_000
    block_size: int = 32
    step_tokens: int = 2048
    """Of prompts in a step, at most."""
    itl_target_s: float | None = None
    """What a step may take while somebody decodes; None: 8 times the shortest one."""
    hand_over_s: float = 0.005
    page_tokens_per_s: float = 1e6
    startup_s: float = 60.0

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.block_size

    @property
    def step_s(self) -> float:
        """That one with sequences is to take at most."""
        shortest = self.cost.base + self.cost.per_decode_sequence
        return self.itl_target_s or max(8 * shortest, 0.01)


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way."""

    asked: Asked
    number: int
    decoders: tuple[str, ...] = ()
    left: int = 0
    """Tokens of its prompt that are to be computed."""
    first_at: float = math.inf
    ended_at: float = math.inf
    counted: str = ""
    """The instance in whose books (`Member.decodes`) it is, or was last; "": it was sent nowhere yet."""

    @property
    def itl_s(self) -> float:
        return (self.ended_at - self.first_at) / max(self.asked.output - 1, 1)


class Running:
    """An instance that runs."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.machine = machine
        self.speeds = Speeds()
        self.prompts: deque[Request] = deque()
        self.waiting: deque[Request] = deque()
        """Whose KV is here or comes here, and that have no slot."""
        self.decoding: list[tuple[int, int, Request]] = []
        """A heap: (the step of its last token, number, request)."""
        self.steps = 0
        self.queued_tokens = 0
        self.kv_used = 0
        self.busy = False
        self._chunk = 0
        self._done: list[Request] = []

    def __len__(self) -> int:
        return len(self.prompts) + len(self.waiting) + len(self.decoding)

    def all(self) -> list[Request]:
        """Whose prompt is or was to be computed here, and who decodes here, in the order of their coming."""
        found = {one.number: one for one in (*self.prompts, *self.waiting)}
        found |= {one.number: one for one in self._done if self.busy}
        found |= {one.number: one for _, _, one in self.decoding}
        return [found[number] for number in sorted(found)]

    def prefill(self, request: Request) -> None:
        request.left = request.asked.prompt
        self.queued_tokens += request.left
        self.prompts.append(request)

    def decode(self, request: Request) -> None:
        """Its prompt is computed, and its first token is there."""
        self.waiting.append(request)

    def begin(self) -> float | None:
        """Composes a step, if there is work; returns what it takes."""
        if self.busy:
            return None
        machine, cost = self.machine, self.machine.cost
        while self.waiting and len(self.decoding) < machine.slots and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            self.kv_used += request.asked.prompt
            entry = (self.steps + request.asked.output - 1, request.number, request)
            heapq.heappush(self.decoding, entry)
        sequences = len(self.decoding)
        seconds = cost.base + cost.per_decode_sequence * sequences + cost.per_kv_token * self.kv_used
        budget = machine.step_tokens
        if sequences and self.prompts:
            spare = machine.step_s - seconds
            tokens = int(spare / cost.per_prefill_token) if cost.per_prefill_token else budget
            budget = max(min(tokens, budget), _LEAST_TOKENS)
        chunk, read, self._done = 0, 0, []
        for request in self.prompts:
            count = min(budget - chunk, request.left)
            if count <= 0:
                break
            request.left -= count
            chunk += count
            read += request.asked.prompt - request.left
            if not request.left:
                self._done.append(request)
        if not sequences and not chunk:
            return None
        for _ in self._done:
            self.prompts.popleft()
        self.queued_tokens -= chunk
        self._chunk = chunk
        self.busy = True
        return seconds + cost.per_prefill_token * chunk + cost.per_kv_token * read

    def end(self, seconds: float) -> tuple[list[Request], list[Request]]:
        """The step is over: whose prompt is computed, and whose answer is complete."""
        self.busy = False
        self.speeds.step(self._chunk, seconds)
        self.steps += 1
        self.kv_used += len(self.decoding)
        ended = []
        while self.decoding and self.decoding[0][0] <= self.steps:
            request = heapq.heappop(self.decoding)[2]
            self.kv_used -= request.asked.prompt + request.asked.output - 1
            ended.append(request)
        return self._done, ended

    def load(self) -> Load:
        """As an engine says it."""
        machine = self.machine
        return Load(
            waiting=len(self.prompts) + len(self.waiting),
            running=len(self.decoding),
            waiting_tokens=self.queued_tokens,
            free_blocks=max(machine.kv_tokens - self.kv_used, 0) // machine.block_size,
            prefill_tokens_per_s=self.speeds.prefill_tokens_per_s,
            decode_step_s=self.speeds.decode_step_s,
        )

    def _fits(self, request: Request) -> bool:
        room = self.machine.kv_tokens - self.kv_used - len(self.decoding) * self.machine.block_size
        return room >= request.asked.prompt or not self.decoding
