"""What /debug/requests and /debug/timeline answer, for /openapi.json and for tests."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

ABOUT = "The last requests, the slow, failed or running ones; or all that is known of one (--events-keep)"
_TEXT = {"type": "string"}
WHICH: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("id", _TEXT, "All of the request that its client knows by this id"),
    ("recent", _TEXT, "Those that run and that ended last, the last one first (so without any of these)"),
    ("slow", _TEXT, "Those of the last hour that waited longest for their first token"),
    ("failed", _TEXT, "The last ones that failed"),
    ("running", _TEXT, "Those that have not ended"),
    ("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}, "So many at most"),
)
TRACE = "Requests as a trace for ui.perfetto.dev"
WHEN: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("id", _TEXT, "Of the request that its client knows by this id"),
    (
        "last_s",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86400, "default": 10},
        "Of so many seconds",
    ),
)


class EventSpan(Struct, forbid_unknown_fields=True):
    name: Literal["read", "wait", "queue", "prefill", "handover", "decode", "lost", "finish"]
    where: str
    """An instance, or `gateway`."""
    begin_ms: float
    """Since the request arrived."""
    end_ms: float
    attempt: int
    """The id under which the instance knew it: another one after each loss."""
    slot: int | None


class EventNote(Struct, forbid_unknown_fields=True):
    at_ms: float
    where: str
    what: str
    """See `protocol/notes.py`."""
    attempt: int
    detail: dict[str, int | str] | UnsetType = UNSET


class EventTrail(Struct, forbid_unknown_fields=True):
    """One sequence."""

    index: int
    spans: list[EventSpan]
    """Without gaps, from the arrival to the end."""
    events: list[EventNote]


class Clock(Struct, forbid_unknown_fields=True):
    offset_ms: float
    """An instance's clock minus the gateway's."""
    error_ms: float | None
    """By how much that can be wrong; None: not known."""


class LoggedRequest(Struct, forbid_unknown_fields=True):
    id: str
    state: Literal["running", "done", "failed"]
    arrived: float
    """Seconds since 1970."""
    seconds: float
    """From its arrival to its end, or until now."""
    first_token_s: float | None
    sequences: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int | None
    reasons: list[str]
    error: str | None
    instances: list[str]
    """In the order in which it came to them."""
    preemptions: int
    continuations: int
    timings: dict[str, float | None]
    """Milliseconds of its first sequence: `total_ms`, `first_token_ms`, `clock_error_ms`, and of each kind of
    span, which add up to the total."""
    clocks: dict[str, Clock] | UnsetType = UNSET
    """With `id`, as `trails`."""
    trails: list[EventTrail] | UnsetType = UNSET


class Requests(Struct, forbid_unknown_fields=True):
    keep: int
    """--events-keep"""
    kind: Literal["recent", "slow", "failed", "running", "id"]
    requests: list[LoggedRequest]


class Trace(Struct, forbid_unknown_fields=True):
    """Chrome's trace event format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: Literal["ms"]
