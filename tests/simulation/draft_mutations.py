"""Deliberate defects of steps that confirm drafts; see `mutations.py`."""

from __future__ import annotations

import numpy as np

from baton.engine import dispatch
from baton.engine.scheduling.scheduler import MIN_LOOKAHEAD, Scheduler
from baton.engine.states import State
from baton.engine.workers.rows import Rows
from baton.executor.drafts.runs import Places
from baton.executor.drafts.speculating import Speculator
from baton.protocol.rules.prefix_keys import root_key
from baton.worker.slots import batches
from baton.worker.slots import commit as worker_commit
from baton.worker.slots import slots as worker_slots
from baton.worker.slots.commit import Commit
from baton.worker.slots.slot_table import SlotTable
from baton.worker.slots.slots import Slots
from tests.simulation.mutations import Patch, mutation


@mutation("a draft counts as computed", "tokens", "crash", "failure", "closing-5", "owner")
def drafts_count(patch: Patch) -> None:
    patch.setattr(worker_commit, "confirmed_counts", lambda batch, result: batch.counts)


@mutation("the page behind a run is offered to others", "closing-5", "pages", start=18)
def refused_page(patch: Patch) -> None:
    """Where the newest token is to be, a refused draft lies."""
    progress = Scheduler.progress

    def wrong(self, request):
        if self.lookahead > max(self.block_size, MIN_LOOKAHEAD) and request.state is State.RUNNING:
            self.admissions.index(request, len(request.tokens))
        progress(self, request)

    patch.setattr(Scheduler, "progress", wrong)


@mutation("blocks are granted for one draft too few", "drafts")
def granted_too_late(patch: Patch) -> None:
    made = Scheduler.__init__

    def wrong(self, *args, drafts=0, **options):
        made(self, *args, drafts=max(drafts - 1, 0), **options)

    patch.setattr(Scheduler, "__init__", wrong)


@mutation("a stop token inside a run is overlooked", "tokens", "crash", "failure")
def stop_overlooked(patch: Patch) -> None:
    fitting = batches.fitting

    class NoStops:
        @staticmethod
        def among(slots, tokens):
            return np.zeros(len(tokens), np.bool_)

    def wrong(slots, drafts, room, spare, stops):
        return fitting(slots, drafts, room, spare, NoStops)

    patch.setattr(worker_slots, "fitting", wrong)
    patch.setattr(Commit, "_take_runs", _unchecked)


def _unchecked(self, batch, runs, outcome):
    outcome.speculation = batches.speculation(batch.drafts[batch.samples], runs)
    outcome.slots, outcome.epochs = np.repeat(outcome.slots, runs), np.repeat(outcome.epochs, runs)


@mutation("drafts of an epoch that is over are computed", "drafts")
def drafts_of_another_epoch(patch: Patch) -> None:
    close = SlotTable.close

    def wrong(self, slot, *rest):
        kept = self.drafts.get(slot)
        closed = close(self, slot, *rest)
        if kept is not None:
            self.drafts[slot] = kept
        return closed

    commit = Slots.commit

    def keeping(self, batch, result):
        before = dict(self.table.drafts)
        outcome = commit(self, batch, result)
        for slot, drafts in before.items():
            self.table.drafts.setdefault(slot, drafts)
        return outcome

    patch.setattr(SlotTable, "close", wrong)
    patch.setattr(Slots, "commit", keeping)


@mutation("a wrong draft does not end the run", "tokens", "crash", "failure")
def wrong_drafts_count(patch: Patch) -> None:
    waves = Places.waves

    def wrong(self):
        expected = self.expected
        for wave in waves(self):
            yield wave
            self.expected = expected.copy()
            on = (expected[wave.places] >= 0) & (wave.tokens >= 0)
            self.expected[wave.places[on]] = wave.tokens[on]

    patch.setattr(Places, "waves", wrong)


@mutation("drafts may come from requests of every salt", "salt")
def drafts_of_every_salt(patch: Patch) -> None:
    patch.setattr(dispatch, "root_key", lambda salt: root_key(""))


@mutation("ranks draft apart", "agreement", "drafts", "crash")
def ranks_draft_apart(patch: Patch) -> None:
    draft = Speculator.draft

    def wrong(self, batch, result, seconds):
        found = draft(self, batch, result, seconds)
        if len(found) > 1 and id(self) // 64 % 2:
            found[:, 0] = -1
        return found

    patch.setattr(Speculator, "draft", wrong)


@mutation("only the last token of a run is told", "tokens", "closing-2", "liveness")
def last_of_run(patch: Patch) -> None:
    deliver = Rows.deliver

    def wrong(self, tokens, logprobs, outboxes):
        requests = self.requests
        last = [
            i for i in range(len(requests)) if i + 1 == len(requests) or requests[i + 1] is not requests[i]
        ]
        kept = type(self)([requests[i] for i in last])
        deliver(kept, type(tokens)("i", [tokens[i] for i in last]), [], outboxes)

    patch.setattr(Rows, "deliver", wrong)
