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

*All instances of a cluster change, or none.*  A gateway has every instance check first (`check_weights`),
which changes nothing and stops no request; the ranks load the weights beside the present ones, where they
can.  It decides only when all have.  From a check that went well
until `PREPARED_S` later the instance is *locked*: another gateway's check, and its other orders, are
refused as `busy`, so two gateways never decide at once.  The lock ends with `release_weights`, with the
update, with the connection of its holder, or by its deadline, and holds nothing else.  What the ranks have
prepared goes with it, and when one of them cannot prepare it; a gateway that still waits for other instances
asks again, which makes the lock longer.

What was decided (`Query.weights`) is not refused.  While another order is under way it waits, and nothing is
admitted from the moment that it came; so what a gateway submits after it is computed with these weights or
newer ones.  An instance that has them already says so; one that cannot load them fails, and its next
incarnation loads them from the start.

A cancelled request leaves while all this happens, as always.  A gateway that is lost, or stops waiting, takes
nothing back: what it ordered happens, and no answer is sent.

How long draining may take is bounded as every wait for closings is (`EngineCore`); how long the ranks may
take is bounded from the moment of sending, for weights by `load_timeout_s`, which has nothing to do with
how long a step may take.  The instance fails after that (a check is given up instead), and when some ranks
have new weights and others refused them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from baton.engine.outbox import Outboxes
from baton.engine.request import Outbox
from baton.engine.scheduling.scheduler import Scheduler
from baton.protocol.messages.commands import Control, Preempt
from baton.protocol.messages.reports import ControlDone
from baton.protocol.messages.requests import Query, QueryReply
from baton.protocol.rules.silence import Silence
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

Action = Literal["check_weights", "update_weights", "start_profile", "stop_profile"]
ACTIONS: frozenset[str] = frozenset((*get_args(Action), "release_weights"))
CHECK_S = 60.0
"""What the ranks may take to look at a checkpoint; they may load it then, for as long as that may take."""
PREPARED_S = 30.0
"""How long an instance stays locked for the gateway that had it check."""
MAX_ARGUMENT = 4096
"""Characters; no path of Linux is longer."""


class OrderFailed(RuntimeError):
    """The instance cannot go on: ranks differ in their weights, or it does not get those that were
    decided."""


class UnexpectedDone(ValueError):
    """A `ControlDone` that answers nothing."""


@dataclass(slots=True)
class _Order:
    outbox: Outbox
    query: int
    action: Action
    argument: str
    weights: Weights
    """Of `update_weights`."""
    decided: bool
    began: float
    preempted: int
    id: int = 0
    """Of the `Control`; 0 while draining."""
    patience: Silence | None = None
    """With the ranks, once the `Control` was sent."""
    done: dict[int, str] = field(default_factory=dict)
    """rank → its error, "" for none."""
    values: set[str] = field(default_factory=set)
    """What ranks without an error said."""


@dataclass(slots=True)
class _Lock:
    """For the gateway that had this instance check."""

    outbox: Outbox
    until: float


