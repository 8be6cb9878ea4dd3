"""Looks into engines that no engine has into another one; what the watches share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from baton.engine.handover.records import Attempt
from baton.engine.request import Request
from baton.engine.scheduling.ledger import Ledger
from baton.engine.states import State
from baton.simulation import describe

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess
    from baton.simulation.world import World


def arrivals_of(engine: EngineProcess) -> Any:
    """The side of D.  The engine is ready."""
    handovers: Any = engine.core._handovers
    return handovers.arrivals


def attempts_of(engine: EngineProcess) -> dict[tuple[int, int], Attempt]:
    """The side of P: by (id, attempt).  The engine is ready."""
    handovers: Any = engine.core._handovers
    found: dict[tuple[int, int], Attempt] = handovers.departures.attempts._attempts
    return found


def owns(engine: EngineProcess, attempt: Attempt, pages: Iterable[int]) -> bool:
    """P still has these pages for this attempt, which is not over."""
    ledger, request = engine.core.scheduler.ledger, attempt.departure.request
    held = ledger._exported.get(attempt.key)
    if held is None and request.slot >= 0:
        held = list(ledger.table(request.slot))
    return held is not None and set(pages) <= set(held)


def ledger_state(ledger: Ledger) -> tuple[Any, ...]:
    """All that it holds.  Equal states are equally right or wrong."""
    books: Any = ledger
    outside = [(key, *table) for key, table in (*books._reserved.items(), *books._exported.items())]
    return (
        books._refs.copy(),
        bytes(books._known),
        books._free.copy(),
        list(books._cached),
        [table.copy() for table in books._tables],
        len(books._reserved),
        outside,
    )


def salt_of(world: World, name: str) -> str:
    """Of the request of this name."""
    number = describe.number_in(name)
    return "" if number is None else world.client(number).spec.salt


def well(engine: EngineProcess) -> bool:
    """It lives, is ready and goes on."""
    core: Any = engine.core
    return engine.alive and core.ready and core.failure is None and not core.closing


def quiet(world: World, one: EngineProcess, other: EngineProcess) -> bool:
    """Two engines that have spoken with each other, never lost each other, and between which nothing is on
    its way or waits to be read: each knows what the other one knows."""
    here, there = one.instance.name, other.instance.name
    if not well(one) or not well(other) or frozenset((here, there)) in world.network.broken:
        return False
    out, back = one.peers.link(there), other.peers.link(here)
    if out is None or back is None or out.in_flight or back.in_flight:
        return False
    return not one.peers.pending and not other.peers.pending


def waiters(engine: EngineProcess) -> dict[Request, set[Request]]:
    """Of each request with a slot: those that wait for blocks which it is to compute, and those that wait for
    these.  Found in the tables of blocks, not in the scheduler's own books of it."""
    scheduler, size = engine.core.scheduler, engine.instance.config.block_size
    there = [request for request in scheduler.slots if request is not None]
    direct: dict[Request, set[Request]] = {}
    for follower in there:
        if follower.state is not State.FOLLOWING:
            continue
        shared = scheduler.ledger.table(follower.slot)[: follower.indexed]
        for other in there:
            if other is not follower:
                first = other.indexed if other.state is State.FOLLOWING else other.computed // size
                own = scheduler.ledger.table(other.slot)[first : len(shared)]
                if any(block == mine for block, mine in zip(own, shared[first:], strict=False)):
                    direct.setdefault(other, set()).add(follower)
    found: dict[Request, set[Request]] = {}
    for request, followers in direct.items():
        reached, more = set(followers), list(followers)
        while more:
            new = direct.get(more.pop(), set()) - reached
            reached |= new
            more += new
        found[request] = reached
    return found
