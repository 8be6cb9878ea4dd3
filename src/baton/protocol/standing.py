"""What operators have made of an instance: its label, and whether it drains.

Theory.  The engine owns its *standing*; gateways repeat it.  A gateway that is given an order passes it on
(`Query.stand`), the engine numbers it, and tells all its gateways in `Welcome`.  So of two orders that two
gateways give at once the engine takes one after the other, and all gateways end with the later one.

A new incarnation knows of no orders.  Each gateway remembers the newest standing that it has heard of and
gives it back (`again`); the engine takes what is newer than its own.

Numbers (`generation`) grow with each change: an order makes one that is higher than what the engine has and
than what its gateway knew, so what a gateway gives back later, out of older knowledge, does not undo it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LabelName = Literal["", "mixed", "prefill", "decode"]


class Standing(msgspec.Struct, array_like=True, frozen=True):
    generation: int = 0
    """0: nobody has ordered anything."""
    label: LabelName = ""
    """Empty: that of the registration."""
    draining: bool = False
    move_after_s: float | None = None
    """While it drains: each gateway continues what runs there elsewhere, so long after it heard of it."""


class Stand(msgspec.Struct, array_like=True, frozen=True):
    """What is ordered; None leaves a field as it is."""

    how: Literal["order", "only_if", "again"] = "order"
    generation: int = 0
    """That the gateway knows; `only_if`: the order is for this one alone; `again`: of what is given back."""
    label: LabelName | None = None
    draining: bool | None = None
    move_after_s: float | None = None


class Stale(ValueError):
    """An `only_if` for a standing that is no more."""


def give_back(standing: Standing) -> Stand:
    """For an incarnation that does not know it."""
    return Stand("again", standing.generation, standing.label, standing.draining, standing.move_after_s)


def changed(standing: Standing, stand: Stand) -> Standing:
    """What an engine's standing is after this.  Raises `Stale`."""
    label = standing.label if stand.label is None else stand.label
    draining = standing.draining if stand.draining is None else stand.draining
    move_after_s = standing.move_after_s if stand.draining is None else stand.move_after_s
    if stand.how == "again":
        if stand.generation <= standing.generation:
            return standing
        return Standing(stand.generation, label, draining, move_after_s)
    if stand.how == "only_if" and stand.generation != standing.generation:
        raise Stale(
            f"somebody else has changed it meanwhile (its standing is number {standing.generation}, "
            f"not {stand.generation})"
        )
    same = (label, draining, move_after_s) == (standing.label, standing.draining, standing.move_after_s)
    if same and standing.generation >= stand.generation:
        return standing
    return Standing(max(standing.generation, stand.generation) + 1, label, draining, move_after_s)
