"""Whether greedy answers are those of a reference, token by token, and how far the logits behind them are.

Answers are compared as they stand: at each of their positions the reference is given the prompt and the
answer's own tokens before it, and asked for its most likely token.  An answer that begins to differ therefore
goes on being compared, and a difference says how near the reference itself was to it: the margin, in logits,
between the reference's token and the answer's.  With errors of e on both logits, margins below 2 e are
expected to be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.executor.base import Int32Array


class Logits(Protocol):
    """A `TextScorer`."""

    def text_logits(self, tokens: Int32Array) -> Iterable[Tensor]: ...


@dataclass(frozen=True, slots=True)
class AnswersCompared:
    """Of all answers together."""

    answers: int
    equal: int
    """Answers that are the reference's own from their first to their last token"""
    positions: int
    different: int
    """Positions at which the reference has another most likely token"""
    first: int | None
    """Tokens before the earliest difference in any answer; None: there is none"""
    margin: float
    """Largest of the differences' margins, in logits; 0: there is none"""
    error: float
    """Root of the mean squared difference of logits, each position's less its mean"""
    deviation: float
    """Standard deviation of the reference's logits, to compare the error with"""

    @property
    def relative(self) -> float:
        """The error over the deviation."""
        return self.error / self.deviation


def compare_answers(
    answers: Iterable[tuple[Sequence[int], Sequence[int]]], model: Logits, reference: Logits
) -> AnswersCompared:
    """`answers`: (prompt, answer), each of at least one token; greedy ones of `model`."""
    count = equal = positions = different = 0
    first: int | None = None
    margin = wrong = spread = 0.0
    elements = 0
    for prompt, answer in answers:
        text = np.array([*prompt, *answer], np.int32)[:-1]
        start = len(prompt) - 1
        found, expected = (
            torch.cat([part.float() for part in one.text_logits(text)])[start:] for one in (model, reference)
        )
        tokens = torch.tensor(list(answer))
        best = expected.max(dim=1)
        lost = best.values - expected.gather(1, tokens.unsqueeze(1)).squeeze(1)
        other = (best.indices != tokens).nonzero().flatten().tolist()
        count += 1
        equal += not other
        if other:
            different += len(other)
            first = other[0] if first is None else min(first, other[0])
            margin = max(margin, float(lost[other].max()))
        found, expected = (one - one.mean(dim=1, keepdim=True) for one in (found, expected))
        wrong += float((found - expected).square().sum(dtype=torch.float64))
        spread += float(expected.square().sum(dtype=torch.float64))
        elements += expected.numel()
        positions += len(tokens)
    error, deviation = (wrong / elements) ** 0.5, (spread / elements) ** 0.5
    return AnswersCompared(count, equal, positions, different, first, margin, error, deviation)
