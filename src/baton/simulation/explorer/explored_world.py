"""A small world: what can happen in a scenario of the explorer, and what follows from it.

Theory.  A state is what every party is and what is on the way between them, in four queues:

    clients ──inbox──► engine ──log──► worker ──reports──► engine ──outputs──► clients

An action moves one party: the engine reads one message, reads one report, or decides and sends (so turns of
every composition occur); the worker runs a round that finds any number of the records on the way; the gateway
reads one message; a client hangs up; somebody dies, and the others find out.  Whatever an order or a delay
could change is a choice between actions.

One saving that cannot hide anything: when no client can do anything but read, and nobody can die, outputs are
read at once, as nothing but the reader depends on when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from baton.protocol.codec import unpack_int32
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import COMMANDS, Admit
from baton.protocol.messages.reports import REPORTS, StepReport
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Outputs
from baton.simulation import describe
from baton.simulation.explorer.explored import Engine, Worker, check_pair
from baton.simulation.explorer.explored_gateway import Gateway
from baton.simulation.explorer.machines import Broken, Machines, Messages
from baton.simulation.explorer.scenarios import Scenario
from baton.simulation.plans.plan import simulated_config

DEAD = -1
VOCAB = 50
NAMES = "ABCDEFGH"

Action = tuple[str, int]


class State(NamedTuple):
    """Parties and messages by number."""

    engine: int
    worker: int
    gateway: int
    inbox: tuple[int, ...]
    log: tuple[int, ...]
    reports: tuple[int, ...]
    outputs: tuple[int, ...]
    crash: bool
    """The scenario's crash can still happen."""


def explored_config(scenario: Scenario) -> InstanceConfig:
    """Of an instance of this scenario."""
    return simulated_config(
        vocab_size=VOCAB,
        tensor_parallel_size=1,
        max_model_len=16,
        block_size=scenario.block_size,
        num_blocks=scenario.num_blocks,
        max_num_seqs=scenario.num_slots,
        max_num_batched_tokens=scenario.step_tokens,
        auto_step_tokens=False,
        max_waiting=8,
        load_interval_s=0.0,
        admission_headroom=0,
        enable_prefix_caching=scenario.prefix_caching,
        step_timeout_s=120.0,
        max_preparing=64,
        lease_s=10.0,
    )


