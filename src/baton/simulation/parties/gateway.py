"""A gateway process: the production cluster and its connections, and the clients behind it.

The cluster (`Cluster` with its members, routing and table of requests), the requests and the inboxes are
those of production; what is virtual are the sockets below and the HTTP clients above.  What
`cluster_client.py` and `instance_client.py` do around the cluster is done here: a connection for each
instance, attached by the supervisor, closed when the instance fails, and opened again when it alone was at
fault.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from baton.gateway.arranging.arranger import Arranger
from baton.gateway.cluster.cluster import Cluster
from baton.gateway.cluster.member import Label, Member
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import ApiError
from baton.protocol.codec import MalformedMessage
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Load, QueryKind
from baton.simulation.events import Party, Timer
from baton.simulation.parties.client import Client
from baton.simulation.parties.new_weights import WeightsUpdates
from baton.simulation.parties.registrar import check_lost
from baton.simulation.plans.plan import RETRY_WAIT_S
from baton.simulation.wires.network import Connection

if TYPE_CHECKING:
    from baton.simulation.parties.instance import Instance
    from baton.simulation.world import World


class GatewayProcess(Party):
    """One start of a gateway process."""

    def __init__(self, world: World, number: int, start: int, random: Random) -> None:
        super().__init__(f"gateway{number}", world.draw_rate(random), random.uniform(0, 1e4))
        self.number = number
        self.cluster = Cluster(
            f"g{number}.{start}",
            retry_wait_s=RETRY_WAIT_S,
            disaggregation_threshold=world.plan.threshold,
        )
        joined = world.plan.ttl_s is not None
        for config, label in zip(world.plan.instances, world.labels, strict=True):
            self.cluster.add(config.name, label, joined=joined)
        if world.plan.arranging is not None:
            self.cluster.roles.arrange(Arranger(world.plan.arranging))
        self.heard: dict[str, Any] = {}
        """By instance: what its registrar has sent (`registrar.py`)."""
        self.updates = WeightsUpdates(world, self)
        self.leaving = False
        """It was told to leave: clients go to others, if there are any."""
        self.clients: dict[EngineRequest, Client] = {}
        self.connections: dict[str, Connection] = {}
        """By the instance's name."""
        self._world = world
        self._events = world.events
        self._random = random
        self._num_connections = 0
        self._timer: Timer | None = None

    def member(self, index: int) -> Member:
        """The instance at a place of the plan."""
        return self.cluster.members[self._world.plan.instances[index].name]

    # -- what the supervisor and the network do

    def attach(self, instance: Instance) -> None:
        """Connects to an incarnation, which may not listen yet."""
        self._close(instance.member)
        self._num_connections += 1
        identity = f"{self.cluster.name}.{self._num_connections}".encode()
        connection = Connection(
            self._events, self, instance.engine, identity, self._random, self._world.plan.usual_delay
        )
        self.connections[instance.member] = instance.engine.connections[identity] = connection
        self._world.note(self, f"connects to {instance.name} as {identity.decode()}")
        self.cluster.attach(instance.member, instance.name, self.now())
        self.pump()

    def lost(self, name: str, reason: str) -> None:
        """The supervisor says that the instance is gone; it may have said why itself."""
        reason = self.cluster.members[name].failure or reason
        self._world.note(self, f"is told of {name}: {reason}")
        self._close(name)
        self.cluster.lost(name, reason, self.now())
        self.pump()

    def disconnected(self, connection: Connection) -> None:
        """The socket noticed that its connection broke: nothing that was in flight will be answered."""
        instance = connection.engine.instance
        if self.connections.get(instance.member) is not connection:
            return
        self._world.note(self, f"notices that its connection to {instance.name} broke")
        self.lost(instance.member, "the connection to the instance broke")
        if instance.alive:
            self.attach(instance)

    def _connect_again(self, instance: Instance) -> None:
        if instance.member not in self.connections and instance.alive:
            self.attach(instance)

    def renewed(self, instance: Instance, ttl_s: float) -> None:
        """An instance says over HTTP that it lives."""
        name = instance.member
        if self._world.over:
            return
        if name not in self.cluster.members:
            self.cluster.add(name, self._world.labels[instance.index], joined=True)
        self.cluster.renew(name, ttl_s, self.now())
        self._connect_again(instance)
        self.pump()

    def message_arrived(self, connection: Connection, data: bytes) -> None:
        world, instance = self._world, connection.engine.instance
        name = instance.member
        world.message_passed("gateway", self.number, self)
        if self.connections.get(name) is not connection:
            return
        try:
            message = FROM_ENGINE.decode(data)
            world.monitor.gateway_reads(self, instance, message)
            self.cluster.receive(name, message, self.now())
            if isinstance(message, Load) and name in self.cluster.members:
                world.timeline.steps[self, name] = self.cluster.members[name].steps
        except MalformedMessage as error:
            self.lost(name, f"a message of the instance could not be read: {error}")
            self._events.after(0.1, self, self._connect_again, instance)
            return
        if self.cluster.members[name].failure is not None:  # it said that it is failing
            self._close(name)
        self.pump()

    def die(self) -> None:
        """The process ends: its sockets close, its clients see their connections break."""
        self.alive = False
        for name in list(self.connections):
            self._close(name)
        for client in list(self.clients.values()):
            client.connection_lost()

    # -- what an operator does

    def query(self, name: str, what: QueryKind) -> bool:
        """Somebody asks an instance something; the answer is noted.  False: it is not ready, or not known."""
        member = self.cluster.members.get(name)
        if not self.alive or member is None or member.state != "ready":
            return False
        self.cluster.query(name, what, self._answered)
        self.pump()
        return True

    def relabel(self, name: str, label: Label) -> None:
        self.cluster.set_label(name, label, self.now())
        self.pump()

    def drain(self, name: str, move_after_s: float | None) -> None:
        self.cluster.drain(name, self.now(), move_after_s)
        self.pump()

    def undrain(self, name: str) -> None:
        self.cluster.undrain(name, self.now())
        self.pump()

    # -- inside

    def pump(self) -> None:
        """Sends what is to be sent and sets the timer, as the shell does after every call."""
        world = self._world
        self.updates.settle()
        for name, message in self.cluster.take_outgoing():
            world.message_passed("gateway", self.number, self)
            connection = self.connections.get(name)
            if connection is not None:
                world.monitor.gateway_sends(self, name, message)
                connection.send_to_engine(TO_ENGINE.encode(message))
        self._arm()
        world.monitor.after_gateway(self)

    def now(self) -> float:
        """What its own clock shows."""
        return self.local(self._events.now)

    def _arm(self) -> None:
        deadline = self.cluster.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._timer.at <= self.global_time(deadline) + 1e-9:
                return  # (it goes off too early once, and is set again)
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._events.at(self.global_time(deadline) + 1e-9, self, self._on_timer)

    def _answered(self, answer: dict[str, Any] | ApiError) -> None:
        self._world.monitor.clients.query_answered(self, answer)

    def _on_timer(self) -> None:
        self._timer = None
        cluster = self.cluster
        waiting = [member for member in cluster.members.values() if member.lease is not None]
        cluster.on_clock(self.now())
        for member in waiting:
            if member.lease is None and not self._world.over:
                check_lost(self._world, self, member.name)
                self._world.losses += 1
                self._world.note(self, f"gives {member.name} up: {member.failure}")
                self._close(member.name)
        for name in [name for name in self.connections if name not in cluster.members]:
            self._close(name)
        self.pump()

    def _close(self, name: str) -> None:
        connection = self.connections.pop(name, None)
        if connection is not None:
            connection.detach()
            if self._world.plan.notices:
                self._events.after(0.02 * self._random.random(), connection.engine, connection.ended)
                self._world.monitor.standing.closed(connection)


__all__ = ["Client", "GatewayProcess"]
