"""Products with weights in groups by `native/grouped.cpp`, which explains the arithmetic; `native/grouped.h`
has the layout."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.model.cpu.library import INT, POINTER, Native
from baton.model.ops.fused import Activations, Form
from baton.model.weights.group_rows import GroupRows
from baton.model.weights.grouped import Grouped, InGroups, parts_of
from baton.model.weights.store import Facts, Shelf

_HALF, _HALF_BYTE, _HALF_HALF, _FULL, _HALF_EIGHTHS, _E2M1, _WORD = range(7)
_META_BYTES = {_E2M1: 1, _WORD: 2, _HALF: 2, _HALF_BYTE: 3, _HALF_EIGHTHS: 3, _HALF_HALF: 4, _FULL: 8}
"""Of an output's scale and zero, for each group."""
_EXPONENT = 0xFF << 23
"""Of a float32's bits."""
_LARGEST_HALF, _LARGEST_IN_WORD = 15, 1
"""Stored scales are below two to the power of this."""


class Weight(ctypes.Structure):
    """`GroupedWeight` of native/grouped.h."""

    _fields_ = (
        ("packed", POINTER),
        ("bits", INT),
        ("group", INT),
        ("meta", INT),
        ("n", INT),
        ("k", INT),
        ("zero", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("next", POINTER),
    )


class PackedGroups:
    """A `Grouped` in panels.  It is copied; nothing of it is kept.  None: the shelf has it.

    Scales and zeros take as few bytes as hold them exactly: float16 scales (times one power of two for all)
    if all fit, zeros as bytes or not at all if they are whole numbers (of 4 bits, eighths as well) or all the
    same; else float32.  Zeros in eighths with scales of few bits, as `weights.quantize` finds them, are one
    word of 16 bits.  Numbers of MXFP4 take four bits, and their scales, powers of two, a byte.
    """

    def __init__(self, library: Native, weight: Grouped | None, shelf: Shelf) -> None:
        panel = 2 * library.lanes
        scales: Tensor | None = None
        if weight is not None and weight.e2m1 and not _are_powers_of_two(weight.scales):
            weight = weight.in_bytes()

        def described() -> Facts:
            nonlocal scales
            assert weight is not None
            padded = -(-weight.out_features // panel) * panel
            kind, exponent, scales = _kind_of(weight)
            groups = weight.in_features // weight.group
            return {
                "bits": weight.bits,
                "group": weight.group,
                "meta": kind,
                "n": weight.out_features,
                "k": weight.in_features,
                "zero": float(weight.zeros.flatten()[0]) if weight.zeros.numel() else 0.0,
                "scale": 2.0**exponent,
                "bytes": padded * (weight.in_features * weight.bits // 8 + groups * _META_BYTES[kind]),
            }

        facts = dict(shelf.note("groups", described))
        self.elements = shelf.make("groups", (int(facts.pop("bytes")),), torch.uint8)
        self.twin = Weight(packed=self.elements.data_ptr(), **facts)
        self.out_features, self.in_features = int(facts["n"]), int(facts["k"])
        self.group, self.bits = int(facts["group"]), int(facts["bits"])
        self.address = ctypes.addressof(self.twin)
        if weight is not None and scales is not None:
            parts = [part.contiguous() for part in (weight.codes, scales, weight.zeros)]
            pack = library.function("pack_nibbles" if weight.nibbles else "pack_grouped", *[POINTER] * 4)
            pack(self.address, *(part.data_ptr() for part in parts))
        self._rows = library.function("grouped_rows", INT, POINTER, POINTER, POINTER, INT)

    @property
    def nbytes(self) -> int:
        return self.elements.numel()

    def rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[T] row numbers → [T, in_features], as they are multiplied."""
        rows = rows.long().contiguous()
        out = torch.empty((len(rows), self.in_features), dtype=dtype)
        self._rows(int(dtype == torch.bfloat16), self.address, rows.data_ptr(), out.data_ptr(), len(rows))
        return out


class NativeGroupedProduct:
    """Activations in blocks [T, in] → x Wᵀ + b [T, out] in `dtype`.  A row depends on its row of x only.

    Without a weight the shelf has it.  One of several parts is a chain of `PackedGroups`.
    """

    def __init__(
        self,
        library: Native,
        weight: InGroups | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        shelf: Shelf | None = None,
    ) -> None:
        shelf = shelf or Shelf()
        self.parts = [PackedGroups(library, part, own) for part, own in shelved(weight, shelf)]
        for part, following in itertools.pairwise(self.parts):
            part.twin.next = following.address
        self.out_features = sum(part.out_features for part in self.parts)
        self.in_features = self.parts[0].in_features
        self.address = self.parts[0].address
        """Of the chain, for a native kernel"""
        self.form = Form("groups", kept_order(weight, self.in_features, shelf))
        self.bias = bias
        self._dtype = dtype
        self._to_bf16 = int(dtype == torch.bfloat16)
        self._linear = library.function("linear_grouped", INT, *[POINTER] * 5, INT)

    @property
    def nbytes(self) -> int:
        order = self.form.order
        return sum(part.nbytes for part in self.parts) + (0 if order is None else 4 * order.numel())

    def rows(self, rows: Tensor) -> Tensor:
        """[T] row numbers → [T, in] of the weight."""
        if len(self.parts) == 1:
            return self.parts[0].rows(rows, self._dtype)
        return rows_of_parts(
            rows,
            [(part.out_features, partial(part.rows, dtype=self._dtype)) for part in self.parts],
        )

    def multiply(self, x: Activations) -> Tensor:
        assert isinstance(x, GroupRows)
        tokens = x.values.shape[0]
        out = torch.empty((tokens, self.out_features), dtype=self._dtype)
        self._linear(
            self._to_bf16,
            self.address,
            x.values.data_ptr(),
            x.factors.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            tokens,
        )
        return out


def shelved(weight: InGroups | None, shelf: Shelf) -> list[tuple[Grouped | None, Shelf]]:
    """The parts of a weight, None if the shelf has them, each with a shelf of its own."""
    parts: Sequence[Grouped | None] = () if weight is None else parts_of(weight)
    count = int(shelf.note("parts", lambda: {"count": len(parts)})["count"])
    parts = parts or [None] * count
    shelves = [shelf, *(replace(shelf, name=f"{shelf.name}/{number}") for number in range(1, count))]
    return list(zip(parts, shelves, strict=True))


def rows_of_parts(rows: Tensor, parts: Sequence[tuple[int, Callable[[Tensor], Tensor]]]) -> Tensor:
    """[T] row numbers → [T, in]; `parts`: of each its outputs, and what reads rows of it."""
    rows, first = rows.long(), 0
    places, found = [], []
    for outputs, read in parts:
        (here,) = torch.nonzero((rows >= first) & (rows < first + outputs), as_tuple=True)
        places.append(here)
        found.append(read(rows[here] - first))
        first += outputs
    return torch.cat(found)[torch.cat(places).argsort()]


def kept_order(weight: InGroups | None, inputs: int, shelf: Shelf) -> Tensor | None:
    """The order of the inputs, on the shelf; of a weight that is there, if there is no `weight`."""
    given = weight is not None and weight.order is not None
    ordered = shelf.note("order", lambda: {"given": int(given)})
    if not ordered["given"]:
        return None
    if weight is None or weight.order is None:
        return shelf.make("order", (inputs,), torch.int32)
    return shelf.keep("order", weight.order)


def _are_powers_of_two(scales: Tensor) -> bool:
    """Or zero: whether the exponent is all that a float32 holds."""
    return bool(((scales.contiguous().view(torch.int32) & ~_EXPONENT) == 0).all())


def _kind_of(weight: Grouped) -> tuple[int, int, Tensor]:
    """(How scales and zeros are stored; the exponent of the power of two that scales are stored without; such
    scales [out, groups] float32)"""
    scales, zeros = weight.scales, weight.zeros
    if not scales.numel():
        return _HALF, 0, scales
    if weight.e2m1:  # (the kernel has twice the numbers)
        return _E2M1, -1, scales
    least, most = (float(end) for end in torch.aminmax(scales))
    largest = max(-least, most)
    exponent = math.frexp(largest)[1] - _LARGEST_HALF if largest else 0
    stored = torch.ldexp(scales, torch.tensor(-exponent))
    if torch.equal(stored.half().float(), stored):
        least, most = (float(end) for end in torch.aminmax(zeros))
        if least == most:
            return _HALF, exponent, stored
        # (of 4 bits, zero points above 16 do not fit into what codes are unpacked to)
        largest_zero = 16 if weight.bits == 4 else 255
        if least >= 0 and most <= largest_zero and torch.equal(zeros.to(torch.uint8).float(), zeros):
            return _HALF_BYTE, exponent, stored
        eighths = zeros * 8
        if weight.bits == 4 and least >= 0 and most <= 15 and torch.equal(eighths.round(), eighths):
            in_words = torch.ldexp(stored, torch.tensor(_LARGEST_IN_WORD - _LARGEST_HALF))
            halves = in_words.half()
            # (sign, the exponent's first bit, the mantissa's last five: a word has no room for them)
            if torch.equal(halves.float(), in_words) and not (halves.view(torch.int16) & ~0x3FE0).any():
                return _WORD, exponent + _LARGEST_HALF - _LARGEST_IN_WORD, in_words
            return _HALF_EIGHTHS, exponent, stored
        if torch.equal(zeros.half().float(), zeros):
            return _HALF_HALF, exponent, stored
    return _FULL, 0, scales
