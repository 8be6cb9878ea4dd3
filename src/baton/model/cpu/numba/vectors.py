"""Vector instructions for numba: what its kernels are made of, as LLVM instructions.

Theory.  Numba compiles Python through LLVM, but has neither vectors nor bfloat16; whether a loop becomes
vector code is left to an optimizer that must be coaxed.  So a vector of 16 float32 is made a type of its
own here, and each operation on it one LLVM instruction or a few.  LLVM cuts a vector of 16 into what the
CPU has (two of 8 with AVX2, four of 4 with NEON).  The inner loop of attention is one operation,
`accumulate_product`: a tile of sums is kept in registers, and where the CPU can multiply pairs of bfloat16
(AVX-512 BF16) it does.

Addresses are plain int64.  An *element* is passed where a function serves two types: `PAIRS` (a uint16:
bfloat16, two adjacent ones make a step of a product) or `SINGLES` (a float32).
"""

# Compiled functions have the types that numba infers.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, var-annotated"
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

LANES = 16
PAIRS, SINGLES = np.uint16(0), np.float32(0)


def _features() -> dict[str, bool]:
    """Of the CPU that code is compiled for: this one, or what NUMBA_CPU_FEATURES says."""
    wanted = getattr(numba.config, "CPU_FEATURES", None)
    if wanted is None:
        return dict(binding.get_host_cpu_features())
    return {word[1:]: word[0] == "+" for word in wanted.split(",") if word}


PAIR_PRODUCTS = _features().get("avx512bf16", False)
MANY_REGISTERS = _features().get("avx512f", False)
"""32 registers of 16 lanes, rather than 16 of 8 or 32 of 4."""


class _BFloat(ir.Type):  # type: ignore[misc]
    null = "0.0"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_BF16, _F32, _VOID = _BFloat(), ir.FloatType(), ir.VoidType()


class Vector(types.Type):
    """16 float32."""

    def __init__(self) -> None:
        super().__init__(name="vector(16 x float32)")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(_F32, LANES))


VECTOR = Vector()


_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function that emits instructions, `(builder, *values) -> value`, one that kernels can call."""

    def register(emit: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*values: Any) -> Any:
            raise NotImplementedError("only inside compiled code")

        names = [inspect.Parameter(f"value{i}", _POSITIONAL) for i in range(len(arguments))]

        @type_callable(operation)
        def typer(context: Any) -> Any:
            def accept(*given: Any) -> Any:
                return result if given == arguments else None

            accept.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
            return accept

        @lower_builtin(operation, *arguments)
        def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else value

        operation.__name__ = emit.__name__
        operation.__doc__ = emit.__doc__
        return operation

    return register


def _call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [v.type for v in values]), name)
    return builder.call(function, values)


def _at(builder: Any, address: Any, type_: ir.Type) -> Any:
    return builder.inttoptr(address, type_.as_pointer())


def _splat(builder: Any, value: Any, lanes: int = LANES) -> Any:
    vector = ir.VectorType(value.type, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _constant(value: float, type_: ir.Type = _F32, lanes: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(type_, lanes), [value] * lanes)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


# Memory


@_operation(types.int64, types.int64)
def int64_at(builder, address):
    return builder.load(_at(builder, address, _I64))


@_operation(types.int64, types.int64)
def int32_at(builder, address):
    return builder.sext(builder.load(_at(builder, address, _I32)), _I64)


@_operation(types.void, types.int64, types.int64)
def copy_int32(builder, target, source):
    builder.store(builder.load(_at(builder, source, _I32), align=4), _at(builder, target, _I32), align=4)


@_operation(types.void, types.int64, types.int64)
def copy_int16(builder, target, source):
    builder.store(builder.load(_at(builder, source, _I16), align=2), _at(builder, target, _I16), align=2)


@_operation(types.void, types.int64, types.int64)
def put_int32(builder, address, value):
    builder.store(builder.trunc(value, _I32), _at(builder, address, _I32), align=4)


@_operation(types.float32, types.int64)
def float_at(builder, address):
    return builder.load(_at(builder, address, _F32), align=4)


@_operation(types.void, types.int64, types.float32)
def put_float(builder, address, value):
    builder.store(value, _at(builder, address, _F32), align=4)


@_operation(types.int64, types.int64)
def fetch_add_int64(builder, address):
    """Adds one, atomically; returns what was there."""
    return builder.atomic_rmw("add", _at(builder, address, _I64), _I64(1), "acq_rel")


@_operation(types.int64, types.int64)
def fetch_add_int32(builder, address):
    return builder.sext(builder.atomic_rmw("add", _at(builder, address, _I32), _I32(1), "acq_rel"), _I64)


# Vectors


@_operation(VECTOR, types.int64)
def load(builder, address):
    return builder.load(_at(builder, address, ir.VectorType(_F32, LANES)), align=4)


@_operation(types.void, types.int64, VECTOR)
def store(builder, address, vector):
    builder.store(vector, _at(builder, address, vector.type), align=4)


@_operation(VECTOR, types.float32)
def splat(builder, value):
    return _splat(builder, value)


@_operation(VECTOR, VECTOR, VECTOR)
def add(builder, a, b):
    return builder.fadd(a, b)


@_operation(VECTOR, VECTOR, VECTOR)
def subtract(builder, a, b):
    return builder.fsub(a, b)


@_operation(VECTOR, VECTOR, VECTOR)
def multiply(builder, a, b):
    return builder.fmul(a, b)


@_operation(VECTOR, VECTOR, VECTOR)
def divide(builder, a, b):
    return builder.fdiv(a, b)


@_operation(VECTOR, VECTOR, VECTOR, VECTOR)
def multiply_add(builder, a, b, c):
    """a * b + c, rounded once."""
    return _fma(builder, a, b, c)


@_operation(VECTOR, VECTOR, VECTOR)
def maximum(builder, a, b):
    """b where either is a NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_operation(VECTOR, VECTOR, types.int64, types.int64, types.float32)
