"""Whether a class of transformers computes each token for itself, seen by trying it, bit by bit.

What the probe cannot see (a shift along the sequence, a result that depends on how many tokens there are) is
seen here: tokens of a context come all at once, then one after the other, then beside another context.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.model.adapted.decoder import AdaptedDecoder
from baton.model.attention import AttentionStep

_MOST = 7


def why_not_alone(model: AdaptedDecoder) -> str:
    """A clause, or "".  Writes into the first two blocks of the pool, if it has two."""
    vocab, blocks = model.config.vocab_size, len(model.backend.pool)
    count = min(model.backend.shape.block_size, _MOST)
    tokens = np.linspace(0, vocab - 1, count).astype(np.int32)
    together = _hidden(model, [tokens], [0])
    alone = torch.cat([_hidden(model, [tokens[at : at + 1]], [at]) for at in range(count)])
    if not _same(alone, together):
        return "results of a token depend on the tokens that its step computes beside it"
    if blocks > 1 and not _same(_hidden(model, [tokens, tokens[::-1].copy()], [0, 0])[:count], together):
        return "results of a token depend on other requests in its step"
    return ""


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def _hidden(model: AdaptedDecoder, rows: list[np.ndarray], starts: list[int]) -> Tensor:
    counts = np.array([len(row) for row in rows], np.int32)
    tables = np.arange(len(rows), dtype=np.int32)[:, None]
    decodes = int(len(rows) == 1 and counts[0] == 1)
    step = AttentionStep(np.array(starts, np.int32), counts, tables, decodes)
    hidden, _ = model(np.concatenate(rows), step, np.empty(0, np.int64))
    return hidden.clone()
