"""What goes wrong in a cluster: between instances, with their pages, and by the hands of operators."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from baton.engine.handover.records import TRUST, Stage
from baton.gateway.cluster.member import LABELS
from baton.protocol.messages.handover import PEER, Cancel, Renew, Reserve
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.passes import gateway_key, plan_pass
from baton.simulation.checks.looks import arrivals_of, attempts_of, well
from baton.simulation.faults.kinds import fault, stall
from baton.simulation.parties.worker import RankProcess
from baton.simulation.plans.plan import Fault
from baton.simulation.wires.peers import Stranger

if TYPE_CHECKING:
    from baton.simulation.world import World

_LEAVE_AFTER_S = 0.4


@fault("freeze")
def _freeze(world: World, fault: Fault, random: Random) -> None:
    """A whole instance is stopped, as by SIGSTOP, and goes on later, maybe after its leases."""
    instance = world.instances[fault.instance]
    if not instance.alive:
        return
    instance.excuses.append("the instance was frozen")
    until = min(world.events.now + fault.amount, world.plan.faults_end)
    for party in instance.parties:
        party.stalled_until = max(party.stalled_until, until)
    world.struck(fault, instance.engine)


@fault("break_peer")
def _break_peer(world: World, fault: Fault, random: Random) -> None:
    """The connections between two instances break, in one direction or in both."""
    links = [link for link in world.network.between(fault.instance, fault.target) if not link.broken]
    if links and random.random() < 0.5:
        links = [random.choice(links)]
    for link in links:
        world.struck(fault, link.wire)
        link.cut()


@fault("linger_peer")
def _linger_peer(world: World, fault: Fault, random: Random) -> None:
    """The connections between two instances break, and what was sent on them is read later, maybe after what
    is sent on the next ones."""
    for link in world.network.between(fault.instance, fault.target):
        if link.is_open and not link.broken:
            world.struck(fault, link.wire)
            link.linger(world.events.now + fault.amount)


@fault("stall_peer")
def _stall_peer(world: World, fault: Fault, random: Random) -> None:
    """In one direction or in both."""
    both = random.random() < 0.5
    for link in world.network.between(fault.instance, fault.target):
        if both or link.ends[0] == fault.instance:
            stall(world, fault, link.wire)


@fault("slow_peer")
def _slow_peer(world: World, fault: Fault, random: Random) -> None:
    """`target` -1: all of this instance's connections to others, which are not there yet."""
    world.network.slow_down(fault.instance, fault.target, fault.amount)
    world.struck(fault, world.people)


@fault("partition")
def _partition(world: World, fault: Fault, random: Random) -> None:
    """Nothing passes between two instances for a while; then the connections go on, or are broken."""
    until = min(world.events.now + fault.amount, world.plan.faults_end)
    world.network.partition(fault.instance, fault.target, until)
    world.struck(fault, world.people)
    if random.random() < 0.5:
        world.events.at(until, world.people, _cut_all, world, fault)


def _cut_all(world: World, fault: Fault) -> None:
    for link in world.network.between(fault.instance, fault.target):
        link.cut()


