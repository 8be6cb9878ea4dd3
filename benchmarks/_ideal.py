"""What a cost model allows: one instance that prefills, some that decode, and nothing in between takes time.

The same clients, the same requests, the same steps (chunked prefill, first come first served; a decode step
takes everybody who is there when it begins), but no message, no copy, no scheduling takes any time.  So a
real run can at best be as fast as this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.protocol.config import CostModel


@dataclass(slots=True)
class Timed:
    """One request: its size, and when it was sent and its tokens came."""

    num_prompt: int
    num_output: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def per_token_s(self) -> float:
        """Of the tokens after the first."""
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)

    @property
    def second_token_s(self) -> float:
        """From the first token to the second: all of the hand-over that a client can see."""
        return self.times[1] - self.times[0]


class _Prefill:
    """The prefilling instance: one step after another while there is work."""

    def __init__(self, cost: CostModel, budget: int, slots: int) -> None:
        self._cost = cost
        self._budget = budget
        self._slots = slots
        self.queue: deque[list[int]] = deque()
        """[request, tokens to compute]"""
        self._done: list[int] = []
        self.ends: float | None = None

    def begin(self, now: float, sizes: Sequence[Timed]) -> None:
        """Composes a step, if it is idle and there is work."""
        if self.ends is not None or not self.queue:
            return
        left, computed, read = self._budget, 0, 0
        for entry in list(self.queue)[: self._slots]:
            count = min(left, entry[1])
            if count == 0:
                break
            entry[1] -= count
            left -= count
            computed += count
            read += sizes[entry[0]].num_prompt - entry[1]
        self._done = []
        while self.queue and self.queue[0][1] == 0:
            self._done.append(self.queue.popleft()[0])
        cost = self._cost
        self.ends = now + cost.base + cost.per_prefill_token * computed + cost.per_kv_token * read

    def finish(self) -> list[int]:
        """The requests whose first token is there."""
        self.ends = None
        return self._done


class _Decode:
    """A decoding instance."""

    def __init__(self, cost: CostModel, slots: int) -> None:
        self._cost = cost
        self._slots = slots
        self.waiting: deque[int] = deque()
        self.running: list[int] = []
        self.ends: float | None = None

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def begin(self, now: float, requests: Sequence[Timed]) -> None:
        if self.ends is not None:
            return
        while self.waiting and len(self.running) < self._slots:
            self.running.append(self.waiting.popleft())
        if self.running:
            cost = self._cost
            read = sum(requests[i].num_prompt + len(requests[i].times) for i in self.running)
            self.ends = (
                now + cost.base + cost.per_decode_sequence * len(self.running) + cost.per_kv_token * read
            )

    def finish(self, now: float, requests: Sequence[Timed]) -> list[int]:
        """The requests that are over."""
        self.ends = None
        for number in self.running:
            requests[number].times.append(now)
        over = [i for i in self.running if len(requests[i].times) == requests[i].num_output]
        self.running = [i for i in self.running if len(requests[i].times) < requests[i].num_output]
        return over


def simulate(
    sizes: Sequence[tuple[int, int]],
    at_once: int,
    cost: CostModel,
    *,
    decoders: int = 1,
    budget: int = 2048,
    slots: int = 256,
) -> list[Timed]:
    """`at_once` clients, each with one request after the other; `sizes` are (prompt, output)."""
    requests = [Timed(prompt, output) for prompt, output in sizes]
    prefill, instances = _Prefill(cost, budget, slots), [_Decode(cost, slots) for _ in range(decoders)]
    unsent = deque(range(len(requests)))
    now, over = 0.0, min(at_once, len(requests))
    while True:
        for _ in range(min(over, len(unsent))):
            number = unsent.popleft()
            requests[number].sent = now
            prefill.queue.append([number, requests[number].num_prompt])
        prefill.begin(now, requests)
        for instance in instances:
            instance.begin(now, requests)
        ends = [machine.ends for machine in (prefill, *instances) if machine.ends is not None]
        if not ends:
            return requests
        now, over = min(ends), 0
        if prefill.ends == now:
            for number in prefill.finish():
                requests[number].times.append(now)
                if requests[number].num_output > 1:
                    min(instances, key=len).waiting.append(number)
                else:
                    over += 1
        for instance in instances:
            if instance.ends == now:
                over += len(instance.finish(now, requests))


def total_s(requests: Sequence[Timed]) -> float:
    return max(request.times[-1] for request in requests) - min(request.sent for request in requests)
