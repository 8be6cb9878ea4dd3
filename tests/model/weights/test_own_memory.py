"""Tensors in mappings of their own: what they hold, where they begin, and that their memory goes too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from baton.model.weights.own_memory import own_memory

MEGABYTE = 1 << 20


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("elements", [0, 1, 1000, 2 * MEGABYTE, 3 * MEGABYTE + 5])
def test_it_is_zero_and_can_be_written(elements: int, dtype: torch.dtype) -> None:
    found = own_memory(elements, dtype)
    assert found.shape == (elements,)
    assert found.dtype == dtype
    assert not found.any()
    found.fill_(3)
    assert torch.equal(found, torch.full((elements,), 3, dtype=dtype))
    if elements >= 2 * MEGABYTE:
        assert found.data_ptr() % (2 * MEGABYTE) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_its_memory_goes_with_it() -> None:
    before = anonymous()
    kept = own_memory(64 * MEGABYTE, torch.int8).fill_(1)[5:9].view(2, 2)  # a view holds it
    assert anonymous() - before > 60 * MEGABYTE
    assert int(kept.sum()) == 4
    del kept
    assert anonymous() - before < 4 * MEGABYTE
