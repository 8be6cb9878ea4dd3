"""From the blocks of a GGUF file's tensor to a `Grouped`, or to floating point.

Theory.  A row is cut into blocks of 32 or 256 inputs; each holds its scales and its codes.  All come out in
groups of 32 inputs, each with a scale and a zero point:

* Q4_0, Q5_0, Q8_0: a float16 scale d for 32 signed codes; w = d * (code - 8 | 16 | 128).
* Q4_1, Q5_1: and a float16 minimum m; w = d * code + m, so the zero point is -m / d.
* Q4_K, Q5_K: 256 inputs have two float16, d and dmin, and eight groups of 32 with six bits of scale s and
  minimum m each; w = d s code - dmin m.
* Q6_K: 256 inputs have a float16 d and sixteen groups of *16* inputs with eight bits of scale each;
  w = d s (code - 32).
* MXFP4: a byte e for 32 of its numbers; w = 2^(e - 127) x.

Codes of 5 and 6 bits become bytes.  Where a scale is zero but the minimum is not, all weights of a group are
that minimum, which becomes the scale.  Minimum / scale is rounded to float32: 1e-7 of the minimum.

Kernels multiply groups of 32, so two groups of Q6_K share a scale: the larger of their two over the largest
whole number by which all codes still fit into a byte.  That half is exact, the other is rounded once: this is
the one type that cannot be held exactly, and `decoded` returns its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.model.checkpoint.gguf import BLOCKS
from baton.model.weights.grouped import Grouped

GROUP: Final = 32
EXACT: Final = frozenset(BLOCKS) - {"Q6_K"}
"""Types that need not be rounded."""
BITS: Final = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q4_K": 4,
    "Q5_0": 8,
    "Q5_1": 8,
    "Q5_K": 8,
    "Q6_K": 8,
    "Q8_0": 8,
    "MXFP4": 4,
}
"""Of a code in the end."""
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CACHED_ELEMENTS: Final = 1 << 16
_E8M0_NAN: Final = 255
"""Of MXFP4's scales."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Parts = tuple[Bytes, Floats, Floats]
"""Of n blocks: codes [n, elements], scales and zeros [n, groups]"""


def plain(kind: str, memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor in floating point: a view of the bytes [n] uint8."""
    return memory.view(_FLOATS[kind]).view(shape)


def decoded(kind: str, memory: Tensor, shape: tuple[int, int]) -> tuple[Grouped, float]:
    """Bytes [n] uint8 → a weight [out, in] in groups, and its relative error (root mean square; 0: exact).

    Raises `ValueError` (one line) if a scale is NaN or infinite.
    """
    out_features, in_features = shape
    elements, size = BLOCKS[kind]
    blocks = memory.numpy().reshape(out_features, in_features // elements, size)
    codes = torch.empty(shape, dtype=torch.uint8)
    scales = torch.empty((out_features, in_features // GROUP), dtype=torch.float32)
    zeros = torch.empty_like(scales)
    errors: list[tuple[float, float]] = []
    read: Callable[[Bytes], Parts] = partial(_q6_k, errors=errors) if kind == "Q6_K" else _READERS[kind]

    def compute(part: slice) -> None:
        # Anything may be in a damaged file; `Grouped` refuses what is no number.
        with np.errstate(all="ignore"):
            found = read(blocks[part].reshape(-1, size))
            for target, values in ((codes, found[0]), (scales, found[1]), (zeros, found[2])):
                target[part].numpy()[:] = values.reshape(-1, target.shape[1])

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for _ in pool.map(compute, _slices(out_features, in_features)):
            pass
    wrong, total = (sum(pair[place] for pair in errors) for place in (0, 1))
    found = Grouped(codes, scales, zeros, GROUP, BITS[kind], e2m1=kind == "MXFP4")
    return found, (wrong / total) ** 0.5 if total else 0.0


def scales_finite(kind: str, memory: Tensor) -> bool:
    """Whether all scales and minima of a tensor's bytes [n] are numbers."""
    blocks = memory.numpy().reshape(-1, BLOCKS[kind][1])
    if kind == "MXFP4":
        return not bool((blocks[:, 0] == _E8M0_NAN).any())
    places = _SCALES_AT[kind]
    some = 1 << 16
    return all(
        bool(np.isfinite(_half(blocks[first : first + some], place)).all())
        for first in range(0, len(blocks), some)
        for place in places
    )


def _slices(rows: int, columns: int) -> Iterator[slice]:
    some = max(1, _CACHED_ELEMENTS // columns)
    return (slice(first, min(first + some, rows)) for first in range(0, rows, some))


def _half(blocks: Bytes, place: int) -> Floats:
    """The float16 at a byte of each block: [n] float32."""
    return np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16)[:, 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, bytes] → [n, 2 * bytes]: the low halves of all, then the high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[n, 4] → [n, 32]: bit i, as 0 or 16."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little") << np.uint8(4)