def keep(builder, vector, low, high, other):
    """Lanes [low, high) as they are, `other` in the rest."""
    lanes = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
    above = builder.icmp_signed(">=", lanes, _splat(builder, low))
    below = builder.icmp_signed("<", lanes, _splat(builder, high))
    return builder.select(builder.and_(above, below), vector, _splat(builder, other))


def _halves(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Lane i with lane i + half, until one is left."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(_I32, lanes), list(range(start, start + lanes)))
            )
            for start in (0, lanes)
        )
        vector = combine(low, high)
    return builder.extract_element(vector, _I32(0))


@_operation(types.float32, VECTOR)
def highest(builder, vector):
    return _halves(builder, vector, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@_operation(types.float32, VECTOR)
def total(builder, vector):
    return _halves(builder, vector, builder.fadd)


@_operation(types.void, types.int64, VECTOR, types.int64)
def store_bytes(builder, address, vector, count):
    """The first `count` of 16, each 128 + the nearest integer."""
    whole = _call(builder, f"llvm.rint.v{LANES}f32", vector.type, vector)
    numbers = builder.add(builder.fptosi(whole, ir.VectorType(_I32, LANES)), _constant(128, _I32))
    values = builder.trunc(numbers, ir.VectorType(_I8, LANES))
    pointer = _at(builder, address, values.type)
    _call(builder, f"llvm.masked.store.v{LANES}i8.p0", _VOID, values, pointer, _I32(1), _mask(builder, count))


@_operation(VECTOR, VECTOR)
def exp2(builder, x):
    """2^x for x <= 127, to 2e-7 relative; 0 below 2^-126.

    x = n + f with an integer n and |f| <= 1/2; 2^f is a polynomial, 2^n the exponent of a float32.
    """
    x = builder.select(builder.fcmp_ordered(">", x, _constant(-127.0)), x, _constant(-127.0))
    whole = _call(builder, f"llvm.rint.v{LANES}f32", x.type, x)
    f = builder.fsub(x, whole)
    power = _constant(1.535336188319500e-4)
    for coefficient in (
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
        1.0,
    ):
        power = _fma(builder, power, f, _constant(_single(coefficient)))
    exponent = builder.add(builder.fptosi(whole, ir.VectorType(_I32, LANES)), _constant(127, _I32))
    return builder.fmul(power, builder.bitcast(builder.shl(exponent, _constant(23, _I32)), x.type))


def _single(value: float) -> float:
    return float(np.float32(value))


# Elements


def _round(builder: Any, vector: Any) -> Any:
    """float32 → the bits of bfloat16, to nearest, ties to even; a NaN stays one."""
    lanes = vector.type.count
    shorts = ir.VectorType(_I16, lanes)
    if PAIR_PRODUCTS:
        return builder.bitcast(builder.fptrunc(vector, ir.VectorType(_BF16, lanes)), shorts)
    bits = builder.bitcast(vector, ir.VectorType(_I32, lanes))
    sixteen = _constant(16, _I32, lanes)
    odd = builder.and_(builder.lshr(bits, sixteen), _constant(1, _I32, lanes))
    even = builder.add(bits, builder.add(odd, _constant(0x7FFF, _I32, lanes)))
    quiet = builder.or_(bits, _constant(0x400000, _I32, lanes))
    number = builder.fcmp_ordered("==", vector, vector)
    return builder.trunc(builder.lshr(builder.select(number, even, quiet), sixteen), shorts)


def _widen(builder: Any, bits: Any) -> Any:
    lanes = bits.type.count
    wide = builder.zext(bits, ir.VectorType(_I32, lanes))
    return builder.bitcast(builder.shl(wide, _constant(16, _I32, lanes)), ir.VectorType(_F32, lanes))


def _mask(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, _splat(builder, count))


def _is_pairs(element: types.Type) -> bool:
    return element == types.uint16


@intrinsic
def element_bytes(context, element):
    size = 2 if _is_pairs(element) else 4
    return types.int64(element), lambda context, builder, signature, values: _I64(size)


@intrinsic
def load_elements(context, address, element):
    """16 elements as float32."""

    def emit(context, builder, signature, values):
        if _is_pairs(element):
            return _widen(builder, builder.load(_at(builder, values[0], ir.VectorType(_I16, LANES)), align=2))
        return builder.load(_at(builder, values[0], ir.VectorType(_F32, LANES)), align=4)

    return VECTOR(types.int64, element), emit


@intrinsic
def load_some(context, address, count, element):
    """The first `count` of 16; zeros in the other lanes."""

    def emit(context, builder, signature, values):
        mask = _mask(builder, values[1])
        kind, name, align = (_I16, "i16", 2) if _is_pairs(element) else (_F32, "f32", 4)
        vector = ir.VectorType(kind, LANES)
        pointer = _at(builder, values[0], vector)
        zeros = _constant(0 if _is_pairs(element) else 0.0, kind)
        found = _call(
            builder, f"llvm.masked.load.v{LANES}{name}.p0", vector, pointer, _I32(align), mask, zeros
        )
        return _widen(builder, found) if _is_pairs(element) else found

    return VECTOR(types.int64, types.int64, element), emit


@intrinsic
def store_elements(context, address, vector, element):
    """Rounds 16 float32 to elements."""

    def emit(context, builder, signature, values):
        rounded = _round(builder, values[1]) if _is_pairs(element) else values[1]
        builder.store(rounded, _at(builder, values[0], rounded.type), align=2 if _is_pairs(element) else 4)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR, element), emit


@intrinsic
def store_some(context, address, vector, count, element):
    """The first `count` of 16."""

    def emit(context, builder, signature, values):
        rounded = _round(builder, values[1]) if _is_pairs(element) else values[1]
        name, align = ("i16", 2) if _is_pairs(element) else ("f32", 4)
        pointer = _at(builder, values[0], rounded.type)
        mask = _mask(builder, values[2])
        _call(builder, f"llvm.masked.store.v{LANES}{name}.p0", _VOID, rounded, pointer, _I32(align), mask)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR, types.int64, element), emit
