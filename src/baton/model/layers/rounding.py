"""What `--quantization int4` and `--quantize-head` do to weights while they are loaded, and what it costs.

A checkpoint's weights in floating point become `Grouped` layer by layer, each in the largest groups, up
to the size that was asked for, that divide its rows.  How far the result is from the file
is noted, for the banner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from baton.model.cpu.library import native
from baton.model.cpu.quantizing import quantize_natively
from baton.model.weights.grouped import Grouped
from baton.model.weights.quantize import group_for, quantize, relative_error

_LISTED = 5
"""Kinds of weights that are named; more of them are practically all."""


@dataclass(frozen=True)
class Grouping:
    """How weights in floating point are quantized."""

    bits: int
    """4, 6 or 8"""
    group: int
    """Inputs a group, at most"""


@dataclass
class Rounded:
    """Errors of weights that are not what the files hold, each relative (root mean square)."""

    errors: dict[str, float] = field(default_factory=dict)
    """By the name of a weight, or of several that are one product"""

    def note(self, name: str, error: float) -> None:
        self.errors[name] = error

    def sort(self, names: Iterable[str]) -> None:
        """Into the order of `names`, whatever the order in which they were noted."""
        places = {name: place for place, name in enumerate(names)}
        last = len(places)
        found = sorted(self.errors.items(), key=lambda item: places.get(item[0].split(" + ")[0], last))
        self.errors.clear()
        self.errors.update(found)

    def told(self) -> str:
        """In a few words; "" if nothing was rounded."""
        if not self.errors:
            return ""
        worst = max(self.errors, key=self.errors.__getitem__)
        mean = sum(self.errors.values()) / len(self.errors)
        parts = [name for names in self.errors for name in names.split(" + ")]
        kinds = list(dict.fromkeys(name.removesuffix(".weight").split(".")[-1] for name in parts))
        plural = "s" if len(self.errors) > 1 else ""
        which = f" ({', '.join(kinds)})" if len(kinds) <= _LISTED else ""
        return (
            f"{len(self.errors)} weight{plural}{which} rounded by {100 * mean:.2g} % (RMS; most {worst}: "
            f"{100 * self.errors[worst]:.2g} %)"
        )


def in_groups(weight: Tensor, grouping: Grouping) -> tuple[Grouped, float]:
    """And its relative error.  Raises `ValueError` if no group divides its rows."""
    group = group_for(weight.shape[1], grouping.group)
    if not group:
        raise ValueError(f"{weight.shape[1]} inputs are no multiple of 32, the smallest group")
    library = native()
    if library is not None:
        return quantize_natively(library, weight, grouping.bits, group)
    found = quantize(weight, grouping.bits, group)
    return found, relative_error(weight, found)
