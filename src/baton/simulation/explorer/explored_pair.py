"""Two instances that hand over to each other: what can happen in such a scenario of the explorer.

Theory.  As `explored_world.py`, with an engine and a worker on each side, P that prefills and D that decodes,
and between them two queues of messages.  Further actions: an engine reads what the other one sent, and D's
worker copies the next page of a fetch, as P's pool holds it at that moment.  Time stands still, so no lease
ever ends and no wait is over by itself: each waiting party must be woken by a message, or the state is stuck.

An instance may die at any moment, engine and worker at once.  What it has sent may arrive or not; the other
engine and the gateway find out, each at any moment after that, and it does not come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from baton.gateway.cluster.member import Label
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import COMMANDS
from baton.protocol.messages.handover import PEER
from baton.protocol.messages.reports import REPORTS
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE
from baton.simulation import describe
from baton.simulation.explorer.explored import Engine, Worker, check_pair
from baton.simulation.explorer.explored_gateway import Gateway
from baton.simulation.explorer.explored_world import DEAD, NAMES, Action, count_message, explored_config
from baton.simulation.explorer.machines import Broken, Machines, Messages
from baton.simulation.explorer.scenarios import Scenario

SIDES = ("p", "d")
P, D = 0, 1
Queues = tuple[tuple[int, ...], tuple[int, ...]]
_NONE: Queues = ((), ())


class PairState(NamedTuple):
    """Parties and messages by number; pairs are of P and of D."""

    engines: tuple[int, int]
    workers: tuple[int, int]
    """Of a dead one: its memory, which can still be read."""
    gateway: int
    inbox: Queues
    log: Queues
    reports: Queues
    outputs: Queues
    peers: Queues
    """On the way to P and to D."""
    crash: bool
    """The scenario's crash can still happen."""
    unnoticed: tuple[bool, bool]
    """Of the one that died: the gateway, and the other engine, do not know it yet."""


def put(pair: tuple[Any, Any], side: int, value: Any) -> tuple[Any, Any]:
    return (value, pair[1]) if side == P else (pair[0], value)


