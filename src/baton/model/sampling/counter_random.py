"""Random numbers that are a function of (seed, position): SplitMix64 as a counter-based generator.

Theory.  SplitMix64 (Steele, Lea and Flood, 2014) adds a constant to a 64-bit state and outputs a mix of
it; so its n-th output is `mix(start + n * GOLDEN)` and can be had without the ones before.  A request's
stream starts at `mix(seed + GOLDEN)`, so that seeds 1, 2, 3 start far apart, and the token at position p
uses output p + 1.  The upper 53 bits make a double in [0, 1).

So a request draws the same numbers however it was batched, chunked, preempted or moved, and a row of a
batch needs no state of its own.  All arithmetic is modulo 2**64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(GOLDEN)


def mix(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finalizer, a bijection of 64-bit integers."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def stream_starts(seeds: UInt64Array) -> UInt64Array:
    return mix(seeds + _GOLDEN)


def uniforms(starts: UInt64Array, positions: UInt64Array) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (start of a stream, position)."""
    bits = mix(starts + (positions + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
