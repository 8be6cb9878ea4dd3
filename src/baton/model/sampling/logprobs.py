"""Log-probabilities for reports: of the chosen token, its rank, and the k most likely tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.protocol.params.sampling import LISTED_LOGPROBS, TokenLogprobs


def token_logprobs(
    logits: Tensor, chosen: Tensor, count: int, these: Tensor | None = None
) -> list[TokenLogprobs]:
    """Raw logits [n, vocab] and chosen tokens [n] → a report for each row, with the `count` best, or with
    `these` tokens [m], best first.

    Natural logarithms, in float32.  Among equals the smaller id comes first; what cannot be is left out.
    More than `LISTED_LOGPROBS` are packed: no step of the interpreter is taken for each of them.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, chosen.unsqueeze(1))
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    if these is None and count > LISTED_LOGPROBS:
        packed = (_packed(row, count) for row in logprobs)
        return [
            TokenLogprobs.packed(token, logprob, rank, ids, values)
            for token, logprob, rank, (ids, values) in zip(
                chosen.tolist(), own.squeeze(1).tolist(), ranks, packed, strict=True
            )
        ]
    tops = _best(logprobs, min(count, logprobs.shape[1])) if these is None else _of(logprobs, these)
    return [
        TokenLogprobs(token, logprob, rank, top)
        for token, logprob, rank, top in zip(
            chosen.tolist(), own.squeeze(1).tolist(), ranks, tops, strict=True
        )
    ]


def _best(logprobs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    if count == 0:
        return [()] * logprobs.shape[0]
    values, ids = logprobs.topk(count, dim=-1)
    # `topk` keeps any of several equals at the border: where there are more, take the smallest ids.
    ambiguous = ((logprobs >= values[:, -1:]).sum(dim=-1) > count).nonzero().squeeze(1)
    if len(ambiguous):
        exact = logprobs[ambiguous].sort(dim=-1, descending=True, stable=True)
        values[ambiguous], ids[ambiguous] = exact.values[:, :count], exact.indices[:, :count]
    return [
        tuple(sorted(_possible(row_ids, row_values), key=lambda pair: (-pair[1], pair[0])))
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _packed(logprobs: Tensor, count: int) -> tuple[bytes, bytes]:
    """Of one position [vocab]: (ids, packed int32; log-probabilities, packed float32) of the `count` best."""
    values, ids = logprobs.sort(descending=True, stable=True)
    possible = min(count, int((values > -math.inf).sum()))
    return ids[:possible].int().cpu().numpy().tobytes(), values[:possible].cpu().numpy().tobytes()


def _of(logprobs: Tensor, these: Tensor) -> list[tuple[tuple[int, float], ...]]:
    ids = these.tolist()
    return [
        tuple(sorted(_possible(ids, values), key=lambda pair: (-pair[1], pair[0])))
        for values in logprobs[:, these.to(logprobs.device)].tolist()
    ]


def _possible(ids: list[int], values: list[float]) -> list[tuple[int, float]]:
    return [pair for pair in zip(ids, values, strict=True) if pair[1] > -math.inf]
