"""Deliberate defects of a gateway that changes labels itself; see `mutations.py`."""

from __future__ import annotations

from baton.gateway.arranging import arranger
from baton.gateway.arranging.arranger import Arranger
from baton.gateway.cluster import roles
from tests.simulation.mutations import Patch, mutation


@mutation("labels change without a pause between two changes", "arrange", scenario="auto-labels")
def no_cool_down(patch: Patch) -> None:
    patch.setattr(Arranger, "_cool_down", lambda self, change, serving: 0.0)


@mutation("a label goes there and back as often as it likes", "arrange", scenario="auto-labels")
def flapping(patch: Patch) -> None:
    patch.setattr(Arranger, "_cool_down", lambda self, change, serving: self.rules.cool_down_s)


@mutation("the last instance that decodes gets to prefill", "arrange", scenario="auto-labels")
def last_decoder(patch: Patch) -> None:
    patch.setattr(arranger, "_serve_all", lambda instances: True)


@mutation("an instance that drains counts as one that is left", "arrange", scenario="auto-labels")
def counts_who_leaves(patch: Patch) -> None:
    look = Arranger.look

    def wrong(self, seen):
        return look(self, seen._replace(instances=tuple(one._replace(serves=True) for one in seen.instances)))

    patch.setattr(Arranger, "look", wrong)


@mutation("an old report counts as a new one", "arrange", scenario="auto-labels")
def stale(patch: Patch) -> None:
    view_of = roles.view_of

    def wrong(member, now, **more):
        return view_of(member, now, **more)._replace(age_s=0.0)

    patch.setattr(roles, "view_of", wrong)


@mutation("a label is changed before the one before it was", "arrange", scenario="auto-labels")
def two_in_flight(patch: Patch) -> None:
    patch.setattr(Arranger, "_settled", lambda self, seen: True)


@mutation(
    "an order that went with its connection is waited for", "arrange", scenario="auto-labels", start=26_800
)
def waits_for_refused(patch: Patch) -> None:
    patch.setattr(Arranger, "refused", lambda self, change: None)


@mutation(
    "a label that somebody else changed since is waited for", "arrange", scenario="auto-labels", start=136
)
def waits_for_a_label(patch: Patch) -> None:
    patch.setattr(Arranger, "done", lambda self, change: None)