class SmallWorld:
    """One scenario: its states and actions."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._config = explored_config(scenario)
        self._engines, self._workers, self._gateways = Machines(), Machines(), Machines()
        self._messages = Messages()
        self._pairs: set[tuple[int, int]] = set()
        self._greetings = {name: self._greet(name) for name in ("i1", "i2")}
        self._fresh_worker = self._workers.add(Worker(self._config))

    def _greet(self, incarnation: str) -> tuple[int, bytes]:
        """A new engine that has welcomed the gateway, and its `Welcome`."""
        gateway = Gateway(self._config, (), ())
        gateway.connect(incarnation)
        engine = Engine(self._config, incarnation, self._scenario.block_size)
        for message in gateway.take_outgoing():
            engine.message(message)
        _, (welcome,), _ = engine.flush(True)
        return self._engines.add(engine), welcome

    def initial(self) -> State:
        scenario = self._scenario
        engine, welcome = self._greetings["i1"]
        gateway = Gateway(self._config, scenario.asks, scenario.queries)
        gateway.connect("i1")
        gateway.take_outgoing()
        gateway.receive(welcome)
        gateway.submit_all()
        inbox = self._messages.add(gateway.take_outgoing())
        number = self._gateways.add(gateway)
        return State(engine, self._fresh_worker, number, inbox, (), (), (), scenario.crash is not None)

    def check_pair(self, state: State) -> None:
        pair = (state.engine, state.worker)
        if DEAD in pair or pair in self._pairs:
            return
        self._pairs.add(pair)
        engine: Engine = self._engines.contents[state.engine]
        if engine.core.failure is None:
            check_pair(engine, self._workers.contents[state.worker])

    # -- actions

    def actions(self, state: State) -> tuple[list[Action], list[Action]]:
        """What somebody will do sooner or later, and what may never happen."""
        duties: list[Action] = []
        freedoms: list[Action] = []
        if state.engine != DEAD:
            if state.inbox:
                duties.append(("message", 0))
            if state.reports:
                duties.append(("report", 0))
            if self._engines.contents[state.engine].unsent:
                duties.append(("flush", 0))
            if state.worker == DEAD:
                duties.append(("notice", 0))
        elif state.gateway != DEAD:
            duties.append(("restart", 0))
        if state.worker != DEAD:
            first = 0 if self._workers.contents[state.worker].awake else 1
            duties += [("round", count) for count in range(first, len(state.log) + 1)]
        if state.gateway != DEAD:
            if state.outputs:
                duties.append(("deliver", 0))
            gateway: Gateway = self._gateways.contents[state.gateway]
            if gateway.queries and gateway.cluster.state == "ready":
                duties.append(("query", 0))
            freedoms += [
                ("cancel", number)
                for number, client in enumerate(gateway.clients)
                if client.may_cancel and client.answer is None
            ]
        if state.crash and state.engine != DEAD:
            freedoms.append(("crash", 0))
        return duties, freedoms

    def act(self, state: State, action: Action) -> State:
        """The state that follows.  Raises `Broken`."""
        following: State = getattr(self, f"_{action[0]}")(state, action[1])
        return following

    def _message(self, state: State, _: int) -> State:
        head, data = state.inbox[0], self._messages.data[state.inbox[0]]
        step = self._engines.move(state.engine, ("message", head), lambda engine: _none(engine.message(data)))
        return state._replace(engine=step.to, inbox=state.inbox[1:])

    def _report(self, state: State, _: int) -> State:
        head, data = state.reports[0], self._messages.data[state.reports[0]]
        step = self._engines.move(state.engine, ("report", head), lambda engine: _none(engine.report(data)))
        return state._replace(engine=step.to, reports=state.reports[1:])

    def _flush(self, state: State, _: int) -> State:
        alive = state.gateway != DEAD

        def act(engine: Engine) -> tuple[tuple[int, ...], ...]:
            records, sent, _ = engine.flush(alive)
            return self._messages.add(records), self._messages.add(sent)

        step = self._engines.move(state.engine, ("flush", alive), act)
        log = () if state.worker == DEAD else state.log + step.sent[0]
        return state._replace(engine=step.to, log=log, outputs=state.outputs + step.sent[1])

    def _round(self, state: State, count: int) -> State:
        found, rest = state.log[:count], state.log[count:]
        records = self._messages.all(found)
        step = self._workers.move(
            state.worker, found, lambda worker: (self._messages.add(worker.round(records)),)
        )
        return state._replace(worker=step.to, log=rest, reports=state.reports + step.sent[0])

    def _deliver(self, state: State, _: int) -> State:
        head, data = state.outputs[0], self._messages.data[state.outputs[0]]
        following = self._at_gateway(state, ("deliver", head), lambda gateway: gateway.receive(data))
        return following._replace(outputs=state.outputs[1:])

    def _cancel(self, state: State, number: int) -> State:
        return self._at_gateway(state, ("cancel", number), lambda gateway: gateway.cancel(number))

    def _query(self, state: State, _: int) -> State:
        return self._at_gateway(state, ("query", 0), lambda gateway: gateway.query())

    def _at_gateway(self, state: State, what: tuple[str, int], act: Any) -> State:
        step = self._gateways.move(state.gateway, what, lambda gateway: (self._messages.add(act(gateway)),))
        inbox = state.inbox if state.engine == DEAD else state.inbox + step.sent[0]
        return state._replace(gateway=step.to, inbox=inbox)

    def _crash(self, state: State, _: int) -> State:
        state = state._replace(crash=False)
        if self._scenario.crash == "gateway":
            return state._replace(gateway=DEAD, outputs=())
        if self._scenario.crash == "worker":
            return state._replace(worker=DEAD, log=())
        return state._replace(engine=DEAD, worker=DEAD, inbox=(), log=(), reports=())

    def _notice(self, state: State, _: int) -> State:
        """The engine finds its worker dead: it reads all that is left, tells the gateway, and leaves."""
        reports = self._messages.all(state.reports)
        alive = state.gateway != DEAD

        def act(engine: Engine) -> tuple[tuple[int, ...], ...]:
            for data in reports:
                engine.report(data)
            engine.worker_died()
            return (self._messages.add(engine.flush(alive)[1]),)

        step = self._engines.move(state.engine, ("notice", state.reports), act)
        return state._replace(engine=DEAD, inbox=(), reports=(), outputs=state.outputs + step.sent[0])

    def _restart(self, state: State, _: int) -> State:
        """The supervisor tells the gateway, which may have got a part of the last messages or none."""
        engine, welcome = self._greetings["i2"]

        def act(gateway: Gateway) -> list[bytes]:
            gateway.lost()
            gateway.connect("i2")
            gateway.take_outgoing()
            return gateway.receive(welcome)

        following = state._replace(engine=engine, worker=self._fresh_worker, outputs=())
        return self._at_gateway(following, ("restart", 0), act)

    def drain(self, state: State) -> State:
        """Outputs are read at once if it makes no difference when."""
        while state.outputs and not state.crash and DEAD not in (state.engine, state.worker, state.gateway):
            gateway: Gateway = self._gateways.contents[state.gateway]
            if gateway.queries or any(
                client.may_cancel and client.answer is None for client in gateway.clients
            ):
                break
            state = self._deliver(state, 0)
        return state

    def unsettled(self, state: State) -> str | None:
        """What is not as it must be when nobody has anything to do; None: all is well."""
        if state.gateway != DEAD:
            gateway: Gateway = self._gateways.contents[state.gateway]
            waiting = [client.name for client in gateway.clients if client.answer is None]
            if waiting:
                return f"{', '.join(waiting)} still wait for an answer"
            if len(gateway.cluster):
                return "the gateway still has requests in flight"
        if state.engine != DEAD:
            core = self._engines.contents[state.engine].core
            scheduler = core.scheduler
            if scheduler.num_occupied or scheduler.num_waiting or scheduler.ledger.num_held:
                return f"the engine still holds: {scheduler.gauges()}"
            if core.next_deadline() is not None:
                return "the engine still waits for reports"
        if state.worker != DEAD and self._workers.contents[state.worker].open:
            return f"slots {sorted(self._workers.contents[state.worker].open)} are open in the worker"
        return None

    # -- for people

    def describe(self, state: State, action: Action) -> str:
        kind, count = action
        if kind == "message":
            return f"engine reads {describe.to_engine(TO_ENGINE.decode(self._messages.data[state.inbox[0]]))}"
        if kind == "report":
            return f"engine reads {describe.report(REPORTS.decode(self._messages.data[state.reports[0]]))}"
        if kind == "deliver":
            (text,) = self._list(state.outputs[:1], FROM_ENGINE, describe.from_engine)
            return f"gateway reads {text}"
        if kind == "cancel":
            return f"client {NAMES[count]} hangs up"
        if kind == "crash":
            return f"the {self._scenario.crash} dies"
        if kind == "notice":
            return "engine finds its worker dead, reads what is left, says Failing and leaves"
        if kind == "restart":
            return "supervisor starts the instance again; gateway goes on there"
        if kind == "query":
            return f"gateway asks: {self._gateways.contents[state.gateway].queries[0]}"
        try:
            following = self.act(state, action)
        except Broken:
            who = "engine decides" if kind == "flush" else f"worker runs a round with {count} new records"
            return f"{who}, and"
        if kind == "flush":
            return "engine sends " + "; ".join(self._sent(state, following) or ["nothing"])
        report = self._list(following.reports[len(state.reports) :], REPORTS, describe.report)
        return f"worker runs a round with {count} new records: " + ("; ".join(report) or "nothing to report")

    def _sent(self, before: State, after: State) -> list[str]:
        lines = [
            describe.command(command)
            for data in self._messages.all(after.log[len(before.log) :])
            for command in COMMANDS.decode(data).commands
        ]
        return lines + self._list(after.outputs[len(before.outputs) :], FROM_ENGINE, describe.from_engine)

    def _list(self, numbers: Sequence[int], codec: Any, text: Any) -> list[str]:
        return [text(codec.decode(data)) for data in self._messages.all(numbers)]

    def count_events(self) -> Counter[str]:
        events: Counter[str] = Counter()
        for data in self._messages.data:
            count_message(data, events)
        return events


def _none(_: None) -> tuple[tuple[int, ...], ...]:
    return ()


def _count_commands(batch: Any, events: Counter[str]) -> None:
    for command in batch.commands:
        name = type(command).__name__
        if isinstance(command, Admit) and command.num_computed:
            name = "Admit with shared blocks"
        elif isinstance(command, Admit) and len(unpack_int32(command.tokens)) > command.num_prompt:
            name = "Admit after preemption"
        events[name] += 1


def _count_report(report: Any, events: Counter[str]) -> None:
    if isinstance(report, StepReport):
        for closed in report.closings:
            events[f"Closed({closed.reason.value})"] += 1


def _count_outputs(message: Any, events: Counter[str]) -> None:
    if isinstance(message, Outputs):
        for finished in message.finished:
            events[f"Finished({finished.reason})"] += 1
    elif type(message).__name__ == "Failing":
        events["Failing"] += 1


_COUNTED: tuple[tuple[Any, Callable[[Any, Counter[str]], None]], ...] = (
    (COMMANDS, _count_commands),
    (REPORTS, _count_report),
    (FROM_ENGINE, _count_outputs),
)


def count_message(data: bytes, events: Counter[str]) -> None:
    """Adds what a message, of any channel, shows."""
    for codec, count in _COUNTED:
        try:
            message = codec.decode(data)
        except ValueError:
            continue
        count(message, events)
