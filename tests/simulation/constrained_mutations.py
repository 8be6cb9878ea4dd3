"""Deliberate defects of requests whose answers are bound to a grammar; see `mutations.py`."""

from __future__ import annotations

import msgspec

from baton.engine import dispatch
from baton.engine.handover import reservation
from baton.engine.handover.reservation import Request as ReservedRequest
from baton.gateway.cluster.request import EngineRequest
from baton.protocol.params.sampling import Sampling
from baton.worker.slots import commit as worker_commit
from baton.worker.slots.slots import Slots
from tests.simulation.mutations import Patch, mutation


def _replaced(sampling: Sampling, **changes: object) -> Sampling:
    """With another constraint; without one where nothing is named."""
    if sampling.constraint is None:
        return sampling
    changed = msgspec.structs.replace(sampling.constraint, **changes) if changes else None
    return msgspec.structs.replace(sampling, constraint=changed)


@mutation("the matcher of a request that starts again reads nothing", "tokens", scenario="constrained")
def not_replayed(patch: Patch) -> None:
    admit = Slots._admit

    def wrong(self, command):
        effect = admit(self, command)
        return effect._replace(num_prompt=len(effect.tokens)) if hasattr(effect, "num_prompt") else effect

    patch.setattr(Slots, "_admit", wrong)


@mutation("what a constraint asks of the end is forgotten by the engine", "tokens", scenario="constrained")
def min_tokens_forgotten(patch: Patch) -> None:
    make = dispatch.Admit

    def wrong(**fields):
        sampling = _replaced(fields.pop("sampling"), min_tokens=0)
        return make(sampling=sampling, **fields)

    patch.setattr(dispatch, "Admit", wrong)


@mutation("a constraint is lost in the hand-over", "tokens", scenario="constrained")
def lost_in_handover(patch: Patch) -> None:
    def wrong(outbox, id, name, tokens, sampling, *rest, **more):
        return ReservedRequest(outbox, id, name, tokens, _replaced(sampling), *rest, **more)

    patch.setattr(reservation, "Request", wrong)


@mutation("a constraint is lost when a request goes on elsewhere", "tokens", scenario="constrained")
def lost_in_continuation(patch: Patch) -> None:
    submit = EngineRequest.submit

    def wrong(self, decoders=()):
        message = submit(self, decoders)
        if message.generated:
            message = msgspec.structs.replace(message, sampling=_replaced(message.sampling))
        return message

    patch.setattr(EngineRequest, "submit", wrong)


@mutation("the end of an answer is due whatever its constraint says", "tokens", scenario="constrained")
def goes_on_forgotten(patch: Patch) -> None:
    submit = EngineRequest.submit

    def wrong(self, decoders=()):
        message = submit(self, decoders)
        return msgspec.structs.replace(message, sampling=_replaced(message.sampling, goes_on=False))

    patch.setattr(EngineRequest, "submit", wrong)


@mutation("the token of a late row counts", "tokens", "crash", "failure", scenario="constrained")
def late_token(patch: Patch) -> None:
    patch.setattr(worker_commit, "without_late", lambda batch, result: (batch, result))
