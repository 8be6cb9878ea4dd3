"""The engine's state machine: messages in, messages out, no I/O, the clock an argument.

Theory.  The core knows every request as (gateway, id).  It is fed by

* `on_message(gateway, message, now)`: what a gateway sent;
* `on_report(rank, report, now)`: what a worker rank reported, in the order of that rank's ring;
* `on_peer(peer, message, now)`: what another engine sent, known by its incarnation (`handovers.py`);
* `on_clock(now)`: time has passed, at the latest at `next_deadline()`;
* `gateway_lost`, `peer_lost`, `shut_down`, `fail`: what the shell noticed;

and collects what is to be sent until `flush(now)` takes it: at most one `CommandBatch` (numbered from 1
without gaps, the same for every rank), for each gateway its replies and one `Outputs`, and messages to other
engines, each with its address.  The shell flushes after each look at its queues: one decision, one record.

The worker decides tokens and closings, the core everything else.  A slot is the worker's from
`Admit` to `Closed`; whatever happens meanwhile (`Cancel`, `Preempt`, both), the core waits for that closing
and only then gives slot and blocks up.  The table in `states.py` says what a closing means in each state.

A message that no correct sender would send is a *violation*: the core logs it with its sender, counts it and
drops it.  After a report that cannot be decoded tokens would be missing unnoticed, so the instance fails.  It
also fails when a rank says that it failed or dies, when ranks disagree on what they are, and when something
runs and the workers have reported nothing for `step_timeout_s`.  `failure` says why; the core tells the
gateways in `Failing`, its last message to them (`LastWords`).  The supervisor bounds how long a start takes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from baton.engine.counters import Counters, Counting
from baton.engine.dispatch import CommandBuffer
from baton.engine.endings import refuse
from baton.engine.handover.courier import Courier, earliest
from baton.engine.handover.handovers import Handovers
from baton.engine.outbox import Outboxes
from baton.engine.parts import Machinery
from baton.engine.request import Outbox
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.standing import Announcements, LastWords
from baton.engine.states import State
from baton.engine.validation import Rejected
from baton.engine.workers.controls import ACTIONS, Controls, OrderFailed, UnexpectedDone
from baton.engine.workers.handshake import DYING_S, Handshake, HandshakeError
from baton.engine.workers.steps import UnreadableReport
from baton.protocol.codec import MalformedMessage
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import CommandBatch, Control, Grants
from baton.protocol.messages.handover import PeerMessage, Refused, Reserve
from baton.protocol.messages.reports import (
    ControlDone,
    Fetched,
    LayersDone,
    Report,
    StepReport,
    StepRoutes,
    StepsRan,
    StrangersRefused,
    WorkerFailed,
    WorkerReady,
)
from baton.protocol.messages.requests import (
    Cancel,
    Failing,
    FromEngine,
    Hello,
    Query,
    QueryReply,
    Submit,
    Target,
    ToEngine,
)
from baton.protocol.rules.passes import gateway_key, pair_key
from baton.protocol.rules.silence import Silence
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

_CLOSING = (State.PREEMPTING, State.ABORTING)


class Outgoing(NamedTuple):
    """What a flush wants sent."""

    batch: CommandBatch | None
    gateways: list[tuple[bytes, FromEngine]]
    peers: list[tuple[Target, PeerMessage]]


class EngineCore(Counting):
    """One instance's engine.  `workers` are the process ids of the ranks, rank 0 first; `peer_endpoint` is
    where other engines reach this one, "" if it takes part in no hand-over; `secret` is drawn for this
    incarnation (`protocol/rules/passes.py`)."""

    def __init__(
        self,
        config: InstanceConfig,
        *,
        incarnation: str,
        workers: Sequence[int],
        now: float,
        peer_endpoint: str = "",
        secret: bytes = b"",
    ) -> None:
        self.config = config
        self.incarnation = incarnation
        self._secret = secret
        self.workers = list(workers)
        self.failure: str | None = None
        """Why the instance cannot go on; None while it can."""
        self.closing = False
        """The instance was told to shut down."""
        self.counters = Counters()
        self.worker_failures: dict[int, str] = {}
        """What ranks said of themselves before they died."""
        self._started = now
        self._handshake = Handshake(config, len(self.workers))
        self._outboxes = Outboxes(now)
        self.gateways = self._outboxes.heard_of
        self._controls = Controls(
            len(self.workers), config.step_timeout_s, self._outboxes, config.startup_timeout_s
        )
        self._controls.weights = config.weights
        self._courier = Courier(incarnation, peer_endpoint)
        self._machinery: Machinery | None = None
        self._announced = Announcements(self._outboxes)
        self._last_words = LastWords()
        self._buffer = CommandBuffer()
        self._reports = Silence(config.step_timeout_s, now)
        self._expecting = False
        self._failing_at: float | None = None

    # -- what the shell needs

    @property
    def ready(self) -> bool:
        """All ranks are ready and agree."""
        return self._machinery is not None

    @property
    def over(self) -> bool:
        """The instance ends now: it was told to, or it failed and has said why."""
        return self.closing or (self.failure is not None and self._last_words.said)

    @property
    def scheduler(self) -> Scheduler:
        """Exists once `ready`; raises `RuntimeError` before."""
        if self._machinery is None:
            raise RuntimeError("the workers are not ready yet")
        return self._machinery.scheduler

    @property
    def _scheduler(self) -> Scheduler | None:
        return self._machinery.scheduler if self._machinery else None

    @property
    def _handovers(self) -> Handovers | None:
        return self._machinery.handovers if self._machinery else None

    def next_deadline(self) -> float | None:
        """When `on_clock` must be called at the latest; None: nothing is timed."""
        if self.failure is not None:
            return self._last_words.deadline
        if self._failing_at is not None:
            return self._failing_at
        deadline = self._reports.deadline if self._expecting else None
        if self.closing:
            return deadline
        deadline = earliest(earliest(deadline, self._controls.deadline), self._announced.resumes_at)
        if self._machinery is not None:
            deadline = earliest(deadline, self._machinery.handovers.next_deadline)
            deadline = earliest(deadline, self._machinery.loads.next_deadline)
        return deadline

    @property
    def unhurried(self) -> bool:
        """What the workers report next are tokens, and nobody waits for what may follow from them: for blocks
        or a slot, for another engine (such waits have a deadline), or for an order to be done."""
        machinery = self._machinery
        return (
            machinery is not None
            and not machinery.scheduler.in_demand
            and not machinery.scheduler.num_following
            and machinery.handovers.next_deadline is None
            and not self._controls.under_way
        )

    def flush(self, now: float) -> Outgoing:
        """Decides, and takes everything that is to be sent."""
        self._outboxes.now = now
        if self._machinery is not None and self.failure is None and not self.closing:
            self._decide(self._machinery, now)
        if self.failure is not None:
            self._last_words.wait(now)
        expects = self._expects_reports()
        if expects and not self._expecting:
            self._reports.heard(now)
        self._expecting = expects
        return Outgoing(self._buffer.take(), self._outboxes.take(), self._courier.take())

    def take_grants(self) -> list[Grants]:
        """After a flush, before what it returned is sent: what page servers are to be told of who may fetch
        pages.  It concerns no slot and no step, so it does not take the way of the command log."""
        return self._handovers.take_grants() if self._handovers is not None else []

    def on_clock(self, now: float) -> None:
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        self._outboxes.now = now
        self._touch()
        if self.failure is not None:
            self._last_words.give_up(self.failure)
            return
        if self._failing_at is not None:
            rank, message = next(iter(self.worker_failures.items()))
            self.fail(f"worker rank {rank} failed: {message}")
            return
        failure = self._controls.on_clock(self._scheduler, now) if self._scheduler is not None else None
        if failure is not None:
            self.fail(failure)
            return
        if self._announced.resumes_at is not None and now >= self._announced.resumes_at:
            self._pause(Query(0, "resume"))
        self._hand_over_clock(now)
        if not self._expecting or not self._reports.look(now):
            return
        self.fail(
            f"{self.scheduler.num_occupied} requests run and nothing was reported for "
            f"{now - self._reports.since:.1f} s: the worker hangs, or a step takes longer than "
            f"step_timeout_s, {self.config.step_timeout_s:g}"
        )

    def fail(self, message: str) -> None:
        """The instance cannot go on: the core tells every gateway (`LastWords`).  The first reason stays."""
        if self.failure is None:
            self.failure = message
            # (Of an instance that was never ready the supervisor tells the user why, once.)
            log.log(logging.CRITICAL if self.ready else logging.DEBUG, "the instance fails: %s", message)
            self._buffer.commands.append(Control("shutdown"))  # ranks that are well leave by themselves
            self._outboxes.tell_all_last(Failing(message))

    def shut_down(self) -> None:
        """Ends the instance: tells workers and gateways so, and takes nothing new."""
        self._last_words.end()
        if not self.closing and self.failure is None:
            self.closing = True
            self._buffer.commands.append(Control("shutdown"))
            self._outboxes.tell_all_last(Failing("the instance is shutting down"))

    def gateway_lost(self, identity: bytes) -> None:
        """The connection to a gateway broke: the core cancels all of its requests."""
        outbox = self._outboxes.drop(identity)
        self._touch()
        if outbox is not None:
            # (Requests that the gateway cancelled itself before it left are not counted.)
            alive = sum(request.state is not State.ABORTING for request in outbox.requests.values())
            level = logging.WARNING if alive else logging.DEBUG
            self._buffer.commands += self._controls.gateway_lost(outbox)
            self._announced.left(outbox)
            log.log(level, "gateway %s is gone; cancelling its %d requests", outbox, alive)
            if self._machinery is not None:
                for request in list(outbox.requests.values()):
                    self._machinery.intake.cancel(request, self._outboxes.now)
                self._machinery.handovers.arrivals.gateway_lost(outbox, self._outboxes.now)

    def violation(self, sender: str, what: str) -> None:
        """Something arrived that cannot be."""
        self.counters.violations += 1
        log.error("protocol violation by %s: %s; dropped", sender, what)

    # -- gateways

    def on_message(self, gateway: bytes, message: ToEngine, now: float) -> None:
        self._outboxes.now = now
        self._touch()
        outbox = self._outboxes.of(gateway)
        if isinstance(message, Submit):
            self._submit(outbox, message, now)
        elif isinstance(message, Cancel) and self._machinery is not None:
            self._machinery.intake.cancel_id(outbox, message.id, now)
        elif isinstance(message, Query):
            if message.what in ACTIONS:
                self._order(outbox, message, now)
            else:
                self._outboxes.reply(outbox, QueryReply(message.id, self._query(message, now)))
        elif isinstance(message, Hello):
            self._hello(outbox, message)

    def _hello(self, outbox: Outbox, hello: Hello) -> None:
        if outbox.name is not None and outbox.name != hello.gateway:
            # Another process behind the same connection: it numbers its requests anew.
            self.gateway_lost(outbox.identity)
            outbox = self._outboxes.of(outbox.identity)
        self._send_load(self._outboxes.now, at_once=True)
        outbox.call(hello.gateway)
        self._last_words.end()
        if self.failure is not None:
            self._outboxes.reply(outbox, Failing(self.failure))
        elif self._announced.hello(outbox, hello):
            whole = self._machinery.loads.whole(self._outboxes.now) if self._machinery else None
            if whole is not None:
                self._outboxes.reply(outbox, whole)

    def _submit(self, outbox: Outbox, submit: Submit, now: float) -> None:
        if self.closing or self.failure is not None:
            text = "the instance is going down; send this to another one, or later"
            refusal = Rejected("shutting_down", text)
        elif self._machinery is None:
            refusal = Rejected("bad_request", "the instance is still loading; submit nothing before Welcome")
        else:
            self._machinery.intake.submit(outbox, submit, now)
            return
        refuse(self._outboxes, self.counters, outbox, submit.id, refusal)

    def _order(self, outbox: Outbox, query: Query, now: float) -> None:
        if self.closing or self.failure is not None:
            body = {"error": "the instance is going down", "code": "shutting_down"}
        elif self._scheduler is None:
            body = {"error": "the instance is still loading", "code": "loading"}
        else:
            self._buffer.commands += self._controls.begin(outbox, query, self._scheduler, now)
            if self._scheduler.draining and self._handovers is not None:
                self._handovers.end_all("new weights", now)
            return
        self._outboxes.reply(outbox, QueryReply(query.id, body))

    def _query(self, query: Query, now: float) -> dict[str, Any]:
        if query.what == "stats":
            if query.argument == "steps":
                self._send_load(now, at_once=True)
            return self.stats(now)
        machinery = self._machinery
        if machinery is None:
            return {"error": "the instance is still loading", "code": "loading"}
        if query.what == "ledger":
            return machinery.describe_ledger(now)
        if query.what == "reset_prefix_cache":
            return {"forgotten_blocks": machinery.scheduler.reset_prefix()}
        if query.what == "stand":
            return self._announced.stand(query)
        return {"paused": self._pause(query)}

    def _pause(self, query: Query) -> bool:
        paused, scheduler = self._announced.pause(query, self._outboxes.now), self.scheduler
        if paused != scheduler.paused:
            scheduler.pause(paused)
            self._buffer.commands.append(Control("pause" if paused else "resume"))
        return paused

    def stats(self, now: float) -> dict[str, Any]:
        """Counters (see `Counters`) and gauges, in seconds, tokens and blocks."""
        values: dict[str, Any] = {
            "ready": self.ready,
            "incarnation": self.incarnation,
            "uptime_s": now - self._started,
            "now": now,
            "gateways": len(self._outboxes),
            "max_waiting": self.config.max_waiting,
            "max_num_seqs": self.config.max_num_seqs,
            "block_size": self.config.block_size,
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "under_way": self._controls.under_way,
            "weights": self._controls.weights.name,
        }
        if self._machinery is not None:
            values |= self._machinery.gauges()
        return values | self.counters.snapshot()

    def _send_load(self, now: float, *, at_once: bool = False) -> None:
        load = self._machinery.loads.changes(now, at_once=at_once) if self._machinery else None
        if load is not None:
            self._outboxes.tell_all(load)

    def _touch(self) -> None:
        """Something happened that may change the load."""
        if self._machinery is not None:
            self._machinery.loads.touch()

    # -- other engines

    def on_peer(self, peer: str, message: PeerMessage, now: float) -> None:
        """`peer`: the incarnation of the engine that sent this."""
        self._outboxes.now = now
        self._touch()
        machinery = self._machinery
        if machinery is None or self.closing or self.failure is not None:
            if isinstance(message, Reserve):
                refused = Refused(
                    message.id, message.attempt, "shutting_down", "the instance takes nothing now"
                )
                key = pair_key(gateway_key(self._secret), peer)
                self._courier.send(Target(peer, message.endpoint, key), refused)
            return
        self._hand_over_clock(now)
        if isinstance(message, Reserve) and machinery.scheduler.due:
            machinery.dispatcher.schedule(now)  # what waits here may be admitted at once
        machinery.handovers.on_peer(peer, message, now)

    def peer_lost(self, peer: str, now: float, dead: bool = False) -> None:
        """The connection to this engine is gone.  `dead`: its process has ended, for certain."""
        self._outboxes.now = now
        self._touch()
        if self._handovers is not None:
            self._handovers.peer_lost(peer, now, dead)

    def _hand_over_clock(self, now: float) -> None:
        if self._handovers is not None and not self.closing and self.failure is None:
            failure = self._handovers.on_clock(now)
            if failure is not None:
                self.fail(failure)

    # -- workers

    def on_report(self, rank: int, report: Report, now: float) -> None:
        self._outboxes.now = now
        self._reports.heard(now)
        self._touch()
        self._hand_over_clock(now)
        if isinstance(report, StepReport | StepRoutes | StepsRan):
            self._step(rank, report)
        elif isinstance(report, Fetched):
            self._fetched(rank, report, now)
        elif isinstance(report, LayersDone):
            self._layers_done(rank, report)
        elif isinstance(report, WorkerReady):
            self._worker_ready(rank, report)
        elif isinstance(report, ControlDone):
            self._control_done(rank, report, now)
        elif isinstance(report, StrangersRefused):
            self.strangers_refused(report)
        elif isinstance(report, WorkerFailed):
            self.worker_failures[rank] = report.message
            self._failing_at = now + DYING_S
            log.debug("worker rank %d failed: %s", rank, report.message)

    def _step(self, rank: int, report: StepReport | StepRoutes | StepsRan) -> None:
        if (rank == 0) == isinstance(report, StepsRan) or self._machinery is None:
            self.violation(f"worker rank {rank}", "a step report, which is only rank 0's to send, when ready")
            return
        try:
            self._machinery.steps.read(report, self._outboxes.now, rank)
        except UnreadableReport as error:
            self.fail(f"a step report of worker rank 0 cannot be read: {error}")

    def _fetched(self, rank: int, report: Fetched, now: float) -> None:
        if self._handovers is None or report.rank != rank:
            self.violation(f"worker rank {rank}", f"Fetched of rank {report.rank}, or before it was ready")
            return
        self._handovers.arrivals.fetched(rank, report, now)

    def _layers_done(self, rank: int, report: LayersDone) -> None:
        if rank != 0 or self._handovers is None:
            self.violation(f"worker rank {rank}", "LayersDone, which is only rank 0's to send, when ready")
            return
        try:
            self._handovers.layers_done(report)
        except MalformedMessage as error:
            self.violation(f"worker rank {rank}", f"LayersDone: {error}")

    def _control_done(self, rank: int, report: ControlDone, now: float) -> None:
        if self._scheduler is None:
            self.violation(f"worker rank {rank}", "ControlDone before all ranks are ready")
            return
        try:
            before = self._controls.weights
            self._controls.done(rank, report, self._scheduler, now)
            if self._controls.weights != before:
                self._have_new_weights(self._controls.weights)
        except UnexpectedDone as error:
            self.violation(f"worker rank {rank}", str(error))
        except OrderFailed as error:
            self.fail(str(error))

    def _have_new_weights(self, weights: Weights) -> None:
        if self._handovers is not None:
            self._handovers.new_weights(weights.name)
        self._announced.change(weights=weights)  # (other gateways have not ordered them)

    def _worker_ready(self, rank: int, ready: WorkerReady) -> None:
        try:
            agreed = self._handshake.add(rank, ready)
        except HandshakeError as error:
            self.fail(str(error))
            return
        if agreed is None:
            return
        self._machinery = machinery = Machinery(
            self.config,
            len(self.workers),
            agreed,
            self._courier,
            self._outboxes,
            self.counters,
            self._buffer,
            self.incarnation,
            self.violation,
            self._secret,
        )
        endpoint, key, weights = self._courier.endpoint, gateway_key(self._secret), self._controls.weights
        welcome = agreed.welcome(self.config, self.incarnation, self.workers, endpoint, key, weights)
        self._announced.begin(welcome)
        whole = machinery.loads.whole(self._outboxes.now)
        if whole is not None:
            self._outboxes.tell_all(whole)

    def _expects_reports(self) -> bool:
        """Whether silence of the workers would be wrong."""
        scheduler = self._scheduler
        if scheduler is None or self.closing or self.failure is not None:
            return False
        if not scheduler.paused:
            return scheduler.num_occupied > 0
        return any(request and request.state in _CLOSING for request in scheduler.slots)

    def _decide(self, machinery: Machinery, now: float) -> None:
        machinery.dispatcher.decide(now)
        self._buffer.commands += self._controls.commands(machinery.scheduler, now)
        self._send_load(now)
