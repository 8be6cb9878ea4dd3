"""Perplexity of a text, and how far a model's predictions are from those of a reference.

Theory.  Windows of `context` tokens, which begin every `stride` tokens, cover the text.  Each token is
predicted once: in the first window that has it, from the tokens before it in that window.  So a token has
between `context - stride` and `context - 1` tokens before it, but for those of the first window.  With p(t),
the probability that the model gave the token that is there, over N tokens:

    perplexity = exp(-sum of ln p(t) / N)

A perplexity hides errors that cancel.  A quantized model is therefore compared with its `reference` position
by position, over the whole vocabulary: Kullback and Leibler's divergence D = sum over v of
r(v) (ln r(v) - ln p(v)), in nats, where r is the reference's distribution, and how often both have the same
most likely token.  These are the figures of llama.cpp's `perplexity --kl-divergence`, so that the two can be
compared; its own windows do not slide (a token of the second half of each is counted), which `stride` of half
a context comes near to.

The executor that serves computes both models, in pieces through the paged KV cache: the figures are those of
what a request gets, with its weights, its KV cache and its rounding (logits are float32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from baton.executor.scoring import TextScorer
from baton.protocol.config import InstanceConfig

_BLOCKS_BESIDES = 1
"""Of the pool, besides those of a window."""
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [first, last) of the text, of which the last `scored` are predicted."""

    first: int
    last: int
    scored: int


def windows(count: int, context: int, stride: int) -> Iterator[Window]:
    """Of a text of `count` tokens.  Raises `ValueError` for fewer than two, and wrong sizes."""
    if count < 2:
        raise ValueError(f"the text has {count} tokens; at least two are needed")
    if not 1 <= stride < context:
        raise ValueError(f"stride {stride}: give 1 to {context - 1}, less than the context")
    done = 1  # the first token has nothing before it
    for first in range(0, count, stride):
        last = min(first + context, count)
        yield Window(first, last, last - done)
        done = last
        if last == count:
            return


@dataclass(frozen=True, slots=True)
class Compared:
    """What the reference says."""

    perplexity: float
    ratio: float
    """The model's perplexity over the reference's."""
    kl_mean: float
    """Nats, over positions; also the next three."""
    kl_median: float
    kl_p999: float
    """99.9th percentile."""
    kl_max: float
    top1_agreement: float
    """Share of the positions, 0 to 1, at which both have the same most likely token."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """One measurement."""

    tokens: int
    """That were predicted."""
    context: int
    stride: int
    perplexity: float
    standard_error: float
    """Of the perplexity, as if the tokens were independent."""
    reference: Compared | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        """The perplexity is the first line."""
        lines = [
            f"Perplexity: {self.perplexity:.4f} +/- {self.standard_error:.4f} over {self.tokens} tokens "
            f"(context {self.context}, stride {self.stride})"
        ]
        if (other := self.reference) is not None:
            lines += [
                f"Reference: {other.perplexity:.4f}, ratio {other.ratio:.5f}",
                f"KL divergence: mean {other.kl_mean:.6f}, median {other.kl_median:.6f}, 99.9 % "
                f"{other.kl_p999:.6f}, max {other.kl_max:.6f} nats",
                f"Same most likely token: {other.top1_agreement * 100:.3f} %",
            ]
        return "\n".join(lines)


class Predictor(Protocol):
    """What is measured, and what it is compared with."""

    def log_probabilities(self, tokens: Ids, first: int) -> Iterator[torch.Tensor]:
        """Logarithms [n, vocabulary] float32 after each of `tokens` [T] from `first` on, in order, n at a
        time; n need not be the same for two models."""
        ...


class Scorer:
    """A model of ours that is asked for the distributions after each token of a window.  Close it."""

    def __init__(self, config: InstanceConfig, context: int) -> None:
        """Raises what `TextScorer.from_config` raises."""
        blocks = -(-context // config.block_size) + _BLOCKS_BESIDES
        self._executor = TextScorer.from_config(
            msgspec.structs.replace(
                config, max_model_len=context, max_num_seqs=1, num_blocks=blocks, tensor_parallel_size=1
            ),
            0,
            "",
        )

    @property
    def weight_bytes(self) -> int:
        """See `TextScorer`."""
        return self._executor.weight_bytes

    def log_probabilities(self, tokens: Ids, first: int) -> Iterator[torch.Tensor]:
        for logits in self._executor.text_logits(tokens, first):
            yield torch.log_softmax(logits.float(), dim=-1)

    def close(self) -> None:
        self._executor.close()


class _Sums:
    """What is kept of each position."""

    def __init__(self) -> None:
        self.own: list[npt.NDArray[np.float64]] = []
        self.others: list[npt.NDArray[np.float64]] = []
        self.divergences: list[npt.NDArray[np.float64]] = []
        self.agreed = 0

    def add(self, found: torch.Tensor, expected: torch.Tensor | None, targets: torch.Tensor) -> None:
        """[n, vocabulary], the reference's, and the tokens that are there [n]."""
        self.own.append(found.gather(1, targets.unsqueeze(1)).squeeze(1).double().numpy())
        if expected is None:
            return
        self.others.append(expected.gather(1, targets.unsqueeze(1)).squeeze(1).double().numpy())
        # A probability of zero adds nothing, whatever its logarithm is.
        terms = torch.where(expected > -math.inf, expected.exp() * (expected - found), 0.0)
        self.divergences.append(terms.sum(dim=1, dtype=torch.float64).clamp_(min=0.0).numpy())
        self.agreed += int((found.argmax(dim=1) == expected.argmax(dim=1)).sum())


