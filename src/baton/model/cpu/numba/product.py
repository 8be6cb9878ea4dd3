"""The inner loop of numba's attention: a product of a few rows whose sums stay in registers.

Theory.  Numba cannot be made to keep a tile of vectors in registers, so this one operation writes the loop as
LLVM instructions.  Each step reads a line or more of B once, broadcasts an element pair of each row of A, and
multiplies: R rows and V vectors need R + V loads for R * V products, which is why a tile reaches what the CPU
can multiply.  Where it has AVX-512 BF16, one instruction multiplies a vector of pairs of bfloat16 and adds
both products; else pairs are widened and take two.
"""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton.model.cpu.numba.vectors import (
    _BF16,
    _F32,
    _I8,
    _I32,
    _I64,
    _VOID,
    LANES,
    PAIR_PRODUCTS,
    _at,
    _call,
    _constant,
    _fma,
    _is_pairs,
    _splat,
)

PREFETCH = 3
"""Locality: 3 the first-level cache, 1 the last one that a core has for itself."""


@intrinsic(prefer_literal=True)
def accumulate_product(
    context, c, c_stride, factors, a, a_stride, b, b_stride, ahead, steps, rows, vectors, lanes, element
):
    """C = C * factors + A B for `rows` rows and `vectors * lanes` columns; the tile of C stays in registers.

    C: float32, rows `c_stride` bytes apart.  factors: address of [rows] float32; None: C = A B.
    A: elements, rows `a_stride` apart; a step is 4 bytes of a row: two bfloat16 or one float32.
    B: a step is `lanes * vectors * 4` bytes, `b_stride` from one to the next.
    What lies `ahead` bytes beyond B is prefetched.  Strides of C and A, rows, vectors, lanes: constants.
    """
    constants = (c_stride, a_stride, rows, vectors, lanes)
    if not all(isinstance(constant, types.IntegerLiteral) for constant in constants):
        return None
    sizes = [constant.literal_value for constant in constants]
    element = types.unliteral(element)
    signature = types.void(
        types.int64,
        c_stride,
        types.none if factors == types.none else types.int64,
        types.int64,
        a_stride,
        *[types.int64] * 4,
        rows,
        vectors,
        lanes,
        element,
    )

    def emit(context, builder, signature, values):
        c, _, scales, a, _, b, stride, ahead, steps = values[:9]
        if factors == types.none:
            scales = None
        _product(builder, sizes, _is_pairs(element), c, scales, a, b, stride, ahead, steps)
        return context.get_dummy_value()

    return signature, emit


def _product(builder, sizes, pairs, c, factors, a, b, stride, ahead, steps):
    c_stride, a_stride, rows, vectors, lanes = sizes
    floats, ints = ir.VectorType(_F32, lanes), ir.VectorType(_I32, lanes)
    tile = [(row, vector) for row in range(rows) for vector in range(vectors)]

    def at(base, offset, type_):
        return _at(builder, builder.add(base, _I64(offset)), type_)

    def sum_at(row, vector):
        return at(c, row * c_stride + vector * lanes * 4, floats)

    if factors is None:
        sums = [_constant(0.0, _F32, lanes) for _ in tile]
    else:
        scale = [
            _splat(builder, builder.load(at(factors, 4 * row, _F32), align=4), lanes) for row in range(rows)
        ]
        sums = [builder.fmul(builder.load(sum_at(*place), align=4), scale[place[0]]) for place in tile]

    before = builder.block
    loop, after = builder.append_basic_block("step"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed(">", steps, _I64(0)), loop, after)
    builder.position_at_end(loop)
    step, place = builder.phi(_I64), builder.phi(_I64)
    step.add_incoming(_I64(0), before)
    place.add_incoming(b, before)
    running = []
    for value in sums:
        running.append(builder.phi(floats))
        running[-1].add_incoming(value, before)

    right = []
    for vector in range(vectors):
        right.append(builder.load(at(place, vector * lanes * 4, ints), align=4))
        if lanes == LANES:
            next_line = at(builder.add(place, ahead), vector * lanes * 4, _I8)
            _call(builder, "llvm.prefetch.p0", _VOID, next_line, _I32(0), _I32(PREFETCH), _I32(1))
    high = _constant(-65536, _I32, lanes)
    left_at = builder.add(a, builder.mul(step, _I64(4)))
    next_sums = []
    for row in range(rows):
        left = builder.load(at(left_at, row * a_stride, _I32), align=4)
        for vector in range(vectors):
            number = row * vectors + vector
            if pairs and PAIR_PRODUCTS and lanes == LANES:
                operands = [
                    builder.bitcast(bits, ir.VectorType(_BF16, 2 * lanes))
                    for bits in (right[vector], _splat(builder, left))
                ]
                name = "llvm.x86.avx512bf16.dpbf16ps.512"
                value = _call(builder, name, floats, running[number], *operands)
            elif pairs:
                value = running[number]
                for bits, whole in (
                    (_I32(16), _constant(16, _I32, lanes)),
                    (_I32(-65536), high),
                ):
                    cut = builder.shl if whole is not high else builder.and_
                    one = _splat(builder, builder.bitcast(cut(left, bits), _F32), lanes)
                    many = builder.bitcast(cut(right[vector], whole), floats)
                    value = _fma(builder, many, one, value)
            else:
                one = _splat(builder, builder.bitcast(left, _F32), lanes)
                value = _fma(builder, builder.bitcast(right[vector], floats), one, running[number])
            next_sums.append(value)
    next_step = builder.add(step, _I64(1))
    step.add_incoming(next_step, loop)
    place.add_incoming(builder.add(place, stride), loop)
    for phi, value in zip(running, next_sums, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", next_step, steps), loop, after)

    builder.position_at_end(after)
    for (row, vector), first, last in zip(tile, sums, next_sums, strict=True):
        result = builder.phi(floats)
        result.add_incoming(first, before)
        result.add_incoming(last, loop)
        running[row * vectors + vector] = result
    for (row, vector), result in zip(tile, running, strict=True):
        builder.store(result, sum_at(row, vector), align=4)