@fault("strange_peer")
def _strange_peer(world: World, fault: Fault, random: Random) -> None:
    """A peer sends what makes no sense, or somebody speaks as a peer whom nobody knows."""
    engine = world.instances[fault.instance].engine
    if not engine.alive or not engine.listening or not engine.core.ready:
        return
    if engine.stalled_until > world.events.now:  # (it reads when it goes on)
        world.events.at(engine.stalled_until, engine, _strange_peer, world, fault, random)
        return
    links = [link for link in world.network.between(fault.instance, -1) if link.target is engine]
    if links and random.random() < 0.5:
        link = random.choice(links)
        if link.is_open and not link.broken:
            world.struck(fault, link.wire)
            link.send(b"\xc1" + random.randbytes(4))
        return
    world.struck(fault, engine)
    number, known = random.randrange(1, 40), world.gateways[0].cluster.name
    source = engine.core._handovers.source if engine.core._handovers else None
    now = engine.local(world.events.now)
    request, proof = 1_000_000 + number, b""
    plans = [
        plan for plan in world.monitor.strangers.passes.plans.items() if plan[0][0] == engine.instance.name
    ]
    if (
        plans and random.random() < 0.7
    ):  # with the word of a gateway that it gave to another one, or for another
        (_, known, request, _), proof = random.choice(plans)
        if random.random() < 0.5:
            proof = plan_pass(gateway_key(engine.instance.secret), known, request + 1, "x.1")
    if source is None or random.random() < 0.3:
        engine.core.on_peer("x.1", Renew(1.0, [(number, 1)]), now)
    else:
        reserve = Reserve(
            number,
            1,
            endpoint="sim://nobody",
            gateway=random.choice((known, known, known, "nobody"))
            if proof
            else random.choice((known, "nobody")),
            request=request,
            name="stranger",
            prompt=random.choice((b"\1\0\0\0" * random.randrange(1, 30), proof and b"\1\0\0\0")),
            generated=b"",
            sampling=Sampling(seed=1),
            stopping=Stopping(3),
            priority=0,
            cache_salt="",
            source=source,
            lease_s=random.choice((0.3, 0.3 if proof else 0.0)),
            plan_pass=proof,
        )
        world.monitor.peer_reads(engine, "x.1", reserve, now)
        engine.core.on_peer("x.1", reserve, now)
        world.monitor.peer_has_read(engine, "x.1", reserve)
    engine.wake()


@fault("strange_link")
def _strange_link(world: World, fault: Fault, random: Random) -> None:
    """Somebody connects as an engine, with what he has seen of its connections elsewhere or made up."""
    engine = world.instances[fault.instance].engine
    if not engine.alive or not engine.listening or not engine.core.ready:
        return
    made_up = random.randbytes(16).hex()
    links = [link for link in world.network.links if link.source is not engine]
    if links and random.random() < 0.8:
        link = random.choice(links)
        peer, number, session, proof = link.routing_id.decode().rsplit("/", 3)
        if link.target is engine:  # the session or the proof is not that of the peer
            number = str(int(number) + random.choice((-1, 0, 1, 5)))
            session, proof = random.choice(((made_up, proof), (session, made_up), (made_up, made_up)))
    else:
        others = [other.name for other in world.instances if other.engine is not engine]
        peer, number, session, proof = random.choice((*others, "x.1")), "1", made_up, made_up
    stranger = Stranger(f"{peer}/{number}/{session}/{proof}".encode(), peer, int(number))
    world.struck(fault, engine)
    message = random.choice((Renew(1.0, [(1, 1)]), Cancel(1, 1, by_p=True), Cancel(1, 1, by_p=False)))
    engine.peers.arrived(stranger, PEER.encode(message))


_SNOOPS = 40


@fault("strange_reader")
def _strange_reader(world: World, fault: Fault, random: Random) -> None:
    """Somebody asks a page server for pages again and again, with tokens that he has seen or made up, and as
    another member than the one for which they were made, or as none."""
    rank = random.choice(world.instances[fault.instance].ranks)
    world.struck(fault, rank)
    _snoop(world, rank, random, [random.randbytes(16)], _SNOOPS)


def _snoop(world: World, rank: RankProcess, random: Random, seen: list[bytes], left: int) -> None:
    seen += [token for token in world.monitor.strangers.grants.tokens(rank) if token not in seen]
    if rank.alive and not world.plan.one_host and rank.transfers.party.stalled_until <= world.events.now:
        page = random.randrange(rank.executor.info.num_blocks)
        members = [one.transfers.source().reader_key for other in world.instances for one in other.ranks]
        rank.transfers.serves(random.choice(seen), random.choice([b"", *members]), (page,))
    if left and world.events.now < world.plan.faults_end:
        world.events.after(0.02 * random.random(), world.people, _snoop, world, rank, random, seen, left - 1)


def _rank(world: World, fault: Fault) -> RankProcess:
    ranks = world.instances[fault.instance].ranks
    return ranks[fault.target % len(ranks)]


