"""Functions that several kernels share.

Theory.  Triton's interpreter, in which the tests run kernels on a CPU, keeps a bfloat16 as its bits and
multiplies the bits: products of bfloat16 are wrong there without a word.  So in the interpreter `product`
widens its factors, which are rounded by then: products of two bfloat16 are exact in float32, so this is
what a device computes, but for the order of additions.

`/` of float32 is an approximation on CUDA (two units in the last place), and so are `tl.exp` and
`tl.rsqrt`.  That is good enough for activations.  Where results are to be those of a CPU, bit for bit
(what is quantized, what is sampled), `tl.div_rn`, `fused` and `exponential` are used.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Kernels of this process run in Triton's interpreter (TRITON_INTERPRET=1 when it was imported)."""
LOG2E: Final = tl.constexpr(1.4426950408889634)
_LARGEST: Final = tl.constexpr(127.0)
_LEAST: Final = tl.constexpr(2.0**-100)
_ROUNDING: Final = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 of at most 2^22 is rounded to an integer, ties to even, by adding it."""


@triton.jit
def product(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """[M, K] @ [K, N] + c, which is float32; float32 factors are multiplied as such, not as TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Of float32, by the exponential: there is no such instruction that the interpreter knows."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def byte_scales(largest: tl.tensor, broken: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest magnitude of each head, and whether it holds NaN or infinity → what its numbers are
    multiplied by to become integers, and the scale that is kept: `attention.kv_int8.quantize`."""
    there = (largest > _LEAST) & ~broken
    divisor = tl.where(there, largest, 1.0)
    hundred = tl.zeros_like(divisor) + _LARGEST
    factor = tl.where(there, tl.div_rn(hundred, divisor), 0.0)
    scale = tl.where(there, tl.div_rn(divisor, hundred), 0.0)
    return factor, tl.where(broken, float("nan"), scale)


@triton.jit
def is_broken(x: tl.tensor) -> tl.tensor:
    """1 where x is NaN or infinite, else 0."""
    return tl.where((x != x) | (tl.abs(x) == float("inf")), 1, 0)


@triton.jit
def to_integers(x: tl.tensor, factor: tl.tensor, broken: tl.tensor) -> tl.tensor:
    """Heads [n, d] of float32 → integers, as float32, by `byte_scales`.

    What is rounded to an integer is the product as float32 has it, as on a CPU.  The bounds stand between it
    and the addition, so that no compiler makes one instruction of both, which would not round the product."""
    exact = tl.where(broken[:, None], 0.0, x * factor[:, None])
    return (tl.minimum(tl.maximum(exact, -_LARGEST), _LARGEST) + _ROUNDING) - _ROUNDING


@triton.jit
def fused(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """a * b + c of float32, rounded once.  (The interpreter before Triton 3.9 rounds twice: there by way of
    float64, in which a * b is exact.)"""
    if INTERPRETED:
        return (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def exponential(x: tl.tensor) -> tl.tensor:
    """e^x of float32 x <= 0, 0 below -87: bit for bit that of native/ranking.h where a CPU has fused
    multiply-add.  x = n ln 2 + r with |r| <= ln 2 / 2: a polynomial for e^r, and n goes into the exponent."""
    y = tl.where(x < -87.0, 0.0, x)
    zero = tl.zeros_like(y)
    shifted = fused(y, zero + 1.44269504, zero + _ROUNDING)
    n = shifted - _ROUNDING
    r = fused(n, zero - 0.693359375, y)
    r = fused(n, zero + 2.12194440e-4, r)
    p = fused(zero + 1.9875691500e-4, r, zero + 1.3981999507e-3)
    p = fused(p, r, zero + 8.3334519073e-3)
    p = fused(p, r, zero + 4.1665795894e-2)
    p = fused(p, r, zero + 1.6666665459e-1)
    p = fused(p, r, zero + 5.0000001201e-1)
    p = fused(p, r * r, r) + 1.0
    bits = p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return tl.where(x < -87.0, 0.0, bits.to(tl.float32, bitcast=True))
