"""Products with weights in groups by `native/grouped.cpp`, which explains the arithmetic; `native/grouped.h`
has the layout."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.model.cpu.library import INT, POINTER, Native
from baton.model.cpu.packing import Laid, Survey
from baton.model.ops.fused import Activations, Form
from baton.model.weights.group_rows import GroupRows
from baton.model.weights.grouped import Grouped, InGroups, runs_of
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

    def __init__(self, library: Native, weights: Sequence[Grouped] | None, shelf: Shelf) -> None:
        """`weights` are kept alike: one weight, whose outputs come in their order."""
        panel = 2 * library.lanes
        laid: Laid | None = None
        if weights is not None:
            if weights[0].e2m1 and not all(_are_powers_of_two(weight.scales) for weight in weights):
                weights = [weight.in_bytes() for weight in weights]
            laid = Laid.of(weights)

        def described() -> Facts:
            assert laid is not None
            weight, outputs = laid.parts[0], laid.out_features
            padded = -(-outputs // panel) * panel
            kind, exponent, zero = _kind_of(library, laid)
            groups = weight.in_features // weight.group
            return {
                "bits": weight.bits,
                "group": weight.group,
                "meta": kind,
                "n": outputs,
                "k": weight.in_features,
                "zero": zero,
                "scale": 2.0**exponent,
                "bytes": padded * (weight.in_features * weight.bits // 8 + groups * _META_BYTES[kind]),
            }

        facts = dict(shelf.note("groups", described))
        self.elements = shelf.make("groups", (int(facts.pop("bytes")),), torch.uint8)
        self.twin = Weight(packed=self.elements.data_ptr(), **facts)
        self.out_features, self.in_features = int(facts["n"]), int(facts["k"])
        self.group, self.bits = int(facts["group"]), int(facts["bits"])
        self.address = ctypes.addressof(self.twin)
        if laid is not None and not shelf.complete:
            laid.pack(library, self.address, self.twin.scale)
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
    With `result` the product and b are in that dtype, and rows of the weight in `dtype`.

    Without a weight the shelf has it.  One of several parts is a chain of `PackedGroups`.
    """

    def __init__(
        self,
        library: Native,
        weight: InGroups | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        shelf: Shelf | None = None,
        result: torch.dtype | None = None,
    ) -> None:
        shelf = shelf or Shelf()
        self.parts = [PackedGroups(library, run, own) for run, own in shelved(weight, shelf)]
        for part, following in itertools.pairwise(self.parts):
            part.twin.next = following.address
        self.out_features = sum(part.out_features for part in self.parts)
        self.in_features = self.parts[0].in_features
        self.address = self.parts[0].address
        """Of the chain, for a native kernel"""
        self.form = Form("groups", kept_order(weight, self.in_features, shelf))
        self.bias = bias
        self._dtype, self._result = dtype, result or dtype
        self._to_bf16 = int(self._result == torch.bfloat16)
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
        out = torch.empty((tokens, self.out_features), dtype=self._result)
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


def shelved(weight: InGroups | None, shelf: Shelf) -> list[tuple[Sequence[Grouped] | None, Shelf]]:
    """The runs of a weight, None if the shelf has them, each with a shelf of its own."""
    runs: Sequence[Sequence[Grouped] | None] = () if weight is None else runs_of(weight)
    count = int(shelf.note("parts", lambda: {"count": len(runs)})["count"])
    runs = runs or [None] * count
    shelves = [shelf, *(replace(shelf, name=f"{shelf.name}/{number}") for number in range(1, count))]
    return list(zip(runs, shelves, strict=True))


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


def _kind_of(library: Native, laid: Laid) -> tuple[int, int, float]:
    """How scales and zeros are stored; the exponent of the power of two that scales are stored without; the
    zero point, if all are the same."""
    weight = laid.parts[0]
    if not sum(part.scales.numel() for part in laid.parts):
        return _HALF, 0, 0.0
    if weight.e2m1:  # (the kernel has twice the numbers)
        return _E2M1, -1, 0.0
    found = laid.survey(library)
    return *_kind_by(found, weight.bits), found.least


def _kind_by(found: Survey, bits: int) -> tuple[int, int]:
    """As `_kind_of`"""
    if found.halves:
        if found.least == found.most:
            return _HALF, found.exponent
        # (of 4 bits, zero points above 16 do not fit into what codes are unpacked to)
        largest_zero = 16 if bits == 4 else 255
        if found.least >= 0 and found.most <= largest_zero and found.whole:
            return _HALF_BYTE, found.exponent
        if bits == 4 and found.least >= 0 and found.most <= 15 and found.eighths:
            # (sign, the exponent's first bit, the mantissa's last five: a word has no room for them)
            if found.words:
                return _WORD, found.exponent + _LARGEST_HALF - _LARGEST_IN_WORD
            return _HALF_EIGHTHS, found.exponent
        if found.half_zeros:
            return _HALF_HALF, found.exponent
    return _FULL, 0