class Controls:
    """The order that is under way, if any, on an instance of `num_ranks` ranks."""

    def __init__(
        self, num_ranks: int, timeout_s: float, outboxes: Outboxes, load_timeout_s: float | None = None
    ) -> None:
        self._num_ranks = num_ranks
        self._timeouts = {
            "check_weights": max(CHECK_S, load_timeout_s or 0.0),
            "update_weights": timeout_s if load_timeout_s is None else load_timeout_s,
        }
        self._timeout_s = timeout_s
        self._outboxes = outboxes
        self._order: _Order | None = None
        self._lock: _Lock | None = None
        self._waiting: dict[bytes, tuple[Outbox, Query]] = {}
        """By connection: what was decided while another order was under way; the last of each."""
        self._given_up: set[int] = set()
        """Checks that took too long; each rank still answers."""
        self._useless = False
        """What ranks may have prepared is for nobody: they are to be told."""
        self._ids = 0
        self.weights = Weights()
        """Those of the last update that succeeded, also one before this start."""

    @property
    def under_way(self) -> str:
        """The action of the order, or ""."""
        return self._order.action if self._order else ""

    @property
    def deadline(self) -> float | None:
        """When the ranks must have answered, or, while nothing is under way, the lock is over."""
        if self._order is not None:
            return self._order.patience.deadline if self._order.patience else None
        return self._lock.until if self._lock else None

    def on_clock(self, scheduler: Scheduler, now: float) -> str | None:
        """At `deadline`.  Returns why the instance cannot go on, if so: the ranks took too long, before the
        eyes of an engine that was not away itself."""
        order = self._order
        if order is None and self._lock is not None and now >= self._lock.until:
            log.warning("new weights were checked and not decided: what was prepared for them is given back")
            self._lock, self._useless = None, True
        if order is None or order.patience is None or not order.patience.look(now):
            return None
        silent = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in order.done)
        what = f"worker ranks {silent} have not answered {order.action} for {order.patience.patience_s:g} s"
        if order.action == "check_weights":
            self._given_up.add(order.id)
            self._useless = True
            self._end(
                order, _error(f"{what}: is {order.argument!r} on a slow disk?", "timeout"), scheduler, now
            )
            return None
        flag = "--startup-timeout" if order.action == "update_weights" else "--step-timeout"
        return f"{what}: they hang, or it takes longer than {flag}"

    def begin(
        self, outbox: Outbox, query: Query, scheduler: Scheduler, now: float
    ) -> Sequence[Preempt | Control]:
        """Takes an order; returns what to tell the worker first.  One that is refused is answered at once."""
        if query.what == "release_weights":
            commands = self.gateway_lost(outbox)
            if not commands and self._lock is None and self._order is None:
                commands = [Control("release_weights")]  # (one rank may have prepared what another refused)
            self._outboxes.reply(outbox, QueryReply(query.id, {"released": True}))
            return commands
        if query.what == "update_weights" and query.weights is not None:
            return self._take_decided(outbox, query, query.weights, scheduler, now)
        refusal = self._refusal(outbox, query, now)
        if refusal is not None:
            self._outboxes.reply(outbox, QueryReply(query.id, refusal))
            return []
        return self._start(outbox, query, scheduler, now)

    def gateway_lost(self, outbox: Outbox) -> list[Control]:
        """Its lock, if it has it, is over; what the ranks have prepared for it is of no use any more: returns
        what to tell them."""
        order = self._order
        checks = order is not None and order.action == "check_weights" and order.outbox is outbox
        locks = self._lock is not None and self._lock.outbox is outbox
        if locks:
            self._lock = None
        return [Control("release_weights")] if checks or locks else []

    def _take_decided(
        self, outbox: Outbox, query: Query, decided: Weights, scheduler: Scheduler, now: float
    ) -> list[Preempt]:
        if not decided.newer(self.weights):
            self._outboxes.reply(outbox, QueryReply(query.id, self._has_already()))
            return []
        self._lock = None
        if self._order is None:
            return self._start(outbox, query, scheduler, now)
        self._waiting[outbox.identity] = outbox, query
        return [Preempt(request.slot, request.epoch) for request in scheduler.drain()]

    def _has_already(self) -> dict[str, Any]:
        return {"path": self.weights.path, "weights": self.weights.name, "preempted_requests": 0}

    def _start(self, outbox: Outbox, query: Query, scheduler: Scheduler, now: float) -> list[Preempt]:
        victims = scheduler.drain() if query.what == "update_weights" else []
        alone = Weights(self.weights.generation + 1, query.argument, query.argument)
        self._order = _Order(
            outbox,
            query.id,
            cast(Action, query.what),
            query.argument,
            query.weights or alone,
            query.weights is not None,
            now,
            len(victims),
        )
        log.info("%s %s: %d requests give way", query.what, query.argument, len(victims))
        return [Preempt(request.slot, request.epoch) for request in victims]

    def _refusal(self, outbox: Outbox, query: Query, now: float) -> dict[str, Any] | None:
        if self._order is not None:
            return _error(f"{self._order.action} is under way; try again when it is done", "busy")
        lock = self._lock
        if lock is not None and lock.outbox is not outbox and now < lock.until:
            left = lock.until - now
            return _error(f"another server is about to load new weights; try again in {left:.0f} s", "busy")
        if query.what == "stop_profile":
            return None
        if not 1 <= len(query.argument) <= MAX_ARGUMENT or "\0" in query.argument:
            return _error(f"{query.what} needs a directory, 1 to {MAX_ARGUMENT} characters", "refused")
        return None

    def commands(self, scheduler: Scheduler, now: float) -> list[Control]:
        """What is to be sent now."""
        order = self._order
        commands = [Control("release_weights")] if self._useless else []
        self._useless = False
        if order is None or order.id or (order.action == "update_weights" and scheduler.num_occupied):
            return commands
        self._ids += 1
        order.id = self._ids
        order.patience = Silence(self._timeouts.get(order.action, self._timeout_s), now)
        return [*commands, Control(order.action, order.argument, order.id)]

    def done(self, rank: int, report: ControlDone, scheduler: Scheduler, now: float) -> None:
        """A rank has answered; the last one's answer ends the order.

        Raises `UnexpectedDone` (the report changes nothing) or `OrderFailed`.
        """
        order = self._order
        if order is None or report.id != order.id:
            if report.id in self._given_up:
                return
            raise UnexpectedDone(f"ControlDone of order {report.id}, which is not under way")
        if rank in order.done:
            raise UnexpectedDone(f"ControlDone of order {report.id} for the second time")
        order.done[rank] = report.error
        if not report.error:
            order.values.add(report.value)
        if len(order.done) < self._num_ranks:
            return
        errors = {rank: order.done[rank] for rank in sorted(order.done) if order.done[rank]}
        if errors and order.action == "update_weights":
            if len(errors) < self._num_ranks:
                raise OrderFailed(f"only some ranks have the new weights: {_join(errors)}")
            if order.decided:
                raise OrderFailed(f"the weights that all instances get cannot be loaded: {_join(errors)}")
        if order.action == "check_weights" and (errors or len(order.values) > 1):
            self._lock, self._useless = None, True
        if errors:
            body = _error(_join(errors), "refused")
        elif len(order.values) > 1:
            body = _error(f"the ranks find different files at {order.argument!r}", "refused")
        else:
            body = self._success(order, scheduler, now)
        self._end(order, body, scheduler, now)

    def _end(self, order: _Order, body: dict[str, Any], scheduler: Scheduler, now: float) -> None:
        """The order is answered; what was decided meanwhile follows."""
        self._order = None
        log.info("%s %s", order.action, body.get("error") or f"done in {now - order.began:.2f} s")
        self._outboxes.reply(order.outbox, QueryReply(order.query, body))
        while self._waiting and self._order is None:
            outbox, query = self._waiting.pop(next(iter(self._waiting)))
            assert query.weights is not None  # (it was decided)
            self._take_decided(outbox, query, query.weights, scheduler, now)
        if self._order is None and scheduler.draining:
            scheduler.end_drain()

    def _success(self, order: _Order, scheduler: Scheduler, now: float) -> dict[str, Any]:
        if order.action == "check_weights":
            self._lock = _Lock(order.outbox, now + PREPARED_S)
            (value,) = order.values
            return {"path": order.argument, "weights": value or order.argument}
        if order.action != "update_weights":
            return {"profiling": order.action == "start_profile"}
        self.weights = order.weights
        return {
            "path": order.argument,
            "weights": order.weights.name,
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
