"""What is checked of requests that wait for blocks which another request computes.

The watch takes nothing from the books of `engine/scheduling/in_flight.py`.  Who follows has a slot of which
the worker has not been told.  Each block that it shares is one of these, and the watch finds out which for
itself:

| the block | is |
| --- | --- |
| holds the tokens of its position at the leader | computed |
| is to be written by a request that the worker has been told of | awaited |
| is to be written by another one that follows, which got its slot before | awaited |

Anything else is awaited for ever.  And who awaits nothing is told to the worker in the same turn.

The worker computes the prompt of each request by the best priority of those that wait for it, and as
patiently as all of these are (`lent`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.engine.handover.records import departure_of
from baton.engine.request import Request
from baton.engine.states import State
from baton.protocol.codec import unpack_int32
from baton.protocol.messages.commands import Admit, CommandBatch, Reprioritize
from baton.simulation.checks.books import Books, Violation
from baton.simulation.checks.looks import salt_of, waiters, well

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.world import World


class FollowWatch:
    """The rules `follow` and `lent`."""

    def __init__(self, world: World, books: Callable[[Instance], Books]) -> None:
        self._world = world
        self._books = books

    def commanded(self, engine: EngineProcess, batch: CommandBatch) -> None:
        """After `EngineWatch.commanded`: who writes which blocks."""
        books, size = self._books(engine.instance), engine.instance.config.block_size
        for command in batch.commands:
            if isinstance(command, Admit | Reprioritize):
                books.urgency[command.slot] = command.epoch, command.priority, command.patient
            if isinstance(command, Admit):
                request = engine.core.scheduler.slots[command.slot]
                last = len(unpack_int32(command.tokens)) // size
                written = unpack_int32(command.blocks)[command.num_computed // size : last]
                books.writers[command.slot] = (command.epoch, set(written))
                salt = "" if request is None else salt_of(self._world, request.name)
                books.salts.update(dict.fromkeys(written, salt))

    def after_turn(self, engine: EngineProcess) -> None:
        """After each turn of the engine."""
        if not well(engine):
            return
        self._check_urgency(engine)
        core: Any = engine.core
        following = [one for one in core.scheduler.slots if one and one.state is State.FOLLOWING]
        if not following:
            return
        books = self._books(engine.instance)
        if core.scheduler.num_following != len(following):
            raise Violation("follow", f"{len(following)} follow, {core.scheduler.num_following} are counted")
        open_slots = books.at_engine
        awaited = {
            block
            for slot, (epoch, blocks) in books.writers.items()
            if slot in open_slots and open_slots[slot][0] == epoch
            for block in blocks
        }
        for request in following:
            if request.slot in open_slots:
                raise Violation("follow", f"{request.name} follows, and the worker was told of its slot")
            own = {
                other.slot: set(core.scheduler.ledger.table(other.slot)[other.indexed :])
                for other in following
                if other is not request
            }
            self._check(engine, request, awaited, own)

    def _check_urgency(self, engine: EngineProcess) -> None:
        told, waiting = self._books(engine.instance).urgency, waiters(engine)
        for request in engine.core.scheduler.slots:
            if request is None or request.state is not State.RUNNING:
                continue
            there = [request, *waiting.get(request, ())]
            priority = min(one.rank[0] for one in there)
            patient = all(one.patient for one in there) and not _departs(request)
            epoch, told_priority, told_patient = told[request.slot]
            if (epoch, told_priority) != (request.epoch, priority) or (told_patient and not patient):
                raise Violation(
                    "lent",
                    f"{request.name} on slot {request.slot} of {engine.instance.name} is computed with "
                    f"priority {told_priority}{', patiently' * told_patient}; with those that wait for it it "
                    f"has {priority}{', patiently' * patient}",
                )

    def _check(
        self, engine: EngineProcess, request: Request, awaited: set[int], own: dict[int, set[int]]
    ) -> None:
        leader, size = engine.instance.ranks[0], engine.instance.config.block_size
        table = engine.core.scheduler.ledger.table(request.slot)
        scheduler: Any = engine.core.scheduler
        known = scheduler.prefix._key_of
        if not scheduler.paused and all(block in known for block in table[: request.indexed]):
            raise Violation("follow", f"{request.name} waits, and all that it shares was reported")
        for index in range(request.indexed):
            block = table[index]
            if block in awaited or any(block in blocks for blocks in own.values()):
                continue
            tokens = request.tokens[index * size : (index + 1) * size].tolist()
            if leader.executor.tokens_in(block) != tokens:
                raise Violation(
                    "follow",
                    f"{request.name} on slot {request.slot} of {engine.instance.name} waits for block "
                    f"{block}, its {index}th, which nobody computes",
                )


def _departs(request: Request) -> bool:
    departure = departure_of(request)
    return departure is not None and not departure.over