class PairWorld:
    """One scenario: its states and actions."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._configs = [self._config(side) for side in SIDES]
        self._engines = [Machines(), Machines()]
        self._workers = [Machines(), Machines()]
        self._gateways = Machines()
        self._messages = Messages()
        self._pairs: set[tuple[int, int, int]] = set()

    def _config(self, side: str) -> InstanceConfig:
        return msgspec.structs.replace(
            explored_config(self._scenario), name=side, peer_endpoint=f"sim://{side}"
        )

    def initial(self) -> PairState:
        scenario = self._scenario
        labels: dict[str, Label] = {"p": "prefill", "d": "decode"}
        gateway = Gateway(self._configs[P], scenario.asks, scenario.queries, labels)
        engines = []
        for side, name in enumerate(SIDES):
            engine = Engine(self._configs[side], name, scenario.block_size)
            gateway.connect(name, name)
            for data in gateway.take_for(SIDES)[side]:
                engine.message(data)
            _, (welcome,), _ = engine.flush(True)
            gateway.receive_from(name, welcome)
            engines.append(self._engines[side].add(engine))
        gateway.submit_all()
        to_p, to_d = (self._messages.add(data) for data in gateway.take_for(SIDES))
        workers = [self._workers[side].add(Worker(self._configs[side])) for side in (P, D)]
        return PairState(
            (engines[P], engines[D]),
            (workers[P], workers[D]),
            self._gateways.add(gateway),
            (to_p, to_d),
            *(_NONE, _NONE, _NONE, _NONE),
            scenario.crash is not None,
            (False, False),
        )

    def check_pair(self, state: PairState) -> None:
        for side in (P, D):
            pair = (side, state.engines[side], state.workers[side])
            if state.engines[side] == DEAD or pair in self._pairs:
                continue
            self._pairs.add(pair)
            engine = self._engine(state, side)
            if engine.core.failure is None:
                check_pair(engine, self._worker(state, side))

    def _engine(self, state: PairState, side: int) -> Engine:
        return cast(Engine, self._engines[side].contents[state.engines[side]])

    def _worker(self, state: PairState, side: int) -> Worker:
        return cast(Worker, self._workers[side].contents[state.workers[side]])

    def _clients(self, state: PairState) -> Gateway:
        return cast(Gateway, self._gateways.contents[state.gateway])

    # -- actions

    def actions(self, state: PairState) -> tuple[list[Action], list[Action]]:
        """What somebody will do sooner or later, and what may never happen."""
        duties: list[Action] = []
        for side, name in enumerate(SIDES):
            if state.outputs[side]:
                duties.append((f"deliver {name}", 0))
            if state.engines[side] == DEAD:
                continue
            for kind, queue in (("message", state.inbox), ("report", state.reports), ("peer", state.peers)):
                if queue[side]:
                    duties.append((f"{kind} {name}", 0))
            if self._engine(state, side).unsent:
                duties.append((f"flush {name}", 0))
            worker = self._worker(state, side)
            first = 0 if worker.awake else 1
            duties += [(f"round {name}", count) for count in range(first, len(state.log[side]) + 1)]
            if worker.transfers.under_way:
                duties.append((f"copy {name}", 0))
        duties += [
            (f"notice {who}", 0) for who, yet in zip(("gateway", "peer"), state.unnoticed, strict=True) if yet
        ]
        freedoms: list[Action] = [
            ("cancel .", number)
            for number, client in enumerate(self._clients(state).clients)
            if client.may_cancel and client.answer is None
        ]
        if state.crash and self._scenario.crash != "fetch":
            freedoms.append(("crash .", 0))
        elif state.crash and self._worker(state, D).transfers.under_way:
            freedoms.append(("fail d", 0))
        return duties, freedoms

    def act(self, state: PairState, action: Action) -> PairState:
        """The state that follows.  Raises `Broken`."""
        kind, _, who = action[0].partition(" ")
        side = SIDES.index(who) if who in SIDES else -1
        following: PairState = getattr(self, f"_{kind}")(state, side, who, action[1])
        return following

    def _message(self, state: PairState, side: int, who: str, _: int) -> PairState:
        head, *rest = state.inbox[side]
        data = self._messages.data[head]
        state = self._move_engine(state, side, ("message", head), lambda engine: engine.message(data))
        return state._replace(inbox=put(state.inbox, side, tuple(rest)))

    def _report(self, state: PairState, side: int, who: str, _: int) -> PairState:
        head, *rest = state.reports[side]
        data = self._messages.data[head]
        state = self._move_engine(state, side, ("report", head), lambda engine: engine.report(data))
        return state._replace(reports=put(state.reports, side, tuple(rest)))

    def _peer(self, state: PairState, side: int, who: str, _: int) -> PairState:
        head, *rest = state.peers[side]
        data, sender = self._messages.data[head], SIDES[1 - side]
        state = self._move_engine(state, side, ("peer", head), lambda engine: engine.peer(sender, data))
        return state._replace(peers=put(state.peers, side, tuple(rest)))

    def _move_engine(
        self, state: PairState, side: int, what: tuple[str, int], act: Callable[[Engine], None]
    ) -> PairState:
        def moved(engine: Engine) -> tuple[tuple[int, ...], ...]:
            act(engine)
            return ()

        step = self._engines[side].move(state.engines[side], what, moved)
        return state._replace(engines=put(state.engines, side, step.to))

    def _flush(self, state: PairState, side: int, who: str, _: int) -> PairState:
        def act(engine: Engine) -> tuple[tuple[int, ...], ...]:
            return tuple(self._messages.add(sent) for sent in engine.flush(True))

        step = self._engines[side].move(state.engines[side], ("flush", 0), act)
        records, outputs, told = step.sent
        other = 1 - side
        unnoticed = state.unnoticed
        if state.engines[other] == DEAD and told:
            told, unnoticed = (), (unnoticed[0], True)  # it finds out (again) that nobody is there
        return state._replace(
            unnoticed=unnoticed,
            engines=put(state.engines, side, step.to),
            log=put(state.log, side, state.log[side] + records),
            outputs=put(state.outputs, side, state.outputs[side] + outputs),
            peers=put(state.peers, other, state.peers[other] + told),
        )

    def _round(self, state: PairState, side: int, who: str, count: int) -> PairState:
        found, rest = state.log[side][:count], state.log[side][count:]
        records = self._messages.all(found)
        state = self._move_worker(state, side, ("round", found), lambda worker: worker.round(records))
        return state._replace(log=put(state.log, side, rest))

    def _copy(self, state: PairState, side: int, who: str, _: int) -> PairState:
        copy = self._worker(state, side).transfers.next_copy()
        assert copy is not None
        page, block = copy
        self._check_copy(state, side, page, block)
        content = self._worker(state, 1 - side).page(page)
        return self._move_worker(state, side, ("copy", content), lambda worker: worker.copy(content))

    def _check_copy(self, state: PairState, side: int, page: int, block: int) -> None:
        """D writes only what is reserved, and reads only what P keeps for it."""
        ledger: Any = self._engine(state, side).core.scheduler.ledger
        if not any(block in table for table in ledger._reserved.values()):
            raise Broken(f"reserved: a fetch writes block {block} of D, which is reserved for nobody")
        if state.engines[1 - side] != DEAD:
            theirs: Any = self._engine(state, 1 - side).core.scheduler.ledger
            if not theirs._refs[page]:
                raise Broken(f"exported: D reads block {page} of P, which P has given up")

    def _move_worker(
        self, state: PairState, side: int, what: tuple[str, Any], act: Callable[[Worker], list[bytes]]
    ) -> PairState:
        step = self._workers[side].move(
            state.workers[side], what, lambda worker: (self._messages.add(act(worker)),)
        )
        return state._replace(
            workers=put(state.workers, side, step.to),
            reports=put(state.reports, side, state.reports[side] + step.sent[0]),
        )

    def _fail(self, state: PairState, side: int, who: str, _: int) -> PairState:
        """The fetch that is under way cannot go on."""
        state = self._move_worker(state, side, ("fail", 0), lambda worker: worker.fail())
        return state._replace(crash=False)

    def _deliver(self, state: PairState, side: int, who: str, _: int) -> PairState:
        head, *rest = state.outputs[side]
        data = self._messages.data[head]
        state = self._at_gateway(state, (who, head), lambda gateway: gateway.receive_from(who, data))
        return state._replace(outputs=put(state.outputs, side, tuple(rest)))

    def _cancel(self, state: PairState, side: int, who: str, number: int) -> PairState:
        return self._at_gateway(state, ("cancel", number), lambda gateway: gateway.hang_up(number))

    def _at_gateway(
        self, state: PairState, what: tuple[str, int], act: Callable[[Gateway], None]
    ) -> PairState:
        def moved(gateway: Gateway) -> tuple[tuple[int, ...], ...]:
            act(gateway)
            return tuple(self._messages.add(sent) for sent in gateway.take_for(SIDES))

        step = self._gateways.move(state.gateway, what, moved)
        inbox = state.inbox
        for side in (P, D):
            if state.engines[side] != DEAD:
                inbox = put(inbox, side, inbox[side] + step.sent[side])
        return state._replace(gateway=step.to, inbox=inbox)

    def _crash(self, state: PairState, side: int, who: str, _: int) -> PairState:
        dead = SIDES.index(str(self._scenario.crash))
        return state._replace(
            engines=put(state.engines, dead, DEAD),
            inbox=put(state.inbox, dead, ()),
            log=put(state.log, dead, ()),
            reports=put(state.reports, dead, ()),
            peers=put(state.peers, dead, ()),
            crash=False,
            unnoticed=(True, True),
        )

    def _notice(self, state: PairState, side: int, who: str, _: int) -> PairState:
        """The gateway or the other engine sees that it is dead; what has not arrived by then never will."""
        dead = state.engines.index(DEAD)
        if who == "gateway":
            state = state._replace(
                outputs=put(state.outputs, dead, ()), unnoticed=(False, state.unnoticed[1])
            )
            return self._at_gateway(state, ("lost", dead), lambda gateway: gateway.lost(SIDES[dead]))
        other = 1 - dead
        state = state._replace(peers=put(state.peers, other, ()), unnoticed=(state.unnoticed[0], False))
        return self._move_engine(state, other, ("died", dead), lambda engine: engine.peer_died(SIDES[dead]))

    def drain(self, state: PairState) -> PairState:
        """Outputs are read at once if it makes no difference when."""
        if state.crash or any(state.unnoticed):
            return state
        if any(client.may_cancel and client.answer is None for client in self._clients(state).clients):
            return state
        for side, name in enumerate(SIDES):
            while state.outputs[side]:
                state = self._deliver(state, side, name, 0)
        return state

    def unsettled(self, state: PairState) -> str | None:
        """What is not as it must be when nobody has anything to do; None: all is well."""
        gateway = self._clients(state)
        waiting = [client.name for client in gateway.clients if client.answer is None]
        if waiting:
            return f"{', '.join(waiting)} still wait for an answer"
        if len(gateway.cluster):
            return "the gateway still has requests in flight"
        for side, name in enumerate(SIDES):
            if state.engines[side] == DEAD:
                continue
            core = self._engine(state, side).core
            scheduler, counts = core.scheduler, core.scheduler.ledger.counts()
            owned = counts["held"] + counts["reserved"] + counts["exported"]
            if owned or scheduler.num_occupied or scheduler.num_waiting or scheduler.arriving:
                return f"{name} still holds: {scheduler.gauges()}"
            if core.next_deadline() is not None:
                return f"{name} still times something"
            worker = self._worker(state, side)
            if worker.open or worker.transfers.under_way:
                return f"slots {sorted(worker.open)} are open in the worker of {name}, or it still fetches"
        return None

    # -- for people

    def describe(self, state: PairState, action: Action) -> str:
        kind, _, who = action[0].partition(" ")
        side = SIDES.index(who) if who in SIDES else -1
        if kind in ("message", "report", "peer", "deliver"):
            queue, codec, text = {
                "message": (state.inbox, TO_ENGINE, describe.to_engine),
                "report": (state.reports, REPORTS, describe.report),
                "peer": (state.peers, PEER, describe.peer),
                "deliver": (state.outputs, FROM_ENGINE, describe.from_engine),
            }[kind]
            (line,) = self._list(queue[side][:1], codec, text)
            return f"{'the gateway' if kind == 'deliver' else f'engine {who}'} reads {line}"
        if kind == "cancel":
            return f"client {NAMES[action[1]]} hangs up"
        if kind == "fail":
            return f"the fetch of {who} fails"
        if kind == "crash":
            return f"instance {self._scenario.crash} dies"
        if kind == "notice":
            return f"the {who} sees that it is dead"
        try:
            following = self.act(state, action)
        except Broken:
            return f"{who}: {kind}, and"
        if kind == "flush":
            return f"engine {who} sends " + ("; ".join(self._sent(state, following, side)) or "nothing")
        report = self._list(following.reports[side][len(state.reports[side]) :], REPORTS, describe.report)
        what = f"runs a round with {action[1]} new records" if kind == "round" else "copies a page"
        return f"worker {who} {what}: " + ("; ".join(report) or "nothing to report")

    def _sent(self, before: PairState, after: PairState, side: int) -> list[str]:
        other = 1 - side
        lines = [
            describe.command(command)
            for data in self._messages.all(after.log[side][len(before.log[side]) :])
            for command in COMMANDS.decode(data).commands
        ]
        lines += self._list(after.peers[other][len(before.peers[other]) :], PEER, describe.peer)
        new = after.outputs[side][len(before.outputs[side]) :]
        return lines + self._list(new, FROM_ENGINE, describe.from_engine)

    def _list(self, numbers: Sequence[int], codec: Any, text: Any) -> list[str]:
        return [text(codec.decode(data)) for data in self._messages.all(numbers)]

    def count_events(self) -> Counter[str]:
        events: Counter[str] = Counter()
        for data in self._messages.data:
            count_message(data, events)
            try:
                events[type(PEER.decode(data)).__name__] += 1
            except ValueError:
                continue
        return events
