"""Deliberate defects of workers whose executor is one step late; see `mutations.py`."""

from __future__ import annotations

from baton.executor.simulated.late import LateSimulatedExecutor
from baton.worker.slots.late_slots import LateSlots
from baton.worker.slots.outcome import StepOutcome
from baton.worker.slots.slots import Slots
from tests.simulation.mutations import Patch, mutation


def _unwatched(patch: Patch) -> None:
    """A device does not say that a slot is released too early."""
    patch.setattr(LateSimulatedExecutor, "_refuse_in_flight", lambda *_: None)


@mutation(
    "a slot is closed before the step in flight is over", "owner", "closing-2", "crash", scenario="late"
)
def closed_in_flight(patch: Patch) -> None:
    end = LateSlots._end
    _unwatched(patch)
    patch.setattr(
        LateSlots, "_end", lambda self, flight, result, over, later: end(self, flight, result, over, set())
    )


@mutation(
    "a preempted slot is closed before its step is over", "owner", "closing-2", "crash", scenario="late"
)
def preempted_in_flight(patch: Patch) -> None:
    _unwatched(patch)
    patch.setattr(LateSlots, "apply", Slots.apply)


@mutation("the row behind a stop token is reported", "tokens", "closing-6", scenario="late")
def discard_forgotten(patch: Patch) -> None:
    patch.setattr(StepOutcome, "drop", lambda self, indices: None)


@mutation("a carried token is that of the step before", "tokens", "closing-5", "pages", scenario="late")
def carried_too_late(patch: Patch) -> None:
    collect = LateSimulatedExecutor.collect

    def wrong(self):
        before = self._newest.copy()
        result = collect(self)
        self._newest, self._behind = getattr(self, "_behind", before), self._newest.copy()
        return result

    patch.setattr(LateSimulatedExecutor, "collect", wrong)
