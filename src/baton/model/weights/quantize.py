"""From a weight in floating point to a `Grouped`: what `--quantization int4` does while loading.

Theory.  A group's scale maps its range to the codes.  With the whole range, a single outlier makes steps wide
for all others; with a part of it (the *clip*) outliers are cut off.  So several clips are tried for each
group, each with the scale and zero point that follow, and the one with the least squared error is kept.

In 4 bits with zero points, both are then fitted to the codes by least squares, codes are chosen anew, and so
on some times for each clip.  Zero points are in eighths, which kernels multiply as fast as whole numbers and
keep in as many bits; they are rounded only when the best clip is known.  (Whole numbers round normal weights
by 7.8 % in groups of 32, eighths by 7.15 %, sixteenths by some 0.02 points less.)  In 8 bits, and symmetric,
zero points are whole numbers, and the scale is fitted once, where that helps.

Scales are rounded before codes are chosen: with zero points in eighths to 6 bits, so kernels keep both in two
bytes, else to float16's 11.  (Of the two around a fitted one the better is taken; so 6 bits err by some 0.01
points more than 11.)

Rows are done some at a time, in threads of our own: so few elements that PyTorch computes each operation in
one thread, in the nearest cache.  Its own threads would meet after each of some hundred short operations.
`cpu.quantizing` does the same in C++, some tens of times as fast, where the library is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.weights.grouped import GROUPS, MIDDLE, Grouped

_CACHED_ELEMENTS = 1 << 15
"""PyTorch divides an operation on more elements among threads."""
_FITTED_CLIPS, _FITS = (1.0, 0.9, 0.8, 0.7), 3
_WHOLE_CLIPS = {
    4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68),
    6: (1.0,),
    8: (1.0,),
}
"""By bits: from 6 on steps are fine enough."""
_SCALE_BITS, _WORD_BITS = 11, 6
"""Of a scale's mantissa, with the first: as float16 has; where it shares a word with its zero point."""
_TINY = 1e-30


def search_for(bits: int, symmetric: bool) -> tuple[tuple[float, ...], int]:
    """(Parts of a group's range that are tried; fits of scale and zero point for each of them, 0 if zero
    points are whole numbers)"""
    if bits == 4 and not symmetric:
        return _FITTED_CLIPS, _FITS
    return _WHOLE_CLIPS[bits], 0


def group_for(in_features: int, wanted: int) -> int:
    """The largest size of groups, up to `wanted`, that divides a row; 0 if none does."""
    return max((group for group in GROUPS if group <= wanted and in_features % group == 0), default=0)


