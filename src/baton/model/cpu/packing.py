"""Packing weights in groups by `native/packing.cpp`: where their parts lie, and what they are like."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.model.cpu.library import INT, POINTER, Native
from baton.model.weights.grouped import Grouped


class _Rows(ctypes.Structure):
    """`Rows` of native/packing.cpp."""

    _fields_ = (("codes", POINTER), ("scales", POINTER), ("zeros", POINTER), ("count", INT))


class _Packing(ctypes.Structure):
    """`Packing` of native/packing.cpp."""

    _fields_ = (
        ("weight", POINTER),
        ("parts", POINTER),
        ("num_parts", INT),
        ("nibbles", INT),
        ("factor", ctypes.c_double),
    )


class Survey(ctypes.Structure):
    """`Survey` of native/packing.cpp, which says what its fields are."""

    _fields_ = (
        ("parts", POINTER),
        ("num_parts", INT),
        ("groups", INT),
        ("least", ctypes.c_double),
        ("most", ctypes.c_double),
        ("exponent", INT),
        ("halves", INT),
        ("words", INT),
        ("whole", INT),
        ("eighths", INT),
        ("half_zeros", INT),
    )
    least: float
    most: float
    exponent: int
    halves: int
    words: int
    whole: int
    eighths: int
    half_zeros: int


@dataclass(frozen=True)
class Laid:
    """Weights that are kept alike, with what they share: together they are one, whose outputs come in their
    order."""

    parts: Sequence[Grouped]
    _kept: Sequence[Tensor]
    _rows: ctypes.Array[_Rows]

    @staticmethod
    def of(parts: Sequence[Grouped]) -> Laid:
        kept = [
            tuple(part.contiguous() for part in (weight.codes, weight.scales, weight.zeros))
            for weight in parts
        ]
        rows = [
            _Rows(codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), len(codes))
            for codes, scales, zeros in kept
        ]
        return Laid(parts, [part for three in kept for part in three], (_Rows * len(rows))(*rows))

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    def survey(self, library: Native) -> Survey:
        groups = self.parts[0].scales.shape[1]
        found = Survey(parts=ctypes.addressof(self._rows), num_parts=len(self._rows), groups=groups)
        library.function("survey_groups", POINTER)(ctypes.addressof(found))
        return found

    def pack(self, library: Native, twin: int, scale: float) -> None:
        """Into the memory of the `Weight` at `twin`; scales are stored divided by `scale`, a power of two,
        but for MXFP4's, of which the exponents are stored as they are."""
        task = _Packing(
            weight=twin,
            parts=ctypes.addressof(self._rows),
            num_parts=len(self._rows),
            nibbles=self.parts[0].nibbles,
            factor=1.0 if self.parts[0].e2m1 else 1 / scale,
        )
        library.function("pack_groups", POINTER)(ctypes.addressof(task))
