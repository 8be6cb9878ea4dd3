"""Products of 16 bits whose results are float32, as an output head's are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ELEMENTS = 1 << 20
"""Of a weight, that are widened at a time: as many as stay in a cache."""


def multiply_wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in], weight [out, in], bias [out] → x Wᵀ + b [T, out] in float32, of sums that nothing rounds."""
    if weight.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if x.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # (from PyTorch 2.8 on)
        found = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        rows = max(1, _ELEMENTS // weight.shape[1])
        wide = x.float()
        parts = (weight[first : first + rows] for first in range(0, len(weight), rows))
        found = torch.cat([F.linear(wide, part.float()) for part in parts], dim=1)
    return found if bias is None else found.add_(bias)
