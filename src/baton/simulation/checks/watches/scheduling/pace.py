"""What is checked of how steps are composed where that is chosen by what steps take.

The watch adds up for itself what each prompt has computed and what was computed meanwhile of those that came
later, from the batches alone, and asks of each batch whether streams wait for no more than they should.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from baton.executor.base import StepBatch
from baton.simulation.checks.books import Violation
from baton.worker.slots.composition import BESIDE_ROWS, BESIDE_STREAMS, LEAST, SLACK, UNNOTICED_S
from baton.worker.slots.slot_table import DECODE, PREFILL

if TYPE_CHECKING:
    from baton.simulation.parties.worker import RankProcess


@dataclass(slots=True)
class _Seen:
    """A prompt, as its batches show it."""

    epoch: int
    admission: int
    priority: int
    resumed: bool
    size: int
    own: int = 0
    later: int = 0
    """Tokens of prompts of the same rank that were admitted later."""


class PaceWatch:
    """The rules `streams` and `passed`, of one incarnation's rank 0."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def before_step(self, rank: RankProcess, batch: StepBatch) -> None:
        if rank.slots.table.composition is None:
            return
        self._check_streams(rank, batch)
        self._check_passed(rank, batch)

    def _check_streams(self, rank: RankProcess, batch: StepBatch) -> None:
        """All that decodes and has a block for its token is in the step, and the step is not longer than the
        targets allow."""
        slots, table = rank.slots, cast(Any, rank.slots.table)
        first = batch.first_prompt
        rows = set(batch.slots[:first].tolist())
        for slot in slots.open_slots():
            ready = table.phase[slot] == DECODE and table.computed[slot] < table.capacity[slot]
            if ready and slot not in rows and len(rows) < slots.max_num_batched_tokens:
                raise Violation("streams", f"step {batch.step} leaves slot {slot} out, which could decode")
        composition = table.composition
        pace, target = composition.pace, composition._itl_target
        prompts = range(first, len(batch.slots))
        tokens = int(batch.counts[first:].sum())
        late = composition._ttft_target is not None
        if not rows or not prompts or pace is None or late or table.patient[list(rows)].all():
            return
        context = int(batch.starts[:first].sum())
        start = int(batch.starts[first])
        least = LEAST
        if target is None:
            alone = pace.decoding(len(rows), context)
            least = int(LEAST * SLACK)  # a prompt is not cut for the few tokens between
            target = max(BESIDE_STREAMS * pace.shortest, BESIDE_ROWS * alone, UNNOTICED_S) * SLACK * SLACK
        fewest = pace.with_prompts(least, start, len(rows), context)
        takes = pace.with_prompts(tokens, start, len(rows), context)
        if takes > max(target, fewest) * 1.0001:
            raise Violation(
                "streams",
                f"step {batch.step} computes {tokens} tokens of prompts in {takes:.4f} s beside {len(rows)} "
                f"rows, for whose next tokens there are {target:.4f} s",
            )

    def _check_passed(self, rank: RankProcess, batch: StepBatch) -> None:
        table: Any = rank.slots.table
        prompts = table.composition.prompts
        for slot in [slot for slot in self._seen if table.phase[slot] != PREFILL]:
            del self._seen[slot]
        for slot, prompt in prompts.items():
            epoch = int(table.epoch[slot])
            seen = self._seen.get(slot)
            if seen is None or seen.epoch != epoch:
                size = len(table.tokens[slot]) - int(table.computed[slot])
                self._seen[slot] = _Seen(epoch, prompt.number, prompt.priority, prompt.resumed, size)
        taken = dict(zip(batch.slots.tolist(), batch.counts.tolist(), strict=True))
        pieces = {slot: taken[slot] for slot in self._seen if slot in taken}
        for slot, seen in self._seen.items():
            seen.own += pieces.get(slot, 0)
            passing = 0
            for other, count in pieces.items():
                of = self._seen[other]
                rank_of = (of.priority, not of.resumed)
                if of.admission > seen.admission and rank_of == (seen.priority, not seen.resumed):
                    passing += count
            allowed = seen.size // 2 + seen.own
            if seen.later > allowed and passing and slot not in pieces:
                raise Violation(
                    "passed",
                    f"step {batch.step} computes {passing} tokens of prompts that came after the one on slot "
                    f"{slot}, which has {seen.own} of {seen.size} and was passed by {seen.later} before",
                )
            seen.later += passing
