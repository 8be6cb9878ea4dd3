"""The whole cluster on a cost model: arrivals, routing, steps, hand-overs, and who decides about roles.

An instance may die (`deaths`): what it had begins anew elsewhere, as the gateway does it but that an answer's
tokens are all generated again, and it serves again after `Machine.startup_s`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from baton.gateway.arranging.arranger import Arranger, Change
from baton.gateway.arranging.measured import Counting, Label, Snapshot
from baton.gateway.cluster.member import Member
from baton.gateway.cluster.roles import view_of
from baton.gateway.cluster.routing import Job, choose
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.requests import Hello, Welcome
from baton.simulation.capacity.load import Asked
from baton.simulation.capacity.machine import Machine, Request, Running

_LOAD_S = 0.05
"""Between two reports of an instance, as in production."""
_AGAIN_S = 1.0
"""After which a request is tried again that nobody could take."""
_PATIENCE_S = 600.0
"""After the last arrival: what has not ended then never does."""


class Capacity:
    """One run.  `labels`: the instances that are there from the beginning; `arranger` None: they stay so."""

    def __init__(
        self,
        requests: Sequence[Asked],
        labels: Sequence[Label],
        machine: Machine,
        arranger: Arranger | None = None,
        deaths: Sequence[tuple[float, int]] = (),
    ) -> None:
        """`deaths`: when an instance dies, and which, by its place in `labels`."""
        self.requests = [Request(asked, number) for number, asked in enumerate(requests)]
        self.machine = machine
        self.arranger = arranger
        self.members: dict[str, Member] = {}
        self.running: dict[str, Running] = {}
        self.traffic = Counting()
        if arranger is not None:
            self.traffic.slo = arranger.rules.slo
        self.history: list[tuple[float, tuple[Label, ...]]] = []
        """When labels changed, to what."""
        self.changes: list[tuple[float, Change]] = []
        self.steps = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._reported: dict[str, float] = {}
        self._names: Counter[str] = Counter()
        self._turns = itertools.count(1)
        for label in labels:
            self._start(self._name(label), label)
        names = list(self.members)
        for at, place in deaths:
            self._later(at, self._dies, names[place % len(names)])

    def run(self, tick: Callable[[float], None] = lambda now: None) -> None:
        """Until all have ended, or nothing does any more.  `tick` is told the time, now and then."""
        last = self.requests[-1].asked.at if self.requests else 0.0
        arrivals = iter(self.requests)
        coming = next(arrivals, None)
        shown = 0.0
        while coming is not None or self._events:
            if coming is not None and (not self._events or coming.asked.at <= self._events[0][0]):
                self._now = coming.asked.at
                self._arrive(coming)
                coming = next(arrivals, None)
            else:
                self._now, _, action, args = heapq.heappop(self._events)
                action(*args)
            if self._now - shown > 5.0:
                shown = self._now
                tick(shown)
            if self._now > last + _PATIENCE_S:
                break

    @property
    def labels(self) -> tuple[Label, ...]:
        """Of the instances that serve."""
        return tuple(sorted((one.label for one in self.members.values() if one.serves), reverse=True))

    # -- instances

    def _name(self, label: Label) -> str:
        self._names[label] += 1
        return f"{label}-{self._names[label] - 1}"

    def _start(self, name: str, label: Label) -> None:
        machine = self.machine
        member = self.members.get(name) or Member(name, label)
        self.members[name] = member
        member.attach(name, Hello(""))
        member.welcomed(
            Welcome(
                name,
                machine.num_blocks,
                machine.block_size,
                1 << 30,
                machine.slots,
                1,
                [],
                peer_endpoint=name,
                source=InstanceSource("", machine.block_size, []),
            ),
            self._now,
        )
        self.running[name] = Running(name, machine)
        member.loaded(self.running[name].load(), self._now)
        self._note()

    def _dies(self, name: str) -> None:
        running = self.running.pop(name, None)
        if running is None:
            return  # (it is gone, or dead)
        member = self.members[name]
        member.leave("restarting", "it died")
        self._note()
        for request in running.all():
            self._arrive(request)
        self._later(self.machine.startup_s, self._start, name, member.label)

    def _change(self, change: Change) -> None:
        self.changes.append((self._now, change))
        if change.kind == "label":
            self.members[change.name].label = change.label
            self._note()
        elif change.kind == "drain":
            self.members[change.name].draining = True
            self._note()
            self._remove_if_empty(change.name)
        else:
            name = self._name(change.label)
            assert self.arranger is not None
            self.arranger.named(name)
            self._later(self.machine.startup_s, self._start, name, change.label)

    def _remove_if_empty(self, name: str) -> None:
        member = self.members.get(name)
        if name not in self.running or member is None:
            return
        if member.draining and not len(self.running[name]) and not member.decodes:
            del self.members[name], self.running[name]

    def _note(self) -> None:
        self.history.append((self._now, self.labels))

    # -- requests

    def _arrive(self, request: Request) -> None:
        size = request.asked.prompt
        job = Job(size, request.asked.output <= 1, lambda member: 0)
        plan = choose(self.members.values(), job, None)
        if plan is None:  # (all are dead)
            self._later(_AGAIN_S, self._arrive, request)
            return
        self._uncount(request, heard=False)
        at, now = plan.at, self._now
        at.turn = next(self._turns)
        at.sent(plan.work, now)
        if not request.counted:
            self.traffic.sent(plan.work)
        decoder = plan.decoders[0] if plan.decoders else at
        decoder.turn = at.turn
        decoder.expects(request.number, size // self.machine.block_size + 1)
        request.decoders = tuple(member.name for member in plan.decoders)
        request.counted = decoder.name
        self.running[at.name].prefill(request)
        self._go_on(at.name)

    def _go_on(self, name: str) -> None:
        running = self.running.get(name)
        seconds = None if running is None else running.begin()
        if running is not None and seconds is not None:
            self._later(seconds, self._step_ends, running, seconds)

    def _step_ends(self, running: Running, seconds: float) -> None:
        name, now = running.name, self._now
        if self.running.get(name) is not running:
            return  # (it died meanwhile)
        self.steps += 1
        computed, ended = running.end(seconds)
        for request in computed:
            if request.first_at == math.inf:
                request.first_at = now
                self.traffic.began(now - request.asked.at)
            if request.asked.output <= 1:
                self._ends(request)
            else:
                self._hand_over(request, name)
        for request in ended:
            self._ends(request)
        self._remove_if_empty(name)
        self._go_on(name)
        if name in self.running and now >= self._reported.get(name, -1.0) + _LOAD_S:
            self._reported[name] = now
            self.members[name].loaded(running.load(), now)
            self._look()

    def _hand_over(self, request: Request, at: str) -> None:
        target = next((name for name in request.decoders if name in self.running), at)
        if request.counted != target:
            self._uncount(request, heard=False)
            self.members[target].expects(request.number, 0)
            request.counted = target
        self.members[target].decodes_now(request.number, self.members[target].decodes.get(request.number, 0))
        if target == at:
            self.running[at].decode(request)
            return
        machine = self.machine
        delay = machine.hand_over_s + request.asked.prompt / machine.page_tokens_per_s
        self._later(delay, self._arrives, request, target)

    def _arrives(self, request: Request, target: str) -> None:
        if target not in self.running:
            self._arrive(request)
            return
        self.running[target].decode(request)
        self._go_on(target)

    def _ends(self, request: Request) -> None:
        request.ended_at = self._now
        self.traffic.ended_with(request.asked.output, self._now - request.first_at)
        self._uncount(request, heard=True)

    def _uncount(self, request: Request, *, heard: bool) -> None:
        member = self.members.get(request.counted)
        if member is not None:
            member.dismiss(request.number, heard=heard)

    # -- inside

    def _look(self) -> None:
        if self.arranger is None or self._now < self.arranger.next_look:
            return
        standings = []
        for name, member in self.members.items():
            running = self.running.get(name)
            decoding = len(running.decoding) + len(running.waiting) if running else 0
            in_flight = len(running) if running else 0
            standings.append(
                view_of(member, self._now, decoding=decoding, in_flight=in_flight, removable=True)
            )
        change = self.arranger.look(Snapshot(self._now, tuple(standings), self.traffic.now()))
        if change is not None:
            self._change(change)

    def _later(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), action, args))
