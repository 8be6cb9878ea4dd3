"""From decisions to commands: what the scheduler and the hand-overs decide is written for the workers.  Pure.

Theory.  At the end of a turn the engine decides once (`Dispatcher.decide`): arrivals whose pages are here get
their slots, departures ask for room, the scheduler gives blocks, preempts and admits until nothing more
follows, and the rest of the room is given to other engines as credits.  Each decision that concerns a worker
becomes a command in the `CommandBuffer`, in the order in which the decisions were made.  The engine sends the
buffer as one `CommandBatch`; the worker applies it as a whole.
"""

from __future__ import annotations

import logging

import msgspec

from baton.engine.counters import Counters
from baton.engine.handover.handovers import Handovers
from baton.engine.loads import Turnover
from baton.engine.outbox import Outboxes
from baton.engine.request import Request
from baton.engine.scheduling.backlog import Backlog
from baton.engine.scheduling.decisions import Admission
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.workers.step_cost import StepCosts
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Admit, Command, CommandBatch, Grow, Preempt, Reprioritize
from baton.protocol.rules.prefix_keys import root_key

log = logging.getLogger(__name__)


class CommandBuffer:
    """The commands that leave with the next batch.  Batches are numbered from 1 without gaps."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self._sequence = 0

    def take(self) -> CommandBatch | None:
        """The next batch; None: there is no command.  The buffer is empty afterwards."""
        if not self.commands:
            return None
        self._sequence += 1
        batch = CommandBatch(self._sequence, self.commands)
        self.commands = []
        return batch


class Dispatcher:
    """Of one engine.  `costs` None: the worker needs no measured costs (`Pace`).  `salted`: the worker
    drafts, and wants to know which requests have the same salt."""

    def __init__(
        self,
        buffer: CommandBuffer,
        scheduler: Scheduler,
        handovers: Handovers,
        backlog: Backlog,
        turnover: Turnover,
        costs: StepCosts | None,
        counters: Counters,
        outboxes: Outboxes,
        salted: bool,
    ) -> None:
        self.buffer = buffer
        self._scheduler = scheduler
        self._handovers = handovers
        self._backlog = backlog
        self._turnover = turnover
        self._costs = costs
        self._counters = counters
        self._outboxes = outboxes
        self._salted = salted

    def decide(self, now: float) -> None:
        """Everything that is to be decided at the end of a turn."""
        handovers, buffer = self._handovers, self.buffer
        handovers.arrivals.settle(now)
        buffer.commands += handovers.arrivals.fetches.commands
        handovers.arrivals.fetches.commands.clear()
        for admission in handovers.arrivals.seat(now):
            buffer.commands.append(self._admit(admission, now))
        handovers.departures.fill(now)
        while self._scheduler.due:
            self.schedule(now)
            handovers.departures.fill(now)  # an admission makes place for the next one
        handovers.arrivals.grant(now)
        pace = self._costs.take() if self._costs is not None else None
        if pace is not None:
            buffer.commands.append(pace)

    def schedule(self, now: float) -> None:
        """What the scheduler alone decides."""
        decisions, commands = self._scheduler.decide(), self.buffer.commands
        for request, blocks in decisions.grown:
            commands.append(Grow(request.slot, request.epoch, pack_int32(blocks)))
        for request in decisions.preempted:
            about = {"request_id": request.name or request.id}
            log.debug("preempting request %s on slot %d", about["request_id"], request.slot, extra=about)
            commands.append(Preempt(request.slot, request.epoch))
            if request.notes is not None:
                request.notes.add(now, "preempted", len(request.tokens), c=request.slot)
        for request in decisions.gave_up:
            request.num_preemptions += 1
            self._counters.preemptions += 1
        newcomers = 0
        for request in decisions.following:
            newcomers += self._takes_slot(request, now)
            if request.notes is not None:
                request.notes.add(now, "follows", request.slot)
        for admission in decisions.admitted:
            newcomers += self._takes_slot(admission.request, now)
            commands.append(self._admit(admission, now))
        for request in decisions.lent:
            if request.told != (request.urgency[0], request.hurried):
                commands.append(Reprioritize(request.slot, request.epoch, *self._tell(request)))
        self._turnover.decided(newcomers, self._scheduler.num_waiting, now)

    def _takes_slot(self, request: Request, now: float) -> bool:
        """Whether this is the first time."""
        if request.first_admitted is not None:
            return False
        request.first_admitted = now
        self._backlog.remove(request)
        return True

    def _tell(self, request: Request) -> tuple[int, bool]:
        """Its priority and patience for the worker.  (Who fetches its pages waits for each chunk.)"""
        request.told = request.urgency[0], request.hurried
        departs = self._handovers.departures.departs(request)
        return int(request.urgency[0]), not request.hurried and not departs

    def _admit(self, admission: Admission, now: float) -> Admit:
        request = admission.request
        if request.notes is not None:
            request.notes.add(now, "admitted", request.slot, admission.num_computed, len(request.tokens))
        if not request.begun:
            request.begun = True
            request.num_cached = admission.num_computed
            if request.num_cached:
                request.gateway.cached.append((request.id, request.num_cached))
            caching = self._scheduler.prefix is not None
            self._counters.count_admission(request, caching=caching, num_followed=admission.num_followed)
        else:
            self._counters.recomputed_tokens += len(request.tokens) - admission.num_computed
        self._outboxes.tell_progress(request, admission.num_computed)
        handover = self._handovers.departures.departs(request)
        if handover:
            self._handovers.departures.admitted(request, admission.num_computed)
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and not request.wants_prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        if sampling.routes_from is not None and sampling.routes_from != request.routes_sent:
            sampling = msgspec.structs.replace(sampling, routes_from=request.routes_sent)
        priority, patient = self._tell(request)
        return Admit(
            slot=request.slot,
            epoch=request.epoch,
            tokens=pack_int32(request.tokens),
            num_prompt=request.num_prompt,
            num_computed=admission.num_computed,
            blocks=pack_int32(admission.blocks),
            sampling=sampling,
            stopping=request.stopping,
            handover=handover,
            patient=patient,
            priority=priority,
            waited=now - request.arrived,
            salt=root_key(request.cache_salt) if self._salted else b"",
        )
