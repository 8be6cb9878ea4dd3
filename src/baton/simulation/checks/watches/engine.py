"""What is checked where an engine reads, decides and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.engine.handover.records import Stage
from baton.engine.scheduling.ledger import LedgerError
from baton.engine.scheduling.scheduler import MIN_LOOKAHEAD
from baton.engine.states import State
from baton.protocol.codec import unpack_int32, unpack_int64
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import Admit, CommandBatch, Control, DropFetch, Fetch, Grow, Pace
from baton.protocol.messages.reports import Report, StepReport
from baton.protocol.messages.requests import Cancel, FromEngine, Hello, Outputs, Submit, ToEngine
from baton.protocol.rules.prefix_keys import root_key
from baton.simulation import describe
from baton.simulation.checks.books import Books, Violation
from baton.simulation.checks.looks import arrivals_of, ledger_state, salt_of
from baton.simulation.plans.drafts import most_drafts

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.parties.worker import RankProcess
    from baton.simulation.wires.network import Connection
    from baton.simulation.world import World


class EngineWatch:
    """Rules `ledger`, `table`, `closing-4`, `closing-5`, `epoch`, `cancel`, `salt`, `queue`, `violation`."""

    def __init__(self, world: World, books: Callable[[Instance], Books]) -> None:
        self._world = world
        self._books = books

    def reads(self, engine: EngineProcess, connection: Connection, message: ToEngine) -> None:
        books = self._books(engine.instance)
        if isinstance(message, Submit):
            books.requests.setdefault(connection.identity, {}).setdefault(message.id, True)
        elif isinstance(message, Cancel):
            books.cancelled.append((connection.identity, message.id))
        elif isinstance(message, Hello):
            books.gateways[message.gateway] = connection.identity
        if self._world.recording:
            self._world.note(engine, f"reads {describe.to_engine(message)}", describe.number_of(message))

    def refused_malformed(self, engine: EngineProcess) -> None:
        self._books(engine.instance).violations += 1
        self._world.note(engine, "refuses a malformed message")

    def refused_stale(self, engine: EngineProcess) -> None:
        self._books(engine.instance).violations += 1
        self._world.note(engine, "reads a stale report")

    def gateway_lost(self, engine: EngineProcess, identity: bytes) -> None:
        self._books(engine.instance).requests.pop(identity, None)
        self._world.note(engine, f"finds {identity.decode()} gone and cancels its requests")

    def commanded(self, engine: EngineProcess, batch: CommandBatch) -> None:
        """The engine appends a batch to the command log."""
        books = self._books(engine.instance)
        if batch.sequence != books.sequence + 1:
            raise Violation("agreement", f"command batch {batch.sequence} follows batch {books.sequence}")
        books.sequence = batch.sequence
        books.batches.append(batch)
        for command in batch.commands:
            if isinstance(command, Control | Fetch | DropFetch | Pace):
                continue
            slot, epoch = command.slot, command.epoch
            held = books.at_engine.get(slot)
            if isinstance(command, Admit):
                if held is not None:
                    raise Violation(
                        "closing-4",
                        f"slot {slot} is given away again before Closed of epoch {held[0]} was read",
                    )
                if epoch <= books.epochs.get(slot, -1):
                    raise Violation("epoch", f"slot {slot}: epoch {epoch} follows {books.epochs[slot]}")
                books.epochs[slot] = epoch
                request = engine.core.scheduler.slots[slot]
                if request is None:
                    raise Violation("closing-4", f"{describe.command(command)} for nobody")
                books.at_engine[slot] = (epoch, list(unpack_int32(command.blocks)), request)
                self._check_salt(engine, request.name, command)
                if command.num_computed:
                    self._check_shared(engine, books, command)
            elif epoch != books.epochs.get(slot):
                raise Violation(
                    "epoch", f"{describe.command(command)}, but the last is {books.epochs.get(slot)}"
                )
            elif isinstance(command, Grow):
                if held is None:
                    raise Violation("closing-4", f"{describe.command(command)} after its Closed was read")
                held[1].extend(unpack_int32(command.blocks))
        if self._world.recording:
            for command in batch.commands:
                self._world.note(
                    engine,
                    f"log {batch.sequence}: {describe.command(command, engine.core)}",
                    describe.request_on(engine, command),
                )

    def sends(self, engine: EngineProcess, connection: Connection, message: FromEngine) -> None:
        if self._world.recording:
            self._world.note(engine, f"tells {connection.identity.decode()}: {describe.from_engine(message)}")
        if not isinstance(message, Outputs):
            return
        alive = self._books(engine.instance).requests.setdefault(connection.identity, {})
        for number in unpack_int64(message.ids):
            if not alive.get(number):
                raise Violation(
                    "answer", f"the engine sends a token for id {number} after its Finished or Cancel"
                )
            self._world.monitor.clients.streamed(connection.gateway, engine, number)
        for finished in message.finished:
            if finished.id not in alive:
                raise Violation("answer", f"the engine finishes id {finished.id}, which nobody submitted")
            if alive[finished.id] is None:
                raise Violation("answer", f"the engine finishes id {finished.id} for the second time")
            alive[finished.id] = None  # type: ignore[assignment]

    def has_read(self, engine: EngineProcess, rank: int, report: Report) -> None:
        """After the core has taken in a report."""
        if rank != 0 or not isinstance(report, StepReport):
            return
        books = self._books(engine.instance)
        for slot in books.at_engine:
            self._check_index(books, slot, engine.instance.ranks[0])
        for closed in report.closings:
            held = books.at_engine.get(closed.slot)
            if held is not None and held[0] == closed.epoch:
                books.indexed.pop((closed.slot, closed.epoch), None)
                del books.at_engine[closed.slot]
                books.closed.append((closed.slot, closed.epoch))
        if self._world.recording:
            self._world.note(engine, f"reads {describe.report(report)}")

    def after_turn(self, engine: EngineProcess) -> None:
        """After each turn of the engine."""
        core = engine.core
        if not core.ready:
            return
        books, scheduler = self._books(engine.instance), core.scheduler
        ledger = scheduler.ledger
        state = ledger_state(ledger)
        if state != books.sound:
            try:
                ledger.check()
            except LedgerError as error:
                raise Violation("ledger", str(error)) from None
            books.sound = state
        for slot, (epoch, blocks, _) in books.at_engine.items():
            request = scheduler.slots[slot]
            if request is None or request.epoch != epoch:
                now = "free" if request is None else f"epoch {request.epoch}'s"
                raise Violation("closing-4", f"slot {slot} is {now} before Closed of epoch {epoch} was read")
            if list(ledger.table(slot)) != blocks:
                raise Violation(
                    "table",
                    f"slot {slot}, epoch {epoch}: the ledger says blocks {list(ledger.table(slot))}, the "
                    f"command log has given the worker {blocks}",
                )
        if core.failure is None and scheduler.num_occupied != len(books.at_engine):
            raise Violation(
                "closing-1",
                f"{scheduler.num_occupied} slots are occupied, on the wire {len(books.at_engine)} are open",
            )
        if core.counters.violations != books.violations:
            raise Violation(
                "violation",
                f"the engine counts {core.counters.violations} protocol violations, "
                f"{books.violations} were made ({self._world.last_log})",
            )
        self._check_cancels(engine, books)
        self._check_queue(scheduler, engine.instance.config.max_waiting)
        self._check_room(scheduler, engine.instance.config)
        deadline = core.next_deadline()
        running = scheduler.num_occupied > 0 and not scheduler.paused
        if core.failure is None and not core.closing and running and deadline is None:
            raise Violation("timer", f"{scheduler.num_occupied} requests run and nobody times them")

    def _check_cancels(self, engine: EngineProcess, books: Books) -> None:
        core: Any = engine.core
        for identity, number in books.cancelled:
            request = core._outboxes.of(identity).requests.get(number)
            if request is not None and request.state is not State.ABORTING:
                raise Violation(
                    "cancel",
                    f"request {request.name} was cancelled and is {request.state.value} after the turn",
                )
            alive = books.requests.get(identity)
            if alive is not None and alive.get(number):
                alive[number] = False
            self._check_reservations(engine, identity, number)
        books.cancelled.clear()
        for request in core.scheduler.slots:
            if request is None or request.state is State.ABORTING:
                continue
            if request.gateway.identity not in books.requests:
                raise Violation(
                    "cancel", f"the gateway of {request.name} is gone and it is {request.state.value} still"
                )

    def _check_index(self, books: Books, slot: int, leader: RankProcess) -> None:
        """What has entered the prefix index must be in the leader's pool (closing-5)."""
        epoch, table, request = books.at_engine[slot]
        if request.epoch != epoch:
            return
        seen = books.indexed.get((slot, epoch), 0)
        if seen >= request.indexed:
            return
        books.indexed[slot, epoch] = request.indexed
        size = leader.instance.config.block_size
        for index in range(seen, request.indexed):
            found = leader.executor.tokens_in(table[index])
            wanted = request.tokens[index * size : (index + 1) * size].tolist()
            if found != wanted:
                raise Violation(
                    "closing-5",
                    f"block {table[index]} of request {request.name} is in the prefix index as {wanted}, "
                    f"but holds {found}",
                )
            books.salts[table[index]] = salt_of(self._world, request.name)

    def _check_shared(self, engine: EngineProcess, books: Books, admit: Admit) -> None:
        """Blocks that come from the prefix cache were put there under the same salt."""
        request = engine.core.scheduler.slots[admit.slot]
        if request is None:
            return
        salt = salt_of(self._world, request.name)
        blocks = unpack_int32(admit.blocks)
        for index in range(admit.num_computed // engine.instance.config.block_size):
            if books.salts.get(blocks[index], salt) != salt:
                raise Violation(
                    "salt",
                    f"{request.name} of salt {salt!r} shares block {blocks[index]} of salt "
                    f"{books.salts[blocks[index]]!r}",
                )

    def _check_salt(self, engine: EngineProcess, name: str, admit: Admit) -> None:
        """The worker drafts for a request from those of its salt."""
        salt = salt_of(self._world, name)
        if admit.salt != (root_key(salt) if engine.instance.config.speculation else b""):
            raise Violation("salt", f"{name} of salt {salt!r} is drafted for as if it had another one")

    def _check_reservations(self, engine: EngineProcess, identity: bytes, number: int) -> None:
        """Nothing is kept for a request that its gateway has cancelled here, if it was here before."""
        now = engine.local(self._world.events.now)
        for arrival in arrivals_of(engine)._arrivals.values():
            request = arrival.request
            if (request.gateway.identity, request.id) != (identity, number):
                continue
            if arrival.stage is not Stage.CLOSING and not arrival.handed and arrival.reserved_at < now:
                raise Violation(
                    "cancel",
                    f"{request.name} was cancelled by its gateway and is {arrival.stage.value} at "
                    f"{engine.instance.name} after the turn",
                )

    def _check_room(self, scheduler: Any, config: InstanceConfig) -> None:
        """A worker that computes drafts takes as many blocks of a slot as they fill."""
        size = scheduler.block_size
        ahead = max(size, MIN_LOOKAHEAD) + most_drafts(config)
        for slot, request in enumerate(scheduler.slots):
            if request is None or request.state is not State.RUNNING or slot in scheduler._wanting:
                continue
            room = request.held * size - len(request.tokens)
            if room < ahead and request.held * size < request.limit:
                raise Violation(
                    "drafts",
                    f"{request.name} has room for {room} tokens, {ahead} are looked ahead, and wants none",
                )

    def _check_queue(self, scheduler: Any, limit: int) -> None:
        if scheduler.num_waiting <= limit:
            return
        newcomers = sum(1 for request in scheduler.waiting_requests() if request.first_admitted is None)
        if newcomers > limit:
            raise Violation("queue", f"{newcomers} newcomers wait, max_waiting is {limit}")
