"""What an engine is made of once its workers are ready, and what it says about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.engine.counters import Counters
from baton.engine.dispatch import CommandBuffer, Dispatcher
from baton.engine.handover.courier import Courier
from baton.engine.handover.handovers import Handovers
from baton.engine.intake import Intake
from baton.engine.loads import Loads, Speeds, Turnover
from baton.engine.outbox import Outboxes
from baton.engine.scheduling.backlog import Backlog
from baton.engine.scheduling.ledger import Ledger
from baton.engine.scheduling.prefix import PrefixIndex
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.validation import Limits
from baton.engine.workers.handshake import Agreed
from baton.engine.workers.step_cost import StepCosts
from baton.engine.workers.step_notes import StepNotes
from baton.engine.workers.steps import StepReader
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.requests import Load

PREFILL_STEPS_AHEAD = 2
"""The step that runs, of which nothing was reported yet, and the one that follows it without a pause."""

KEYS_SHOWN = 20
"""Of those that wait, so many API keys are told apart in statistics."""


class Machinery:
    """Intake, scheduler, hand-overs, dispatcher, reader of step reports, load reports, over one ledger.

    `violation(sender, what)` counts and logs what no correct sender would send.
    """

    def __init__(
        self,
        config: InstanceConfig,
        num_ranks: int,
        agreed: Agreed,
        courier: Courier,
        outboxes: Outboxes,
        counters: Counters,
        buffer: CommandBuffer,
        incarnation: str,
        violation: Callable[[str, str], None],
        secret: bytes,
    ) -> None:
        self._numbers = 0
        ledger = Ledger(agreed.num_blocks, config.max_num_seqs)
        prefix = PrefixIndex(ledger) if config.enable_prefix_caching else None
        limits = Limits(agreed.num_blocks, agreed.block_size, config.max_model_len, agreed.vocab_size)
        self.scheduler = Scheduler(
            ledger,
            prefix,
            block_size=agreed.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            admission_headroom=config.admission_headroom,
            prefill_ahead=PREFILL_STEPS_AHEAD * config.max_num_batched_tokens,
            in_order=not config.auto_step_tokens,
            drafts=config.speculation.num_speculative_tokens if config.speculation else 0,
        )
        self.backlog = Backlog()
        turnover = Turnover()
        self.handovers = Handovers(
            config,
            num_ranks,
            limits,
            courier,
            self.scheduler,
            outboxes,
            counters,
            agreed.source if courier.endpoint else None,
            self._number,
            violation,
            secret,
        )
        self.speeds = Speeds()
        self.costs = StepCosts() if config.auto_step_tokens else None
        self.dispatcher = Dispatcher(
            buffer,
            self.scheduler,
            self.handovers,
            self.backlog,
            turnover,
            self.costs,
            counters,
            outboxes,
            salted=config.speculation is not None,
        )
        self.intake = Intake(
            limits,
            config.max_waiting,
            incarnation,
            self.scheduler,
            self.handovers,
            self.dispatcher,
            self.backlog,
            turnover,
            outboxes,
            counters,
            self._number,
        )
        notes = StepNotes(wanted=config.note_steps, ranks_per_host=config.ranks_per_host)
        self.loads = Loads(config.load_interval_s, prefix, self.measure, notes.take)
        self.steps = StepReader(
            self.scheduler,
            outboxes,
            counters,
            violation,
            self.handovers.departures,
            self.speeds,
            self.costs,
            notes,
        )

    def _number(self) -> int:
        """Counts the requests of this engine, in the order of their coming."""
        self._numbers += 1
        return self._numbers

    def gauges(self) -> dict[str, Any]:
        """For statistics."""
        return (
            self.scheduler.gauges()
            | self.handovers.gauges()
            | {
                "waiting": self.intake.num_waiting,
                "waiting_by_key": self.backlog.counts(KEYS_SHOWN),
                "step_cost": {} if self.costs is None else self.costs.snapshot(),
            }
        )

    def describe_ledger(self, now: float) -> dict[str, Any]:
        """Who owns which blocks, and which hand-over waits for what."""
        shot = self.scheduler.ledger.snapshot(self._holder, lambda key: self.handovers.describe(key, now))
        return shot | {"handovers": self.handovers.waits(now)}

    def _holder(self, slot: int) -> str:
        request = self.scheduler.slots[slot]
        return f"slot {slot}" if request is None else f"slot {slot}: {request.name or request.id}"

    def measure(self) -> Load:
        """How busy the instance is now, without keys."""
        scheduler = self.scheduler
        waiting = [*scheduler.waiting_requests(), *self.handovers.departures.preparing()]
        tokens = sum(len(request.tokens) for request in waiting)
        running = 0
        for request in scheduler.slots:
            if request is not None:
                running += 1
                tokens += max(len(request.tokens) - request.num_generated - request.computed, 0)
        return Load(
            waiting=len(waiting),
            running=running,
            waiting_tokens=tokens,
            free_blocks=scheduler.ledger.available,
            prefill_tokens_per_s=self.speeds.prefill_tokens_per_s,
            decode_step_s=self.speeds.decode_step_s,
        )
