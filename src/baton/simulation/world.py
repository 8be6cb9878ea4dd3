"""A whole cluster in one thread: instances, a supervisor, gateways, clients, and what goes wrong.

Theory.  `World(plan).run()` schedules the plan's requests and faults, then fires timers until none is left.
What a fault does to whom stands in `single.py` and `cluster.py`.  Faults stop at `plan.faults_end`:
stalls end, partitions heal, a pause is resumed, what drains takes part again, crashes no longer happen, and
the supervisor (`supervisor.py`) starts again what is down.  From then on somebody must get something at least
every `PATIENCE_S` virtual seconds, until every client has its answer and nothing is left to happen at all;
then nothing may be held.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from baton.gateway.cluster.member import Label
from baton.protocol.messages.handover import PoolSource
from baton.protocol.weights import Weights
from baton.simulation.checks.explain import explain
from baton.simulation.checks.monitor import Monitor, Violation
from baton.simulation.describe import number_in
from baton.simulation.events import Events, Party
from baton.simulation.faults import cluster_kinds, gateway_kinds, host_kinds  # noqa: F401  (for FAULTS)
from baton.simulation.faults.kinds import see_that_it_runs, strike
from baton.simulation.parties.client import Client
from baton.simulation.parties.instance import EngineProcess, Instance
from baton.simulation.parties.new_weights import check_weights
from baton.simulation.parties.registrar import check_found
from baton.simulation.parties.relay import OtherHosts
from baton.simulation.parties.supervisor import Supervisor
from baton.simulation.parties.worker import RankProcess
from baton.simulation.plans.plan import Fault, RunPlan
from baton.simulation.timeline import Timeline, logs_told
from baton.simulation.wires.peers import Network

PATIENCE_S = 5.0
"""Virtual seconds without any progress, after the faults stopped, that are a failure."""
LIMIT_S = 120.0
"""Virtual seconds after which a run must be over."""
COUNTED = (
    "departures",
    "reserved",
    "credits",
    "handed",
    "taken",
    "returned",
    "lost",
    "arrivals",
    "credits_given",
    "arrived",
    "seated",
    "fetches",
    "fetch_errors",
)
"""Of the engines' counters of hand-overs, besides those by reason."""
_LOG = Party("log")


class Crashed(BaseException):
    """The process that handles this event is dead: nothing more of it happens.

    Not an `Exception`, so that no production code can survive it.
    """


@dataclass
class Outcome:
    """What a run did."""

    seed: int
    violation: Violation | None = None
    events: int = 0
    virtual_seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    crashes: int = 0
    continued: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    handovers: Counter[str] = field(default_factory=Counter)
    """What engines counted of them."""