def _symmetric(codes: Bytes, scale: Floats, middle: int) -> Parts:
    return codes, scale[:, None], np.full((len(scale), 1), middle, np.float32)


def _with_minimum(codes: Bytes, scales: Floats, minima: Floats) -> Parts:
    """w = scale * code + minimum, for [n, groups] of them."""
    flat = scales == 0
    divisor = np.where(flat, 1, scales).astype(np.float32)
    zeros = np.where(flat, -(minima != 0).astype(np.float32), -minima / divisor)
    if flat.any():
        codes = np.where(np.repeat(flat, GROUP, axis=1), np.uint8(0), codes)
    return codes, np.where(flat, minima, scales), zeros.astype(np.float32)


def _q4_0(blocks: Bytes) -> Parts:
    return _symmetric(_nibbles(blocks[:, 2:]), _half(blocks, 0), 8)


def _q4_1(blocks: Bytes) -> Parts:
    return _with_minimum(_nibbles(blocks[:, 4:]), _half(blocks, 0)[:, None], _half(blocks, 2)[:, None])


def _q5_0(blocks: Bytes) -> Parts:
    return _symmetric(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), 16)


def _q5_1(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _with_minimum(codes, _half(blocks, 0)[:, None], _half(blocks, 2)[:, None])


def _q8_0(blocks: Bytes) -> Parts:
    return _symmetric(blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), 128)


def _mxfp4(blocks: Bytes) -> Parts:
    exponents = blocks[:, 0].astype(np.int32)
    scales = np.ldexp(np.float32(1), exponents - 127)
    scales[exponents == _E8M0_NAN] = np.nan
    return _nibbles(blocks[:, 1:]), scales[:, None], np.zeros((len(blocks), 1), np.float32)


def _six_bits(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima [n, 8] of Q4_K and Q5_K: each twelve bytes hold eight of both."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 2 & 48)), axis=1).astype(np.float32)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 2 & 48)), axis=1).astype(np.float32)
    return scales * _half(blocks, 0)[:, None], minima * -_half(blocks, 2)[:, None]


def _four_bits_of_k(packed: Bytes) -> Bytes:
    """[n, 128] → [n, 256]: each 32 bytes hold two groups, one in the low halves, one in the high."""
    four = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((four & 15, four >> 4), axis=2).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Parts:
    return _with_minimum(_four_bits_of_k(blocks[:, 16:]), *_six_bits(blocks))


def _q5_k(blocks: Bytes) -> Parts:
    # Bit g of each of 32 bytes belongs to group g.
    fifth = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)
    codes = _four_bits_of_k(blocks[:, 48:]) | (fifth.reshape(-1, 256) << np.uint8(4))
    return _with_minimum(codes, *_six_bits(blocks))


def _q6_parts(blocks: Bytes) -> tuple[Floats, Floats]:
    """Values [n, 16, 16], -32 to 31, and scales [n, 16]."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([high >> np.uint8(2 * place) & 3 for place in range(4)], axis=2)
    values = (low | high << np.uint8(4)).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return values.reshape(-1, 16, 16), scales * _half(blocks, 208)[:, None]


def _halved(better: np.ufunc, values: Floats) -> Any:
    """[n, groups, 32] → [n, groups]: the best of each; `reduce` takes three times as long for so few."""
    while values.shape[2] > 1:
        half = values.shape[2] // 2
        values = better(values[:, :, :half], values[:, :, half:])
    return values[:, :, 0]


def _q6_k(blocks: Bytes, errors: list[tuple[float, float]] | None = None) -> Parts:
    """Appends the sums of the squares of what is wrong, and of the weights."""
    values, scales = _q6_parts(blocks)
    pairs = scales.reshape(-1, 8, 2)
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    larger = np.where(np.abs(first) >= np.abs(second), first, second)
    share = pairs / np.where(larger == 0, 1, larger)[:, :, None]
    # In multiples of the larger scale: codes have to span the range of these.
    steps: Any = (values.reshape(-1, 8, 2, 16) * share[:, :, :, None]).reshape(-1, 8, GROUP)
    low, high = np.minimum(_halved(np.minimum, steps), 0), np.maximum(_halved(np.maximum, steps), 0)
    times = np.floor(254 / np.maximum(high - low, 1))
    zeros = np.ceil(-low * times)
    if errors is not None:
        total = np.einsum("bgi,bgi->bg", steps, steps) * np.square(larger)
    steps *= times[:, :, None]
    codes = np.rint(steps)
    if errors is not None:
        steps -= codes
        wrong = np.einsum("bgi,bgi->bg", steps, steps) * np.square(larger / times)
        errors.append((float(wrong.sum(dtype=np.float64)), float(total.sum(dtype=np.float64))))
    codes += zeros[:, :, None]
    return codes.astype(np.uint8).reshape(-1, 256), larger / times, zeros


_READERS: Final[dict[str, Callable[[Bytes], Parts]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "MXFP4": _mxfp4,
}  # fmt: skip
_SCALES_AT: Final = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
"""Bytes of a block where there is a float16."""
