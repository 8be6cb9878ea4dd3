"""Who starts processes and sees them die: instances again after half a second, gateways after less."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from baton.simulation.events import Party
from baton.simulation.parties.gateway import GatewayProcess
from baton.simulation.parties.hosts import LinkProcess
from baton.simulation.parties.instance import EngineProcess, Instance
from baton.simulation.parties.worker import RankProcess

if TYPE_CHECKING:
    from baton.simulation.world import World

_RESTART_S = 0.5


class Supervisor(Party):
    """Of all processes of a run."""

    def __init__(self, world: World) -> None:
        super().__init__("supervisor")
        self._world = world
        self._events = world.events
        self._random = world.random_for("world")
        self._starts: Counter[str] = Counter()

    # -- starting

    def new_instance(self, index: int) -> Instance:
        """The next incarnation of an instance."""
        member = self._world.plan.instances[index].name
        self._starts[member] += 1
        start = self._starts[member]
        instance = Instance(self._world, index, start, self._world.random_for(f"{member}.{start}"))
        self._world.know(instance)
        return instance

    def new_gateway(self, number: int) -> GatewayProcess:
        name = f"gateway{number}"
        self._starts[name] += 1
        start = self._starts[name]
        return GatewayProcess(self._world, number, start, self._world.random_for(f"{name}.{start}"))

    def start(self, instance: Instance) -> None:
        """Processes, and gateways that connect to them."""
        world = self._world
        if instance.link is not None:
            instance.link.wake()
        random = world.random_for(f"start {instance.name}")
        world.note(self, f"starts {instance.name}")
        engine = instance.engine
        self._events.after(0.02 * random.random(), engine, engine.listen)
        for rank in instance.ranks_here:
            self._events.after(0.01 + 0.1 * random.random(), rank, rank.load)
        for gateway in world.gateways:
            self._events.after(0.0, gateway, gateway.attach, instance)
        instance.registrar.start()

    # -- dying

    def kill(self, party: Party) -> None:
        """A process is killed."""
        self._world.crashes += 1
        if isinstance(party, EngineProcess):
            party.instance.excuses.append("the engine was killed")
            self.instance_gone(party.instance, "the engine process was killed by SIGKILL")
        elif isinstance(party, RankProcess):
            self._world.crashes -= 1
            self.rank_died(party, "was killed by SIGKILL")
        elif isinstance(party, GatewayProcess):
            self.gateway_ends(party)

    def gateway_ends(self, gateway: GatewayProcess) -> None:
        """Its process is gone: another one takes its place."""
        gateway.die()
        self._events.after(0.1 + 0.2 * self._random.random(), self, self._restart_gateway, gateway)

    def rank_died(self, rank: RankProcess, how: str) -> None:
        """A rank is gone: its engine will notice."""
        self._world.crashes += 1
        rank.die()
        engine = rank.instance.engine
        rank.instance.excuses.append(f"rank {rank.rank} {how}")
        self._world.note(rank, how)
        text = f"worker rank {rank.rank} {how}"
        if rank.relay is not None:
            relay = rank.relay
            self._events.after(0.001 * self._random.random(), relay, relay.rank_died, rank.rank, text)
            return
        self._events.after(0.001 * self._random.random(), engine, engine.rank_died, text)

    def link_ended(self, link: LinkProcess, how: str) -> None:
        """What stands for the ranks of other hosts is gone: the engine sees that as a rank's end."""
        engine = link.instance.engine
        link.die()
        self._world.note(link, f"ends: {how}")
        text = f"the link {how}"
        self._events.after(0.001 * self._random.random(), engine, engine.rank_died, text)

    def instance_gone(self, instance: Instance, reason: str) -> None:
        """The engine has ended, and with it the instance."""
        if not instance.alive:
            return
        self._world.losses += 1
        self._world.collect(instance)
        instance.die()
        self._events.after(0.06 * self._random.random(), self, self._notice, instance, reason)

    # -- starting again

    def _notice(self, instance: Instance, reason: str) -> None:
        self._world.note(self, f"sees that {instance.name} is gone: {reason}")
        for gateway in self._world.gateways:
            self._events.after(0.0, gateway, gateway.lost, instance.member, reason)
        self._events.after(_RESTART_S, self, self._restart, instance.index)

    def _restart(self, index: int) -> None:
        instance = self._world.instances[index] = self.new_instance(index)
        self.start(instance)

    def _restart_gateway(self, old: GatewayProcess) -> None:
        gateway = self._world.gateways[old.number] = self.new_gateway(old.number)
        self._world.note(self, f"starts {gateway.name} again as {gateway.cluster.name}")
        for instance in self._world.instances:
            if instance.alive:
                self._events.after(0.0, gateway, gateway.attach, instance)
                instance.registrar.register(gateway)
