"""Requests as gateways send them: an engine whose workers are ready takes or refuses and cancels them.  Pure.

Theory.  A `Submit` is checked (`validation.py`) and becomes a `Request`, which goes on in one of two ways: to
the scheduler's line, or first into a preparation, if it is to be handed over (`handover/departures.py`).

`max_waiting` bounds those that wait in either place.  Before a request is refused for want of a place, the
scheduler decides what it can, as what came just before may be admitted at once; then `backlog.py` says which
newcomer makes place.  A request that is refused or displaced holds nothing: it gets its `Finished` at once.

A request that is cancelled is gone at once if the worker has not heard of it.  Otherwise it waits for the
worker's closing, and its tokens go nowhere from now on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from baton.engine.counters import Counters
from baton.engine.dispatch import Dispatcher
from baton.engine.endings import finish, refuse
from baton.engine.handover.handovers import Handovers
from baton.engine.loads import Turnover
from baton.engine.outbox import Outboxes
from baton.engine.request import Outbox, Request
from baton.engine.scheduling.backlog import Backlog
from baton.engine.scheduling.prefix import root_key
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.states import Event, State
from baton.engine.validation import Limits, Rejected, check_submit
from baton.protocol.messages.commands import Abort
from baton.protocol.messages.requests import Submit, Target
from baton.protocol.notes import Notes
from baton.protocol.rules.fair_queue import Flow

log = logging.getLogger(__name__)


class Intake:
    """Of one engine, which is called `incarnation`.  `max_waiting`: requests; `number()` counts those of the
    engine in the order of their coming."""

    def __init__(
        self,
        limits: Limits,
        max_waiting: int,
        incarnation: str,
        scheduler: Scheduler,
        handovers: Handovers,
        dispatcher: Dispatcher,
        backlog: Backlog,
        turnover: Turnover,
        outboxes: Outboxes,
        counters: Counters,
        number: Callable[[], int],
    ) -> None:
        self._limits = limits
        self._max_waiting = max_waiting
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._handovers = handovers
        self._dispatcher = dispatcher
        self._backlog = backlog
        self._turnover = turnover
        self._outboxes = outboxes
        self._counters = counters
        self._number = number

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, those in preparation included."""
        return self._scheduler.num_waiting + self._handovers.departures.num_preparing

    def submit(self, outbox: Outbox, submit: Submit, now: float) -> None:
        try:
            request = self._accept(outbox, submit, now)
        except Rejected as refusal:
            self._refuse(outbox, submit.id, refusal, now)
            return
        outbox.requests[submit.id] = request
        if not request.continued:
            self._backlog.add(request)
        decoders = tuple(target for target in submit.decoders if not self._is_here(target))
        if not self._handovers.departures.begin(request, decoders):
            self._scheduler.enqueue(request)

    def cancel_id(self, outbox: Outbox, id: int, now: float) -> None:
        """A gateway cancels what it calls so."""
        request = outbox.requests.get(id)
        if request is not None:
            self.cancel(request, now)
        else:  # it has just finished, or is on its way here
            self._handovers.arrivals.cancel_request(outbox, id, now)

    def cancel(self, request: Request, now: float) -> None:
        """Its gateway wants it no more."""
        was = request.state
        state = self._withdraw(request, now)
        if state is State.GONE:
            finish(self._outboxes, self._counters, request, "aborted")
        elif was is not State.ABORTING:
            self._scheduler.stop_running(request)
            self._dispatcher.buffer.commands.append(Abort(request.slot, request.epoch))
            self._outboxes.redirect(request, self._outboxes.nowhere)

    def _is_here(self, target: Target) -> bool:
        return target.incarnation == self._incarnation

    def _accept(self, outbox: Outbox, submit: Submit, now: float) -> Request:
        """Raises `Rejected`."""
        if submit.id in outbox.requests:
            raise Rejected(
                "bad_request", f"id: {submit.id} is that of a request that has not ended; never use one twice"
            )
        tokens = check_submit(submit, self._limits)
        flow = msgspec.structs.replace(submit.flow, gateway=outbox.flow)
        if self.num_waiting >= self._max_waiting and self._scheduler.due:
            self._dispatcher.schedule(now)  # what came just before may be admitted at once
        if self.num_waiting >= self._max_waiting:
            self._make_place(submit, flow, now)
        request = Request(
            outbox,
            submit.id,
            submit.name,
            tokens,
            submit.sampling,
            submit.stopping,
            priority=submit.priority,
            number=self._number(),
            arrived=now,
            num_prompt=len(submit.prompt) // 4,
            cache_salt=submit.cache_salt,
            root=root_key(submit.cache_salt) if self._scheduler.prefix is not None else b"",
            patient=submit.patient,
            flow=flow,
        )
        if submit.noted:
            request.notes = Notes()
            request.notes.add(now, "arrived", request.num_prompt, request.num_generated)
        if submit.progress and not request.num_generated:
            request.progress_at = now
        return request

    def _make_place(self, submit: Submit, flow: Flow, now: float) -> None:
        """The queue is full: the worst newcomer that waits goes.  Raises `Rejected` if that is this one."""
        full = Rejected(
            "queue_full",
            f"{self.num_waiting} requests are waiting and max_waiting is {self._max_waiting}; "
            "try again later, or raise --max-waiting",
        )
        worst = self._backlog.place_for(submit.priority, flow, continued=bool(submit.generated))
        if worst is None:
            raise full
        log.debug("request %s makes place for %s", worst.name or worst.id, submit.name or submit.id)
        self._counters.displaced += 1
        self._withdraw(worst, now)
        del worst.gateway.requests[worst.id]
        self._refuse(worst.gateway, worst.id, full, now)

    def _refuse(self, outbox: Outbox, id: int, refusal: Rejected, now: float) -> None:
        """A full queue says when to come again."""
        wait_s = self._turnover.wait_s(self.num_waiting, now) if refusal.code == "queue_full" else 0.0
        refuse(self._outboxes, self._counters, outbox, id, refusal, retry_after_s=wait_s)

    def _withdraw(self, request: Request, now: float) -> State:
        """A request is wanted no more.  Returns its state: gone, or to be closed by the worker."""
        was, state = request.state, request.advance(Event.CANCEL)
        self._backlog.remove(request)
        if was is State.ARRIVING:
            self._handovers.arrivals.withdrawn(request, now)
        elif request.departure is not None:
            self._handovers.departures.withdrawn(request)
        if was is State.WAITING:
            self._scheduler.withdraw(request)
        elif was is State.FOLLOWING:
            self._scheduler.release(request)
        return state
