"""The tables of angles grow with the positions that are used, and say the same whenever that is."""

from __future__ import annotations

import pytest
import torch

from baton.model.description.model import RopeConfig
from baton.model.layers.rotary import Rotary, rope_frequencies

ROPE = RopeConfig(10_000.0)


def test_tables_are_as_long_as_what_was_reached() -> None:
    rotary = Rotary(ROPE, 64, 1 << 20, torch.device("cpu"))
    assert len(rotary.cos) == len(rotary.sin) == 4096
    rotary.reach(4000)
    assert len(rotary.cos) == 4096
    rotary.reach(5000)
    assert len(rotary.cos) == 8192
    rotary.reach(40_000)
    assert 40_000 <= len(rotary.sin) < 80_000
    small = Rotary(ROPE, 64, 5000, torch.device("cpu"))
    small.reach(1 << 30)
    assert 5000 <= len(small.cos) <= 8192


@pytest.mark.parametrize("steps", [(30_000,), (1, 4097, 9000, 30_000), (4096, 8192, 20_000, 30_000)])
def test_the_same_bits_however_it_grew(steps: tuple[int, ...]) -> None:
    rotary = Rotary(ROPE, 64, 1 << 20, torch.device("cpu"))
    for positions in steps:
        rotary.reach(positions)
    frequencies, _ = rope_frequencies(ROPE, 64)
    angles = torch.outer(torch.arange(30_000, dtype=torch.float32), frequencies)
    assert torch.equal(rotary.cos[:30_000], angles.cos())
    assert torch.equal(rotary.sin[:30_000], angles.sin())
