"""Requests whose prompts are cut in random ways, beside the same prompts in one piece; no engine.

`Requests` composes steps as a worker does: decode rows first, then chunks, of several requests together.  A
request may begin with blocks of another one that has the same prefix, be thrown out and computed again
(preempted), and go on with copies of its blocks in other places (handed over).  The logits of each position
must be those of `whole`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.executor.devices import kernels
from baton.executor.torch_executor import TorchExecutor
from baton.model import attention
from baton.model.attention import AttentionStep
from baton.model.cpu.library import instruction_sets, native
from baton.model.ops.fused import FusedOps
from baton.model.sampling.logprobs import token_logprobs

BACKENDS = (*instruction_sets(), "numba", "torch")
"""The library's builds; numba; PyTorch alone."""


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """What is made inside uses this one of `BACKENDS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("BATON_CPU_ISA", raising=False)
        patch.delenv("BATON_NATIVE", raising=False)
        if name in instruction_sets():
            patch.setenv("BATON_CPU_ISA", name)
        else:
            patch.setenv("BATON_NATIVE", "0")
        if name == "torch":
            patch.setattr(attention, "_kernels", lambda shape: None)
            patch.setattr(kernels, "fused_ops", lambda *asked: FusedOps(asked[-1]))
        native.cache_clear()
        yield
    native.cache_clear()


@dataclass
class Request:
    tokens: np.ndarray
    expected: Tensor
    """[tokens, vocab] logits."""
    table: list[int] = field(default_factory=list)
    done: int = 0
    borrowed: int = 0
    """Blocks at the front that are another request's."""


class Requests:
    """Drives an executor's model.  Its pool must have room for `whole` and for all requests of a `run`."""

    def __init__(self, executor: TorchExecutor, chance: random.Random) -> None:
        self._model, self._pool = executor._model, executor._pool.tensor
        self._block = executor.info.block_size
        self._vocab = executor.info.vocab_size
        self._chance = chance
        self._free = list(range(executor.info.num_blocks))
        chance.shuffle(self._free)
        self.counted = 0
        """Positions whose logits were compared."""

    def whole(self, tokens: np.ndarray) -> Tensor:
        """[n, vocab] logits of a prompt that is computed in one step."""
        table = self._take(len(tokens))
        found = self._step([(Request(tokens, torch.empty(0), table), len(tokens))], everything=True)
        self._free += table
        return found.clone()

    def run(self, prompts: list[np.ndarray], expected: list[Tensor]) -> None:
        """All prompts, cut at random; asserts that each position has what is expected."""
        chance = self._chance
        requests = [Request(*pair) for pair in zip(prompts, expected, strict=True)]
        while any(request.done < len(request.tokens) for request in requests):
            for request in requests:
                self._disturb(request, requests)
            going = [request for request in requests if request.done < len(request.tokens)]
            chance.shuffle(going)
            work = [
                (request, self._count(request)) for request in going[: chance.randrange(1, len(going) + 1)]
            ]
            work.sort(key=lambda item: item[1] != 1)
            self._check(work)
        for request in requests:
            self._free += request.table[request.borrowed :]

    def _count(self, request: Request) -> int:
        """Tokens of its next chunk."""
        left = len(request.tokens) - request.done
        sizes = [1, 1, 2, 5, 16, 40, self._chance.randrange(1, 400), self._chance.randrange(1, 1500)]
        return min(self._chance.choice(sizes), left)

    def _disturb(self, request: Request, requests: list[Request]) -> None:
        kind = self._chance.random()
        if request.done == 0:
            if kind < 0.5:
                self._hit(request, self._chance.choice(requests))
        elif kind < 0.08 and not self._lent(request, requests):
            begin = request.borrowed
            if kind < 0.04:  # preempted
                self._free += request.table[begin:]
                request.table, request.done, request.borrowed = [], 0, 0
            else:  # handed over
                table = self._take(request.done)
                self._pool[table] = self._pool[request.table[: len(table)]]
                self._free += request.table[begin:]
                request.table, request.borrowed = table, 0

    def _hit(self, request: Request, other: Request) -> None:
        """Begins with the blocks that another one has of the same tokens."""
        most = min(other.done, len(request.tokens) - 1)
        same = request.tokens[:most] == other.tokens[:most]
        blocks = int(np.argmin(np.append(same, False))) // self._block
        if other is request or other.borrowed or not blocks:
            return  # who lends has all of it itself
        request.table, request.done, request.borrowed = other.table[:blocks], blocks * self._block, blocks

    @staticmethod
    def _lent(request: Request, requests: list[Request]) -> bool:
        """Whether blocks of its own are another one's too."""
        own = set(request.table[request.borrowed :])
        return any(own.intersection(other.table[: other.borrowed]) for other in requests)

    def _take(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self._block))]

    def _check(self, work: list[tuple[Request, int]]) -> None:
        everything = self._chance.random() < 0.3
        found = self._step(work, everything)
        places = [
            (request, position)
            for request, count in work
            for position in range(
                request.done if everything else request.done + count - 1, request.done + count
            )
        ]
        expected = torch.stack([request.expected[position] for request, position in places])
        wrong = (found != expected).any(dim=1).nonzero().flatten().tolist()
        cut = [(request.done, count) for request, count in work]
        assert not wrong, (
            f"positions {[places[row][1] for row in wrong][:5]} of a step of (done, count) {cut}"
        )
        chosen = expected.argmax(dim=1)
        reports = token_logprobs(found, chosen, 3)
        for row in self._chance.sample(range(len(places)), min(3, len(places))):
            assert token_logprobs(expected[row : row + 1], chosen[row : row + 1], 3) == [reports[row]]
        self.counted += len(places)
        for request, count in work:
            request.done += count

    def _step(self, work: list[tuple[Request, int]], everything: bool) -> Tensor:
        """Logits of all tokens, or of each row's last one."""
        for request, count in work:
            blocks = -(-(request.done + count) // self._block)
            request.table += [self._free.pop() for _ in range(blocks - len(request.table))]
        starts = np.array([request.done for request, _ in work], np.int32)
        counts = np.array([count for _, count in work], np.int32)
        tables = np.zeros((len(work), max(len(request.table) for request, _ in work)), np.int32)
        for row, (request, _) in enumerate(work):
            tables[row, : len(request.table)] = request.table
        tokens = np.concatenate(
            [request.tokens[request.done : request.done + count] for request, count in work]
        )
        step = AttentionStep(starts, counts, tables, int((counts == 1).sum()))
        wanted = None if everything else np.cumsum(counts, dtype=np.int64) - 1
        with torch.inference_mode():
            _, logits = self._model(tokens.astype(np.int32), step, wanted, None, everything)
        assert logits is not None
        return logits
