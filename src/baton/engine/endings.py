"""How a request ends for its gateway."""

from __future__ import annotations

from typing import Literal

from baton.engine.counters import Counters
from baton.engine.outbox import Outboxes
from baton.engine.request import Outbox, Request
from baton.engine.validation import RejectCode, Rejected
from baton.protocol.messages.requests import Finished, FinishReason
from baton.protocol.params.sampling import NOTHING_LEFT, UNFOLLOWABLE


def finish(
    outboxes: Outboxes,
    counters: Counters,
    request: Request,
    reason: FinishReason,
    message: str = "",
    *,
    pooled: bytes = b"",
) -> None:
    """Writes the one `Finished` of a request that is gone."""
    code: RejectCode | Literal[""] = ""
    if reason == "error":
        code = "bad_request" if message.startswith((UNFOLLOWABLE, NOTHING_LEFT)) else "internal"
    outbox = request.gateway
    outbox.requests.pop(request.id, None)
    counters.finished[reason] += 1
    if reason != "handed_over":
        counters.preemptions_of.add(request.num_preemptions)
    admitted = request.first_admitted
    notes = request.notes
    if notes is not None:
        counts = request.num_generated, request.num_preemptions, request.num_accepted
        notes.add(outboxes.now, "ended", *counts, text=reason)
    outbox.finished.append(
        Finished(
            request.id,
            reason,
            code=code,
            message=message,
            num_cached=request.num_cached,
            num_preemptions=request.num_preemptions,
            queued_s=0.0 if admitted is None else admitted - request.arrived,
            pooled=pooled,
            notes=[] if notes is None else notes.entries,
        )
    )
    outboxes.touch(outbox)


def refuse(
    outboxes: Outboxes,
    counters: Counters,
    outbox: Outbox,
    id: int,
    refusal: Rejected,
    *,
    retry_after_s: float = 0.0,
) -> None:
    """Writes the one `Finished` of a request that holds nothing.  `retry_after_s`: 0 says nothing of when."""
    counters.rejected[refusal.code] += 1
    counters.finished["rejected"] += 1
    outbox.finished.append(
        Finished(id, "rejected", code=refusal.code, message=refusal.message, retry_after_s=retry_after_s)
    )
    outboxes.touch(outbox)
