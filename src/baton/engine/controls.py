"""Orders to all ranks that are answered when every rank has carried them out: new weights, profiles.

Theory.  One order is under way at a time; a second one is refused as `busy`.

| phase | what happens | leaves by |
| --- | --- | --- |
| draining | only `update_weights`: what ran was told `Preempt`, nothing is admitted | the last closing |
| sent | the `Control` is in the log; the ranks work on it | `ControlDone` of every rank, or the deadline |

*Weights never change under a request half-way.*  While an update is sent no slot is occupied, so nothing is
computed, and no block is held.  When all ranks have the new weights the prefix index forgets everything, and
only then is anything admitted.  So each request goes on with its prompt and the tokens that it has, whose KV
is computed anew, and KV of old weights is never read by new ones.  If the ranks refuse, the old weights
are in place and what the index knows is still true.

A cancelled request leaves while all this happens, as always.  A gateway that is lost, or stops waiting, takes
nothing back: what it ordered happens, and nobody is told.

How long draining may take is bounded as every wait for closings is (`EngineCore`); how long the ranks may
take is bounded by `timeout_s` from the moment of sending.  The instance fails after that, and when some ranks
have new weights and others refused them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from baton.engine.outbox import Outbox, Outboxes
from baton.engine.scheduler import Scheduler
from baton.protocol.commands import Control, Preempt
from baton.protocol.reports import ControlDone
from baton.protocol.requests import Query, QueryReply
from baton.protocol.silence import Silence

log = logging.getLogger(__name__)

Action = Literal["update_weights", "start_profile", "stop_profile"]
ACTIONS: frozenset[str] = frozenset(("update_weights", "start_profile", "stop_profile"))
MAX_ARGUMENT = 4096
"""Characters; no path of Linux is longer."""


class RanksDiffer(RuntimeError):
    """Some ranks have new weights and some the old ones: the instance cannot go on."""


class UnexpectedDone(ValueError):
    """A `ControlDone` that answers nothing."""


@dataclass(slots=True)
class _Order:
    outbox: Outbox
    query: int
    action: Action
    argument: str
    began: float
    preempted: int
    id: int = 0
    """Of the `Control`; 0 while draining."""
    patience: Silence | None = None
    """With the ranks, once the `Control` was sent."""
    done: dict[int, str] = field(default_factory=dict)
    """rank → its error, "" for none."""


class Controls:
    """The order that is under way, if any, on an instance of `num_ranks` ranks."""

    def __init__(self, num_ranks: int, timeout_s: float, outboxes: Outboxes) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._outboxes = outboxes
        self._order: _Order | None = None
        self._ids = 0
        self.weights = ""
        """The checkpoint of the last update that succeeded, also one before this start."""

    @property
    def under_way(self) -> str:
        """The action of the order, or ""."""
        return self._order.action if self._order else ""

    @property
    def deadline(self) -> float | None:
        """When the ranks must have answered; None: nothing was sent."""
        patience = self._order.patience if self._order else None
        return patience.deadline if patience else None

    def overdue(self, now: float) -> bool:
        """Whether the ranks took too long, before the eyes of an engine that was not away itself."""
        patience = self._order.patience if self._order else None
        return patience is not None and patience.look(now)

    def describe_overdue(self) -> str:
        """What to say when the deadline has passed."""
        order = self._order
        if order is None:
            return "no order is under way"
        silent = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in order.done)
        return (
            f"worker ranks {silent} have not answered {order.action} for {self._timeout_s:g} s: they hang, "
            "or it takes longer than step_timeout_s"
        )

    def begin(self, outbox: Outbox, query: Query, scheduler: Scheduler, now: float) -> list[Preempt]:
        """Takes an order; returns what to tell the worker first.  One that is refused is answered at once."""
        refusal = self._refusal(query)
        if refusal is not None:
            self._outboxes.reply(outbox, QueryReply(query.id, refusal))
            return []
        victims = scheduler.drain() if query.what == "update_weights" else []
        action = cast(Action, query.what)
        self._order = _Order(outbox, query.id, action, query.argument, now, len(victims))
        log.info("%s %s: %d requests give way", action, query.argument, len(victims))
        return [Preempt(request.slot, request.epoch) for request in victims]

    def _refusal(self, query: Query) -> dict[str, Any] | None:
        if self._order is not None:
            return _error(f"{self._order.action} is under way; try again when it is done", "busy")
        if query.what == "stop_profile":
            return None
        if not 1 <= len(query.argument) <= MAX_ARGUMENT or "\0" in query.argument:
            return _error(f"{query.what} needs a directory, 1 to {MAX_ARGUMENT} characters", "refused")
        return None

    def command(self, scheduler: Scheduler, now: float) -> Control | None:
        """What is to be sent now, if anything."""
        order = self._order
        if order is None or order.id or (order.action == "update_weights" and scheduler.num_occupied):
            return None
        self._ids += 1
        order.id = self._ids
        order.patience = Silence(self._timeout_s, now)
        return Control(order.action, order.argument, order.id)

    def done(self, rank: int, report: ControlDone, scheduler: Scheduler, now: float) -> None:
        """A rank has answered; the last one's answer ends the order.

        Raises `UnexpectedDone` (the report changes nothing) or `RanksDiffer`.
        """
        order = self._order
        if order is None or report.id != order.id:
            raise UnexpectedDone(f"ControlDone of order {report.id}, which is not under way")
        if rank in order.done:
            raise UnexpectedDone(f"ControlDone of order {report.id} for the second time")
        order.done[rank] = report.error
        if len(order.done) < self._num_ranks:
            return
        errors = {rank: order.done[rank] for rank in sorted(order.done) if order.done[rank]}
        if errors and len(errors) < self._num_ranks and order.action == "update_weights":
            raise RanksDiffer(f"only some ranks have the new weights: {_join(errors)}")
        self._order = None
        if errors:
            body = _error(_join(errors), "refused")
        else:
            body = self._success(order, scheduler, now)
        if order.action == "update_weights":
            self.weights = self.weights if errors else order.argument
            scheduler.end_drain()
        log.info("%s %s", order.action, body.get("error") or f"done in {now - order.began:.2f} s")
        self._outboxes.reply(order.outbox, QueryReply(order.query, body))

    @staticmethod
    def _success(order: _Order, scheduler: Scheduler, now: float) -> dict[str, Any]:
        if order.action != "update_weights":
            return {"profiling": order.action == "start_profile"}
        return {
            "path": order.argument,
            "preempted_requests": order.preempted,
            "forgotten_blocks": scheduler.reset_prefix(),
            "seconds": now - order.began,
        }


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": message, "code": code}


def _join(errors: dict[int, str]) -> str:
    """What ranks say, once if they all say the same."""
    if len(set(errors.values())) == 1:
        return next(iter(errors.values()))
    return "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
