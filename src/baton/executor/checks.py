"""Whether a model that was loaded computes numbers, before it serves."""

from __future__ import annotations

import numpy as np

from baton.executor.base import Int32Array
from baton.model.attention import AttentionStep
from baton.model.loader import AnyDecoder, is_finite


def gives_numbers(model: AnyDecoder, vocab_size: int, table: Int32Array) -> bool:
    """Computes some tokens in the block of the table [1, 1]: a NaN in the weights is in the logits of every
    token.  True on ranks without logits."""
    count = min(model.backend.shape.block_size, 8)
    tokens = np.linspace(0, vocab_size - 1, count).astype(np.int32)
    step = AttentionStep(np.zeros(1, np.int32), np.array([count], np.int32), table, 0)
    _, logits = model(tokens, step, None)
    return logits is None or is_finite(logits)