class World:
    """One run of one plan.  `recording`: keep a timeline (slower)."""

    def __init__(self, plan: RunPlan, *, recording: bool = False) -> None:
        self.plan = plan
        self.recording = recording
        self.timeline = Timeline()
        self.events = Events()
        self.monitor = Monitor(self)
        self.people = Party("operator")
        self.losses = 0
        """How often an instance or a connection was lost."""
        self.steps = 0
        self.continued = 0
        """How often a request went on elsewhere with tokens that it had."""
        self.crashes = 0
        self.preemptions = 0
        self.faults: Counter[str] = Counter()
        self.handovers: Counter[str] = Counter()
        self._collected: set[str] = set()
        self.last_log = ""
        self._messages: Counter[tuple[str, int]] = Counter()
        self._crash_points = {
            (*_who_crashes(fault), int(fault.amount))
            for fault in plan.faults
            if fault.kind.startswith("crash_")
        }
        self.labels: list[Label] = list(plan.labels)
        """What operators have made of the instances so far."""
        self.decided: list[Weights] = []
        """All that gateways have ever decided that instances have."""
        self.network = Network(self)
        self._engines: dict[str, EngineProcess] = {}
        self.supervisor = Supervisor(self)
        self.gateways = [self.supervisor.new_gateway(number) for number in range(plan.num_gateways)]
        self.hosts = OtherHosts(self)
        self.instances = [self.supervisor.new_instance(index) for index in range(len(plan.instances))]
        self.clients = [Client(self, spec) for spec in plan.requests]
        self._by_number = {client.spec.number: client for client in self.clients}
        self.open_clients = len(self.clients)
        self.over = False
        """Nobody is left who asks: nothing new is begun."""
        self._last_progress = 0.0
        self._seen_progress = (0, 0)
        self._next_look = 0.0
        self._running_since: dict[tuple[str, int, int, int], float] = {}

    @property
    def newest_weights(self) -> Weights:
        """What an instance that is started now loads."""
        return max(self.decided, key=lambda weights: (weights.generation, weights.name), default=Weights())

    @property
    def nobody_waits(self) -> bool:
        """The faults are over, all clients have their answers, and all instances and their hosts are well."""
        calm = not self.open_clients and self.events.now > self.plan.faults_end
        ready = calm and all(one.alive and one.engine.core.ready for one in self.instances)
        return ready and self.hosts.all_take_part()

    # -- what the parties use

    def draw_rate(self, random: Random) -> float:
        """How fast a process's clock runs."""
        if self.plan.extreme_clocks:
            return 1.0 + self.plan.drift * random.choice((-0.5, 0.5))
        return 1.0 + self.plan.drift * (random.random() - 0.5)

    def random_for(self, name: str) -> Random:
        """A generator that depends on the plan's seed and the name alone."""
        return Random(f"{self.plan.seed}/{self.plan.delays}/{name}")

    def note(self, party: Party, text: str, request: int | None = None, phase: str = "i") -> None:
        """A line of the timeline."""
        if self.recording:
            self.timeline.add(self.events.now, party.name, text, request, phase)

    def message_passed(self, kind: str, number: int, party: Party) -> None:
        """A process is about to send or to handle a message: the moment at which it may crash."""
        if not self._crash_points:
            return
        key = (kind, number)
        self._messages[key] += 1
        point = (kind, number, self._messages[key])
        if point in self._crash_points and self.events.now < self.plan.faults_end:
            self._crash_points.discard(point)
            self.faults[f"crash_{kind.split()[0]}"] += 1
            self.note(party, f"CRASHES at its message {self._messages[key]}")
            self.supervisor.kill(party)
            raise Crashed

    def know(self, instance: Instance) -> None:
        """A new incarnation."""
        self._engines[instance.name] = instance.engine

    def engine_of(self, incarnation: str) -> EngineProcess | None:
        return self._engines.get(incarnation)

    def listening(self, endpoint: str) -> EngineProcess | None:
        """Who listens there for other engines; None: nobody does."""
        engine = self._engines.get(endpoint.removeprefix("sim://"))
        return engine if engine is not None and engine.alive and engine.listening else None

    def rank_of(self, source: PoolSource) -> RankProcess | None:
        """Whose pool it is, dead or alive."""
        incarnation, _, rank = source.shared_memory.rpartition("/")
        engine = self._engines.get(incarnation)
        return None if engine is None else engine.instance.ranks[int(rank)]

    def client(self, number: int) -> Client:
        """Whose request has this number.  (A plan that was made smaller has gaps.)"""
        return self._by_number[number]

    def struck(self, fault: Fault, party: Party) -> None:
        """A fault has happened to somebody."""
        self.faults[fault.kind] += 1
        self.note(party, f"FAULT {fault}")

    def collect(self, instance: Instance) -> None:
        """What an incarnation has counted, once."""
        if instance.name in self._collected:
            return
        self._collected.add(instance.name)
        counters = instance.engine.core.counters
        self.preemptions += counters.preemptions
        for name, value in vars(counters.handovers).items():
            if isinstance(value, Counter):
                self.handovers.update({f"{name}: {why}": count for why, count in value.items()})
            elif name in COUNTED:
                self.handovers[name] += value

    def engine_left(self, engine: EngineProcess) -> None:
        """The engine ends by itself: it has failed, or was told to."""
        instance, reason = engine.instance, engine.core.failure
        self.monitor.relay.failed(instance, reason)
        if reason is not None and not instance.excuses:
            raise Violation("failure", f"{instance.name} failed though nothing was done to it: {reason}")
        self.note(engine, f"leaves: {reason or 'it was told to'}")
        self.supervisor.instance_gone(instance, reason or "the engine process exited with status 0")

    # -- the run

    def run(self) -> Outcome:
        """Until nothing is left to happen, or a rule is broken."""
        outcome = self.run_until(math.inf)
        assert outcome is not None
        return outcome

    def run_until(self, until: float, give_up: Callable[[], bool] | None = None) -> Outcome | None:
        """None: neither was so when it came to virtual time `until`, or when `give_up` said so."""
        outcome = Outcome(self.plan.seed)
        with logs_told(self._hear_log, logging.INFO if self.recording else logging.ERROR):
            try:
                self._begin()
                if not self._loop(until, give_up):
                    return None
                self._check_end()
            except Violation as violation:
                outcome.violation = violation
                self.note(self.people, f"VIOLATION {violation}")
        for instance in self.instances:
            self.collect(instance)
        outcome.events = self.events.fired
        outcome.virtual_seconds = self.events.now
        outcome.steps, outcome.continued, outcome.crashes = self.steps, self.continued, self.crashes
        outcome.preemptions, outcome.faults = self.preemptions, self.faults
        outcome.handovers = +self.handovers
        outcome.answers = Counter(client.answer or "none" for client in self.clients)
        return outcome

    def _begin(self) -> None:
        for client in self.clients:
            self.events.at(client.spec.at, client, client.arrive)
        for fault in self.plan.faults:
            if not fault.kind.startswith("crash_"):
                self.events.at(fault.at, self.people, strike, self, fault)
        self.events.at(self.plan.faults_end, self.people, self._calm)
        for instance in self.instances:
            self.supervisor.start(instance)
        self.hosts.begin()

    def _loop(self, until: float, give_up: Callable[[], bool] | None) -> bool:
        """False: it was not run to its end."""
        events, faults_end = self.events, self.plan.faults_end
        registered = self.plan.ttl_s is not None
        while (timer := events.next()) is not None:
            if events.now > until or (give_up is not None and events.fired % 256 == 0 and give_up()):
                return False
            try:
                timer.action(*timer.args)
            except Crashed:
                continue
            except Violation:
                raise
            except Exception as error:
                where = error.__traceback__
                while where is not None and where.tb_next is not None:
                    where = where.tb_next
                file = where.tb_frame.f_code.co_filename.rsplit("/", 2)[-1] if where else ""
                line = f"{file}:{where.tb_lineno}" if where else ""
                raise Violation(
                    "crash", f"{timer.owner.name}: {type(error).__name__}: {error} ({line})"
                ) from error
            if registered:
                check_found(self)
            if events.now > faults_end:
                self._check_progress()
        return True

    def _end_registrations(self) -> None:
        """Every client has its answer: renewals need not go on for ever."""
        self.over = True
        for gateway in self.gateways:
            gateway.cluster.renew_no_more()
            if gateway.alive:  # (one that crashed just now is replaced later)
                gateway.pump()

    def _check_progress(self) -> None:
        if not (self.over or self.open_clients) and self.plan.ttl_s is not None:
            self._end_registrations()
        progress = (self.open_clients, self.steps)
        now = self.events.now
        if progress != self._seen_progress:
            self._seen_progress = progress
            self._last_progress = now
        elif now - self._last_progress > PATIENCE_S and self.open_clients:
            raise Violation(
                "liveness",
                f"nothing has moved for {now - self._last_progress:.1f} virtual seconds: {explain(self)}",
            )
        if now > self._next_look:
            self._next_look = now + 1.0
            self._look_at_running()
        if now > LIMIT_S:
            raise Violation(
                "liveness", f"the run is not over after {LIMIT_S:.0f} virtual seconds: {explain(self)}"
            )

    def _look_at_running(self) -> None:
        """Once a second: a request that runs gets a token in time, however well the others do."""
        running = set()
        for instance in self.instances:
            running |= self._look_at_slots(instance)
        self._running_since = {key: at for key, at in self._running_since.items() if key in running}

    def _look_at_slots(self, instance: Instance) -> set[tuple[str, int, int, int]]:
        core = instance.engine.core
        running: set[tuple[str, int, int, int]] = set()
        if not core.ready:
            return running
        for request in core.scheduler.slots:
            number = None if request is None else number_in(request.name)
            if request is None or number is None:
                continue
            key = (instance.name, number, len(request.tokens), request.num_preemptions)
            running.add(key)
            since = self._running_since.setdefault(key, self.events.now)
            if self.events.now - since > PATIENCE_S:
                raise Violation(
                    "liveness",
                    f"request {number} is {request.state.value} without a token for "
                    f"{self.events.now - since:.1f} virtual seconds: {explain(self)}",
                )
        return running

    def _check_end(self) -> None:
        check_weights(self)
        if self.open_clients:
            raise Violation("liveness", f"nothing is left to happen: {explain(self)}")
        for instance in self.instances:
            if not instance.alive or not instance.engine.core.ready:
                raise Violation("liveness", f"{instance.name} is not running at the end")
            self.monitor.check_end(instance, self.gateways)

    # -- the end of the faults

    def _calm(self) -> None:
        """The faults are over; an operator sees to it that nothing stays paused."""
        self.note(self.people, "THE FAULTS ARE OVER")
        self._crash_points.clear()
        self.network.heal()
        self.hosts.heal()
        for gateway in self.gateways:
            for connection in gateway.connections.values():
                connection.slow_down(0.0)
            for index in range(len(self.instances)):
                if gateway.alive and gateway.member(index).draining:
                    gateway.undrain(gateway.member(index).name)
        self._last_progress = self.events.now
        for index in range(len(self.instances)):
            see_that_it_runs(self, index)

    def _hear_log(self, level: str, message: str) -> None:
        self.last_log = message
        self.note(_LOG, f"{level}: {message}")


def _who_crashes(fault: Fault) -> tuple[str, int]:
    """As `World.message_passed` is told."""
    kind = fault.kind.removeprefix("crash_")
    if kind == "rank":
        return f"rank of {fault.instance}", fault.target
    return kind, fault.instance if kind == "engine" else fault.target
