"""Plays the worker for one executor: slots, block tables, chunked prefill, decode.  For tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from baton.executor.base import Executor, StepBatch
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from baton.protocol.routes import Routes

GREEDY = Sampling(seed=0, temperature=0.0)


@dataclass
class Request:
    slot: int
    prompt: list[int]
    sampling: Sampling
    stopping: Stopping
    blocks: list[int]
    computed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)

    @property
    def all_tokens(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.stopping.max_tokens


class Driver:
    """`chunk`: prefill tokens of one request in one step."""

    def __init__(self, executor: Executor, chunk: int = 1 << 20, seed: int = 0) -> None:
        self.executor = executor
        self.chunk = chunk
        self.block_size = executor.info.block_size
        # Blocks in no particular order, so that a wrong table is noticed.
        self.free = list(np.random.default_rng(seed).permutation(executor.info.num_blocks))
        self.requests: dict[int, Request] = {}
        self.steps = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 1,
        sampling: Sampling = GREEDY,
        stopping: Stopping | None = None,
        generated: list[int] | None = None,
        prefix_of: Request | None = None,
    ) -> Request:
        """`prefix_of`: share the leading full blocks of that request, as far as the prompts agree."""
        slot = next(slot for slot in range(1 << 20) if slot not in self.requests)
        stopping = stopping or Stopping(max_tokens=max_tokens)
        request = Request(slot, list(prompt), sampling, stopping, [], 0, list(generated or ()))
        tokens = request.all_tokens
        if prefix_of is not None:
            same = 0
            while same < min(len(tokens) - 1, prefix_of.computed) and (
                tokens[same] == prefix_of.all_tokens[same]
            ):
                same += 1
            shared = same // self.block_size
            request.blocks = prefix_of.blocks[:shared]
            request.computed = shared * self.block_size
        self.executor.admit(slot, np.array(tokens, np.int32), len(prompt), sampling, stopping)
        self.requests[slot] = request
        return request

    def remove(self, request: Request, keep_blocks: bool = False) -> None:
        self.executor.release(request.slot)
        del self.requests[request.slot]
        if not keep_blocks:
            self.free.extend(request.blocks)

    def run(self) -> None:
        """Steps until every request has its tokens."""
        while not all(request.done for request in self.requests.values()):
            self.step()

    def step(self) -> None:
        running = [request for request in self.requests.values() if not request.done]
        counts = {
            request.slot: min(len(request.all_tokens) - request.computed, self.chunk) for request in running
        }
        running.sort(key=lambda request: not self._is_decode(request))
        self.steps += 1
        batch = self._compose(running, counts)
        result = self.executor.execute(batch)
        sampled = iter(enumerate(result.tokens))
        for row, request in enumerate(running):
            request.computed += int(batch.counts[row])
            request.prompt_logprobs += result.prompt_logprobs.get(row, [])
            request.routes += result.routes.get(row, [])
            if batch.samples[row]:
                request.tokens.append(int(next(sampled)[1]))
                if row in result.logprobs:
                    request.logprobs += result.logprobs[row]
        assert next(sampled, None) is None

    @staticmethod
    def _is_decode(request: Request) -> bool:
        return request.computed == len(request.all_tokens) - 1

    def _compose(self, running: list[Request], counts: dict[int, int]) -> StepBatch:
        tokens: list[int] = []
        targets = {}
        for row, request in enumerate(running):
            end = request.computed + counts[request.slot]
            tokens += request.all_tokens[request.computed : end]
            while len(request.blocks) * self.block_size < end:
                request.blocks.append(int(self.free.pop()))
            followers = request.prompt[request.computed + 1 : end + 1]
            if request.sampling.prompt_logprobs is not None and followers:
                targets[row] = np.array(followers, np.int32)
        width = max(len(request.blocks) for request in running) + 2
        # Columns past the end mean nothing: anything may stand there.
        tables = np.full((len(running), width), 1 << 30, np.int32)
        for row, request in enumerate(running):
            tables[row, : len(request.blocks)] = request.blocks
        return StepBatch(
            step=self.steps,
            slots=np.array([request.slot for request in running], np.int32),
            starts=np.array([request.computed for request in running], np.int32),
            counts=np.array([counts[request.slot] for request in running], np.int32),
            tokens=np.array(tokens, np.int32),
            samples=np.array(
                [request.computed + counts[request.slot] == len(request.all_tokens) for request in running],
                np.bool_,
            ),
            block_tables=tables,
            num_decodes=sum(self._is_decode(request) for request in running),
            prompt_logprob_targets=targets,
        )
