"""Which defects the simulator would find without the rules that were made for them.

`python -m tests.simulation.old_rules SEEDS [part of a name]` runs each defect whose rules are all new for so
many seeds of its scenario, with only the rules of before, and prints the table.  What is found here too needs
no rule of its own.
"""

from __future__ import annotations

import sys

import pytest

from baton.simulation import world
from baton.simulation.checks.watches.engine import EngineWatch
from baton.simulation.checks.watches.gateway import GatewayWatch
from baton.simulation.checks.watches.scheduling.fairness import FairnessWatch
from baton.simulation.checks.watches.scheduling.following import FollowWatch
from baton.simulation.checks.watches.scheduling.order import OrderWatch
from baton.simulation.checks.watches.scheduling.room import RoomWatch
from baton.simulation.checks.watches.strangers import GrantWatch, LinkWatch, TicketWatch
from baton.simulation.parties import gateway
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.test_mutations import find

NEW = frozenset(
    ("room", "promise", "order", "queue", "retired", "fair", "verdict", "weights", "pass", "link", "grant")
)
"""Rules, each with what is watched by classes of its own."""
_NEEDED = (TicketWatch.gateway_sends, GrantWatch.applied, GrantWatch.tokens)
"""What strangers learn from."""


def only_old_rules(patch: pytest.MonkeyPatch) -> None:
    """Takes the new rules away, and what the old ones have learnt since."""

    def nothing(*_: object) -> None:
        pass

    strangers = (TicketWatch, LinkWatch, GrantWatch)
    for watch in (RoomWatch, OrderWatch, GatewayWatch, FairnessWatch, FollowWatch, *strangers):
        for name, member in vars(watch).items():
            if callable(member) and not name.startswith("_") and member not in _NEEDED:
                patch.setattr(watch, name, nothing)
    patch.setattr(EngineWatch, "_check_reservations", nothing)
    patch.setattr(world, "check_found", nothing)
    patch.setattr(world, "check_weights", nothing)
    patch.setattr(gateway, "check_lost", nothing)


def is_new(mutation: Mutation) -> bool:
    """Whether rules that are new find it."""
    return mutation.new or (NEW.issuperset(mutation.rules) and mutation.scenario != "standard")


def main(seeds: int, wanted: str) -> None:
    print("| defect | scenario | seeds | without the new rules |\n| --- | --- | --- | --- |", flush=True)
    for mutation in MUTATIONS:
        if is_new(mutation) and wanted in mutation.name:
            with pytest.MonkeyPatch.context() as patch:
                only_old_rules(patch)
                needed, found = find(mutation, seeds)
            told = f"found as {str(found)[:100]}" if found else "not found"
            print(f"| {mutation.name} | {mutation.scenario} | {needed} | {told} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
