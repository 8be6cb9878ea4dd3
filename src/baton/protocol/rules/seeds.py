"""Seeds of requests, and of each choice of a request."""

from __future__ import annotations

import secrets

_UINT64 = (1 << 64) - 1


def draw_seed() -> int:
    """A seed for a request that brought none."""
    return secrets.randbits(63)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` (from 0) of a request: choice 0 uses the seed itself.

    The others are mixed, so that neighbouring seeds share no choices.
    """
    if choice == 0:
        return seed & _UINT64
    return mix_one((seed + choice * 0x9E3779B97F4A7C15) & _UINT64)


def mix_one(value: int) -> int:
    """Mixes 64 bits as `model/counter_random.mix` does, without arrays (a test compares them)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64
    return value ^ (value >> 31)
