"""Which experts a token goes to, and with which weights: the one router of all mixtures, in plain PyTorch.

All of it is float32, whatever the model's dtype: two experts often have nearly the same score, and a score
that was rounded sends a token elsewhere.  A token's choice depends on its logits only, whatever else is in
the step: sums over experts are made one number after the other (`cumsum`), and of equal scores the lowest id
is chosen, which `torch.topk` does not promise.  On a CUDA device `cumsum` adds up in an order that depends on
the number of rows (ATen/native/cuda/ScanUtils.cuh), so there a kernel of ours makes the sums: `RowSums`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.description.model import MoeConfig


@dataclass(slots=True)
class Routed:
    """Where T tokens go; k experts each."""

    ids: Tensor
    """[T, k] int32, ascending in each row"""
    weights: Tensor
    """[T, k] float32, of the same experts"""
    shared: Tensor | None = None
    """[T] float32: what the shared experts' result is multiplied by; None: 1"""


RowSums = Callable[[Tensor], Tensor]
"""[T, n] float32 → [T, 1]: each row's by the same additions, whatever T is"""


def in_order(rows: Tensor) -> Tensor:
    """`RowSums` of a CPU: from left to right."""
    return rows.cumsum(dim=1)[:, -1:]


def route(logits: Tensor, bias: Tensor | None, config: MoeConfig, row_sums: RowSums = in_order) -> Routed:
    """[T, E] float32, and `bias` [E] float32 → the chosen.  `logits` may be overwritten."""
    if config.bias == "logits" and bias is not None:
        logits += bias
    scores = _scores(logits, config, row_sums)
    choice = scores if config.bias != "choice" or bias is None else scores + bias
    if config.groups > 1:
        choice = _of_best_groups(choice, config)
    ids = _largest(choice, config.chosen).sort(dim=1).values
    weights = scores.gather(1, ids)
    if config.scores == "chosen_softmax":
        weights = _softmax(weights, row_sums)
    if config.normalized:
        weights = weights / row_sums(weights).clamp_(min=config.least_sum)
    if config.factor != 1:
        weights = weights * config.factor
    return Routed(ids.int(), weights)


def sigmoid(x: Tensor) -> Tensor:
    """Of float32.  (PyTorch's own has two forms that differ in the last bit; see `fused`.)"""
    return x.neg().exp_().add_(1.0).reciprocal_()


def _scores(logits: Tensor, config: MoeConfig, row_sums: RowSums) -> Tensor:
    if config.scores == "softmax":
        return _softmax(logits, row_sums)
    return sigmoid(logits) if config.scores == "sigmoid" else logits


def _softmax(logits: Tensor, row_sums: RowSums) -> Tensor:
    powers = (logits - logits.amax(dim=1, keepdim=True)).exp_()
    return powers / row_sums(powers)


def _of_best_groups(choice: Tensor, config: MoeConfig) -> Tensor:
    """[T, E]; -inf outside of each token's best groups."""
    groups = choice.view(len(choice), config.groups, -1)
    two = min(2, groups.shape[2])
    ranked = groups.gather(2, _largest(groups, two))  # (of two there is one sum, in any order)
    found = torch.zeros(groups.shape[:2], dtype=torch.bool, device=choice.device)
    found.scatter_(
        1, _largest(in_order(ranked.flatten(0, 1)).view(groups.shape[:2]), config.chosen_groups), True
    )
    return groups.masked_fill(~found.unsqueeze(2), float("-inf")).flatten(1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the largest of the last dimension are, in their order; of equal ones the first."""
    found: Tensor = values.sort(dim=-1, descending=True, stable=True).indices
    return found[..., :count]