def quantize(weight: Tensor, bits: int = 4, group: int = 64, symmetric: bool = False) -> Grouped:
    """[out, in] → the nearest that is found with such groups.

    Raises `ValueError` (one line) if rows are no multiple of the group, or a weight is NaN or infinite.
    """
    check_group(weight, group)
    out_features, in_features = weight.shape
    codes = torch.empty((out_features, in_features), dtype=torch.uint8)
    scales = torch.empty((out_features, in_features // group), dtype=torch.float32)
    zeros = torch.empty_like(scales)
    search = _Search(bits, symmetric)

    @torch.inference_mode()  # (a setting of each thread)
    def compute(part: slice) -> None:
        # A column a group: then sums over groups and factors of groups are as fast as anything else.
        columns = weight[part].float().reshape(-1, group).t().contiguous()
        found, scale, zero = search(columns)
        codes[part] = found.to(torch.uint8).t().reshape(-1, in_features)
        scales[part], zeros[part] = scale.view(-1, scales.shape[1]), zero.view(-1, zeros.shape[1])

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for _ in pool.map(compute, _parts(out_features, in_features)):
            pass
    return Grouped(codes, scales, zeros, group, bits)


def check_group(weight: Tensor, group: int) -> None:
    """Raises `ValueError` if rows of [out, in] are no multiple of such groups."""
    if group not in GROUPS or weight.shape[1] % group:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of a group of {group}")


def relative_error(exact: Tensor, found: Grouped) -> float:
    """Root of the mean squared error over the root of the mean square of `exact` [out, in]."""
    wrong = total = 0.0
    for part in _parts(found.out_features, found.in_features):
        true = exact[part].double()
        wrong += float((found.rows(part.start, part.stop).dequantized().double() - true).square().sum())
        total += float(true.square().sum())
    return (wrong / total) ** 0.5 if total else 0.0


def _parts(rows: int, columns: int) -> Iterator[slice]:
    some = max(1, _CACHED_ELEMENTS // columns)
    return (slice(first, min(first + some, rows)) for first in range(0, rows, some))


@dataclass(frozen=True)
class _Fit:
    codes: Tensor
    """[group, n], as whole numbers"""
    scale: Tensor
    zero: Tensor
    error: Tensor
    """[n], squared"""

    def or_better(self, other: _Fit) -> _Fit:
        wins = other.error < self.error
        return _Fit(
            torch.where(wins, other.codes, self.codes),
            torch.where(wins, other.scale, self.scale),
            torch.where(wins, other.zero, self.zero),
            torch.where(wins, other.error, self.error),
        )


class _Search:
    """Codes, scales and zero points of groups [group, n], a column each."""

    def __init__(self, bits: int, symmetric: bool) -> None:
        self._most = float((1 << bits) - 1)
        self._middle = MIDDLE[bits]
        self._clips, self._fits = search_for(bits, symmetric)
        self._symmetric = symmetric

    def __call__(self, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[group, n] float32 → codes [group, n], as whole numbers in float32; scales and zeros [n]"""
        low, high = torch.aminmax(exact, dim=0)
        if self._fits:
            codes, scale, zero = self._fitted(exact, low.clamp(max=0), high.clamp(min=0))
        else:
            codes, scale, zero = self._searched(exact, low, high)
        # Without a range any scale serves: float16, in which scales are stored, holds this one.
        return codes, scale.masked_fill((low == 0) & (high == 0), 0), zero

    def _searched(self, exact: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With whole zero points."""
        scale, zero, error = self._tried(exact, low, high, self._clips[0])
        for clip in self._clips[1:]:
            other = self._tried(exact, low, high, clip)
            wins = other[2] < error
            scale, zero, error = (
                torch.where(wins, new, old) for new, old in zip(other, (scale, zero, error), strict=True)
            )
        steps = self._steps(exact, scale, zero)
        fitted = (steps * exact).sum(dim=0).div_(steps.square().sum(dim=0).clamp_(min=1))
        fitted = torch.where(fitted.abs() < _TINY, scale, _rounded(fitted))
        scale = torch.where(self._error(exact, fitted, zero) < error, fitted, scale)
        return self._steps(exact, scale, zero).add_(zero), scale, zero

    def _fitted(self, exact: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With zero points in eighths and scales of few bits.  While clips are tried they are any numbers:
        rounded ones would keep fits from moving."""
        best: _Fit | None = None
        middle = (low + high) * 0.5
        for clip in self._clips:
            scale = ((high - low) * (clip / self._most)).clamp_(min=_TINY)
            zero = (0.5 * self._most - middle / scale).clamp_(0, self._most)
            last = self._measured(exact, scale, zero)
            best = last if best is None else best.or_better(last)
            for _ in range(self._fits):
                last = self._refitted(exact, last, False)
                best = best.or_better(last)
        assert best is not None
        best = self._refitted(exact, best, True)
        best = best.or_better(self._refitted(exact, best, True))
        return best.codes, best.scale, best.zero

    def _measured(self, exact: Tensor, scale: Tensor, zero: Tensor) -> _Fit:
        shifted = (exact * scale.reciprocal()).add_(zero)
        codes = shifted.round().clamp_(0, self._most)
        return _Fit(codes, scale, zero, shifted.sub_(codes).square_().sum(dim=0).mul_(scale).mul_(scale))

    def _refitted(self, exact: Tensor, fit: _Fit, rounds: bool) -> _Fit:
        """With the scale and the zero point that least squares fit to the codes.  If it `rounds`, the zero
        point is rounded to eighths, the scale is fitted to that, and of the two around it that a word holds
        the better is taken."""
        count, total = exact.shape[0], exact.sum(dim=0)
        codes, squares, products = (
            fit.codes.sum(dim=0),
            fit.codes.square().sum(dim=0),
            (fit.codes * exact).sum(dim=0),
        )
        mean = codes / count
        spread = squares - codes * mean
        slope = (products - mean * total) / spread.clamp(min=0.5)
        free = (mean - total / (slope.clamp(min=_TINY) * count)).clamp_(0, self._most)
        zero = torch.where((spread > 0.5) & (slope > _TINY), free, fit.zero)
        if rounds:
            zero = (zero * 8).round_().mul_(0.125)
        lengths = (squares - 2 * zero * codes + zero.square() * count).clamp_(min=_TINY)
        scale = (products - zero * total) / lengths
        scale = torch.where((scale > _TINY) & scale.isfinite(), scale, fit.scale)
        if not rounds:
            return self._measured(exact, scale, zero)
        step = 1 << (24 - _WORD_BITS)
        below = scale.view(torch.int32) & -step
        around = (below.view(torch.float32), (below + step).view(torch.float32))
        lower, upper = (self._measured(exact, near, zero) for near in around)
        return lower.or_better(upper)

    def _tried(self, exact: Tensor, low: Tensor, high: Tensor, clip: float) -> tuple[Tensor, Tensor, Tensor]:
        """Scales, zeros and squared errors [n] of a part of the range."""
        if self._symmetric:  # the sign of the largest magnitude has one code more
            largest = torch.where(high > -low, high, low) * (-clip / self._middle)
            scale = _rounded(torch.where(largest.abs() < _TINY, torch.full_like(largest, _TINY), largest))
            zero = torch.full_like(scale, self._middle)
        else:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scale = _rounded(((high - low) * (clip / self._most)).clamp_(min=_TINY))
            zero = (low * -clip).div_(scale).round_().clamp_(0, self._most)
        return scale, zero, self._error(exact, scale, zero)

    def _error(self, exact: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        inverse = scale.reciprocal()
        true = exact * inverse
        steps = true.round().clamp_(-zero, self._most - zero)
        return steps.sub_(true).square_().sum(dim=0).mul_(scale).mul_(scale)

    def _steps(self, exact: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """code - zero"""
        return (exact * scale.reciprocal()).round_().clamp_(-zero, self._most - zero)


def _rounded(scale: Tensor) -> Tensor:
    """To float16's precision, whatever the exponent: a factor for all makes them float16."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(mantissa.mul_(1 << _SCALE_BITS).round_(), exponent - _SCALE_BITS)
