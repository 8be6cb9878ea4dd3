"""Ordered channels that delay, stall and break.

A `Channel` carries what one party sends another, in order, each message after a random delay.  It can stall
(everything arrives later, still in order) and break (what is on its way is lost).  A `Connection` is two of
them between a gateway and an engine, known to the engine by an identity that is never used again, as with a
ZeroMQ ROUTER: what is sent to an identity that is gone is not lost silently, the sender is told.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from baton.simulation.events import Events, Party

if TYPE_CHECKING:
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.parties.instance import EngineProcess


class Delays:
    """Seconds on the way: at least `least`, usually around `usual`, now and then much more."""

    __slots__ = ("_least", "_random", "_span", "_tail", "extra")

    def __init__(self, random: Random, least: float, usual: float, tail: float = 0.02) -> None:
        self._random = random.random
        self._least = least
        self._span = usual
        self._tail = tail
        """How likely a message takes ten times as long."""

        self.extra = 0.0
        """What a slow link adds to each message."""

    def next(self) -> float:
        x = self._random()
        if x < self._tail:
            return self._least + self.extra + 10.0 * self._span
        return self._least + self.extra + x * self._span


class Channel:
    """One direction.  `deliver` is called with each message when it arrives."""

    __slots__ = ("_delays", "_deliver", "_events", "_free", "_wire", "in_flight")

    def __init__(self, events: Events, wire: Party, delays: Delays, deliver: Callable[[Any], None]) -> None:
        self._events = events
        self._wire = wire
        """The party that stalls when the network does, and dies when the channel breaks."""
        self._delays = delays
        self._deliver = deliver
        self._free = 0.0
        self.in_flight = 0

    def send(self, message: Any) -> float:
        """Returns when it will arrive if nothing stalls."""
        at = max(self._events.now + self._delays.next(), self._free)
        self._free = at
        self.in_flight += 1
        self._events.at(at, self._wire, self._arrive, message)
        return at

    def _arrive(self, message: Any) -> None:
        self.in_flight -= 1
        self._deliver(message)


class Connection:
    """Between a gateway and one incarnation's engine.

    What the gateway sends before the engine listens waits in the gateway's socket, as ZeroMQ has it.
    """

    def __init__(
        self,
        events: Events,
        gateway: GatewayProcess,
        engine: EngineProcess,
        identity: bytes,
        random: Random,
        usual: float,
    ) -> None:
        self.gateway = gateway
        self.engine = engine
        self.identity = identity
        self.wire = Party(f"{gateway.name}–{engine.name}")
        self.open = True
        """The engine can still send to this identity."""
        self.attached = True
        """The gateway still reads from it."""
        self._events = events
        self._delays = Delays(random, 0.0001, usual)
        self.to_engine = Channel(events, self.wire, self._delays, self._at_engine)
        self.to_gateway = Channel(events, self.wire, self._delays, self._at_gateway)
        self._unsent: list[bytes] | None = None if engine.listening else []

    def send_to_engine(self, data: bytes) -> None:
        if self._unsent is not None:
            self._unsent.append(data)
        elif self.open:
            self.to_engine.send(data)

    def send_to_gateway(self, data: bytes) -> bool:
        """False: nobody is there any more."""
        if not self.open:
            return False
        self.to_gateway.send(data)
        return True

    def connected(self) -> None:
        """The engine listens: what waited is sent."""
        waiting, self._unsent = self._unsent or [], None
        if self.attached:
            for data in waiting:
                self.to_engine.send(data)

    def detach(self) -> None:
        """The gateway has closed its end: nothing arrives there any more, and the engine cannot send."""
        self.attached = False
        self.open = False

    def cut(self) -> None:
        """The connection breaks: what is on its way is lost, in both directions."""
        self.wire.alive = False
        self.open = False

    def ended(self) -> None:
        """The engine's kernel sees the end, after what was sent before it."""
        if self.wire.alive and self.to_engine.in_flight:
            self._events.after(0.001, self.engine, self.ended)
        else:
            self.engine.connection_ended(self)

    def slow_down(self, extra: float) -> None:
        """Every message takes `extra` seconds more from now on; 0: as before."""
        self._delays.extra = extra

    def _at_engine(self, data: bytes) -> None:
        if self.engine.alive:
            self.engine.message_arrived(self, data)

    def _at_gateway(self, data: bytes) -> None:
        gateway = self.gateway
        if gateway.stalled_until > self._events.now:
            self._events.at(gateway.stalled_until, gateway, gateway.message_arrived, self, data)
        elif self.attached and gateway.alive:
            gateway.message_arrived(self, data)
