"""Orders of a weight's rows."""

from __future__ import annotations

from torch import Tensor


def pairs_to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows [n * head_dim, …] of a q or k projection from pairs (2i, 2i+1) to (i, i + half)."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
