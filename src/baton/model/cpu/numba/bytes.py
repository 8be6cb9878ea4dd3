"""Vector instructions of keys and values in eight bits (see `vectors`)."""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

from llvmlite import ir
from numba import types

from baton.model.cpu.numba.vectors import (
    _F32,
    _I8,
    _I32,
    _VOID,
    LANES,
    VECTOR,
    _at,
    _call,
    _constant,
    _mask,
    _operation,
    _splat,
)


@_operation(VECTOR, VECTOR)
def nearest(builder, vector):
    """Whole numbers, ties to even."""
    return _call(builder, f"llvm.rint.v{LANES}f32", vector.type, vector)


@_operation(types.void, types.int64, types.int64)
def copy_flipped_byte(builder, target, source):
    """With its highest bit the other one: 128 + q → q, signed."""
    byte = builder.load(_at(builder, source, _I8))
    builder.store(builder.xor(byte, _I8(128)), _at(builder, target, _I8))


@_operation(VECTOR, types.int64, types.int64, types.int64, types.int64)
def load_byte(builder, address, count, shift, flip):
    """Of the first `count` of 16 units of four bytes the one at bit `shift`, xor `flip`, less 128."""
    units = ir.VectorType(_I32, LANES)
    pointer, name = _at(builder, address, units), f"llvm.masked.load.v{LANES}i32.p0"
    loaded = _call(builder, name, units, pointer, _I32(4), _mask(builder, count), _constant(0, _I32))
    shifted = builder.lshr(loaded, _splat(builder, builder.trunc(shift, _I32)))
    byte = builder.and_(shifted, _constant(255, _I32))
    number = builder.sub(builder.xor(byte, _splat(builder, builder.trunc(flip, _I32))), _constant(128, _I32))
    return builder.sitofp(number, ir.VectorType(_F32, LANES))


@_operation(types.void, types.int64, VECTOR, VECTOR, types.int64)
def store_pairs(builder, address, low, high, count):
    """The first `count` of 16 pairs of bfloat16; what is cut off is zero."""
    units = ir.VectorType(_I32, LANES)
    bits = builder.lshr(builder.bitcast(low, units), _constant(16, _I32))
    upper = builder.and_(builder.bitcast(high, units), _constant(-65536, _I32))
    name, pointer = f"llvm.masked.store.v{LANES}i32.p0", _at(builder, address, units)
    _call(builder, name, _VOID, builder.or_(bits, upper), pointer, _I32(4), _mask(builder, count))
