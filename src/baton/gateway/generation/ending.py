"""What is told of a request that is over: a line of the log, where its time went, the end of its story."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from time import monotonic
from typing import Protocol

from baton.gateway.generation.sequence import Sequence
from baton.observe.events.story import Story
from baton.observe.events.views import Timings, timings

log = logging.getLogger("baton.gateway.generation.generation")


class Generation(Protocol):
    """What is asked of one (`generation.py`)."""

    request_id: str
    arrived: float
    error: str | None
    first_token: float | None
    story: Story | None

    @property
    def sequences(self) -> Seq[Sequence]: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_generated(self) -> int: ...
    @property
    def num_cached(self) -> int | None: ...


def tell(generation: Generation, story: Story) -> None:
    """What came of it so far."""
    story.first_at = generation.first_token
    story.generated_tokens = generation.num_generated
    story.cached_tokens = generation.num_cached


def tell_end(generation: Generation, story: Story, now: float) -> None:
    tell(generation, story)
    story.reasons = _reasons(generation)
    story.error = generation.error
    story.ended = now


def timings_of(generation: Generation) -> Timings | None:
    """Where its time went, until its end or until now; None: no notes are taken of it."""
    story = generation.story
    if story is None:
        return None
    if story.ended is None:
        tell(generation, story)
    return timings(story, monotonic())


def log_end(generation: Generation, now: float) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    first = generation.first_token
    log.info(
        "%s prompt=%d generated=%d cached=%s ttft=%s total=%.3f %s",
        generation.request_id,
        generation.num_prompt,
        generation.num_generated,
        "-" if generation.num_cached is None else generation.num_cached,
        "-" if first is None else f"{first - generation.arrived:.3f}",
        now - generation.arrived,
        ",".join(_reasons(generation)) or "cancelled",
        extra={"request_id": generation.request_id},
    )


def _reasons(generation: Generation) -> tuple[str, ...]:
    """How its sequences ended."""
    found = {one.finish_reason or generation.error or "cancelled" for one in generation.sequences}
    return tuple(sorted(found))
