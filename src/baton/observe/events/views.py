"""Stories as JSON: a line of each, all of one, and the timings of an answer."""

from __future__ import annotations

from typing import Any

from baton.observe.events.spans import GATEWAY, ORDER, events, spans, sums
from baton.observe.events.story import Story
from baton.observe.events.trail import Trail
from baton.protocol.notes import described

Timings = dict[str, float | None]
"""Milliseconds by name: `total_ms`, `first_token_ms`, those of each kind of span, `clock_error_ms`."""


def summary(story: Story, now: float) -> dict[str, Any]:
    """One request in a few words: `timings` are of its first sequence, in milliseconds."""
    return {
        "id": story.id,
        "state": _state(story),
        "arrived": round(story.wall, 6),
        "seconds": _seconds((now if story.ended is None else story.ended) - story.arrived),
        "first_token_s": None if story.first_at is None else _seconds(story.first_at - story.arrived),
        "sequences": story.sequences,
        "prompt_tokens": story.prompt_tokens,
        "generated_tokens": story.generated_tokens,
        "cached_tokens": story.cached_tokens,
        "reasons": list(story.reasons),
        "error": story.error,
        "instances": instances(story),
        "preemptions": _count(story, "preempted"),
        "continuations": _lost(story),
        "timings": timings(story, now),
    }


def whole(story: Story, now: float) -> dict[str, Any]:
    """`summary`, and of each sequence that is kept its spans and notes; times in milliseconds since the
    request arrived, on the gateway's clock."""
    kept: list[Trail | None] = list(story.trails) or [None]
    rows = [_sequence(story, index, trail, now) for index, trail in enumerate(kept)]
    return summary(story, now) | {"clocks": _clocks(story), "trails": rows}


def timings(story: Story, now: float) -> Timings:
    """Where the time went, in milliseconds: `*_ms` of the spans add up to `total_ms`.

    `accepted_drafts`, if there were any: how many tokens were drafts that were right.
    """
    trail = story.trails[0] if story.trails else None
    found = spans(story, trail, now)
    end = now if story.ended is None else story.ended
    answer: Timings = {
        "total_ms": _ms(end - story.arrived),
        "first_token_ms": None if story.first_at is None else _ms(story.first_at - story.arrived),
    }
    answer |= {f"{name}_ms": _ms(seconds) for name, seconds in sums(found).items()}
    errors = [clock["error_ms"] for clock in _clocks(story).values()]
    known = [error for error in errors if error is not None]
    notes = [note for told in (trail.told if trail else ()) for note in told.notes]
    accepted = sum(note.c for note in notes if note.what == "ended")
    if accepted:
        answer["accepted_drafts"] = accepted
    answer["clock_error_ms"] = max(known) if known and len(known) == len(errors) else None
    return answer


def server_timing(found: Timings) -> str:
    """The same as the value of a `Server-Timing` header: the kinds of spans, and `total`."""
    spent = [(name.removesuffix("_ms"), value) for name, value in found.items() if value is not None]
    return ", ".join(f"{name};dur={value}" for name, value in spent if name in (*ORDER, "total"))


def instances(story: Story) -> list[str]:
    """Those that had it, in the order of their coming."""
    names: dict[str, None] = {}
    for trail in story.trails:
        for note in trail.entries:
            if note.what == "sent":
                names[note.text.partition(">")[0]] = None
            elif note.what == "heard":
                names[note.text] = None
    return list(names)


def _state(story: Story) -> str:
    if story.ended is None:
        return "running"
    return "failed" if story.failed else "done"


def _sequence(story: Story, index: int, trail: Trail | None, now: float) -> dict[str, Any]:
    begin = story.arrived
    return {
        "index": index,
        "spans": [
            {
                "name": span.name,
                "where": span.where,
                "begin_ms": _ms(span.begin - begin),
                "end_ms": _ms(span.end - begin),
                "attempt": span.id,
                "slot": None if span.slot < 0 else span.slot,
            }
            for span in spans(story, trail, now)
        ],
        "events": [
            {
                "at_ms": _ms(event.at - begin),
                "where": event.where,
                "what": event.note.what,
                "attempt": event.id,
                **({"detail": detail} if (detail := described(event.note)) else {}),
            }
            for event in ([] if trail is None else events(trail))
        ],
    }


def _clocks(story: Story) -> dict[str, dict[str, float | None]]:
    """Of each instance that told something: its clock minus the gateway's, and how wrong that can be."""
    found: dict[str, dict[str, float | None]] = {}
    for trail in story.trails:
        for told in trail.told:
            offset, error = told.moment.offset()
            row = {"offset_ms": _ms(offset), "error_ms": None if error is None else _ms(error)}
            found[told.instance] = row
    return found


def _count(story: Story, what: str) -> int:
    return sum(note.what == what for trail in story.trails for told in trail.told for note in told.notes)


def _lost(story: Story) -> int:
    return sum(note.what == "lost" for trail in story.trails for note in trail.entries)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _seconds(seconds: float) -> float:
    return round(seconds, 6)


__all__ = ["GATEWAY", "Timings", "instances", "server_timing", "summary", "timings", "whole"]
