"""Reading step reports: tokens to their requests and gateways, computed blocks to the index, closings.

The token path does, for each token: append it to its request, and compare one number (`Request.watermark`)
that says when the scheduler has anything to do.  Slots and epochs are looked up once for all reports in a row
that have the same rows (`rows.py`).

Within a report, computed chunks come first, then tokens, then closings, so every token of an epoch precedes
its closing.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING

from baton.engine.counters import Counters
from baton.engine.endings import finish
from baton.engine.loads import Speeds
from baton.engine.outbox import Outboxes
from baton.engine.request import Request
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.states import Event, IllegalTransition, State
from baton.engine.workers.rows import Rows
from baton.engine.workers.step_cost import StepCosts
from baton.engine.workers.step_notes import StepNotes
from baton.protocol.codec import INT32, MalformedMessage, unpack_int32
from baton.protocol.messages.reports import (
    Closed,
    CloseReason,
    PromptLogprobs,
    StepReport,
    StepRoutes,
    StepsRan,
)
from baton.protocol.messages.requests import FinishReason
from baton.protocol.params.sampling import TokenLogprobs

if TYPE_CHECKING:
    from baton.engine.handover.departures import Departures

log = logging.getLogger(__name__)

LEADER = "worker rank 0"
_ANSWERS = (CloseReason.STOP, CloseReason.LENGTH, CloseReason.POOLED)


class UnreadableReport(ValueError):
    """The leader's report cannot be understood: tokens would be missing, so the instance cannot go on."""


