"""New weights for all instances: what `gateway/instances/weights.py` does around the cluster, virtually.

A path says what becomes of it: `w17` changes every token that is computed with it, `w17?d0` is refused by
`d0` when it checks, `w17!d0` passes the check and cannot be loaded by `d0` while it runs (its next
incarnation can).

Rules: a token is what the weights of the moment give, and a request never goes back to older ones
(`tokens`); at the end all instances have the same, and the gateways know which (`weights`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from baton.gateway.errors import ApiError
from baton.gateway.instances.orders import Answers
from baton.gateway.instances.weights import agreed
from baton.simulation.checks.books import Violation

if TYPE_CHECKING:
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.world import World


class WeightsUpdates:
    """Those of one gateway, one at a time."""

    def __init__(self, world: World, gateway: GatewayProcess) -> None:
        self._world = world
        self._gateway = gateway
        self._path = ""
        """Of the check that is under way."""
        self._waits: set[str] = set()
        self._answers: Answers = {}

    def begin(self, path: str) -> bool:
        """Asks all instances to check.  False: not now."""
        cluster = self._gateway.cluster
        members = [member for member in cluster.members.values() if member.state != "failed"]
        if self._path or not members or any(member.state != "ready" for member in members):
            return False
        self._path, self._answers = path, {}
        self._waits = {member.name for member in members}
        for member in members:
            cluster.query(member.name, "check_weights", partial(self._checked, member.name), path)
        self._gateway.pump()
        return True

    def _checked(self, name: str, answer: dict[str, Any] | ApiError) -> None:
        self._answers[name] = answer
        self._waits.discard(name)
        if self._waits:
            return
        gateway, path = self._gateway, self._path
        # As a task that is woken: in a later turn of the event loop.
        self._world.events.after(0.0, gateway, self._decide, path)

    def _decide(self, path: str) -> None:
        cluster, self._path = self._gateway.cluster, ""
        try:
            name = agreed(self._answers, path)
        except ApiError as error:
            self._world.note(self._gateway, f"does not update: {error.message}")
            cluster.release_weights(list(self._answers))
        else:
            self._world.note(self._gateway, f"decides that all instances get {path}")
            cluster.decide(cluster.next_weights(name, path))
        self._gateway.pump()

    def settle(self) -> None:
        """Before anything is sent: the supervisor is told."""
        decided = self._gateway.cluster.weights
        if decided.generation and decided not in self._world.decided:
            self._world.decided.append(decided)


def check_weights(world: World) -> None:
    """At the end all instances have the same, and each gateway knows which."""
    names = {}
    for instance in world.instances:
        controls: Any = instance.engine.core._controls
        names[instance.name] = controls.weights.name
    for gateway in world.gateways:
        names[gateway.name] = gateway.cluster.weights.name
    if len(set(names.values())) > 1:
        raise Violation("weights", f"instances and gateways have different weights at the end: {names}")
