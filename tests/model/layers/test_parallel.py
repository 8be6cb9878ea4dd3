"""What several ranks add up."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.model.layers.parallel import TensorParallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_does_not_depend_on_what_is_summed_beside_it(
    size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    parts = torch.randn(size, 50, 64).to(dtype)
    pieces = (slice(0, 50), slice(0, 1), slice(7, 8), slice(7, 20), slice(3, 49))
    found: list[list[Tensor]] = [[] for _ in range(size)]

    def rank(index: int) -> None:
        parallel = TensorParallel.connect(index, size, str(tmp_path / "meet"), "cpu", 60)
        for piece in pieces:
            found[index].append(parallel.all_reduce(parts[index, piece].clone()))
        parallel.close()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    whole = found[0][0]
    torch.testing.assert_close(whole.float(), parts.float().sum(0), atol=0.1, rtol=0.02)
    for sums in found:
        for piece, part in zip(pieces, sums, strict=True):
            assert torch.equal(part, whole[piece])
