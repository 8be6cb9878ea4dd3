"""Orders of a weight's rows."""

from __future__ import annotations

import torch
from torch import Tensor


def in_halves(rows: Tensor, head_dim: int, rotated: int, neighbours: bool) -> Tensor:
    """Reorders the rows [n * head_dim, …] of a q or k projection so that pairs are (i, i + head_dim / 2).

    Of each head the first `rotated` elements are turned, as pairs (2i, 2i+1) if `neighbours`, else as
    (i, i + rotated / 2); they come first in both halves, and what is not turned behind them, as pairs too.
    """
    places = torch.arange(rotated)
    first, second = (places[::2], places[1::2]) if neighbours else places.chunk(2)
    kept, also_kept = torch.arange(rotated, head_dim).chunk(2) if rotated < head_dim else (places[:0],) * 2
    order = torch.cat((first, kept, second, also_kept)).to(rows.device)
    return rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def pairs_to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows [n * head_dim, …] of a q or k projection from pairs (2i, 2i+1) to (i, i + half)."""
    return in_halves(rows, head_dim, head_dim, neighbours=True)
