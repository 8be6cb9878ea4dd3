"""What is checked of hand-overs: what P announces and frees, what D believes and frees, who streams.

The watch keeps books of its own from what it sees on the wires, for each engine: which pages P has named to
whom and when it last heard that D counts on them; which fetches D has ordered and which ranks have not ended
them.  It looks into both engines at once, which no engine can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from baton.engine.handover.records import Arrival, Attempt, Phase, Stage
from baton.protocol.codec import unpack_int32
from baton.protocol.messages.commands import Admit, CommandBatch, Fetch
from baton.protocol.messages.handover import (
    Cancel,
    Cancelled,
    Handoff,
    PeerMessage,
    Progress,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Taken,
)
from baton.protocol.messages.reports import Fetched, Report
from baton.protocol.messages.requests import Target
from baton.simulation import describe
from baton.simulation.checks.books import Books, Named, OpenFetch, Violation
from baton.simulation.checks.looks import arrivals_of, attempts_of, owns, quiet

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.parties.worker import RankProcess
    from baton.simulation.world import World

_ROUNDING = 1e-6


class HandoverWatch:
    """The rules `progress`, `exported`, `reserved`, `lease`, `pages`, `attempt`, `credit`."""

    def __init__(self, world: World, books: Callable[[Instance], Books]) -> None:
        self._world = world
        self._books = books

    # -- messages

    def reads(self, engine: EngineProcess, peer: str, message: PeerMessage, now: float) -> None:
        """Before the core takes in a message of another engine."""
        books = self._books(engine.instance)
        if self._world.recording:
            text = f"reads {describe.peer(message)} from {peer}"
            self._world.note(engine, text, describe.number_of_peer(message))
        match message:
            case Reserve():
                books.asked[peer, message.id, message.attempt] = (message.gateway, message.request)
            case Handoff():
                gateway, request = books.asked.get((peer, message.id, message.attempt), ("", 0))
                identity = books.gateways.get(gateway)
                if identity is not None:
                    books.requests.setdefault(identity, {})[request] = True
            case Reserved():
                books.promised.add((peer, message.id, message.attempt))
                books.renewed.setdefault((message.id, message.attempt), now)
            case Renew():
                books.renewing[peer, message.stamp] = (now, message.handovers)
            case Taken() | Cancel(by_p=False) | Cancelled(by_p=True):
                books.let_go.add((message.id, message.attempt))
                books.just_let_go.add((message.id, message.attempt))
            case Cancel():
                books.taken_back.append((peer, message.id, message.attempt))

    def peer_lost(self, engine: EngineProcess, peer: str, dead: bool) -> None:
        if dead:
            self._books(engine.instance).dead_peers.add(peer)
        self._world.note(engine, f"is told that {peer} is {'dead' if dead else 'lost'}")

    def sends(self, engine: EngineProcess, to: Target, message: PeerMessage, now: float) -> None:
        """The core wants something told to another engine."""
        if self._world.recording:
            text = f"tells {to.incarnation}: {describe.peer(message)}"
            self._world.note(engine, text, describe.number_of_peer(message))
        match message:
            case Progress() | Handoff():
                self._names(engine, to.incarnation, message)
            case Reserved():
                self._reserves(engine, to.incarnation, message)
            case Renewed():
                self._renews(engine, to.incarnation, message)
            case Taken() | Cancel(by_p=False) | Cancelled(by_p=True):
                key = ("from", to.incarnation, message.id, message.attempt)
                for number, fetch in self._books(engine.instance).fetches.items():
                    if fetch.key == key and fetch.ranks:
                        raise Violation(
                            "reserved",
                            f"{engine.instance.name} sends {describe.peer(message)} while fetch {number} "
                            f"of it is under way on ranks {sorted(fetch.ranks)}",
                        )

    def _renews(self, engine: EngineProcess, peer: str, message: Renewed) -> None:
        """P grants what it does not refuse, from when it read the `Renew`."""
        books = self._books(engine.instance)
        read_at, handovers = books.renewing.pop((peer, message.stamp), (0.0, []))
        for key in handovers:
            if key not in message.unknown:
                books.renewed[key] = read_at

    def _names(self, engine: EngineProcess, peer: str, message: Progress | Handoff) -> None:
        """P says which pages are final: they are what they should be, on every rank."""
        books = self._books(engine.instance)
        key = (message.id, message.attempt)
        attempt = _attempt(engine, *key)
        if attempt is None and key in books.just_let_go:
            return  # (decided before P read that D is over, and sent after it: D knows it no more)
        if attempt is None:
            raise Violation("attempt", f"{describe.peer(message)} of an attempt that is over")
        request = attempt.departure.request
        named = books.named.get(key)
        if named is None or not named.blocks:
            named = books.named[key] = Named(peer, request.slot, request.epoch)
        named.blocks[message.first :] = unpack_int32(message.blocks)
        if isinstance(message, Handoff):
            tokens = len(request.tokens) - len(unpack_int32(message.tokens))
        else:
            tokens = message.complete * engine.instance.config.block_size
        first, named.checked = named.checked, max(named.checked, tokens)
        self._check_pages(engine, "progress", named.blocks, request.tokens, first, tokens, request.name)

    def _reserves(self, engine: EngineProcess, peer: str, message: Reserved) -> None:
        """D's leading blocks are shared among requests of one salt only."""
        arrival = _arrival(engine, peer, message.id, message.attempt)
        books = self._books(engine.instance)
        if arrival is None:
            return
        table = engine.core.scheduler.ledger.reserved(arrival.key)
        salt = arrival.request.cache_salt
        for index, block in enumerate(table):
            if index >= message.num_cached_blocks:
                books.salts.pop(block, None)
            elif books.salts.get(block, salt) != salt:
                raise Violation(
                    "salt",
                    f"{arrival.request.name} of salt {salt!r} shares block {block} of salt "
                    f"{books.salts[block]!r}",
                )

    # -- commands, copies and reports

    def commanded(self, engine: EngineProcess, batch: CommandBatch) -> None:
        """After `EngineWatch.commanded`."""
        books = self._books(engine.instance)
        for command in batch.commands:
            if isinstance(command, Fetch):
                arrival = _fetching(engine, command.id)
                if arrival is None:
                    continue  # it was given up before it was sent
                books.fetches[command.id] = OpenFetch(
                    arrival.key,
                    arrival.peer.incarnation,
                    set(range(len(engine.instance.ranks))),
                    list(unpack_int32(command.pages)),
                    list(unpack_int32(command.blocks)),
                )
            elif isinstance(command, Admit) and command.num_computed:
                request = engine.core.scheduler.slots[command.slot]
                tokens, blocks = unpack_int32(command.tokens), unpack_int32(command.blocks)
                name = "" if request is None else request.name
                self._check_pages(engine, "pages", blocks, tokens, 0, command.num_computed, name)

    def writes(self, rank: RankProcess, block: int) -> None:
        """A fetch is about to write a block."""
        fetches = self._books(rank.instance).fetches.values()
        if not any(rank.rank in fetch.ranks and block in fetch.blocks for fetch in fetches):
            raise Violation("reserved", f"{rank.name} writes block {block}, for which no fetch is under way")

    def before_report(self, engine: EngineProcess, rank: int, report: Report) -> None:
        """Before the core takes in a report."""
        self._arrival: Arrival | None = None
        if isinstance(report, Fetched) and engine.core.ready:
            self._arrival = _fetching(engine, report.id)

    def after_report(self, engine: EngineProcess, rank: int, report: Report) -> None:
        """After it: if D believes what was copied, P must hold it still."""
        if not isinstance(report, Fetched):
            return
        fetch = self._books(engine.instance).fetches.get(report.id)
        if fetch is None:
            return
        fetch.ranks.discard(rank)
        if not fetch.ranks:
            del self._books(engine.instance).fetches[report.id]
        arrival = self._arrival
        if arrival is None or report.error or report.dropped or arrival.stage is Stage.CLOSING:
            return
        source = self._world.engine_of(fetch.peer)
        if source is None or not source.alive or not source.core.ready or source.core.failure is not None:
            return
        attempt = attempts_of(source).get((arrival.id, arrival.attempt))
        if attempt is None or not owns(source, attempt, fetch.pages):
            raise Violation(
                "lease",
                f"{engine.instance.name} uses pages {fetch.pages} of {fetch.peer} for "
                f"{arrival.request.name}, attempt {arrival.attempt}, which that one has given up",
            )

    # -- after each turn

    def after_turn(self, engine: EngineProcess, now: float) -> None:
        core: Any = engine.core
        if not core.ready or core.failure is not None or core.closing:
            return
        books = self._books(engine.instance)
        for key in books.taken_back:
            arrival = _arrival(engine, *key)
            if arrival is not None and arrival.stage not in (Stage.CLOSING, Stage.READY):
                raise Violation(
                    "cancel",
                    f"{arrival.request.name} was cancelled by {key[0]} and is {arrival.stage.value} at "
                    f"{engine.instance.name} after the turn",
                )
        books.taken_back.clear()
        books.just_let_go.clear()
        if books.named:
            self._check_named(engine, books, now)
        if books.fetches:
            self._check_fetches(engine, books)
        attempts = attempts_of(engine)
        if attempts:
            self._check_attempts(engine, books, attempts.values())

    def _check_named(self, engine: EngineProcess, books: Books, now: float) -> None:
        lease_s = engine.instance.config.lease_s
        for key, named in list(books.named.items()):
            if not named.blocks or _still(engine, key, named):
                continue
            over = now >= books.renewed.get(key, -1e9) + lease_s - _ROUNDING
            if not over and key not in books.let_go and named.peer not in books.dead_peers:
                raise Violation(
                    "exported",
                    f"{engine.instance.name} has given up blocks {named.blocks} of hand-over {key} to "
                    f"{named.peer}, which did not let go of them, "
                    f"{books.renewed[key] + lease_s - now:.3f} s before the lease is over",
                )
            del books.named[key]

    def _check_fetches(self, engine: EngineProcess, books: Books) -> None:
        reserved = engine.core.scheduler.ledger._reserved
        for number, fetch in books.fetches.items():
            if not set(fetch.blocks) <= set(reserved.get(fetch.key, ())):
                raise Violation(
                    "reserved",
                    f"{engine.instance.name} has given up blocks {fetch.blocks} of hand-over {fetch.key} "
                    f"while fetch {number} is under way on ranks {sorted(fetch.ranks)}",
                )

    def _check_attempts(self, engine: EngineProcess, books: Books, attempts: Any) -> None:
        for attempt in attempts:
            peer, key = attempt.target.incarnation, (attempt.departure.id, attempt.number)
            if attempt.phase in (Phase.RESERVED, Phase.HANDED):
                if (peer, *key) not in books.promised:
                    raise Violation(
                        "attempt",
                        f"{engine.instance.name} takes hand-over {key[0]}, attempt {key[1]}, for reserved at "
                        f"{peer}, which has not said so",
                    )
            elif attempt.phase is Phase.CREDIT:
                self._check_credit(engine, attempt, peer)

    def _check_credit(self, engine: EngineProcess, attempt: Attempt, peer: str) -> None:
        """While nothing is on its way between the two, D remembers who waits for its credit."""
        decoder, name = self._world.engine_of(peer), engine.instance.name
        if decoder is None or not quiet(self._world, engine, decoder):
            return
        credits = arrivals_of(decoder).credits
        waiting = (name, attempt.departure.id)
        if waiting not in credits._promised and waiting not in credits._waiting:
            raise Violation(
                "credit",
                f"{attempt.departure.request.name} waits at {name} for credit of {peer}, which does not "
                "remember it",
            )

    def _check_pages(
        self,
        engine: EngineProcess,
        rule: str,
        blocks: Sequence[int],
        tokens: Sequence[int],
        first: int,
        count: int,
        name: str,
    ) -> None:
        """The pages of the leading `count` tokens hold these tokens on every rank; from `first` on."""
        size = engine.instance.config.block_size
        for index in range(first // size, -(-count // size)):
            wanted = list(tokens[index * size : min((index + 1) * size, count)])
            for rank in engine.instance.ranks:
                found = rank.executor.tokens_in(blocks[index])[: len(wanted)]
                if found != wanted:
                    raise Violation(
                        rule,
                        f"page {index} of {name} is block {blocks[index]} of {rank.name} and should hold "
                        f"{wanted}, but holds {found}",
                    )


def _attempt(engine: EngineProcess, number: int, attempt: int) -> Attempt | None:
    return attempts_of(engine).get((number, attempt))


def _fetching(engine: EngineProcess, number: int) -> Arrival | None:
    """Whose fetch this is, while it is under way."""
    found: Arrival | None = arrivals_of(engine).fetches._under_way.get(number)
    return found


def _arrival(engine: EngineProcess, peer: str, number: int, attempt: int) -> Arrival | None:
    found: Arrival | None = arrivals_of(engine)._arrivals.get((peer, number, attempt))
    return found


def _still(engine: EngineProcess, key: tuple[int, int], named: Named) -> bool:
    """P has these blocks as they were named."""
    scheduler = engine.core.scheduler
    exported = scheduler.ledger._exported.get(("to", *key))
    if exported is not None and exported[: len(named.blocks)] == named.blocks:
        return True
    request = scheduler.slots[named.slot] if named.slot >= 0 else None
    if request is None or request.epoch != named.epoch:
        return False
    return list(scheduler.ledger.table(named.slot))[: len(named.blocks)] == named.blocks
