"""Who waits for whom, since when, until when: what a person needs to know of a run that does not move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.states import State

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess
    from baton.simulation.world import World

_AWAITED = {State.RUNNING: "the next token", State.FOLLOWING: "blocks that another one computes"}
"""What a request on a slot waits for; any other one waits for its `Closed`."""


def explain(world: World) -> str:
    """Who waits for whom, since when, until when."""
    waiting = [client for client in world.clients if client.answer is None]
    if not waiting:
        return "all clients have their answers; " + _ranks(world)
    client = min(waiting, key=lambda client: client.last_progress)
    parts = [f"request {client.spec.number} of {len(waiting)} open ones"]
    gateway, request = client.gateway, client.request
    if gateway is None or request is None:
        return f"{parts[0]} is not submitted yet"
    parts.append(f"heard something last at {client.last_progress:.3f}")
    if request in gateway.cluster.parked:
        until = gateway.cluster.next_deadline()
        shown = "for ever" if until is None else f"until {gateway.global_time(until):.3f}"
        parts.append(f"{gateway.name} has it parked {shown}, waiting for an instance")
    else:
        parts.append(f"{gateway.name} waits for id {request.id} from {request.at}, plan {request.plan}")
        name = f"r{client.spec.number}"
        parts += [_in_engine(instance.engine, name) for instance in world.instances]
    return "; ".join((*parts, _ranks(world)))


def _in_engine(engine: EngineProcess, name: str) -> str:
    core, who = engine.core, engine.instance.name
    if not engine.alive:
        return f"{who} is dead"
    if not core.ready:
        return f"the engine of {who} waits for its ranks to become ready"
    for slot, request in enumerate(core.scheduler.slots):
        if request is not None and request.name == name:
            what = _AWAITED.get(request.state, "Closed")
            deadline = core.next_deadline()
            until = "for ever" if deadline is None else f"until {engine.global_time(deadline):.3f}"
            return (
                f"the engine of {who} has it {request.state.value} on slot {slot}, epoch {request.epoch}, "
                f"with {len(request.tokens)} tokens in {request.held} blocks, and waits {until} for {what}"
            )
    waiting = list(core.scheduler.waiting_requests())
    for request in waiting:
        if request.name == name:
            gauges = core.scheduler.gauges()
            return f"the engine of {who} has it waiting, one of {len(waiting)}, while {gauges}"
    handovers = core._handovers
    if handovers is not None:
        waits = handovers.waits(engine.local(engine.instance.world.events.now))
        for side, rows in waits.items():
            for row in rows if isinstance(rows, list) else []:
                if row.get("request") == name:
                    return f"the engine of {who} has it among its {side}: {row}"
    return f"the engine of {who} does not know it"


def _ranks(world: World) -> str:
    ranks = [rank for instance in world.instances for rank in instance.ranks]
    return "; ".join(rank.describe() if rank.alive else f"{rank.name}: dead" for rank in ranks)