def measure_perplexity(
    tokens: Ids,
    model: Predictor,
    reference: Predictor | None,
    *,
    context: int,
    stride: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Perplexity:
    """Of `tokens` [T], window by window, both models side by side.

    `progress` is called with the number of tokens predicted so far.  Raises `ValueError` as `windows` does,
    and if a probability is not a number.
    """
    sums = _Sums()
    done = 0
    for window in windows(len(tokens), context, stride):
        text = tokens[window.first : window.last]
        at = len(text) - 1 - window.scored  # the position whose next token is the first that is predicted
        found_of = model.log_probabilities(text[:-1], at)
        expected_of = None if reference is None else reference.log_probabilities(text[:-1], at)
        for found, expected in _side_by_side(found_of, expected_of):
            at += len(found)
            targets = torch.from_numpy(text[at - len(found) + 1 : at + 1].astype(np.int64))
            sums.add(found, expected, targets)
        done += window.scored
        progress(done)
    return _result(sums, context, stride)


def _side_by_side(
    found_of: Iterator[torch.Tensor], expected_of: Iterator[torch.Tensor] | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The same rows of both."""
    expected = None
    for found in found_of:
        if expected_of is None:
            yield found, None
            continue
        while len(found):
            if expected is None or not len(expected):
                expected = next(expected_of)
            rows = min(len(found), len(expected))
            yield found[:rows], expected[:rows]
            found, expected = found[rows:], expected[rows:]


def _result(sums: _Sums, context: int, stride: int) -> Perplexity:
    own = np.concatenate(sums.own)
    if not np.isfinite(own).all():
        raise ValueError(
            f"{int((~np.isfinite(own)).sum())} of {len(own)} tokens have no probability above zero: the "
            "model's numbers do not fit its dtype; try --dtype float32"
        )
    perplexity = _perplexity(own)
    error = perplexity * float(own.std()) / math.sqrt(len(own))
    compared = None
    if sums.divergences:
        apart = np.concatenate(sums.divergences)
        expected = _perplexity(np.concatenate(sums.others))
        compared = Compared(
            perplexity=expected,
            ratio=perplexity / expected,
            kl_mean=float(apart.mean()),
            kl_median=float(np.median(apart)),
            kl_p999=float(np.percentile(apart, 99.9)),
            kl_max=float(apart.max()),
            top1_agreement=sums.agreed / len(apart),
        )
    return Perplexity(len(own), context, stride, perplexity, error, compared)


def _perplexity(logs: npt.NDArray[np.float64]) -> float:
    return math.exp(-float(logs.mean()))
