"""The invariants, and who checks them when.

Theory.  An event touches one process (and what it sends), so after an event only what that process holds, and
what it shares with its neighbours, can have become wrong.  The monitor is called at each such point: before a
step is run, when a report or a command batch is written, after each turn of an engine, each round of a rank
and each call of a gateway.  It keeps books of its own from what it sees on the wires and compares them with
what the parties believe.  What is wrong is raised as `Violation`, which names the rule.

| rule | checked |
| --- | --- |
| `ledger` | every block has one owner, the states sum to the pool (`Ledger.check`); after each turn |
| `table` | the ledger's tables are those that the command log gave the worker; after each turn |
| `owner` | a step reads only blocks of its own request, writes none that another one holds; each step |
| `agreement` | all ranks compose the same batch for step k; each step of a follower |
| `drafts` | a step computes drafts that the step before proposed for this epoch; each step |
| | who runs wants blocks when it has room for less than the lookahead and its drafts; each turn |
| `streams` | who decodes is in each step, and waits for prompts as long as targets say; each step |
| `passed` | a prompt is passed by later ones for half of it and what it got since; each step |
| `closing-1` … `closing-6` | the rules of `protocol/messages/reports.py`; each batch, report, round, chunk |
| `epoch` | the epochs of a slot only grow; each command batch |
| `answer` | one `Finished` for each `Submit`, nothing after it, ids never used twice; each message |
| `cancel` | a request whose `Cancel` was read neither waits nor runs; after each turn |
| `salt` | prefix blocks are shared only among requests of one salt, and so are drafts; each command batch |
| `queue` | `max_waiting` newcomers wait at most, and nobody is refused before; each turn and refusal |
| | a client is told 429 only when every instance that serves has refused; when the gateway does |
| `order` | who waits is served, and who runs gives way, by priority and coming; each decision |
| `fair` | of two flows that wait none is served more than the theory's bound; after each turn |
| `follow` | who waits for blocks that another request computes waits for one that does; each turn |
| `lent` | the worker was told the best priority of a request and of who waits for its blocks; each turn |
| `room` | growth within the headroom and what is promised fit into what is left; each decision |
| `retired` | who may have an id that was given up is told; each call of a gateway |
| | what an engine works on somebody waits for, while nothing is on its way; each turn |
| `violation` | the engine counts a protocol violation for each message that was made to be one only |
| `tokens` | what a client got is a beginning of the oracle's answer, at the end all of it; each chunk |
| `failure` | an instance fails only if something was done to it; when it does |
| `timer` | what runs is timed, what does not is not; after each turn |
| `liveness` | with faults stopped, somebody gets something within 5 virtual seconds, until all have |
| `verdict` | nobody who renewed in time is lost, who is silent is found; each loss, each event |
| `weights` | all instances have the same, and each gateway knows which; at the end |
| `arrange` | a gateway changes one label at a time, for a reason that is not old, and somebody is left to |
| | prefill and to decode (`watches/arranging.py`); each call of a gateway |
| `relay` | what a host beside the leader's gets, and reports, is what was written, in order, once |
| | (`watches/relay.py`), and who is gone or silent is given up; each record, ticket, report and turn of |
| | the link; a rank whose death is all that happened is named |
| `standing` | orders are numbered upwards, and all gateways know the last; each turn, at the end |
| | one gateway is the first of those of an engine; at the end |
| `gone` | 1 s after a gateway is gone, no engine that was awake works for it; then |
| `crash` | no production code raises what it does not say |
| `end` | nothing is held, nobody waits; at the end |

Of hand-overs (`watches/handover.py`):

| rule | checked |
| --- | --- |
| `progress` | a page is announced only when it holds its tokens on every rank; each `Progress`, `Handoff` |
| `pages` | what a request is admitted with as computed holds its tokens on every rank; each `Admit` |
| `exported` | P gives up what D may be reading only when D let go, is dead, or the lease is over; each turn |
| `lease` | when D believes a completed fetch, P still holds those pages; each `Fetched` |
| `reserved` | D gives up blocks and says so only with their fetches closed, writes no other; each turn |
| `coming` | a page that requests share is fetched once, for all of them; each `Reserved`, batch, turn |
| `cancel` | a reservation whose `Cancel` D has read is being closed; each turn |
| `attempt` | P takes for reserved only what D has reserved under this attempt; each turn |
| `credit` | who waits for credit is remembered where it waits, while nothing is on its way; each turn |
| `promise` | room and places are kept only for who waits, and a credit ends in time; each turn |
| `stream` | the tokens of one id come from one instance; each `Outputs` |
| `pass` | D keeps room for exactly those whom a gateway has named in its plan; each answer |
| `link` | an engine reads exactly what comes on the newest connection of each peer; each message |
| `grant` | P grants pages of attempts that D has and renews, and they are theirs; each grant, each turn |
| | page servers serve what was granted and no more; each page |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.protocol.messages.requests import Submit
from baton.simulation.checks.books import Books, Violation
from baton.simulation.checks.watches.arranging import ArrangingWatch
from baton.simulation.checks.watches.clients import ClientWatch
from baton.simulation.checks.watches.coming import ComingWatch
from baton.simulation.checks.watches.engine import EngineWatch
from baton.simulation.checks.watches.gateway import GatewayWatch
from baton.simulation.checks.watches.handover import HandoverWatch
from baton.simulation.checks.watches.relay import RelayWatch
from baton.simulation.checks.watches.scheduling.fairness import FairnessWatch
from baton.simulation.checks.watches.scheduling.following import FollowWatch
from baton.simulation.checks.watches.scheduling.order import OrderWatch
from baton.simulation.checks.watches.scheduling.room import RoomWatch
from baton.simulation.checks.watches.standing import StandingWatch
from baton.simulation.checks.watches.strangers import StrangerWatch
from baton.simulation.checks.watches.worker import WorkerWatch

if TYPE_CHECKING:
    from baton.protocol.messages.commands import CommandBatch
    from baton.protocol.messages.handover import PeerMessage
    from baton.protocol.messages.requests import FromEngine, Target, ToEngine
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.parties.instance import EngineProcess, Instance
    from baton.simulation.wires.network import Connection
    from baton.simulation.world import World


class Monitor:
    """Checks one run."""

    def __init__(self, world: World) -> None:
        self._books: dict[str, Books] = {}
        self.engine = EngineWatch(world, self.books)
        self.worker = WorkerWatch(world, self.books)
        self.handover = HandoverWatch(world, self.books)
        self.room = RoomWatch(world, self.books)
        self.following = FollowWatch(world, self.books)
        self.coming = ComingWatch(self.books)
        self.order = OrderWatch(world)
        self.fairness = FairnessWatch(world)
        self.gateways = GatewayWatch(world)
        self.strangers = StrangerWatch(world)
        self.clients = ClientWatch(world)
        self.arranging = ArrangingWatch()
        self.relay = RelayWatch()
        self.standing = StandingWatch(world)

    def books(self, instance: Instance) -> Books:
        """What the wires of this incarnation said so far."""
        books = self._books.get(instance.name)
        if books is None:
            books = self._books[instance.name] = Books(instance)
        return books

    # -- an engine reads, decides, and ends its turn

    def reads(self, engine: EngineProcess, connection: Connection, message: ToEngine) -> None:
        """Before the core takes in what a gateway sent."""
        self.engine.reads(engine, connection, message)
        if isinstance(message, Submit):
            self.order.before(engine)

    def has_read(self, engine: EngineProcess, connection: Connection, message: ToEngine) -> None:
        """After it."""
        if isinstance(message, Submit):
            self.order.after(engine)
            self.order.submitted(engine, connection, message)
            self.room.decided(engine)

    def peer_reads(self, engine: EngineProcess, peer: str, message: PeerMessage, now: float) -> None:
        """Before the core takes in what another engine sent."""
        self.handover.reads(engine, peer, message, now)
        self.room.reads(engine, peer, message)
        self.strangers.reads(engine, peer, message)
        self.order.reads(engine, peer, message)

    def peer_has_read(self, engine: EngineProcess, peer: str, message: PeerMessage) -> None:
        """After it."""
        self.strangers.passes.has_read(engine, peer, message)
        self.order.has_read(engine, peer, message)
        self.room.decided(engine)

    def peer_sends(self, engine: EngineProcess, to: Target, message: PeerMessage, now: float) -> None:
        self.handover.sends(engine, to, message, now)
        self.room.sends(engine, to.incarnation, message, now)
        self.order.sends(engine, to.incarnation, message)
        self.coming.sends(engine, to.incarnation, message)
        self.strangers.sends(engine, to, message)

    def before_flush(self, engine: EngineProcess) -> None:
        self.order.before(engine)

    def after_flush(self, engine: EngineProcess) -> None:
        """Before what was decided is sent."""
        self.order.after(engine)
        self.room.decided(engine)

    def commanded(self, engine: EngineProcess, batch: CommandBatch) -> None:
        self.engine.commanded(engine, batch)
        self.following.commanded(engine, batch)
        self.handover.commanded(engine, batch)
        self.coming.commanded(engine, batch)

    def after_turn(self, engine: EngineProcess, now: float) -> None:
        self.engine.after_turn(engine)
        self.following.after_turn(engine)
        self.handover.after_turn(engine, now)
        self.coming.after_turn(engine)
        self.fairness.after_turn(engine)
        self.room.after_turn(engine, now)
        self.gateways.after_turn(engine)
        self.strangers.grants.after_turn(engine)
        self.standing.after_turn(engine)

    # -- a gateway reads and sends

    def gateway_reads(self, gateway: GatewayProcess, instance: Instance, message: FromEngine) -> None:
        """Before the cluster takes it in."""
        self.clients.gateway_reads(gateway, instance, message)
        self.gateways.reads(gateway, instance, message)
        self.arranging.reads(gateway, instance, message)

    def gateway_sends(self, gateway: GatewayProcess, to: str, message: ToEngine) -> None:
        self.clients.gateway_sends(gateway, to, message)
        self.arranging.sends(gateway, to, message)
        self.order.gateway_sends(message)
        self.gateways.sends(gateway, to, message)
        self.strangers.passes.gateway_sends(gateway, to, message)

    def after_gateway(self, gateway: GatewayProcess) -> None:
        """After each call of the cluster, when all that it wanted sent was sent."""
        self.clients.after_gateway(gateway)
        self.gateways.after(gateway)
        self.arranging.after(gateway)

    # -- the end

    def check_end(self, instance: Instance, gateways: list[GatewayProcess]) -> None:
        """Nothing is left to happen: nothing may be held, and nobody may wait."""
        core = instance.engine.core
        scheduler = core.scheduler
        counts = scheduler.ledger.counts()
        owned = counts["held"] or counts["reserved"] or counts["exported"]
        if owned or scheduler.num_occupied or scheduler.num_waiting or scheduler.arriving:
            raise Violation(
                "end",
                f"held at the end of {instance.name}: {scheduler.ledger.snapshot()}, {scheduler.gauges()}",
            )
        if core.next_deadline() is not None:
            raise Violation("timer", f"{instance.name} still times something at the end")
        for rank in instance.ranks:
            if rank.slots.open_slots():
                raise Violation("end", f"open at the end: {rank.describe()}")
            if rank.transfers.under_way:
                raise Violation("end", f"{rank.transfers.under_way} fetches of {rank.name} are not over")
        self.standing.check_end(instance, gateways)
        for gateway in gateways:
            if len(gateway.cluster) or gateway.cluster.next_deadline() is not None:
                raise Violation("end", f"{gateway.name} still has {len(gateway.cluster)} requests")


__all__ = ["Monitor", "Violation"]
