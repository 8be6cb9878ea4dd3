"""The experts of a mixture: two products over all of them, whatever the step's tokens are.

Theory.  Experts' weights of a layer lie one after the other (`layout.stacked`), so that one launch has tiles
of all of them; each expert's own product then is a view of its part.  Tiles are small where experts have few
rows on average, as in decode steps.  No number comes back to the host, so a step can be recorded as a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.model.cuda.products import pairs
from baton.model.cuda.products.layout import Laid, plain, stacked, unified
from baton.model.cuda.products.linear import TritonGroups, TritonPlain
from baton.model.cuda.products.tiles import expert_launch, expert_tile
from baton.model.cuda.rows import gated_mul
from baton.model.description.model import Activation
from baton.model.ops.device import DeviceExperts
from baton.model.ops.routing import Routed


class TritonExperts(DeviceExperts):
    """[T, hidden] → the weighted sum of what each token's experts give."""

    def __init__(self, gate_up: Laid, down: Laid, activation: Activation, fixed: bool) -> None:
        self._gate_up, self._down = gate_up, down
        self._activation, self._fixed = activation, fixed

    def __call__(
        self,
        x: Tensor,
        routed: Routed,
        shared: Tensor | None,
        counts: Tensor,
        present: Tensor | None = None,
    ) -> Tensor:
        tokens, chosen = routed.ids.shape
        rows = tokens * chosen
        tiles = [expert_tile(weight, x.dtype, rows, self._fixed) for weight in (self._gate_up, self._down)]
        sorted_ = pairs.sort(routed.ids, self._gate_up.experts, tiles[0].rows, counts, present)
        both = torch.empty((rows, self._gate_up.outputs), dtype=x.dtype, device=x.device)
        expert_launch(x, self._gate_up, both, sorted_.tiles, tiles[0], sorted_.order, chosen).run()
        inner = gated_mul(both, self._activation)
        found = torch.empty((rows, self._down.outputs), dtype=x.dtype, device=x.device)
        expert_launch(inner, self._down, found, sorted_.tiles, tiles[1], None, 1).run()
        return pairs.combine(found, sorted_.places, routed, shared)


def experts_of(
    gate_up: Sequence[object], down: Sequence[object], activation: Activation, fixed: bool
) -> TritonExperts | None:
    """See `DeviceKernels.experts`."""
    both = [_laid(gate_up), _laid(down)]
    if not all(_alike(weights) for weights in both):
        return None
    whole = [stacked(weights) for weights in both]
    for products, weight in zip((gate_up, down), whole, strict=True):
        for number, product in enumerate(products):
            _point(product, weight.of(number))
    return TritonExperts(whole[0], whole[1], activation, fixed)


def _laid(products: Sequence[object]) -> list[Laid]:
    """Of those that there is a kernel for."""
    found = []
    for product in products:
        if isinstance(product, TritonPlain):
            found.append(plain(product.weight, product.bias))
        elif isinstance(product, TritonGroups) and len(product.parts) == 1 and product.order is None:
            found.append(product.parts[0])
        else:
            return []
    return unified(found)


def _alike(weights: list[Laid]) -> bool:
    return len({weight.alike for weight in weights}) == 1


def _point(product: object, weight: Laid) -> None:
    """From now on the product has its weight there."""
    if isinstance(product, TritonGroups):
        product.parts[0] = weight
    else:
        assert isinstance(product, TritonPlain)
        product.weight = weight.codes[0]