@fault("stall_fetch")
def _stall_fetch(world: World, fault: Fault, random: Random) -> None:
    """The transfer thread of a rank does nothing for a while."""
    rank = _rank(world, fault)
    if rank.alive:
        rank.instance.excuses.append("a transfer thread was stalled")
        stall(world, fault, rank.transfers.party)


@fault("lease_edge")
def _lease_edge(world: World, fault: Fault, random: Random) -> None:
    """What D fetches is complete, or D hears of it, within a tenth of the lease around its end; no `Renew`
    arrives meanwhile.  If nothing is fetched now, it is tried again a little later."""
    engine = world.instances[fault.instance].engine
    found = [
        (arrival, source)
        for arrival in (arrivals_of(engine)._arrivals.values() if well(engine) else ())
        if arrival.stage is Stage.FETCHING and arrival.lease_from is not None and arrival.fetches
        and (source := world.engine_of(arrival.peer.incarnation)) is not None
        and well(source) and (arrival.id, arrival.attempt) in attempts_of(source)
    ]  # fmt: skip
    if not found:
        if world.events.now < world.plan.faults_end:
            world.events.after(0.003, world.people, _lease_edge, world, fault, random)
        return
    arrival, source = random.choice(found)
    instance, lease_s = engine.instance, arrival.lease_s
    attempt = attempts_of(source)[arrival.id, arrival.attempt]
    ends_here = engine.global_time(arrival.lease_from + TRUST * lease_s)
    ends_there = source.global_time(attempt.lease.until if attempt.lease else 0.0)
    part = 0.01 * lease_s
    until = random.choice(
        (
            random.uniform(ends_here - 10 * part, ends_here),
            random.uniform(ends_here, ends_there),
            random.uniform(ends_there, ends_there + 2 * part),
            random.uniform(ends_there, ends_there + 10 * part),
        )
    )
    for link in world.network.between(instance.index, source.instance.index):
        link.wire.stalled_until = max(link.wire.stalled_until, ends_there + 0.2 * lease_s)
    parties = [rank.transfers.party for rank in instance.ranks] if random.random() < 0.5 else [engine]
    for party in parties:
        party.stalled_until = max(party.stalled_until, until)
    instance.excuses.append("it was stalled until its lease ended")
    world.struck(fault, engine)


@fault("slow_fetch")
def _slow_fetch(world: World, fault: Fault, random: Random) -> None:
    rank = _rank(world, fault)
    rank.transfers.transport.extra_s = 0.1 * fault.amount
    world.struck(fault, rank)


@fault("fail_fetch")
def _fail_fetch(world: World, fault: Fault, random: Random) -> None:
    rank = _rank(world, fault)
    rank.transfers.transport.failing = True
    world.struck(fault, rank)


@fault("relabel")
def _relabel(world: World, fault: Fault, random: Random) -> None:
    """An operator gives an instance another label; what runs goes on as planned."""
    label = random.choice(LABELS)
    world.labels[fault.instance] = label
    name = world.plan.instances[fault.instance].name
    world.struck(fault, world.people)
    for gateway in world.gateways:
        if gateway.alive:
            gateway.relabel(name, label)


@fault("drain")
def _drain(world: World, fault: Fault, random: Random) -> None:
    """An operator has an instance leave: it drains, then it is told to end, and a new one takes part."""
    instance = world.instances[fault.instance]
    if not instance.alive:
        return
    move_after = random.choice((None, 0.0, 0.1))
    world.struck(fault, world.people)
    for gateway in world.gateways:
        if gateway.alive:
            gateway.drain(instance.member, move_after)
    world.events.after(_LEAVE_AFTER_S * random.random(), world.people, _leave, world, fault.instance)


def _leave(world: World, index: int) -> None:
    instance = world.instances[index]
    if instance.alive:
        instance.excuses.append("the engine was told to leave")
        instance.engine.terminate()
    world.events.after(0.2, world.people, _undrain, world, index)


def _undrain(world: World, index: int) -> None:
    name = world.plan.instances[index].name
    for gateway in world.gateways:
        if gateway.alive and gateway.cluster.members[name].draining:
            gateway.undrain(name)
