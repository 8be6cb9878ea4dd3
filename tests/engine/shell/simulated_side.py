"""One engine's links as the simulator makes them, with the interface of `test_peers.Side`."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

from baton.simulation.events import Events, Party
from baton.simulation.wires.peers import Network, Peers
from tests.engine.introductions import introduce

DEADLINE_S = 60.0
"""Virtual seconds."""


class Silent:
    """A monitor that looks at nothing."""

    def __getattr__(self, name):
        return self

    def __call__(self, *_):
        return None


class SimulatedHost:
    """Two machines, or one, and who listens there: what links need of a world."""

    def __init__(self, one_host=True):
        self.plan = SimpleNamespace(usual_delay=0.001, one_host=one_host, instances=range(100))
        self.events = Events()
        self.network = Network(self)
        self.monitor = Silent()
        self._sides = []

    def side(self, name, endpoint=None):
        self._sides.append(SimulatedSide(self, name, len(self._sides), endpoint or f"sim://{name}"))
        return self._sides[-1]

    def random_for(self, name):
        return Random(name)

    def listening(self, endpoint):
        there = [one for one in self._sides if one.alive and one.peers.endpoint == endpoint]
        return there[-1] if there else None

    def message_passed(self, *_):
        """Nobody crashes here."""


class SimulatedSide(Party):
    """In place of an engine's process, and of its core."""

    def __init__(self, host, name, index, endpoint):
        super().__init__(name)
        self.instance = SimpleNamespace(name=name, index=index, secret=b"", world=host)
        self.core = self
        self.peers = Peers(self, Random(name))
        self.peers.endpoint = endpoint
        self.messages, self.lost, self.violations = [], [], []
        self._host = host

    def on_peer(self, peer, message, now):
        self.messages.append((peer, message))

    def peer_lost(self, peer, now, *, dead=False):
        self.lost.append((peer, dead))

    def refused(self, where, count):
        pass

    def violation(self, sender, what):
        self.violations.append((sender, what))

    def wake(self):
        self._host.events.after(2e-5, self, self._turn)

    def _turn(self):
        self.peers.turn(self._host.events.now, 256)

    def send(self, to, message):
        self.peers.send(introduce(to.name, to.peers.endpoint, self.name), message)
        return True

    def until(self, condition, *others, deadline_s=DEADLINE_S):
        """Lets virtual time pass until the condition holds."""
        end = self._host.events.now + deadline_s
        while not condition():
            timer = self._host.events.next()
            assert timer is not None, (self.messages, self.lost, self.violations)
            assert timer.at < end, (self.messages, self.lost, self.violations)
            timer.action(*timer.args)

    def break_link(self, to):
        self.peers.link(to.name).cut()

    def send_raw(self, to, data):
        """What no engine sends."""
        self.peers.link(to.name).send(data)

    def close(self):
        self.alive = False
        self._host.network.died(self)
