"""What is checked of room: it is reckoned right, and it is kept for nobody who does not want it.

Room is given away at three moments: when a request is admitted, when a request of another instance gets a
reservation, and when one gets credit.  After each of them there must be room for everybody who runs or is to
arrive to grow by the headroom, and for what is promised; the watch adds that up for itself, from the requests
and from what the ledger says of single blocks.

A credit promises room to a request of another instance.  The watch remembers when each was sent, and compares
the line and the promises of D with what the P's that stand in it know of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.engine.handover.credits import PROMISE_S
from baton.engine.handover.records import Phase, Stage
from baton.engine.states import State
from baton.protocol.messages.handover import Cancel, Credit, PeerMessage, Reserve
from baton.simulation.checks.books import Books, Violation
from baton.simulation.checks.looks import arrivals_of, attempts_of, quiet

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.world import World


class RoomWatch:
    """The rules `room` and `promise`."""

    def __init__(self, world: World, books: Callable[[Instance], Books]) -> None:
        self._world = world
        self._books = books

    # -- messages of other engines

    def reads(self, engine: EngineProcess, peer: str, message: PeerMessage) -> None:
        """Before the core takes it in."""
        books = self._books(engine.instance)
        match message:
            case Reserve():
                books.credited.pop((peer, message.id), None)
            case Cancel(by_p=True):
                books.credited.pop((peer, message.id), None)
                books.withdrawn.append((peer, message.id, message.attempt))

    def sends(self, engine: EngineProcess, to: str, message: PeerMessage, now: float) -> None:
        if isinstance(message, Credit):
            self._books(engine.instance).credited[to, message.id] = now

    # -- room is given away

    def decided(self, engine: EngineProcess) -> None:
        """After each call of the core that may have given room away."""
        core: Any = engine.core
        if not core.ready or core.failure is not None:
            return
        scheduler, counted = core.scheduler, core.counters.handovers
        given = sum(scheduler.room._epochs) - counted.seated + counted.arrivals + counted.credits_given
        books = self._books(engine.instance)
        if given == books.given:
            return
        books.given = given
        ahead, size = scheduler.headroom.tokens, engine.instance.config.block_size
        wanted: dict[str, int] = {}
        for request in scheduler.slots:
            if request is not None and request.state in (State.RUNNING, State.FOLLOWING):
                most = min(len(request.tokens) + ahead, request.limit)
                wanted[request.name] = max(-(-most // size) - len(scheduler.ledger.table(request.slot)), 0)
        for key, request in scheduler.arriving.items():
            most = min(len(request.tokens) + ahead, request.limit)
            wanted[request.name] = max(-(-most // size) - len(scheduler.ledger.reserved(key)), 0)
        promised = sum(entry.blocks for entry in arrivals_of(engine).credits._promised.values())
        left = scheduler.ledger._refs.count(0)
        if sum(wanted.values()) + promised > left:
            raise Violation(
                "room",
                f"{engine.instance.name} has given room away that it has not: within {ahead} tokens may be "
                f"wanted {wanted}, {promised} blocks are promised, and {left} are left",
            )

    # -- after each turn

    def after_turn(self, engine: EngineProcess, now: float) -> None:
        core: Any = engine.core
        if not core.ready or core.failure is not None or core.closing or core._failing_at is not None:
            return
        scheduler, credits = core.scheduler, arrivals_of(engine).credits
        books = self._books(engine.instance)
        promised, name = credits._promised, engine.instance.name
        if promised:
            self._check_promises(engine, books, now)
        blocks = sum(entry.blocks for entry in promised.values())
        kept = scheduler.room._promised_slots, scheduler.room._promised_blocks
        if kept != (len(promised), blocks):
            raise Violation(
                "promise",
                f"{name} keeps {kept[0]} slots and {kept[1]} blocks for "
                f"credits that promise {len(promised)} and {blocks}",
            )
        taken = sum(request is not None for request in scheduler.slots) + len(scheduler.arriving)
        if taken + len(promised) > len(scheduler.slots):
            raise Violation(
                "room", f"{name} has {len(scheduler.slots)} slots, {taken} taken and {len(promised)} promised"
            )
        for peer, number, attempt in books.withdrawn:
            entry = promised.get((peer, number)) or credits._waiting.get((peer, number))
            if entry is not None and entry.attempt <= attempt:
                raise Violation(
                    "promise",
                    f"{name} has read the Cancel of {number}/{attempt} of {peer}, and keeps its place",
                )
        books.withdrawn.clear()
        self._check_others(engine)

    def _check_promises(self, engine: EngineProcess, books: Books, now: float) -> None:
        deadline, name = engine.core.next_deadline(), engine.instance.name
        for key in arrivals_of(engine).credits._promised:
            ends = books.credited.get(key, now) + PROMISE_S
            if now >= ends:
                raise Violation("promise", f"room at {name} is promised to {key} beyond its {PROMISE_S:g} s")
            if deadline is None or deadline > ends:
                raise Violation("promise", f"nobody looks when the promise of {name} to {key} ends")

    def _check_others(self, engine: EngineProcess) -> None:
        """What this engine keeps for others, and others for it, is wanted."""
        if len(self._world.plan.instances) == 1:
            return
        for instance in self._world.instances:
            other = instance.engine
            if other is engine or not quiet(self._world, engine, other):
                continue
            _check_wanted(engine, other)
            _check_wanted(other, engine)


def _check_wanted(decoder: EngineProcess, source: EngineProcess) -> None:
    """Nothing is on its way between the two: what D keeps for a request of P is what P waits for."""
    arrivals, peer, name = arrivals_of(decoder), source.instance.name, decoder.instance.name
    attempts = attempts_of(source)
    for (incarnation, number), entry in arrivals.credits._waiting.items():
        if incarnation != peer:
            continue
        attempt = attempts.get((number, entry.attempt))
        if attempt is None or attempt.phase is not Phase.CREDIT:
            raise Violation(
                "promise",
                f"{number}/{entry.attempt} of {peer} stands in the line of {name} and does not wait",
            )
    for incarnation, number in arrivals.credits._promised:
        if incarnation == peer:
            raise Violation(
                "promise", f"{peer} has heard of the credit of {name} for {number} and says nothing"
            )
    for arrival in arrivals._arrivals.values():
        if arrival.peer.incarnation != peer or arrival.handed or arrival.stage is Stage.CLOSING:
            continue
        attempt = attempts.get((arrival.id, arrival.attempt))
        if attempt is None or attempt.phase is not Phase.RESERVED:
            raise Violation(
                "promise",
                f"{name} keeps blocks for {arrival.request.name}, {arrival.id}/{arrival.attempt} of {peer}, "
                f"which {'knows nothing of it' if attempt is None else f'has it as {attempt.phase.value}'}",
            )
