"""Deliberate defects, one at a time, patched into the production classes.

A simulator that finds nothing shows nothing unless it can be seen to find.  Each mutation is a small,
plausible mistake in the code that runs in production; `rules` are the names by which it may be reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest

from baton.engine import intake as engine_intake
from baton.engine.core import EngineCore
from baton.engine.intake import Intake
from baton.engine.scheduling.admission import Admissions
from baton.engine.scheduling.ledger import Ledger
from baton.engine.scheduling.prefix import PrefixIndex, root_key
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.states import State
from baton.engine.workers import steps as engine_steps
from baton.engine.workers.controls import Controls
from baton.engine.workers.steps import StepReader
from baton.gateway.cluster.cluster import Cluster
from baton.gateway.cluster.member import lost_error
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.cluster.table import RequestTable
from baton.protocol.messages.commands import Abort, Preempt
from baton.protocol.messages.reports import Closed, CloseReason, StepReport
from baton.protocol.rules import silence
from baton.protocol.rules.silence import Silence
from baton.protocol.weights import Weights
from baton.simulation.parties import new_weights
from baton.simulation.wires.rings import WatchedReports
from baton.simulation.world import World
from baton.worker.loop import WorkerLoop
from baton.worker.rounds import FollowerRounds, LeaderRounds
from baton.worker.slots.slots import Slots

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    name: str
    rules: tuple[str, ...]
    apply: Callable[[Patch], None]
    scenario: str = "standard"
    start: int = 0
    """Where the test begins, if it would take long from the first seed on.  (The table counts from 0.)"""
    new: bool = False
    """A rule that was there before finds it by something that it has learnt since; see `old_rules.py`."""


MUTATIONS: list[Mutation] = []


def mutation(
    name: str, *rules: str, scenario: str = "standard", start: int = 0, new: bool = False
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS.append(Mutation(name, rules, apply, scenario, start, new))
        return apply

    return add


# -- the engine


@mutation("blocks are freed before Closed", "closing-4", "table")
def free_before_closed(patch: Patch) -> None:
    cancel = Intake.cancel

    def wrong(self, request, now):
        cancel(self, request, now)
        if request.state is State.ABORTING:
            self._scheduler.ledger.release(request.slot)

    patch.setattr(Intake, "cancel", wrong)


@mutation("the slot is given away when it is preempted", "closing-4", "closing-1")
def slot_before_closed(patch: Patch) -> None:
    give_way = Scheduler._give_way

    def wrong(self, decisions):
        give_way(self, decisions)
        for victim in decisions.preempted:
            if self.slots[victim.slot] is victim:
                self.slots[victim.slot] = None
                self.room._free_slots.append(victim.slot)

    patch.setattr(Scheduler, "_give_way", wrong)


@mutation("a closing of a stale epoch is accepted by the engine", "closing-4", "closing-1", "violation")
def stale_epoch_in_engine(patch: Patch) -> None:
    occupant = StepReader._occupant

    def wrong(self, slot, epoch):
        slots = self._scheduler.slots
        request = slots[slot] if 0 <= slot < len(slots) else None
        return request if request is not None else occupant(self, slot, epoch)

    patch.setattr(StepReader, "_occupant", wrong)


@mutation("prefix blocks are indexed before they are computed", "closing-5", "pages")
def indexed_before_computed(patch: Patch) -> None:
    seat = Admissions._seat

    def wrong(self, request, shared, fresh):
        admission = seat(self, request, shared, fresh)
        self.index(request, len(request.tokens) - 1)
        return admission

    patch.setattr(Admissions, "_seat", wrong)


@mutation("a block is indexed one token too early", "closing-5", "pages")
def indexed_one_token_early(patch: Patch) -> None:
    index = Admissions.index
    patch.setattr(Admissions, "index", lambda self, request, computed: index(self, request, computed + 1))


@mutation("a cancel is lost while the request is queued", "cancel")
def cancel_lost_while_queued(patch: Patch) -> None:
    cancel = Intake.cancel

    def wrong(self, request, now):
        if request.state is not State.WAITING:
            cancel(self, request, now)

    patch.setattr(Intake, "cancel", wrong)


@mutation("the requests of a lost gateway run on", "cancel")
def lost_gateway_ignored(patch: Patch) -> None:
    patch.setattr(EngineCore, "gateway_lost", lambda self, identity: self._outboxes.drop(identity) and None)


@mutation("a preempted request is requeued without its last token", "tokens")
def requeued_without_last_token(patch: Patch) -> None:
    close = StepReader._close

    def wrong(self, request, closed, now):
        if closed.reason is CloseReason.PREEMPTED and request.num_generated:
            request.tokens.pop()
        close(self, request, closed, now)

    patch.setattr(StepReader, "_close", wrong)


@mutation("a Grow is dropped", "table")
def grow_dropped(patch: Patch) -> None:
    decide = Scheduler.decide

    def wrong(self):
        decisions = decide(self)
        del decisions.grown[1:]
        return decisions

    patch.setattr(Scheduler, "decide", wrong)


@mutation("a block is freed twice", "ledger")
def double_release(patch: Patch) -> None:
    release = Ledger.release

    def wrong(self, slot):
        table = list(self.table(slot))
        release(self, slot)
        self._free.extend(block for block in table[-1:] if block in self._free)

    patch.setattr(Ledger, "release", wrong)


@mutation(
    "the prefix index does not hear of evictions",
    "pages",
    "owner",
    "tokens",
    "ledger",
    "crash",
    "closing-5",
    "salt",
)
def evictions_unheard(patch: Patch) -> None:
    patch.setattr(PrefixIndex, "_forget", lambda self, block: None)


@mutation("the salt is left out of the prefix keys", "salt")
def salt_ignored(patch: Patch) -> None:
    patch.setattr(engine_intake, "root_key", lambda salt: root_key(""))


@mutation("epochs do not grow when a slot is reused", "epoch")
def epochs_repeat(patch: Patch) -> None:
    seat = Admissions._seat

    def wrong(self, request, shared, fresh):
        self._room._epochs[self._room._free_slots[-1]] = 0
        return seat(self, request, shared, fresh)

    patch.setattr(Admissions, "_seat", wrong)


@mutation("the queue's bound is ignored", "queue")
def queue_bound_ignored(patch: Patch) -> None:
    init = Intake.__init__

    def wrong(self, limits, max_waiting, *others):
        init(self, limits, 1 << 30, *others)

    patch.setattr(Intake, "__init__", wrong)


@mutation("a request behind a cancelled head is not looked at", "liveness", "end", start=38)
def lost_wake_up(patch: Patch) -> None:
    withdraw, admit, hiding = Admissions.withdraw, Admissions._admit, set()

    def wrong_withdraw(self, request):  # (as if it stayed the head until somebody is looked at)
        withdraw(self, request)
        hiding.add(self)

    def wrong_admit(self, decisions):
        hiding.discard(self)
        admit(self, decisions)

    def wrong_enqueue(self, request):
        self.line.push(request)
        self.due = self.due or (self.line.head() is request and self not in hiding)

    patch.setattr(Admissions, "withdraw", wrong_withdraw)
    patch.setattr(Admissions, "_admit", wrong_admit)
    patch.setattr(Admissions, "enqueue", wrong_enqueue)


@mutation("Finished is sent twice", "answer")
def finished_twice(patch: Patch) -> None:
    finish = engine_steps.finish

    def wrong(outboxes, counters, request, reason, message=""):
        finish(outboxes, counters, request, reason, message)
        if reason == "aborted":
            request.gateway.finished.append(request.gateway.finished[-1])

    patch.setattr(engine_intake, "finish", wrong)
    patch.setattr(engine_steps, "finish", wrong)


@mutation("nobody times the steps", "timer")
def untimed(patch: Patch) -> None:
    patch.setattr(EngineCore, "_expects_reports", lambda self: False)


@mutation("tokens of a cancelled request are still sent", "answer")
def tokens_after_cancel(patch: Patch) -> None:
    cancel = Intake.cancel

    def wrong(self, request, now):
        cancel(self, request, now)
        request.outbox = request.gateway

    patch.setattr(Intake, "cancel", wrong)


@mutation("admission goes on while the slots drain for new weights", "crash")
def admission_while_draining(patch: Patch) -> None:
    drain = Scheduler.drain

    def wrong(self):
        victims = drain(self)
        self.end_drain()
        return victims

    patch.setattr(Scheduler, "drain", wrong)
    commands = Controls.commands
    patch.setattr(
        Controls,
        "commands",
        lambda self, scheduler, now: commands(
            self,
            SimpleNamespace(
                num_occupied=sum(1 for one in scheduler.slots if one and one.state is not State.RUNNING)
            ),
            now,
        ),
    )


# -- the worker


@mutation("Closed is not sent when no step runs", "closing-3")
def no_closed_without_step(patch: Patch) -> None:
    emit = WorkerLoop.emit

    def wrong(self, report, ring=True):
        if isinstance(report, StepReport) and report.step == 0 and not self.slots.open_slots():
            return
        emit(self, report, ring)

    patch.setattr(WorkerLoop, "emit", wrong)


@mutation("a command for a stale epoch is answered by the worker", "closing-1")
def stale_epoch_in_worker(patch: Patch) -> None:
    apply = Slots.apply

    def wrong(self, command):
        effect = apply(self, command)
        if effect is None and isinstance(command, Preempt | Abort):
            return Closed(command.slot, command.epoch, CloseReason.ABORTED)
        return effect

    patch.setattr(Slots, "apply", wrong)


@mutation("a token comes after its Closed", "closing-2")
def token_after_closed(patch: Patch) -> None:
    emit = WorkerLoop.emit

    def wrong(self, report, ring=True):
        if isinstance(report, StepReport) and report.step and report.closings:
            emit(self, StepReport(step=0, applied=report.applied, closings=report.closings))
            report = msgspec.structs.replace(report, closings=[])
        emit(self, report, ring)

    patch.setattr(WorkerLoop, "emit", wrong)


@mutation("a follower's ticket is off by one", "agreement")
def ticket_off_by_one(patch: Patch) -> None:
    enter = FollowerRounds.enter

    def wrong(self, busy):
        sequence = enter(self, busy)
        return sequence if sequence is None else max(sequence - 1, self._log.applied)

    patch.setattr(FollowerRounds, "enter", wrong)


@mutation("a follower applies what it has read, whatever the ticket says", "agreement")
def follower_runs_ahead(patch: Patch) -> None:
    enter = FollowerRounds.enter

    def wrong(self, busy):
        sequence = enter(self, busy)
        if sequence is not None:
            self._log.collect()
            sequence = self._log.collected
        return sequence

    patch.setattr(FollowerRounds, "enter", wrong)


@mutation("the leader's ticket is off by one", "agreement")
def leader_ticket_off_by_one(patch: Patch) -> None:
    enter = LeaderRounds.enter

    def wrong(self, busy):
        board = self._tickets
        if board is None:
            return enter(self, busy)
        self._tickets = SimpleNamespace(
            publish=lambda round_, sequence: board.publish(round_, max(sequence - 1, 0)), lag=board.lag
        )
        try:
            return enter(self, busy)
        finally:
            self._tickets = board

    patch.setattr(LeaderRounds, "enter", wrong)


@mutation("an idle rank forgets the reports that wait for room", "liveness", "failure", "end")
def idle_rank_does_not_flush(patch: Patch) -> None:
    def wrong(self):
        if self._log.has_news():
            self._collect()

    patch.setattr(LeaderRounds, "_sleep", wrong)


@mutation("an idle rank leaves reports behind that have woken nobody", "liveness", "failure", start=74)
def idle_rank_does_not_ring(patch: Patch) -> None:
    patch.setattr(WatchedReports, "ring", lambda self: None)


@mutation("grown blocks do not reach the rows that decode", "owner", "tokens")
def stale_decode_tables(patch: Patch) -> None:
    patch.setattr(Slots, "_grow", lambda self, command: self._append_blocks(command))


@mutation("min_tokens is ignored", "tokens")
def min_tokens_ignored(patch: Patch) -> None:
    admit = Slots._admit

    def wrong(self, command):
        effect = admit(self, command)
        self.table.unstoppable[command.slot] = 0
        return effect

    patch.setattr(Slots, "_admit", wrong)


@mutation("a request that starts again gets max_tokens anew", "tokens", "failure")
def max_tokens_anew(patch: Patch) -> None:
    admit = Slots._admit

    def wrong(self, command):
        effect = admit(self, command)
        if not isinstance(effect, Closed):
            self.table.left[command.slot] = command.stopping.max_tokens
        return effect

    patch.setattr(Slots, "_admit", wrong)


# -- the gateway


@mutation("a retry reuses the old id", "answer")
def retry_reuses_id(patch: Patch) -> None:
    send = RequestTable._send

    def wrong(self, request, plan, num_tokens, now):
        old = request.id
        send(self, request, plan, num_tokens, now)
        if request.losses:
            message = plan.at.outgoing[-1]
            plan.at.outgoing[-1] = msgspec.structs.replace(message, id=old)
            self.running[old] = self.running.pop(request.id)
            request.id = old

    patch.setattr(RequestTable, "_send", wrong)


@mutation("a request goes on without its last token", "tokens")
def goes_on_without_last_token(patch: Patch) -> None:
    submit = EngineRequest.submit

    def wrong(self, decoders=()):
        message = submit(self, decoders)
        return msgspec.structs.replace(message, generated=message.generated[:-4])

    patch.setattr(EngineRequest, "submit", wrong)


@mutation("a request goes on from what its client has taken, not from what came", "tokens")
def goes_on_from_received(patch: Patch) -> None:
    submit = EngineRequest.submit

    def wrong(self, decoders=()):
        return msgspec.structs.replace(submit(self, decoders), generated=self.tokens[: self.taken].tobytes())

    patch.setattr(EngineRequest, "submit", wrong)


@mutation("parked requests wait without a limit", "timer")
def parked_for_ever(patch: Patch) -> None:
    patch.setattr(RequestTable, "next_deadline", lambda self: None)


@mutation("a request whose instance was lost fails", "answer")
def no_retry(patch: Patch) -> None:
    patch.setattr(RequestTable, "_lost", lambda self, request, reason, now: request.fail(lost_error(reason)))


# -- watchers


@mutation("a verdict counts though the watcher was away", "verdict", scenario="watchers", start=985)
def verdict_though_away(patch: Patch) -> None:
    patch.setattr(silence, "MAX_VOIDS", 0)


@mutation("one look is enough, however late", "verdict", scenario="watchers")
def one_late_look(patch: Patch) -> None:
    patch.setattr(Silence, "look", lambda self, now: now >= self.since + self.patience_s)


@mutation("who is silent is given chances for ever", "verdict", scenario="watchers")
def chances_for_ever(patch: Patch) -> None:
    def look(self, now):
        if now >= self.deadline:
            self.deadline = now + self._part_s
        return False

    patch.setattr(Silence, "look", look)


@mutation("a renewal does not count", "verdict", scenario="watchers")
def renewals_unheard(patch: Patch) -> None:
    renew = Cluster.renew

    def once(self, name, ttl_s, now):
        if self.members[name].lease is None:
            renew(self, name, ttl_s, now)

    patch.setattr(Cluster, "renew", once)


# -- new weights


@mutation("a gateway decides though an instance refused", "weights", "tokens", scenario="weights")
def decides_anyway(patch: Patch) -> None:
    """And who has refused stays as it is."""
    patch.setattr(new_weights, "agreed", lambda each, path: path)
    take, init = Controls._take_decided, EngineCore.__init__

    def refusing(self, outbox, query, decided, scheduler, now):
        return (
            []
            if decided.path.endswith(f"?{self.member}")
            else take(self, outbox, query, decided, scheduler, now)
        )

    def named(self, config, **more):
        init(self, config, **more)
        self._controls.member = config.name

    patch.setattr(Controls, "_take_decided", refusing)
    patch.setattr(EngineCore, "__init__", named)


@mutation("an instance that cannot load what was decided goes on with the old", "weights", scenario="weights")
def goes_on_with_the_old(patch: Patch) -> None:
    start = Controls._start

    def wrong(self, outbox, query, scheduler, now):
        preempts = start(self, outbox, query, scheduler, now)
        self._order.decided = False
        return preempts

    patch.setattr(Controls, "_start", wrong)


@mutation("an instance that starts again has the weights of the start", "weights", scenario="weights")
def forgets_the_decision(patch: Patch) -> None:
    patch.setattr(Cluster, "_hear_weights", lambda self, theirs: True)
    patch.setattr(World, "newest_weights", property(lambda self: Weights()))


@mutation("a gateway that hears of a newer decision keeps its own", "weights", scenario="weights")
def newer_unheard(patch: Patch) -> None:
    hear = Cluster._hear_weights

    def wrong(self, theirs):
        return theirs.newer(self.weights) or hear(self, theirs)

    patch.setattr(Cluster, "_hear_weights", wrong)


@mutation(
    "an instance that was away when it was decided is not told", "weights", scenario="weights", start=18
)
def missed_the_decision(patch: Patch) -> None:
    hear = Cluster._hear_weights
    patch.setattr(Cluster, "_hear_weights", lambda self, theirs: hear(self, theirs) or True)
