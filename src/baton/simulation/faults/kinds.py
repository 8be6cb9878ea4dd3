"""What each kind of fault does, and to whom.  (Those of clusters: `cluster_kinds.py`.)

`FAULTS` maps every kind that strikes at a moment to a function; crashes are counted in messages instead, by
`World.message_passed`.  A fault looks first whether its target is alive; if it costs an
incarnation, it leaves an excuse with the instance, as an instance that fails without one breaks a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from baton.protocol.codec import pack_int32
from baton.protocol.messages.reports import REPORTS, Closed, CloseReason, StepReport
from baton.protocol.messages.requests import TO_ENGINE, Cancel, Query, QueryKind, Submit
from baton.protocol.params.sampling import Sampling, Stopping
from baton.simulation.events import Party
from baton.simulation.parties.gateway import GatewayProcess
from baton.simulation.parties.instance import EngineProcess
from baton.simulation.parties.worker import RankProcess
from baton.simulation.plans.plan import Fault, FaultKind
from baton.simulation.wires.network import Connection

if TYPE_CHECKING:
    from baton.simulation.world import World

Strike = Callable[["World", Fault, Random], None]
FAULTS: dict[FaultKind, Strike] = {}
_ORDERS_S = 1.0
"""Virtual seconds after the faults in which an order that was on its way may arrive."""


def strike(world: World, fault: Fault) -> None:
    """Something goes wrong.  What it draws for itself depends on the fault alone."""
    FAULTS[fault.kind](world, fault, Random(str(fault)))


def resume(world: World, index: int) -> None:
    """An operator ends a pause of an instance, or that it drains, through any gateway that can."""
    name = world.plan.instances[index].name
    for gateway in world.gateways:
        if gateway.query(name, "resume"):
            if gateway.cluster.members[name].draining:
                gateway.undrain(name)
            return


def see_that_it_runs(world: World, index: int) -> None:
    """After the faults: no instance stays paused, or draining."""
    instance = world.instances[index]
    core = instance.engine.core
    for rank in instance.ranks:
        rank.transfers.transport.extra_s = 0.0
    again = not instance.alive or not core.ready
    if not again and (core.scheduler.paused or world.monitor.standing.drains(instance)):
        again = not world.over  # (who has given it up hears of it no more when registrations are over)
        resume(world, index)
    if again or world.events.now < world.plan.faults_end + _ORDERS_S:
        world.events.after(0.1, world.people, see_that_it_runs, world, index)


def fault(kind: FaultKind) -> Callable[[Strike], Strike]:
    def add(function: Strike) -> Strike:
        FAULTS[kind] = function
        return function

    return add


def stall(world: World, fault: Fault, party: Party) -> None:
    until = min(world.events.now + fault.amount, world.plan.faults_end)
    party.stalled_until = max(party.stalled_until, until)
    world.struck(fault, party)


def _rank(world: World, fault: Fault) -> RankProcess | None:
    ranks = world.instances[fault.instance].ranks
    rank = ranks[fault.target % len(ranks)]
    return rank if rank.alive else None


@fault("stall_engine")
def _stall_engine(world: World, fault: Fault, random: Random) -> None:
    instance = world.instances[fault.instance]
    if instance.alive:
        instance.excuses.append("the engine was stalled")
        stall(world, fault, instance.engine)


@fault("stall_rank")
def _stall_rank(world: World, fault: Fault, random: Random) -> None:
    rank = _rank(world, fault)
    if rank is not None:
        world.instances[fault.instance].excuses.append(f"rank {rank.rank} was stalled")
        stall(world, fault, rank)


FAULTS["hang_rank"] = _stall_rank


@fault("stall_gateway")
def _stall_gateway(world: World, fault: Fault, random: Random) -> None:
    if world.gateways[fault.target].alive:
        stall(world, fault, world.gateways[fault.target])


def _connection(world: World, fault: Fault) -> Connection | None:
    gateway = world.gateways[fault.target]
    return gateway.connections.get(gateway.member(fault.instance).name) if gateway.alive else None


@fault("stall_link")
def _stall_link(world: World, fault: Fault, random: Random) -> None:
    connection = _connection(world, fault)
    if connection is not None:
        stall(world, fault, connection.wire)


@fault("slow_link")
def _slow_link(world: World, fault: Fault, random: Random) -> None:
    connection = _connection(world, fault)
    if connection is not None:
        connection.slow_down(0.1 * fault.amount)
        world.struck(fault, connection.wire)


@fault("break_link")
def _break_link(world: World, fault: Fault, random: Random) -> None:
    connection = _connection(world, fault)
    if connection is not None:
        _cut(world, fault, random, connection)


def _cut(world: World, fault: Fault, random: Random, connection: Connection) -> None:
    if connection.open:
        world.losses += 1
        world.struck(fault, connection.wire)
        connection.cut()
        gateway = connection.gateway
        world.events.after(0.02 * random.random(), gateway, gateway.disconnected, connection)


@fault("fail_rank")
def _fail_rank(world: World, fault: Fault, random: Random) -> None:
    rank = _rank(world, fault)
    if rank is not None:
        rank.executor.lost = True
        world.struck(fault, rank)


@fault("terminate")
def _terminate(world: World, fault: Fault, random: Random) -> None:
    instance = world.instances[fault.instance]
    if instance.alive:
        instance.excuses.append("the engine was told to leave")
        world.struck(fault, instance.engine)
        instance.engine.terminate()


def _stranger(world: World, engine: EngineProcess, random: Random) -> Connection:
    """Somebody who is no gateway of ours, and reads no answer, connects to the engine."""
    stranger = GatewayProcess(world, 99, 0, random)
    identity = f"stranger.{world.events.fired}".encode()
    connection = Connection(world.events, stranger, engine, identity, random, world.plan.usual_delay)
    engine.connections[identity] = connection
    stranger.alive = False
    return connection


@fault("malformed")
def _malformed(world: World, fault: Fault, random: Random) -> None:
    """Somebody who does not speak the protocol, or speaks it badly, connects to the engine."""
    engine = world.instances[fault.instance].engine
    if not engine.alive or not engine.listening:
        return
    connection = _stranger(world, engine, random)
    sampling = Sampling(seed=1)
    good = TO_ENGINE.encode(Submit(1, "stranger", pack_int32([1, 2]), sampling, Stopping(2)))
    for data in random.sample(
        (
            random.randbytes(random.randint(0, 20)),
            good[: random.randrange(len(good))],
            TO_ENGINE.encode(Submit(2, "stranger", b"", sampling, Stopping(2))),
            TO_ENGINE.encode(Submit(3, "stranger", b"\x01", sampling, Stopping(2))),
            TO_ENGINE.encode(Submit(4, "stranger", pack_int32([1 << 20]), sampling, Stopping(2))),
            TO_ENGINE.encode(Submit(5, "stranger", pack_int32([1]), sampling, Stopping(-1))),
            TO_ENGINE.encode(Cancel(random.randint(0, 60))),
            TO_ENGINE.encode(Query(1, "ledger")),
        ),
        random.randint(1, 6),
    ):
        connection.send_to_engine(data)
    if random.random() < 0.5:
        connection.detach()
    world.struck(fault, engine)


@fault("stale_report")
def _stale_report(world: World, fault: Fault, random: Random) -> None:
    """A report of an epoch that is over arrives once more."""
    engine = world.instances[fault.instance].engine
    books = world.monitor.books(world.instances[fault.instance])
    if not engine.alive or not books.closed:
        return
    slot, epoch = random.choice(books.closed)
    report = StepReport(
        step=1,
        applied=0,
        slots=pack_int32([slot]),
        epochs=pack_int32([epoch]),
        tokens=pack_int32([7]),
        closings=[Closed(slot, epoch, CloseReason.STOP)] if random.random() < 0.5 else [],
    )
    engine.report_arrived(0, REPORTS.encode(report), "stale")
    world.struck(fault, engine)


@fault("corrupt_report")
def _corrupt_report(world: World, fault: Fault, random: Random) -> None:
    engine = world.instances[fault.instance].engine
    if engine.alive:
        world.instances[fault.instance].excuses.append("a report was corrupted")
        world.struck(fault, engine)
        engine.report_arrived(0, b"\xc1" + random.randbytes(4), "corrupt")


@fault("corrupt_output")
def _corrupt_output(world: World, fault: Fault, random: Random) -> None:
    """Bytes that are no message arrive at a gateway."""
    connection = _connection(world, fault)
    if connection is not None:
        world.losses += 1
        world.struck(fault, connection.gateway)
        connection.to_gateway.send(b"\xc1" + random.randbytes(4))


@fault("update_weights")
def _update_weights(world: World, fault: Fault, random: Random) -> None:
    """Somebody orders new weights, which the ranks may refuse."""
    engine = world.instances[fault.instance].engine
    if engine.alive and engine.listening:
        connection = _stranger(world, engine, random)
        directory = random.choice(("good", "good", "bad", ""))
        connection.send_to_engine(TO_ENGINE.encode(Query(1, "update_weights", directory)))
        world.struck(fault, engine)


@fault("new_weights")
def _new_weights(world: World, fault: Fault, random: Random) -> None:
    """An operator gives all instances other weights; one may refuse, or not be able to load them, or lose its
    connection about when it is decided."""
    gateway = world.gateways[fault.target % len(world.gateways)]
    name = random.choice(world.plan.instances).name
    path = f"w{world.events.fired}{random.choice(('', '', '?' + name, '!' + name))}"
    if gateway.alive and gateway.updates.begin(path):
        world.struck(fault, gateway)
        if random.random() < 0.3:
            connection, delay = random.choice(list(gateway.connections.values())), world.plan.usual_delay
            at = world.events.now + random.uniform(0.0, 4.0) * delay
            world.events.at(at, world.people, _cut, world, fault, random, connection)


def _ask(world: World, fault: Fault, what: QueryKind, target: int) -> bool:
    gateway = world.gateways[target % len(world.gateways)]
    if not gateway.query(gateway.member(fault.instance).name, what):
        return False
    world.struck(fault, gateway)
    return True


@fault("pause")
def _pause(world: World, fault: Fault, random: Random) -> None:
    if _ask(world, fault, "pause", 0):
        world.events.after(fault.amount, world.people, resume, world, fault.instance)


@fault("reset_prefix")
def _reset_prefix(world: World, fault: Fault, random: Random) -> None:
    _ask(world, fault, "reset_prefix_cache", 0)


@fault("query")
def _query(world: World, fault: Fault, random: Random) -> None:
    _ask(world, fault, random.choice(("stats", "ledger")), random.randrange(8))
