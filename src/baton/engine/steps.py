"""Reading step reports: tokens to their requests and gateways, computed blocks to the index, closings.

The token path does, for each token: look up the slot, compare the epoch, append to the request and to its
outbox, and compare one number (`Request.watermark`) that says when the scheduler has anything to do.

Within a report, computed chunks come first, then tokens, then closings, so every token of an epoch precedes
its closing.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.engine.counters import Counters
from baton.engine.loads import Speeds
from baton.engine.outbox import Outbox, Outboxes
from baton.engine.request import Event, IllegalTransition, Request, State
from baton.engine.scheduler import Scheduler
from baton.protocol.codec import MalformedMessage, unpack_int32
from baton.protocol.reports import Closed, CloseReason, PromptLogprobs, StepReport
from baton.protocol.requests import Finished, FinishReason
from baton.protocol.sampling import TokenLogprobs

if TYPE_CHECKING:
    from baton.engine.departures import Departures

log = logging.getLogger(__name__)

LEADER = "worker rank 0"


class UnreadableReport(ValueError):
    """The leader's report cannot be understood: tokens would be missing, so the instance cannot go on."""


class StepReader:
    """Applies the leader's step reports to the requests on the scheduler's slots.

    `violation(sender, what)` is called with what cannot be.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        outboxes: Outboxes,
        counters: Counters,
        violation: Callable[[str, str], None],
        departures: Departures | None = None,
        speeds: Speeds | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._departures = departures
        self._speeds = speeds
        self._outboxes = outboxes
        self._counters = counters
        self._violation = violation
        self._stale: list[tuple[int, int]] = []
        """(slot, epoch) of the current report that are not open."""

    def read(self, report: StepReport, now: float = 0.0) -> None:
        """Applies one report.  Raises `UnreadableReport`, before anything was applied."""
        slots, epochs, tokens = _unpack(report.slots, report.epochs, report.tokens)
        chunks = _unpack(report.prefill_slots, report.prefill_epochs, report.prefill_computed)
        if slots and (min(slots) < 0 or max(slots) >= len(self._scheduler.slots)):
            raise UnreadableReport(
                f"slots {min(slots)} to {max(slots)}; there are {len(self._scheduler.slots)}"
            )
        if report.step:
            self._counters.steps += 1
            self._counters.step_seconds += report.seconds
        prefilled = 0
        for slot, epoch, computed in zip(*chunks, strict=True):
            request = self._occupant(slot, epoch)
            if request is not None:
                prefilled += computed - request.computed
                self._scheduler.computed(request, computed)
                if request.departure is not None and self._departures is not None:
                    self._departures.computed(request, computed)
        if report.step:
            self._counters.step_tokens.add(prefilled + len(slots))
            if self._speeds is not None:
                self._speeds.step(prefilled, report.seconds)
        for run in report.prompt_logprobs:
            request = self._occupant(run.slot, run.epoch)
            if request is not None:
                self._add_prompt_logprobs(request, run)
        if slots:
            self._add_tokens(slots, epochs, tokens, report.logprobs)
        for closed in report.closings:
            request = self._occupant(closed.slot, closed.epoch)
            if request is not None:
                self._close(request, closed, now)
        if self._stale:
            self._violation(
                LEADER,
                f"step {report.step} names (slot, epoch) that are not open: "
                f"{self._stale[:4]}, {len(self._stale)} in all",
            )
            self._stale.clear()

    def _occupant(self, slot: int, epoch: int) -> Request | None:
        slots = self._scheduler.slots
        request = slots[slot] if 0 <= slot < len(slots) else None
        if request is None or request.epoch != epoch:
            self._stale.append((slot, epoch))
            return None
        return request

    def _add_tokens(
        self,
        slots: array[int],
        epochs: array[int],
        tokens: array[int],
        logprobs: list[tuple[int, TokenLogprobs]],
    ) -> None:
        """The token path."""
        scheduler, running = self._scheduler, self._scheduler.slots
        by_index = dict(logprobs) if logprobs else None
        outbox: Outbox | None = None
        for index, (slot, epoch, token) in enumerate(zip(slots, epochs, tokens, strict=True)):
            request = running[slot]
            if request is None or request.epoch != epoch:
                self._stale.append((slot, epoch))
                continue
            if request.outbox is not outbox:
                outbox = request.outbox
                self._outboxes.touch(outbox)
                ids, texts = outbox.ids, outbox.tokens
            history = request.tokens
            history.append(token)
            if by_index is not None and index in by_index:
                outbox.logprobs.append((len(ids), by_index[index]))
            ids.append(request.id)
            texts.append(token)
            if len(history) >= request.watermark:
                scheduler.progress(request)
        self._counters.generation_tokens += len(slots)

    def _add_prompt_logprobs(self, request: Request, run: PromptLogprobs) -> None:
        """Passes on the positions that the client has not got yet (a preempted prompt is computed again)."""
        expected = request.prompt_logprobs_sent
        skip = expected - run.first
        if skip < 0:
            self._violation(
                LEADER, f"prompt log-probabilities from position {run.first}, expected {expected}"
            )
        elif skip < len(run.positions):
            request.prompt_logprobs_sent += len(run.positions) - skip
            fresh = PromptLogprobs(run.slot, run.epoch, expected, run.positions[skip:])
            request.outbox.prompt_logprobs.append((request.id, fresh))
            self._outboxes.touch(request.outbox)

    def _close(self, request: Request, closed: Closed, now: float) -> None:
        was = request.state
        try:
            unasked = request.departure is None and was is not State.ABORTING
            if closed.reason is CloseReason.HANDED_OVER and unasked:
                raise IllegalTransition(f"request {request.name!r}: handed over, and was not to be")
            state = request.advance(Event(closed.reason.value))
        except IllegalTransition as error:
            # The worker is right that the epoch is over, though for a reason that nobody gave it.
            self._violation(LEADER, str(error))
            request.advance(Event.FAIL)
            self._release(request, now)
            message = f"the worker closed the request unasked: {closed.reason.value}"
            finish(self._outboxes, self._counters, request, "error", message)
            return
        self._release(request, now)
        if state is State.HANDED:
            return
        if state is State.WAITING:
            request.num_preemptions += 1
            self._counters.preemptions += 1
            self._scheduler.enqueue(request)
        elif was is State.ABORTING:
            finish(self._outboxes, self._counters, request, "aborted")
        elif closed.reason is CloseReason.ERROR:
            message = closed.message or "the worker could not run this request"
            finish(self._outboxes, self._counters, request, "error", message)
        else:
            self._scheduler.headroom.on_finish()
            reason: FinishReason = "stop" if closed.reason is CloseReason.STOP else "length"
            finish(self._outboxes, self._counters, request, reason)

    def _release(self, request: Request, now: float) -> None:
        """Gives up the slot; what a departure needs of it is kept."""
        departures = self._departures if request.departure is not None else None
        if departures is not None:
            departures.keep(request)
        self._scheduler.release(request)
        if departures is not None:
            departures.closed(request, now)


def finish(
    outboxes: Outboxes, counters: Counters, request: Request, reason: FinishReason, message: str = ""
) -> None:
    """Writes the one `Finished` of a request that is gone."""
    outbox = request.gateway
    outbox.requests.pop(request.id, None)
    counters.finished[reason] += 1
    admitted = request.first_admitted
    outbox.finished.append(
        Finished(
            request.id,
            reason,
            code="internal" if reason == "error" else "",
            message=message,
            num_cached=request.num_cached,
            num_preemptions=request.num_preemptions,
            queued_s=0.0 if admitted is None else admitted - request.arrived,
        )
    )
    outboxes.touch(outbox)


def _unpack(*arrays: bytes) -> tuple[array[int], array[int], array[int]]:
    """Three aligned arrays.  Raises `UnreadableReport`."""
    try:
        first, second, third = map(unpack_int32, arrays)
    except MalformedMessage as error:
        raise UnreadableReport(str(error)) from None
    if not len(first) == len(second) == len(third):
        raise UnreadableReport(f"aligned arrays of {len(first)}, {len(second)} and {len(third)} entries")
    return first, second, third