class StepReader:
    """Applies the leader's step reports to the requests on the scheduler's slots.

    `violation(sender, what)` counts and logs what no correct worker would report.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        outboxes: Outboxes,
        counters: Counters,
        violation: Callable[[str, str], None],
        departures: Departures | None = None,
        speeds: Speeds | None = None,
        costs: StepCosts | None = None,
        notes: StepNotes | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._departures = departures
        self._speeds = speeds
        self._costs = costs
        self._notes = notes if notes is not None and notes.wanted else None
        self._outboxes = outboxes
        self._counters = counters
        self._violation = violation
        self._stale: list[tuple[int, int]] = []
        """(slot, epoch) of the current report that are not open."""
        self._rows: Rows | None = None
        """Those of the last report that had any, as long as all of them are open."""
        self._rows_of: tuple[bytes, bytes] = b"", b""
        """Its slots and epochs."""

    def read(self, report: StepReport | StepRoutes | StepsRan, now: float = 0.0, rank: int = 0) -> None:
        """Applies one report.  Raises `UnreadableReport`, before anything was applied."""
        if isinstance(report, StepRoutes):
            self._add_routes(report)
            return
        if isinstance(report, StepsRan):
            if self._notes is not None:
                self._notes.ran(rank, report, now)
            return
        rows, tokens, logprobs = self._find_rows(report)
        prefilled = pairs = finished = 0
        if report.prefill_slots or report.prefill_epochs or report.prefill_computed:
            chunks = _unpack(report.prefill_slots, report.prefill_epochs, report.prefill_computed)
            prefilled, pairs, finished = self._add_computed(*chunks, now)
            self._counters.step_prompt_tokens.add(prefilled)
        if report.step:
            self._counters.count_step(prefilled + len(tokens), report.seconds)
            self._counters.count_experts(report.expert_tokens)
            computed = len(tokens) - finished
            if report.speculation:  # drafts were computed too, and those that were right are among the tokens
                self._counters.count_speculation(report.speculation)
                computed += report.speculation[1] - sum(report.speculation[2:])
            if self._costs is not None and not report.prompt_logprobs:  # (these take time of their own)
                self._costs.add(prefilled, pairs, computed, report.context, report.seconds)
            if self._speeds is not None:
                self._speeds.step(prefilled, report.seconds)
            if self._notes is not None:
                self._notes.leader(report, now, prefilled, finished)
        for run in report.prompt_logprobs:
            request = self._occupant(run.slot, run.epoch)
            if request is not None:
                self._add_prompt_logprobs(request, run)
        if tokens:
            self._add_tokens(rows, tokens, logprobs)
            if report.speculation:
                _count_accepted(rows.requests)
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

    def _add_computed(
        self, slots: array[int], epochs: array[int], computed: array[int], now: float
    ) -> tuple[int, int, int]:
        """Pieces of prompts.  Returns how many tokens they have, how many positions those attend to, and how
        many of the prompts are through and gave a token."""
        prefilled = pairs = finished = 0
        for slot, epoch, num_tokens in zip(slots, epochs, computed, strict=True):
            request = self._occupant(slot, epoch)
            if request is not None:
                piece = num_tokens - request.computed
                prefilled += piece
                pairs += piece * (request.computed + piece // 2)
                if num_tokens >= len(request.tokens) and not request.pools:
                    finished += 1
                if request.notes is not None:
                    what = "chunk" if num_tokens < len(request.tokens) else "prefilled"
                    request.notes.add(now, what, piece, num_tokens, slot)
                if request.progress_at is not None:
                    self._outboxes.tell_progress(request, num_tokens)
                self._scheduler.computed(request, num_tokens)
                if request.departure is not None and self._departures is not None:
                    self._departures.computed(request, num_tokens)
        return prefilled, pairs, finished

    def _find_rows(self, report: StepReport) -> tuple[Rows, array[int], list[tuple[int, TokenLogprobs]]]:
        """The rows that are open, with their tokens and log-probabilities.  Raises `UnreadableReport`."""
        rows = self._rows
        if rows is not None and self._rows_of == (report.slots, report.epochs):
            tokens = _ints(report.tokens)
            _check_aligned(rows.requests, rows.requests, tokens)
            return rows, tokens, report.logprobs
        slots, epochs, tokens = _unpack(report.slots, report.epochs, report.tokens)
        running = self._scheduler.slots
        if slots and (min(slots) < 0 or max(slots) >= len(running)):
            raise UnreadableReport(f"slots {min(slots)} to {max(slots)}; there are {len(running)}")
        requests: list[Request] = []
        gone: set[int] = set()
        for row, (slot, epoch) in enumerate(zip(slots, epochs, strict=True)):
            request = running[slot]
            if request is None or request.epoch != epoch:
                self._stale.append((slot, epoch))
                gone.add(row)
            else:
                requests.append(request)
        rows = Rows(requests)
        if not gone:
            self._rows, self._rows_of = rows, (report.slots, report.epochs)
            return rows, tokens, report.logprobs
        kept = [row for row in range(len(slots)) if row not in gone]
        place_of = {row: place for place, row in enumerate(kept)}
        logprobs = [(place_of[row], found) for row, found in report.logprobs if row in place_of]
        return rows, array(INT32, [tokens[row] for row in kept]), logprobs

    def _add_tokens(self, rows: Rows, tokens: array[int], logprobs: list[tuple[int, TokenLogprobs]]) -> None:
        """The token path."""
        self._counters.generation_tokens += len(tokens)
        rows.deliver(tokens, logprobs, self._outboxes)
        scheduler = self._scheduler
        for request, token in zip(rows.requests, tokens, strict=True):
            history = request.tokens
            history.append(token)
            if len(history) >= request.watermark:
                scheduler.progress(request)

    def _add_routes(self, report: StepRoutes) -> None:
        """Passes on the rows that the client has not got yet."""
        for slot, epoch, run in report.runs:
            request = self._occupant(slot, epoch)
            if request is None or request.sampling.routes_from is None:
                continue
            if run.first > request.routes_sent:
                expected = f"expected {request.routes_sent}"
                self._violation(LEADER, f"experts of tokens from position {run.first}, {expected}")
            elif (fresh := run.since(request.routes_sent)) is not None:
                request.routes_sent = fresh.stop
                request.outbox.routes.append((request.id, fresh))
                self._outboxes.touch(request.outbox)
        if self._stale:
            self._violation(LEADER, f"experts of (slot, epoch) that are not open: {self._stale[:4]}")
            self._stale.clear()

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
            wrong = closed.reason in _ANSWERS and (closed.reason is CloseReason.POOLED) != request.pools
            if wrong and was is not State.ABORTING:
                raise IllegalTransition(f"request {request.name!r}: ended by {closed.reason.value!r}")
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
            if closed.reason is CloseReason.POOLED:
                finish(self._outboxes, self._counters, request, "pooled", pooled=closed.pooled)
                return
            reason: FinishReason = "stop" if closed.reason is CloseReason.STOP else "length"
            finish(self._outboxes, self._counters, request, reason)

    def _release(self, request: Request, now: float) -> None:
        """Gives up the slot; what a departure needs of it is kept."""
        self._rows = None
        departures = self._departures if request.departure is not None else None
        if departures is not None:
            departures.keep(request)
        self._scheduler.release(request)
        if departures is not None:
            departures.closed(request, now)


def _count_accepted(requests: list[Request]) -> None:
    """Of a step with drafts, a request for each token: all but the first of a run were drafts."""
    before: Request | None = None
    for request in requests:
        if request is before:
            request.num_accepted += 1
        before = request


def _unpack(*arrays: bytes) -> tuple[array[int], array[int], array[int]]:
    """Three aligned arrays.  Raises `UnreadableReport`."""
    first, second, third = map(_ints, arrays)
    _check_aligned(first, second, third)
    return first, second, third


def _ints(data: bytes) -> array[int]:
    try:
        return unpack_int32(data)
    except MalformedMessage as error:
        raise UnreadableReport(str(error)) from None


def _check_aligned(*columns: Sized) -> None:
    first, second, third = map(len, columns)
    if not first == second == third:
        raise UnreadableReport(f"aligned arrays of {first}, {second} and {third} entries")
